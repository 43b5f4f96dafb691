"""Who may read what: users with SCRAM verifiers, the collections each may read, and the listeners' TLS.

Knows names, verifiers and patterns of collections; must never know a protocol, and keeps no password of the file's
users. The file is JSON: `{"users": {NAME: {"read": [PATTERN...], "verifiers": {MECHANISM: {...}}}}, "anonymous":
{"read": [PATTERN...]}}`; a pattern is `*`, `scope.*` or `scope.collection`. It is read again when it changes; one that
has become unreadable leaves the users of before. Invariants: without a file the mirror's own user at the source may
read everything, and so may everybody on this machine; with one, those who do not log in read only what `anonymous`
says, and only on this machine.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import json
import os
import secrets
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mirror.config import PasswordSource, Settings
from mirror.errors import ConfigError
from mirror.feed.connection_string import parse
from mirror.log import get_logger
from mirror.wire.sasl import HASHES, ITERATIONS_MAX, ITERATIONS_MIN, ScramVerifier

USERS_FILE_BYTES_MAX = 8 * 1024 * 1024
"""Some ten thousand users."""

EVERYTHING = ("*",)

log = get_logger("auth")


@dataclass(frozen=True, slots=True)
class Reader:
    """Somebody who reads, and what."""

    name: str
    patterns: tuple[str, ...] = EVERYTHING

    @property
    def reads_all(self) -> bool:
        """True when no collection has to be looked at."""
        return "*" in self.patterns

    def may_read(self, scope: str, collection: str) -> bool:
        """Whether a collection is among those this reader may read."""
        return any(pattern in ("*", f"{scope}.*", f"{scope}.{collection}") for pattern in self.patterns)


class Users(Protocol):
    """Those who may log in."""

    def verifiers(self, mechanism: str) -> Callable[[str], ScramVerifier | None]:
        """The lookup that a SCRAM exchange of a mechanism needs."""

    def reader(self, name: str) -> Reader | None:
        """The user of a name."""

    def check(self, name: str, password: str) -> Reader | None:
        """The user of a name and a password; None where either is wrong."""

    @property
    def anonymous(self) -> Reader | None:
        """Who somebody on this machine is that did not log in; None: nobody."""


class SourceUser:
    """The one user of a mirror without a users file: the one that the mirror itself is at the source."""

    def __init__(self, name: str, password: Callable[[], str | None]) -> None:
        """`password` is read anew at each login."""
        self._name = name
        self._password = password
        self._kept: dict[str, tuple[str, ScramVerifier]] = {}

    @property
    def anonymous(self) -> Reader | None:
        """Everybody on this machine."""
        return Reader("")

    def reader(self, name: str) -> Reader | None:
        """The source's user."""
        return Reader(name) if name and name == self._name else None

    def verifiers(self, mechanism: str) -> Callable[[str], ScramVerifier | None]:
        """The verifier of the password as it stands now."""

        def verifier_of(name: str) -> ScramVerifier | None:
            password = self._password() if self.reader(name) else None
            if password is None:
                return None
            kept = self._kept.get(mechanism)
            if kept is None or kept[0] != password:
                kept = self._kept[mechanism] = (password, ScramVerifier.of(mechanism, password))
            return kept[1]

        return verifier_of

    def check(self, name: str, password: str) -> Reader | None:
        """The source's user, if this is its password."""
        wanted = self._password() if self.reader(name) else None
        if wanted is None or not hmac.compare_digest(wanted.encode(), password.encode()):
            return None
        return self.reader(name)


class FileUsers:
    """The users of a file."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises ConfigError for a file that cannot be read or makes no sense."""
        self._path = path
        self._stamp = self._stamp_now()
        self._readers: dict[str, Reader] = {}
        self._verifiers: dict[str, dict[str, ScramVerifier]] = {}
        self._anonymous: Reader | None = None
        self._proven: dict[str, tuple[ScramVerifier, bytes]] = {}
        self._salt = secrets.token_bytes(16)
        self._take(read_users(path))

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _take(self, document: Mapping[str, Any]) -> None:
        readers, verifiers, anonymous = parse_users(document, self._path)
        self._readers, self._verifiers, self._anonymous = readers, verifiers, anonymous

    def _refresh(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_users(self._path))
        except ConfigError as error:
            log.error("the users of before stay in force", error=str(error))
        else:
            log.info("users read again", path=str(self._path), users=len(self._readers))

    @property
    def anonymous(self) -> Reader | None:
        """Who the file says that everybody on this machine is."""
        self._refresh()
        return self._anonymous

    def reader(self, name: str) -> Reader | None:
        """A user of the file."""
        self._refresh()
        return self._readers.get(name)

    def verifiers(self, mechanism: str) -> Callable[[str], ScramVerifier | None]:
        """The verifiers of one mechanism."""
        self._refresh()
        return lambda name: self._verifiers.get(name, {}).get(mechanism)

    def check(self, name: str, password: str) -> Reader | None:
        """A user of the file, if this is the password. A password that was proven once is cheap to check again."""
        self._refresh()
        kept = self._verifiers.get(name)
        if not kept:
            return None
        mechanism, verifier = next(iter(kept.items()))
        digest = hmac.digest(self._salt, password.encode(), "sha256")
        proven = self._proven.get(name)
        if proven is None or proven[0] is not verifier or not hmac.compare_digest(proven[1], digest):
            if not verifier.proves(mechanism, password):
                return None
            self._proven[name] = (verifier, digest)
        return self._readers.get(name)


