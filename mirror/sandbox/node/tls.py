"""The nodes' TLS: certificate and client certificates.

Invariant: an exchanged certificate is shown to new connections; open ones go on.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from mirror.errors import ConfigError


@dataclass(slots=True)
class NodeTls:
    """The nodes' certificate and their rules for clients. Raises ConfigError for files that cannot be used."""

    cert_file: Path
    """Certificate and its chain (PEM)."""
    key_file: Path | None = None
    """None: the key is in the same file."""
    client_ca_file: Path | None = None
    """The authority of client certificates; None: none is requested."""
    clients_need_certificate: bool = False
    """Close connections without the certificate of a known user; else a password is enough."""
    context: ssl.SSLContext = field(init=False)

    def __post_init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.client_ca_file is not None:
            try:
                self.context.load_verify_locations(self.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise _unusable(self.client_ca_file, error) from error
            self.context.verify_mode = ssl.CERT_REQUIRED if self.clients_need_certificate else ssl.CERT_OPTIONAL
        elif self.clients_need_certificate:
            raise ConfigError("client certificates are required, but no CA is given", hint="name their CA")
        self.rotate()

    def rotate(self, cert_file: Path | None = None, key_file: Path | None = None) -> None:
        """Show another certificate from now on; without files, load the old files again."""
        cert = cert_file or self.cert_file
        key = key_file or (None if cert_file is not None else self.key_file)
        try:
            self.context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise _unusable(cert, error) from error
        self.cert_file, self.key_file = cert, key


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} cannot be used: {error.strerror or error}", hint="give PEM files")
