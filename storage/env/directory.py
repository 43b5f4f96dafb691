"""A mirror's directory: `mirror.json`, `map.json`, group folders, and the lock of each group's writer.

`mirror.json` is written last, by fsync and rename. A directory without this file counts as empty, unless a writer has
opened a group. The number of groups never changes; vbucket v belongs to group v % groups.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import secrets
import shlex
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields, replace
from typing import IO

import lmdb
import msgpack

from storage.env.environment import DATA_FILE, WRITER_LOCK_FILE, Environment, storage_error
from storage.env.transaction import Transaction
from storage.errors import (
    SET_ASIDE,
    CorruptedError,
    Locked,
    NotAMirror,
    ReadOnly,
    StorageError,
    UnknownFormat,
    WrongBucket,
)
from storage.format import keys, records
from storage.model import Branch, BranchReason, FailoverLog, Identity, Seqno

FORMAT = 3
FILE = "mirror.json"
MAP_FILE = "map.json"
MAP_HINT = "remove the file: the next start follows the newest map of all nodes that answer"
READERS_HINT = "run as the user that owns the mirror, or as a member of its readers_group"
META_BYTES = 8192
"""Size of LMDB's two meta pages, the head of a file. If they are zeros, the file holds no data."""
DAMAGED_HINT = "remove the file: the next command prints the line that makes it again"
LOCK_PAUSES_S = (0.002, 0.01)
"""Pauses between tries for the lock, because a reader that tests the lock holds it for some microseconds."""
VBUCKETS_MAX = 65536
GROUPS_MAX = 1024


def exists(path: str) -> bool:
    return os.path.exists(os.path.join(path, FILE))


def create(path: str, identity: Identity, *, time_ms: int = 0) -> None:
    """Make an empty mirror at `path`: environments first, `mirror.json` last. Raises StorageError if it exists."""
    if exists(path):
        raise StorageError("already holds a mirror", path=path)
    check_unused(path)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        for group in range(identity.group_count):
            folder = group_path(path, group)
            if os.path.islink(folder):
                raise StorageError("is a symbolic link", path=folder, hint="remove it")
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if os.path.exists(os.path.join(folder, DATA_FILE)):  # left by an interrupted creation
                os.unlink(os.path.join(folder, DATA_FILE))
            create_environment(folder, group, identity, time_ms=time_ms)
        write_description(path, identity)
    except OSError as error:
        raise storage_error(error, path) from error


def check_unused(path: str) -> None:
    """For a `path` without `mirror.json`: raise CorruptedError if a writer has ever opened a group there. Raises
    StorageError if a group cannot be read.
    """
    for file in sorted(glob.glob(os.path.join(glob.escape(path), "group-*", DATA_FILE))):
        try:
            with open(file, "rb") as data:
                if not any(data.read(META_BYTES)):  # a power cut interrupted a creation
                    continue
        except OSError as error:
            raise storage_error(error, file) from error
        environment = Environment(os.path.dirname(file), ())
        try:
            stored, fence = _meta(environment)
        finally:
            environment.close()
        if any(fence):  # else the creation was interrupted
            text = json.dumps(_stored_description(stored, environment.path))
            raise CorruptedError(
                f"{FILE} is missing, and the group folders hold a mirror",
                path=path,
                hint=f"to make the file again: echo {shlex.quote(text)} > {shlex.quote(os.path.join(path, FILE))}; to "
                "begin a new mirror: move the folders away",
            )


def _meta(environment: Environment) -> tuple[bytes, bytes]:
    """Read the identity and fence (a number that each writer raises); both are empty if creation was interrupted."""
    with environment.read() as read:
        if read.raw.get(keys.DB_META) is None:
            return b"", b""
    environment.open_all()
    with environment.read() as read:
        return read.get(keys.DB_META, b"identity") or b"", read.get(keys.DB_META, b"fence") or b""


def _stored_description(stored: bytes | None, path: str) -> dict[str, object]:
    """Return what `mirror.json` should contain. `stored` is the identity in the tree `meta`; `path` is for errors.
    Raises CorruptedError.
    """
    try:
        stored_format, _, *values = msgpack.unpackb(stored or b"")
        names = [field.name for field in fields(Identity)]
        if len(values) == len(names) - 1 and isinstance(values[-1], str):
            names.remove("held")
        return dict(zip(("format", *names), (stored_format, *values), strict=False))
    except Exception as error:
        raise CorruptedError("the environment has no identity", path=path, hint=SET_ASIDE) from error


def write_description(path: str, identity: Identity) -> None:
    """Write `mirror.json`, the last step of making a mirror. Raises OSError."""
    replace_file(os.path.join(path, FILE), json.dumps(description(identity), indent=1).encode(), mode=0o666)


