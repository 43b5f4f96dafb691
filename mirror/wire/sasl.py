"""Authentication over SASL, both sides: SCRAM-SHA512, -SHA256, -SHA1 and PLAIN (RFC 5802).

A `ScramClient` or `ScramServer` serves one exchange: two messages of the client and two answers. A message of wrong
order or form raises `SaslError`, which never quotes a secret. Like Couchbase Server, this module hashes passwords as
UTF-8 bytes without normalisation.

Why not the library `scramp`: since 1.5 it refuses nonces with a blank, and fewer than 4096 iterations. But the official
SDKs send blanks (recording sdk_72_conn2), and some clusters use 4000 iterations. The tests use `scramp` as an
independent peer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mirror.errors import AuthRejected, ExitCode

HASHES = {"SCRAM-SHA512": "sha512", "SCRAM-SHA256": "sha256", "SCRAM-SHA1": "sha1"}
"""SASL mechanism -> its hash for `hashlib`; the strongest first."""

MECHANISMS = (*HASHES, "PLAIN")

ITERATIONS_MAX = 1_000_000
"""A server may ask for no more: this many take half a second of processor time. Servers use 4,000 to 15,000."""

ITERATIONS_MIN = 4_000
"""A server may ask for no fewer: with few, a hostile server could easily find the password from the client's proof."""

ITERATIONS_DEFAULT = 4096
MESSAGE_BYTES_MAX = 4096
"""Limit of a SASL message: names and nonces are short."""


class SaslError(AuthRejected):
    """The exchange failed: bad message, bad proof, or no common mechanism."""

    exit_code = ExitCode.REFUSED


def choose_mechanism(offered: Sequence[str], *, plain_allowed: bool) -> str:
    """Return the best mechanism that both sides know; PLAIN only if it is allowed. Raises SaslError."""
    for mechanism in HASHES:
        if mechanism in offered:
            return mechanism
    if "PLAIN" in offered:
        if plain_allowed:
            return "PLAIN"
        raise SaslError(
            "the server offers only PLAIN, which would send the password in the clear",
            hint="use couchbases:// (TLS), or set plain_allowed",
        )
    raise SaslError(f"the server offers no mechanism we know: {', '.join(offered) or 'none at all'}")


def plain_encode(username: str, password: str) -> bytes:
    return b"\0" + username.encode() + b"\0" + password.encode()


def plain_decode(message: bytes) -> tuple[str, str]:
    parts = message.split(b"\0")
    if len(message) > MESSAGE_BYTES_MAX or len(parts) != 3:
        raise SaslError("bad PLAIN message")
    if parts[0] not in (b"", parts[1]):
        raise SaslError("PLAIN message for another user")
    try:
        return parts[1].decode(), parts[2].decode()
    except UnicodeDecodeError:
        raise SaslError("PLAIN message is not UTF-8") from None


class ScramClient:
    def __init__(self, mechanism: str, username: str, password: str, *, nonce: str | None = None) -> None:
        self._hash = _hash_of(mechanism)
        self._password = password
        self._nonce = nonce or secrets.token_hex(16)
        self._first_bare = f"n={_escape(username)},r={self._nonce}"
        self._server_signature: bytes | None = None

    def first(self) -> bytes:
        return f"n,,{self._first_bare}".encode()

    def final(self, challenge: bytes) -> bytes:
        text = _text(challenge)
        fields = _fields(text)
        nonce = fields.get("r", "")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise SaslError("the server's challenge does not carry our nonce")
        iterations = _iterations(fields.get("i", ""))
        salted = hashlib.pbkdf2_hmac(self._hash, self._password.encode(), _unbase64(fields.get("s", "")), iterations)
        client_key = _hmac(self._hash, salted, b"Client Key")
        without_proof = f"c=biws,r={nonce}"
        auth_message = f"{self._first_bare},{text},{without_proof}".encode()
        signature = _hmac(self._hash, hashlib.new(self._hash, client_key).digest(), auth_message)
        self._server_signature = _hmac(self._hash, _hmac(self._hash, salted, b"Server Key"), auth_message)
        return f"{without_proof},p={_base64(_xor(client_key, signature))}".encode()

    def verify(self, outcome: bytes) -> None:
        if self._server_signature is None:
            raise SaslError("the server ended the exchange before its challenge was answered")
        fields = _fields(_text(outcome))
        if not hmac.compare_digest(_unbase64(fields.get("v", "")), self._server_signature):
            raise SaslError("the server does not know the password: it may be an impostor")


@dataclass(frozen=True, slots=True)
class ScramVerifier:
    """The data to store instead of a password: enough to check a client's proof, too little to log in."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    @staticmethod
    def of(
        mechanism: str, password: str, *, salt: bytes | None = None, iterations: int = ITERATIONS_DEFAULT
    ) -> ScramVerifier:
        name = _hash_of(mechanism)
        salt = secrets.token_bytes(16) if salt is None else salt
        salted = hashlib.pbkdf2_hmac(name, password.encode(), salt, iterations)
        stored_key = hashlib.new(name, _hmac(name, salted, b"Client Key")).digest()
        return ScramVerifier(salt, iterations, stored_key, _hmac(name, salted, b"Server Key"))

    @staticmethod
    def decoy(
        mechanism: str, username: str, secret: bytes, *, iterations: int = ITERATIONS_DEFAULT, salt_bytes: int = 16
    ) -> ScramVerifier:
        """Return a verifier for an unknown user. It looks like a known user's, but matches no password."""
        size = hashlib.new(_hash_of(mechanism)).digest_size
        salt = salt_of(mechanism, username, secret, salt_bytes)
        return ScramVerifier(salt, iterations, secrets.token_bytes(size), secrets.token_bytes(size))

    def proves(self, mechanism: str, password: str) -> bool:
        other = ScramVerifier.of(mechanism, password, salt=self.salt, iterations=self.iterations)
        # HMAC pads its key with zeros, so the verifiers of "password" and "password\0" are equal
        return hmac.compare_digest(other.stored_key, self.stored_key) and not password.endswith("\0")


