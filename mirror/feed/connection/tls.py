"""TLS towards a node: certificate and name are always verified, and each failure of a handshake has a remedy.

Each connection reads the files again, so they can be replaced without a restart.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from mirror.config import Settings
from mirror.errors import ConfigError, TlsFailed

CERTIFICATE_BEGIN = b"-----BEGIN CERTIFICATE-----"
"""If the certificate file contains this, errors name the key file: OpenSSL does not always say which file is wrong."""

_EXPIRED, _NOT_YET_VALID = 10, 9
_NAME_MISMATCH = (62, 63, 64)
"""OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH, _EMAIL_, _IP_ADDRESS_."""

_OUR_CERTIFICATE: dict[str, str] = {
    "CERTIFICATE_REQUIRED": "it demands a client certificate",
    "UNKNOWN_CA": "it does not know the authority of our client certificate",
    "CERTIFICATE_EXPIRED": "our client certificate has expired",
    "CERTIFICATE_REVOKED": "our client certificate was revoked",
    "BAD_CERTIFICATE": "it calls our client certificate invalid",
    "UNSUPPORTED_CERTIFICATE": "it does not support the kind of our client certificate",
    "CERTIFICATE_UNKNOWN": "it does not accept our client certificate",
    "ACCESS_DENIED": "it denies access with our client certificate",
    "DECRYPT_ERROR": "it cannot verify a signature for our client certificate",
}
"""The node's objection to our certificate, by a part of the alert's name."""


def _no_passphrase() -> str:
    """Refuse an encrypted key, instead of asking for its passphrase at the terminal."""
    raise ValueError("it has a passphrase; a service cannot ask for one")


def _unusable(setting: str, path: object, error: Exception, hint: str) -> ConfigError:
    if isinstance(error, ssl.SSLError):
        reason = error.reason.replace("_", " ").lower() if error.reason else "it holds no PEM data"
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = "the key does not belong to the certificate"
    else:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"{setting} {path} cannot be used: {reason}", hint=hint)


@dataclass(frozen=True, slots=True)
class Tls:
    context: ssl.SSLContext
    settings: Settings

    @staticmethod
    def of(settings: Settings) -> Tls:
        """Return TLS that verifies certificate and name. Raises ConfigError for files that cannot be used."""
        ca_file, cert_file, key_file = settings.tls_ca_file, settings.tls_client_cert_file, settings.tls_client_key_file
        try:
            context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except (OSError, ssl.SSLError) as error:
            raise _unusable("tls_ca_file", ca_file, error, "give the cluster's CA certificates as a PEM file") from None
        # `tls_ca_file` may hold an intermediate authority or the certificate itself.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        versions = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
        context.minimum_version = versions[settings.tls_minimum_version]
        if cert_file is not None:
            setting, path = "tls_client_cert_file", cert_file
            try:
                if CERTIFICATE_BEGIN in path.read_bytes() and key_file is not None:
                    setting, path = "tls_client_key_file", key_file
                context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
            except (OSError, ssl.SSLError, ValueError) as error:
                hint = "give certificate (with its chain) and key as PEM files; one file may hold both"
                raise _unusable(setting, path, error, hint) from None
        return Tls(context, settings)

    def failure(self, error: ssl.SSLError, where: str) -> TlsFailed:
        """Map a TLS handshake failure, or an alert after it, to an error with a remedy."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return _refused_by_us(error, where, self.settings)
        reason = str(getattr(error, "reason", None) or error).upper()
        if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason or "NO_PROTOCOLS_AVAILABLE" in reason:
            return TlsFailed(
                f"{where} speaks no allowed TLS version (at least {self.settings.tls_minimum_version})",
                hint="allow TLS 1.2 or 1.3 at the cluster; tls_minimum_version must not be above the cluster's version",
            )
        if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER" in reason or "PACKET_LENGTH" in reason:
            return TlsFailed(
                f"{where} does not speak TLS", hint="use its TLS port (usually 11207), or couchbase:// without TLS"
            )
        for part, words in _OUR_CERTIFICATE.items():
            if part in reason and "ALERT" in reason:
                return _refused_by_node(words, where, self.settings)
        if "HANDSHAKE_FAILURE" in reason:
            what = "no cipher in common, or it demands a client certificate"
            return _refused_by_node(what, where, self.settings)
        if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError) or "EOF" in reason:
            return hung_up("during", where, self.settings)
        return TlsFailed(f"TLS with {where} failed: {reason.replace('_', ' ').lower()}")


def _refused_by_us(error: ssl.SSLCertVerificationError, where: str, settings: Settings) -> TlsFailed:
    head = f"the certificate of {where} is refused"
    if error.verify_code == _EXPIRED:
        return TlsFailed(f"{head}: it has expired", hint="renew the cluster's certificate")
    if error.verify_code == _NOT_YET_VALID:
        return TlsFailed(f"{head}: it is not valid yet", hint="check this machine's clock, and the certificate's dates")
    if error.verify_code in _NAME_MISMATCH:
        host = where.rpartition(":")[0]
        return TlsFailed(
            f"{head}: it is not for the name {host}",
            hint="use a name of the certificate in the connection string, or issue a certificate for this name",
        )
    known = "of this machine" if settings.tls_ca_file is None else f"in {settings.tls_ca_file}"
    return TlsFailed(
        f"{head}: none of the authorities {known} vouches for it ({error.verify_message})",
        hint="give the cluster's CA certificate as tls_ca_file",
    )


def _refused_by_node(what: str, where: str, settings: Settings) -> TlsFailed:
    if settings.tls_client_cert_file is None:
        hint = "give a client certificate as tls_client_cert_file and tls_client_key_file"
    else:
        hint = f"check {settings.tls_client_cert_file}, and that the cluster trusts the authority which signed it"
    return TlsFailed(f"{where} refused us: {what}", hint=hint)


def hung_up(when: str, where: str, settings: Settings) -> TlsFailed:
    """Return the error for a node that hung up during or right after the handshake. A starting node does that, too."""
    version = f"no TLS version that we allow (at least {settings.tls_minimum_version})"
    ours = "rejects our client certificate" if settings.tls_client_cert_file else "demands a client certificate"
    return TlsFailed(
        f"{where} hung up {when} the TLS handshake",
        hint=f"it is starting, or speaks no TLS (use its TLS port, usually 11207, or couchbase://), or {ours} "
        f"(tls_client_cert_file), or allows {version}; its log says which",
        retryable=True,
    )