def description(identity: Identity) -> dict[str, object]:
    return {"format": FORMAT, **_fields(identity)}


def create_environment(path: str, group: int, identity: Identity, *, time_ms: int = 0) -> None:
    """Create a group's environment with empty vbuckets: branch 1, nothing published. Raises StorageError."""
    vbids = identity.group_vbids(group)
    # On the disk before `mirror.json`, which says that the groups are there.
    environment = Environment(path, vbids, writable=True, create=True, sync="full")
    try:
        environment.open_all()
        with environment.begin(write=True) as raw:
            txn = Transaction(environment, raw)
            history_ids = ((environment.history_id, 0),)
            branch = records.BranchRow(None, 0, 0, BranchReason.FIRST, time_ms, history_ids=history_ids)
            for vbid in vbids:
                txn.put(keys.DB_BRANCH, keys.BRANCH_KEY.pack(vbid, 1), records.encode_branch(branch))
                txn.put_pub(vbid, records.Pub(Branch(1), Seqno(0), Seqno(0)))
                txn.put_state_row(vbid, records.StateRow(1, 0, 0, 0, None, FailoverLog(), 0, 0, None))
            txn.put(keys.DB_META, b"identity", identity_bytes(identity, group))
            txn.put(keys.DB_META, b"fence", (0).to_bytes(8, "big"))
    except lmdb.Error as error:
        raise storage_error(error, path) from error
    finally:
        environment.close()


def identity_bytes(identity: Identity, group: int) -> bytes:
    """Return the value of `identity` in the tree `meta`. A file with another value belongs to another mirror."""
    return bytes(msgpack.packb([FORMAT, group, *_fields(identity).values()]))


def _fields(identity: Identity) -> dict[str, object]:
    found = asdict(identity)
    if identity.held is None:
        del found["held"]
    if not identity.selection:
        del found["selection"]
    return found


def check_identity(stored: bytes | None, identity: Identity, group: int, path: str) -> None:
    """Raise WrongBucket, UnknownFormat or CorruptedError if `stored`, an environment's identity, is not `identity`."""
    if stored == identity_bytes(identity, group):
        return
    found = _stored_description(stored, path)
    if found["format"] != FORMAT:
        raise _other_format(found["format"], path)
    raise WrongBucket(
        f"holds group {msgpack.unpackb(stored)[1]} of bucket {found['bucket_name']!r} ({found['bucket_uuid']}), "
        f"but mirror.json says group {group} of {identity.bucket_name!r} ({identity.bucket_uuid})",
        path=path,
        hint="put the right folder in its place",
    )


def _other_format(stored_format: object, path: str) -> UnknownFormat:
    if isinstance(stored_format, int) and stored_format < FORMAT:
        message = f"format {stored_format}, filled by a pre-release; this program knows format {FORMAT}"
        return UnknownFormat(message, path=path, hint="move it away and fill it again: run with the same source")
    hint = "use the version of dcp-mirror that wrote it"
    return UnknownFormat(f"format {stored_format}; this program knows format {FORMAT}", path=path, hint=hint)


def load(path: str) -> Identity:
    """Read the identity of the mirror at `path`.

    Raises NotAMirror, ReadOnly (no permission), UnknownFormat, or CorruptedError if `mirror.json` is invalid, or is
    missing from a mirror.
    """
    file_path = os.path.join(path, FILE)
    try:
        with open(file_path, encoding="utf-8") as file:
            data = json.load(file)
    except FileNotFoundError as error:
        check_unused(path)
        what = "no mirror here yet" if os.path.isdir(path) else "no such directory"
        raise NotAMirror(what, path=path, hint="`dcp-mirror run --source ... --data ...` makes one") from error
    except NotADirectoryError as error:
        raise NotAMirror("not a directory", path=path) from error
    except PermissionError as error:
        raise ReadOnly("permission denied", path=file_path, hint=READERS_HINT) from error
    except (OSError, ValueError) as error:
        raise CorruptedError(f"cannot be read: {error}", path=file_path, hint=DAMAGED_HINT) from error
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise CorruptedError("holds no mirror description", path=file_path, hint=DAMAGED_HINT)
    if data["format"] != FORMAT:
        raise _other_format(data["format"], file_path)
    try:
        required = [field.name for field in fields(Identity) if field.name not in ("held", "selection")]
        identity = Identity(**{name: data[name] for name in required}, selection=data.get("selection", ""))
        held = data.get("held")
        if held is not None:
            first, last = held
            identity = replace(identity, held=(first, last))
    except (TypeError, ValueError):
        raise CorruptedError("holds values that cannot be true", path=file_path, hint=DAMAGED_HINT) from None
    except KeyError as error:
        raise CorruptedError(f"lacks {error}", path=file_path, hint=DAMAGED_HINT) from error
    texts = (identity.cluster_uuid, identity.bucket_name, identity.bucket_uuid, identity.selection)
    numbers = (identity.vbucket_count, identity.group_count, *(identity.held or ()))
    if (
        not all(isinstance(text, str) for text in texts)
        or not all(isinstance(number, int) for number in numbers)
        or not 1 <= identity.vbucket_count <= VBUCKETS_MAX
        or not 1 <= identity.group_count <= GROUPS_MAX
        or not 0 <= identity.vbids.start < identity.vbids.stop <= identity.vbucket_count
    ):
        raise CorruptedError("holds values that cannot be true", path=file_path, hint=DAMAGED_HINT)
    return identity


