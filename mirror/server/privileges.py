"""Names of the privileges that requests need, as the server spells them (kv_engine docs/rbac.md), each of them once."""

from __future__ import annotations

READ = "Read"
WRITE = "Upsert"
META_READ = "MetaRead"
DCP_PRODUCER = "DcpProducer"
DCP_STREAM = "DcpStream"
SYSTEM_COLLECTIONS = "SystemCollectionLookup"

ALL_PRIVILEGES = frozenset((READ, WRITE, META_READ, DCP_PRODUCER, DCP_STREAM, SYSTEM_COLLECTIONS))
