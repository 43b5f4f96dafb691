"""The user of a client certificate, and the privileges that requests need, by their names at the server (kv_engine
docs/rbac.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

READ = "Read"
WRITE = "Upsert"
META_READ = "MetaRead"
DCP_PRODUCER = "DcpProducer"
DCP_STREAM = "DcpStream"
SYSTEM_COLLECTIONS = "SystemCollectionLookup"

ALL_PRIVILEGES = frozenset((READ, WRITE, META_READ, DCP_PRODUCER, DCP_STREAM, SYSTEM_COLLECTIONS))


def certified_name(certificate: Mapping[str, Any]) -> str | None:
    """Return the common name of a certificate's subject, which names the user in the usual set-up of clusters."""
    for part in certificate.get("subject", ()):
        for name, value in part:
            if name == "commonName":
                return str(value)
    return None
