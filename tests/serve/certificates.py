"""A certificate for this machine, made for one test."""

from __future__ import annotations

from pathlib import Path

import trustme


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files with a certificate for localhost, its authority behind it, and its key: clients may trust the first."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    certificate.cert_chain_pems[0].write_to_path(str(cert))
    authority.cert_pem.write_to_path(str(cert), append=True)
    certificate.private_key_pem.write_to_path(str(key))
    return cert, key
