"""Makes backups of a mirror, also while its service runs, and restores a mirror from a backup.

A backup (FORMAT.md, "Backups") is a series of parts, which `storage.admin.archive` stores. `backup.json`, the list of
parts and checksums, is the last part, so an unfinished backup lacks this file. In a restored mirror, positions above
the published seqnos have a new history id, so the mirror refuses tokens that the original issued for later changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

from storage.admin.check import CheckReport, check_group
from storage.env import directory
from storage.env.compaction import Compaction
from storage.env.directory import MapRecord
from storage.env.environment import DATA_FILE, storage_error
from storage.env.transaction import Transaction
from storage.errors import CorruptedError, StorageError, UnknownFormat
from storage.history import branches
from storage.model import Identity, Seqno
from storage.read.view import Time, View, open_view
from storage.write.writer import GroupWriter, WriterOptions

VERSION = 1
MANIFEST = "backup.json"
KIND = "dcp-mirror backup"
PART_BYTES = 16 << 20
"""Largest part, bytes. Memory holds a whole part, because in a tar the size of a member precedes its bytes."""
MANIFEST_BYTES_MAX = 256 << 20
WORK = "restore.new"
"""Folder in the target (so on the same file system) where `restore` prepares the mirror."""
_PART = re.compile(rf"group-(\d{{4}})/{re.escape(DATA_FILE)}\.(\d{{6}})")
AGAIN = "make the backup again, or take another one"

Progress = Callable[[int, int], None]
"""Called with the numbers of finished groups and of bytes so far. A restore counts the groups again for its checks."""


class BackupPart(NamedTuple):
    name: str
    data: bytes


class BackupSink(Protocol):
    def put(self, part: BackupPart) -> None:
        """Keep a part. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Summary:
    identity: Identity
    time_ms: int
    """Begin of the backup, milliseconds since 1970."""
    as_of_ms: int | None
    """The restored mirror serves the newest boundaries up to this time; None: the published seqnos."""
    published: dict[int, int]
    """For each vbid: the seqno that the restored mirror serves."""
    parts: int
    bytes: int


def no_part(name: str, why: str = "") -> CorruptedError:
    hint = "give a backup that `dcp-mirror backup` wrote"
    return CorruptedError(f"{name[:80]!r} is no part of a backup{why}", hint=hint)


def part_name(group: int, number: int) -> str:
    return f"{os.path.basename(directory.group_path('', group))}/{DATA_FILE}.{number:06}"


# -- making a backup --------------------------------------------------------------------------------------------------


def create(
    path: str, sink: BackupSink, *, time_ms: int, as_of_ms: int | None = None, progress: Progress = lambda *_: None
) -> Summary:
    """Copy the mirror at `path` into `sink`, with or without a running service.

    With `as_of_ms` the restored mirror serves the newest kept boundary of each vbucket up to that time. Raises
    NoSuchBoundary, StorageError; OSError if the sink fails.
    """
    files: list[dict[str, Any]] = []
    published: dict[int, int] = {}
    rollbacks: dict[int, int] = {}
    byte_count = 0
    with open_view(path, stale_reads=True, partial=True) as view:
        identity = view.identity
        _check_copied(view, as_of_ms)
        for group in range(identity.group_count):
            for number, data in enumerate(_group_parts(view, group, as_of_ms, published, rollbacks)):
                name = part_name(group, number)
                sink.put(BackupPart(name, data))
                files.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
                byte_count += len(data)
                progress(group, byte_count)
            progress(group + 1, byte_count)
        followed = directory.load_map(path, identity.bucket_uuid)  # read last: the map must not be older than the data
    manifest = {
        "kind": KIND,
        "version": VERSION,
        "store_format": directory.FORMAT,
        "time_ms": time_ms,
        "as_of_ms": as_of_ms,
        "mirror": directory.description(identity),
        "map": None if followed is None else {"rev_epoch": followed.rev_epoch, "rev": followed.rev},
        "published": {str(vbid): seqno for vbid, seqno in published.items()},
        "rollbacks": {str(vbid): seqno for vbid, seqno in rollbacks.items()},
        "files": files,
    }
    sink.put(BackupPart(MANIFEST, json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1).encode()))
    return Summary(identity, time_ms, as_of_ms, published, len(files), byte_count)


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_copied(view: View, as_of_ms: int | None) -> None:
    """Raise what would end the backup after some groups were copied."""
    directory.load_map(view.path, view.identity.bucket_uuid)
    for vbid in view.vbids:
        with view.groups.environment(vbid).read() as txn:
            _served(view, vbid, txn, as_of_ms)