def users_of(settings: Settings) -> Users:
    """The users that the settings name."""
    if settings.users_file is not None:
        return FileUsers(settings.users_file)
    name = parse(settings.source).user if settings.source is not None else None
    return SourceUser(name or "", PasswordSource.of(settings).read)


# The file.


def entry_of(password: str, patterns: tuple[str, ...] = EVERYTHING) -> dict[str, Any]:
    """What the file says of a user with this password."""
    verifiers = {}
    for mechanism in HASHES:
        verifier = ScramVerifier.of(mechanism, password)
        verifiers[mechanism] = {
            "salt": _base64(verifier.salt),
            "iterations": verifier.iterations,
            "stored_key": _base64(verifier.stored_key),
            "server_key": _base64(verifier.server_key),
        }
    return {"read": list(patterns), "verifiers": verifiers}


def read_users(path: Path) -> dict[str, Any]:
    """The file's document. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(USERS_FILE_BYTES_MAX + 1)
        document = json.loads(data) if len(data) <= USERS_FILE_BYTES_MAX else None
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _bad(path, "is not a JSON object" if data else "is empty")
    return document


def parse_users(
    document: Mapping[str, Any], path: Path
) -> tuple[dict[str, Reader], dict[str, dict[str, ScramVerifier]], Reader | None]:
    """Readers, their verifiers by mechanism, and the anonymous reader. Raises ConfigError."""
    unknown = set(document) - {"users", "anonymous"}
    if unknown:
        raise _bad(path, f"has the unknown member {min(unknown)!r}")
    users = document.get("users", {})
    if not isinstance(users, dict):
        raise _bad(path, "`users` is not an object")
    readers: dict[str, Reader] = {}
    verifiers: dict[str, dict[str, ScramVerifier]] = {}
    for name, entry in users.items():
        if not name or not isinstance(entry, dict):
            raise _bad(path, f"user {name!r} is not an object with a name")
        readers[name] = Reader(name, _patterns(entry.get("read"), path, f"user {name!r}"))
        kept = entry.get("verifiers")
        if not isinstance(kept, dict) or not kept or set(kept) - set(HASHES):
            raise _bad(path, f"user {name!r} needs `verifiers` of {', '.join(HASHES)}")
        try:
            verifiers[name] = {mechanism: _verifier(kept[mechanism]) for mechanism in HASHES if mechanism in kept}
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise _bad(path, f"a verifier of user {name!r} makes no sense: {error!r}") from None
    anonymous = None
    if document.get("anonymous") is not None:
        entry = document["anonymous"]
        anonymous = Reader("", _patterns(entry.get("read") if isinstance(entry, dict) else None, path, "`anonymous`"))
    return readers, verifiers, anonymous


def _verifier(kept: Mapping[str, Any]) -> ScramVerifier:
    salt, stored_key, server_key = (
        base64.b64decode(kept[name], validate=True) for name in ("salt", "stored_key", "server_key")
    )
    iterations = kept["iterations"]
    if not isinstance(iterations, int) or not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise ValueError(f"{iterations} iterations")
    if not salt or not stored_key or len(stored_key) != len(server_key):
        raise ValueError("salt or keys are of no possible length")
    return ScramVerifier(salt, iterations, stored_key, server_key)


def _patterns(value: Any, path: Path, whose: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _bad(path, f"{whose} needs `read`, a list of collections")
    for pattern in value:
        scope, dot, collection = pattern.partition(".")
        if pattern != "*" and not (scope and dot and collection and scope != "*"):
            raise _bad(path, f"{whose} may read {pattern!r}, which is neither *, scope.* nor scope.collection")
    return tuple(value)


def _bad(path: Path, what: str) -> ConfigError:
    return ConfigError(f"the users file {path} {what}", hint="write it with `dcp-mirror user`", setting="users_file")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


# TLS.


def server_tls(settings: Settings) -> ssl.SSLContext | None:
    """The context of the listeners with TLS; None where no certificate is set. Raises ConfigError."""
    if settings.listen_tls_cert_file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.listen_tls_cert_file, settings.listen_tls_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the certificate {settings.listen_tls_cert_file} or its key cannot be used: {error}",
            hint="both must be PEM, belong together, and the key must have no passphrase",
            setting="listen_tls_cert_file",
        ) from None
    return context
