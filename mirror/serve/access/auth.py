"""Users with SCRAM verifiers, and the collections that each may read.

The file is JSON: `{"users": {NAME: {"read": [PATTERN...], "verifiers": {MECHANISM: {...}}}}, "anonymous": {"read":
[PATTERN...]}, "salt_key": BASE64}`; a pattern is `*`, `scope.*` or `scope.collection`. A changed file is read again; if
it is invalid, the old users stay.

- Without a users file, clients on this machine, and clients that log in as the mirror does at its source, read all.
- With a users file, clients without a login read only the collections of `anonymous`, and only on this machine.
- A challenge does not show whether the user exists: salt, iterations and work look like a known user's (`decoy`).
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mirror.config import PasswordSource, Settings
from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import parse
from mirror.log import get_logger
from mirror.wire.sasl import HASHES, ITERATIONS_MAX, ITERATIONS_MIN, ScramVerifier, salt_of
from storage.model import Manifest

SECRET_BYTES_MIN = 16
USERS_FILE_BYTES_MAX = 8 * 1024 * 1024

EVERYTHING = frozenset(("*",))

log = get_logger("auth")


@dataclass(frozen=True, slots=True)
class Reader:
    name: str
    patterns: frozenset[str] = EVERYTHING
    credential: bytes = field(default=b"", compare=False, repr=False)
    """A value that changes with the user's password; empty if the user is not from a file."""

    @property
    def reads_all(self) -> bool:
        return "*" in self.patterns

    def may_read(self, collection: str) -> bool:
        return not self.patterns.isdisjoint(("*", f"{collection.partition('.')[0]}.*", collection))


def visible(manifest: Manifest, reader: Reader) -> Manifest:
    """Return a manifest's collections and scopes that a reader may read. Every reader may see the default scope."""
    names = manifest.names()
    collections = {number: entry for number, entry in manifest.collections.items() if reader.may_read(names[number])}
    seen = {entry.scope_id for entry in collections.values()}
    scopes = {
        number: name
        for number, name in manifest.scopes.items()
        if number in seen or number == 0 or f"{name}.*" in reader.patterns
    }
    return Manifest(manifest.uid, scopes, collections)


class SourceUser:
    """The only user without a users file: the mirror's own user at its source."""

    def __init__(self, name: str, password: Callable[[], str | None], secret: bytes | None = None) -> None:
        """`password` returns the present password. Salts derive from `secret`, which a service's processes share."""
        self._name = name
        self._password = password
        self._secret = secret or secrets.token_bytes(16)
        self._kept: dict[str, tuple[str, ScramVerifier]] = {}

    @property
    def anonymous(self) -> Reader | None:
        return Reader("")

    def reader(self, name: str) -> Reader | None:
        return Reader(name) if name and name == self._name else None

    def verifier(self, mechanism: str, name: str) -> ScramVerifier | None:
        password = self._password()
        if password is None:
            return None
        kept = self._kept.get(mechanism)
        if kept is None or kept[0] != password:
            salt = salt_of(mechanism, self._name, self._secret)
            kept = self._kept[mechanism] = (password, ScramVerifier.of(mechanism, password, salt=salt))
        return kept[1] if self.reader(name) else None

    def decoy(self, mechanism: str, name: str) -> ScramVerifier:
        return ScramVerifier.decoy(mechanism, name, self._secret)

    def proven(self, name: str, password: str) -> Reader | None:
        return self.check(name, password)

    def check(self, name: str, password: str) -> Reader | None:
        expected = self._password()  # compare digests: the time does not show the password's length
        right = hmac.compare_digest(
            hmac.digest(self._secret, (expected or "").encode(), "sha256"),
            hmac.digest(self._secret, password.encode(), "sha256"),
        )
        return self.reader(name) if right and expected is not None else None


@dataclass(frozen=True, slots=True)
class UsersFile:
    readers: dict[str, Reader]
    verifiers: dict[str, dict[str, ScramVerifier]]
    """By user and mechanism."""
    models: dict[str, list[ScramVerifier]]
    """Verifiers by mechanism. An unknown user's challenge looks like one of these."""
    anonymous: Reader | None
    salt_key: bytes | None