def _served(view: View, vbid: int, txn: Transaction, as_of_ms: int | None) -> tuple[Seqno, bool]:
    """Return the seqno that the restored vbucket serves, and True if the restore must roll it back."""
    served, _ = view.reader(vbid).as_of(txn, None if as_of_ms is None else Time(as_of_ms))
    if as_of_ms is None or not served.pub.seqno:
        return served.pub.seqno, False
    state = view.reader(vbid).state(txn)
    branches.check_settled(state, txn.path)
    return served.pub.seqno, served.pub.seqno < state.published_seqno


def _group_parts(
    view: View, group: int, as_of_ms: int | None, published: dict[int, int], rollbacks: dict[int, int]
) -> Iterator[bytes]:
    """Yield a group's compacted copy in parts. Before the first part, add to `published` the seqno that each restored
    vbucket serves, and to `rollbacks` the boundary of each vbucket that the restore must roll back.
    """
    vbids = view.identity.group_vbids(group)
    if not vbids:
        return
    environment = view.groups.environment(vbids[0])
    with environment.read() as txn, closing(Compaction(environment, txn.raw)) as copy:
        for vbid in vbids:
            published[vbid], rolled_back = _served(view, vbid, txn, as_of_ms)
            if rolled_back:
                rollbacks[vbid] = published[vbid]
        pages = copy.pages()
        while part := b"".join(islice(pages, PART_BYTES // copy.page_bytes)):
            yield part


# -- restoring a mirror -----------------------------------------------------------------------------------------------


def contents(path: str) -> list[str]:
    """Return the names in a folder. Raises OSError. A new file system has `lost+found`, which does not count."""
    return sorted(name for name in os.listdir(path) if name != "lost+found")


def check_target(target: str) -> None:
    """Raise StorageError if `target` is not empty, or cannot be read."""
    try:
        names = contents(target)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(error, target) from error
    if WORK in names:
        hint = f"remove {os.path.join(target, WORK)} unless that restore still runs"
        raise StorageError("a restore into it was not finished", path=target, hint=hint)
    if names:
        raise StorageError(f"is not empty: it holds {names[0]}", path=target, hint="restore into an empty directory")


def restore(
    parts: Iterable[BackupPart],
    target: str,
    *,
    clock_ms: Callable[[], int],
    progress: Progress = lambda *_: None,
    check_rows: bool = True,
) -> Summary:
    """Restore a backup into a mirror at `target`, which must be missing or empty.

    The checksums show damage of the backup. With `check_rows` all rows are checked, too: this shows damage that the
    original mirror had. Raises StorageError. After CorruptedError or UnknownFormat, `target` is as before.
    """
    check_target(target)
    work = os.path.join(target, WORK)
    made = not os.path.exists(target)
    try:
        os.makedirs(target, mode=0o700, exist_ok=True)
        os.mkdir(work, 0o700)
    except OSError as error:
        raise storage_error(error, target) from error
    try:
        summary = _prepare(parts, work, clock_ms, progress, check_rows=check_rows)
        for name in sorted(os.listdir(work), key=lambda name: (name == directory.FILE, name)):
            if name == directory.FILE:
                directory.sync_directory(target)
            os.rename(os.path.join(work, name), os.path.join(target, name))
        os.rmdir(work)
        directory.sync_directory(target)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if made:
            with suppress(OSError):
                os.rmdir(target)
        if isinstance(error, OSError):
            raise storage_error(error, target) from error
        raise
    return summary


def _prepare(
    parts: Iterable[BackupPart], work: str, clock_ms: Callable[[], int], progress: Progress, *, check_rows: bool
) -> Summary:
    found: dict[str, tuple[int, str]] = {}
    manifest: dict[str, Any] | None = None
    total = 0
    with closing(_Files(work)) as files:
        for part in parts:
            if part.name == MANIFEST:
                manifest = read_manifest(part.data)
                continue
            files.append(part)
            found[part.name] = (len(part.data), hashlib.sha256(part.data).hexdigest())
            total += len(part.data)
            progress(files.group, total)
    if manifest is None:
        raise CorruptedError(f"the backup is not complete: it has no {MANIFEST}", hint=AGAIN)
    _compare(manifest, found)
    with open(os.path.join(work, directory.FILE), "w", encoding="utf-8") as file:
        json.dump(manifest["mirror"], file)
    identity = directory.load(work)
    os.unlink(os.path.join(work, directory.FILE))
    rollbacks = {int(vbid): int(seqno) for vbid, seqno in manifest["rollbacks"].items()}
    for group in range(identity.group_count):
        if check_rows:
            _check(work, identity, group)
        _open_once(work, identity, group, rollbacks, clock_ms)
        progress(group + 1, total)
    if manifest["map"] is not None:
        directory.save_map(work, MapRecord(identity.bucket_uuid, **manifest["map"]))
    directory.write_description(work, identity)
    published = {int(vbid): int(seqno) for vbid, seqno in manifest["published"].items()}
    return Summary(identity, manifest["time_ms"], manifest["as_of_ms"], published, len(found), total)


class _Files:
    def __init__(self, work: str) -> None:
        self._work = work
        self._descriptor = -1
        self._expected = (0, 0)

    @property
    def group(self) -> int:
        return self._expected[0]

    def append(self, part: BackupPart) -> None:
        match = _PART.fullmatch(part.name)
        if match is None:
            raise no_part(part.name)
        group, number = int(match[1]), int(match[2])
        if number == 0:
            self.close()
            folder = directory.group_path(self._work, group)
            if os.path.exists(folder):
                raise CorruptedError(f"{part.name} comes twice", hint=AGAIN)
            os.mkdir(folder, 0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(os.path.join(folder, DATA_FILE), flags, 0o600)
        elif (group, number) != self._expected or self._descriptor < 0:
            raise CorruptedError(f"{part_name(*self._expected)} is missing before {part.name}", hint=AGAIN)
        view = memoryview(part.data)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self._expected = (group, number + 1)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def read_manifest(data: bytes) -> dict[str, Any]:
    """Decode `backup.json`. Raises CorruptedError, UnknownFormat."""
    try:
        manifest = json.loads(data)
        if manifest["kind"] != KIND:
            raise KeyError(KIND)
        version, store_format, digest = manifest["version"], manifest["store_format"], manifest.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CorruptedError(f"{MANIFEST} is damaged, or is not that of a backup", hint=AGAIN) from None
    if version != VERSION or store_format != directory.FORMAT:
        raise UnknownFormat(
            f"the backup is of version {version} with data of format {store_format}; this program knows version "
            f"{VERSION} and format {directory.FORMAT}",
            hint="use the version of dcp-mirror that wrote it",
        )
    if digest != _digest(manifest):
        raise CorruptedError(f"{MANIFEST} is damaged: its checksum does not match", hint=AGAIN)
    return dict(manifest)


def _compare(manifest: dict[str, Any], found: dict[str, tuple[int, str]]) -> None:
    expected = {each["name"]: (each["bytes"], each["sha256"]) for each in manifest["files"]}
    for name, (size, digest) in expected.items():
        if name not in found:
            raise CorruptedError(f"the backup is not complete: {name} is missing", hint=AGAIN)
        if found[name] != (size, digest):
            what = "its SHA-256 does not match" if found[name][0] == size else f"{found[name][0]} bytes, not {size}"
            raise CorruptedError(f"the backup is damaged: {name}: {what}", hint=AGAIN)
    if others := sorted(found.keys() - expected.keys()):
        raise CorruptedError(f"{others[0]} does not belong to this backup", hint=AGAIN)


def _check(work: str, identity: Identity, group: int) -> None:
    report = CheckReport()
    if identity.group_vbids(group):
        check_group(work, group, identity, report)
    if report.problems:
        raise CorruptedError(
            f"the mirror was damaged when this backup was made: {len(report.problems)} problems in group {group}, "
            f"first {report.problems[0]}",
            hint="take an older backup; or restore it as it is (--no-check), and resync what `check` names",
        )


def _open_once(
    work: str, identity: Identity, group: int, rollbacks: dict[int, int], clock_ms: Callable[[], int]
) -> None:
    """Open a copied group as a writer, to begin a new history id (FORMAT.md, "Positions"). Roll vbuckets back to the
    boundaries in `rollbacks`.
    """
    path, vbids = directory.group_path(work, group), identity.group_vbids(group)
    if not vbids:
        return
    writer = GroupWriter(path, WriterOptions(group=group, identity=identity, sync="full", clock_ms=clock_ms))
    try:
        for vbid in vbids:
            if vbid in rollbacks:
                writer.vbuckets[vbid].check_rollback(rollbacks[vbid])
                writer.vbuckets[vbid].rollback(rollbacks[vbid])
    finally:
        writer.close()