def salt_of(mechanism: str, username: str, secret: bytes, size: int = 16) -> bytes:
    """Derive a salt for a user without a stored salt; equal arguments give equal salts."""
    return hashlib.shake_256(_hmac("sha512", secret, f"{mechanism} {username}".encode())).digest(size)


class ScramServer:
    def __init__(
        self,
        mechanism: str,
        password_of: Callable[[str], str | None] | None = None,
        *,
        verifier_of: Callable[[str], ScramVerifier | None] | None = None,
        iterations: int = ITERATIONS_DEFAULT,
        salt: bytes | None = None,
        nonce: str | None = None,
        decoy_of: Callable[[str], ScramVerifier] | None = None,
    ) -> None:
        """Take either `password_of` or `verifier_of`; both return None for an unknown user. `decoy_of` returns the
        verifier of an unknown user: the challenge looks like a known user's, and the login fails at the end.
        """
        assert (password_of is None) != (verifier_of is None), "either passwords or verifiers"
        self._mechanism = mechanism
        self._hash = _hash_of(mechanism)
        self._password_of = password_of
        self._verifier_of = verifier_of
        self._iterations = iterations
        self._salt = salt
        secret = secrets.token_bytes(16)
        self._decoy_of = decoy_of or (lambda username: ScramVerifier.decoy(mechanism, username, secret))
        self._own_nonce = nonce or secrets.token_hex(16)
        self._nonce = ""
        self._exchange = ""
        self._verifier: ScramVerifier | None = None
        self._known = False
        self.username = ""

    def _find(self, username: str) -> ScramVerifier | None:
        if self._verifier_of is not None:
            return self._verifier_of(username)
        assert self._password_of is not None
        password = self._password_of(username)
        if password is None:
            return None
        return ScramVerifier.of(self._mechanism, password, salt=self._salt, iterations=self._iterations)

    def challenge(self, first: bytes) -> bytes:
        text = _text(first)
        gs2, _, bare = text.partition(",,")
        if gs2 not in ("n", "y") or self._nonce:
            raise SaslError("bad first SCRAM message")
        fields = _fields(bare)
        if not fields.get("r") or "n" not in fields:
            raise SaslError("first SCRAM message without user or nonce")
        self.username = _unescape(fields["n"])
        found, decoy = self._find(self.username), self._decoy_of(self.username)  # both: equal time for all users
        self._known = found is not None
        self._verifier = found or decoy
        self._nonce = fields["r"] + self._own_nonce
        reply = f"r={self._nonce},s={_base64(self._verifier.salt)},i={self._verifier.iterations}"
        self._exchange = f"{bare},{reply}"
        self._header = _base64(f"{gs2},,".encode())
        return reply.encode()

    def outcome(self, final: bytes) -> bytes:
        """Return the last message. Raises SaslError if the client does not know the password, or its message is bad."""
        text = _text(final)
        fields = _fields(text)
        verifier = self._verifier
        if verifier is None or fields.get("r") != self._nonce or fields.get("c") != self._header:
            raise SaslError("bad final SCRAM message")
        auth_message = f"{self._exchange},{text.rpartition(',p=')[0]}".encode()
        signature = _hmac(self._hash, verifier.stored_key, auth_message)
        proof = _unbase64(fields.get("p", ""))
        if len(proof) != len(signature):
            raise SaslError("wrong user or password")
        claimed = hashlib.new(self._hash, _xor(proof, signature)).digest()
        if not hmac.compare_digest(claimed, verifier.stored_key) or not self._known:
            raise SaslError("wrong user or password")
        if self._verifier_of is not None and self._verifier_of(self.username) != verifier:
            raise SaslError("wrong user or password")  # the verifier changed after the challenge
        return f"v={_base64(_hmac(self._hash, verifier.server_key, auth_message))}".encode()


def _hash_of(mechanism: str) -> str:
    if mechanism not in HASHES:
        raise SaslError(f"unknown SCRAM mechanism {mechanism[:40]!r}")
    return HASHES[mechanism]


def _hmac(name: str, key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, name)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise SaslError("SCRAM message too long")
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise SaslError("SCRAM message is not UTF-8") from None


def _fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in text.split(","):
        if part[1:2] != "=" or part[0] in fields:
            raise SaslError("bad SCRAM message")
        fields[part[0]] = part[2:]
    if "e" in fields:
        raise SaslError(f"the server refused the exchange: {fields['e'][:80]}")
    return fields


def _iterations(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 8):
        raise SaslError("bad SCRAM iteration count")
    count = int(text)
    if not ITERATIONS_MIN <= count <= ITERATIONS_MAX:
        raise SaslError(f"the server asks for {count} SCRAM iterations, allowed: {ITERATIONS_MIN} to {ITERATIONS_MAX}")
    return count


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _unbase64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise SaslError("bad base64 in a SCRAM message") from None


def _escape(name: str) -> str:
    return name.replace("=", "=3D").replace(",", "=2C")


def _unescape(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")