def sync_directory(path: str) -> None:
    """Sync a directory, so that new names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, mode: int = 0o600, like: str | None = None) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` once it is whole and on disk; after an error remove it. Raises OSError.

    All files outside of the data directory are written so. Until then the file has a random name and O_EXCL: in a
    shared folder another user could make a file or link of a known name first, own the result or have it written
    elsewhere. The file gets group and mode of the file `like` if `like` exists, otherwise `mode` under the umask.
    """
    path = os.fspath(path)
    unfinished = f"{path}.{secrets.token_hex(8)}.new"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "wb") as file:
            if like is not None and os.path.exists(like):
                found = os.stat(like)
                if os.fstat(descriptor).st_gid != found.st_gid:
                    os.fchown(descriptor, -1, found.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
            yield file
            # Before the rename: after a power cut the new name could otherwise have an empty file.
            file.flush()
            os.fsync(descriptor)
        os.rename(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    sync_directory(os.path.dirname(path) or ".")


def replace_file(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o600, like: str | None = None) -> None:
    """Replace a whole file, as `replacing` does. Raises OSError."""
    with replacing(path, mode=mode, like=like) as file:
        file.write(data)


def group_path(path: str, group: int) -> str:
    return os.path.join(path, f"group-{group:04d}")


def group_files(path: str, count: int) -> list[tuple[int, int]]:
    """Return (device, inode) of each group's data file, to notice a recreated group; (0, 0) for a missing file."""
    found = []
    for group in range(count):
        try:
            there = os.stat(os.path.join(group_path(path, group), "data.mdb"))
            found.append((there.st_dev, there.st_ino))
        except OSError:
            found.append((0, 0))
    return found


@dataclass(frozen=True, slots=True)
class MapRecord:
    """The epoch and revision of the newest cluster map that a mirror followed. After a restart the mirror follows no
    older map. The mirror replaces `map.json` before it follows a newer map.
    """

    bucket_uuid: str
    rev_epoch: int
    rev: int

    @property
    def revision(self) -> tuple[int, int]:
        return self.rev_epoch, self.rev


def load_map(path: str, bucket_uuid: str) -> MapRecord | None:
    """Return the record of the mirror at `path`, or None if it is of another bucket or missing. Raises StorageError."""
    file_path = os.path.join(path, MAP_FILE)
    try:
        with open(file_path, encoding="utf-8") as file:
            data = json.load(file)
        record = MapRecord(data["bucket_uuid"], data["rev_epoch"], data["rev"])
        if [type(field) for field in astuple(record)] != [str, int, int]:
            raise TypeError
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, file_path) from error
    except (ValueError, KeyError, TypeError):
        raise CorruptedError("is not a record of a cluster map", path=file_path, hint=MAP_HINT) from None
    return record if record.bucket_uuid == bucket_uuid else None


def save_map(path: str, record: MapRecord) -> None:
    """Replace the record of the mirror at `path`. Raises StorageError."""
    file_path = os.path.join(path, MAP_FILE)
    try:
        replace_file(file_path, json.dumps(asdict(record)).encode(), mode=0o666, like=os.path.join(path, FILE))
    except OSError as error:
        raise storage_error(error, file_path) from error


class GroupLock:
    """The exclusive lock of a group's writer. The kernel releases it when the process dies."""

    def __init__(self, path: str) -> None:
        """Take the lock of the group folder `path`. Raises Locked, StorageError."""
        try:
            if os.path.islink(path):
                raise StorageError("is a symbolic link", path=path, hint="move the group's folder here in its place")
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(os.path.join(path, WRITER_LOCK_FILE), flags, 0o600)
        except OSError as error:
            raise storage_error(error, path) from error
        for pause_s in (*LOCK_PAUSES_S, None):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if pause_s is None:
                    os.close(self._descriptor)
                    raise Locked(
                        "another process is writing this group",
                        path=path,
                        hint="stop the other dcp-mirror on this data first",
                    ) from error
            time.sleep(pause_s)

    def release(self) -> None:
        os.close(self._descriptor)