class FileUsers:
    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        """Read the file. Salts of unknown users derive from the file's `salt_key`, or else from `secret`. Clients see
        these salts, so they are not made of user data, which could help to guess a password. Raises ConfigError.
        """
        self._path = path
        self._stamp = file_stamp(path)
        self._file = parse_users(read_users(path), path)
        self._other_secret = secret or secrets.token_bytes(16)
        self._proven: dict[str, tuple[ScramVerifier, bytes]] = {}
        self._salt = secrets.token_bytes(16)

    def _refresh(self) -> None:
        """Read the file if it has changed: 20 us a user."""
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._file = parse_users(read_users(self._path), self._path)
        except ConfigError as error:
            log.error("users-not-reloaded", error=str(error))
        else:
            log.info("users-reloaded", path=str(self._path), users=len(self._file.readers))

    @property
    def anonymous(self) -> Reader | None:
        self._refresh()
        return self._file.anonymous

    def reader(self, name: str) -> Reader | None:
        self._refresh()
        return self._file.readers.get(name)

    def verifier(self, mechanism: str, name: str) -> ScramVerifier | None:
        self._refresh()
        return self._file.verifiers.get(name, {}).get(mechanism)

    def decoy(self, mechanism: str, name: str) -> ScramVerifier:
        """Return a verifier for an unknown user's challenge: for each name always the same, and like a known user's."""
        models, secret = self._file.models[mechanism], self._file.salt_key or self._other_secret
        if not models:
            return ScramVerifier.decoy(mechanism, name, secret)
        model = models[int.from_bytes(salt_of(mechanism, name, secret + b"model", 8)) % len(models)]
        return ScramVerifier.decoy(mechanism, name, secret, iterations=model.iterations, salt_bytes=len(model.salt))

    def proven(self, name: str, password: str) -> Reader | None:
        """Return the user if `check` has accepted this password before; this takes no PBKDF2. None: call `check`."""
        self._refresh()
        digest = self._digest(password)
        verifier, proven = self._proven.get(name, (None, b""))
        right = hmac.compare_digest(proven, digest)
        return self._file.readers.get(name) if right and verifier is self._verifier(name) else None

    def check(self, name: str, password: str) -> Reader | None:
        """Return the user if the password is right. An unknown user costs as much work as a known one."""
        self._refresh()
        verifier = self._verifier(name)
        best = next((each for each in HASHES if self._file.models[each]), next(iter(HASHES)))
        mechanism = next(iter(self._file.verifiers.get(name, (best,))))
        if not (verifier or self.decoy(mechanism, name)).proves(mechanism, password) or verifier is None:
            return None
        self._proven[name] = (verifier, self._digest(password))
        return self.proven(name, password)

    def _verifier(self, name: str) -> ScramVerifier | None:
        return next(iter(self._file.verifiers.get(name, {}).values()), None)

    def _digest(self, password: str) -> bytes:
        return hmac.digest(self._salt, password.encode(), "sha256")


Users = SourceUser | FileUsers


def current(users: Users, reader: Reader) -> Reader | None:
    """Return a reader with its present rights; None if the user was removed or has another password."""
    now = users.reader(reader.name) if reader.name else users.anonymous
    return now if now is not None and now.credential == reader.credential else None


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return time, size and inode, which change with a file's content; None if the file is inaccessible."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def users_of(settings: Settings, secret: bytes | None = None) -> Users:
    """Return the users that the settings name. `secret` is for `SourceUser` or `FileUsers`."""
    if settings.users_file is not None:
        return FileUsers(settings.users_file, secret)
    name = parse(settings.source).user if settings.source is not None else None
    return SourceUser(name or "", PasswordSource.of(settings).read, secret)


# The file.


def entry_of(password: str, patterns: Iterable[str] = EVERYTHING) -> dict[str, Any]:
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


def new_salt_key() -> str:
    return _base64(secrets.token_bytes(16))


def read_users(path: Path) -> dict[str, Any]:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # never wait for a pipe
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _bad(path, "is not a file")
            data = file.read(USERS_FILE_BYTES_MAX + 1)
        if len(data) > USERS_FILE_BYTES_MAX:
            raise _bad(path, f"has more than {USERS_FILE_BYTES_MAX:,} bytes")
        document = json.loads(data)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise _bad(path, "is not a JSON object" if data else "is empty")
    return document


def parse_users(document: Mapping[str, Any], path: Path) -> UsersFile:
    """Raises ConfigError."""
    unknown = set(document) - {"users", "anonymous", "salt_key"}
    if unknown:
        raise _bad(path, f"has the unknown member {min(unknown)!r}")
    users = document.get("users", {})
    if not isinstance(users, dict):
        raise _bad(path, "`users` is not an object")
    salt_key = _salt_key(document, path)
    readers: dict[str, Reader] = {}
    verifiers: dict[str, dict[str, ScramVerifier]] = {}
    for name, entry in users.items():
        if not name or not isinstance(entry, dict):
            raise _bad(path, f"user {name!r} is not an object with a name")
        patterns = _patterns(entry.get("read"), path, f"user {name!r}")
        kept = entry.get("verifiers")
        if not isinstance(kept, dict) or not kept or set(kept) - set(HASHES):
            raise _bad(path, f"user {name!r} needs `verifiers` of {', '.join(HASHES)}")
        try:
            verifiers[name] = {mechanism: _verifier(kept[mechanism]) for mechanism in HASHES if mechanism in kept}
        except (KeyError, TypeError, ValueError) as error:
            raise _bad(path, f"invalid verifier of user {name!r}: {error!r}") from None
        readers[name] = Reader(name, patterns, next(iter(verifiers[name].values())).stored_key)
    anonymous = None
    if document.get("anonymous") is not None:
        entry = document["anonymous"]
        anonymous = Reader("", _patterns(entry.get("read") if isinstance(entry, dict) else None, path, "`anonymous`"))
    models = {mechanism: [kept[mechanism] for kept in verifiers.values() if mechanism in kept] for mechanism in HASHES}
    return UsersFile(readers, verifiers, models, anonymous, salt_key)


def _salt_key(document: Mapping[str, Any], path: Path) -> bytes | None:
    text = document.get("salt_key")
    if text is None:
        return None
    try:
        found = base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        found = b""
    if len(found) < SECRET_BYTES_MIN:
        raise _bad(path, f"`salt_key` is not base64 of {SECRET_BYTES_MIN} bytes or more")
    return found


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


def _patterns(value: Any, path: Path, whose: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise _bad(path, f"{whose} needs `read`, a list of collections")
    for pattern in value:
        scope, dot, collection = pattern.partition(".")
        if pattern != "*" and not (scope and dot and collection and scope != "*"):
            raise _bad(path, f"{whose} may read {pattern!r}, which is neither *, scope.* nor scope.collection")
    return frozenset(value)


def _bad(path: Path, what: str) -> ConfigError:
    return ConfigError(f"the users file {path} {what}", hint="write it with `dcp-mirror user`")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
