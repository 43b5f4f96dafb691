"""Opens and closes LMDB environments, begins their transactions, and translates LMDB's errors.

A process opens an environment file at most once (LMDB's own rule). A forked child neither uses, closes nor frees what
it inherits (`Environment.leave_to_parent`), and opens files anew. The file's memory map is large from the start:
reserved address space, not disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import lmdb
import lmdb._envid

from storage.env.transaction import Transaction
from storage.errors import (
    RUN_CHECK,
    SET_ASIDE,
    Closed,
    CorruptedError,
    DeviceFailed,
    Full,
    Locked,
    ReadOnly,
    StorageError,
    ViewInvalidated,
)
from storage.format import keys

MAP_SIZE = 64 << 30
"""Address space reserved for each environment, bytes. The file has only written LMDB pages. A full map grows."""
READER_TRIES = 3
"""Damage is reported after this many runs of py-lmdb's verifier found it. A commit in a run can look like damage."""
READERS_MAX = 1024
"""Reader slots for the reads of all processes (LMDB's default: 126). Without a free slot, a read raises Locked."""
DATA_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
"""LMDB's table of readers."""
WRITER_LOCK_FILE = "writer.lock"
"""The file on which the environment's writer holds a flock."""
LOOK_INTERVAL_S = 1.0
"""Pause between two checks that the open file is still at its path."""
UNREGISTERED_LOOK_INTERVAL_S = 0.01
"""The same pause on a read-only mount, where LMDB cannot register readers. A starting writer overwrites no LMDB page
that is being read before its third commit. Two commits take longer than the pause, so a reader notices in time.
"""
AFTER_FORK = "open another view in the child"
REMAP_WAIT_S = 10.0
"""Longest wait for the end of this process's reads before a change of the map's size fails with StorageError."""
REMAP_POLL_S = 0.0005
SPACE_MIN = 1 << 20
"""Bytes. With less free space, an input/output error of LMDB is reported as a full disk."""

LMDB_VERSION_MIN = (3, 0)
"""Oldest usable py-lmdb. Older ones cannot verify LMDB pages, and trust page numbers and lengths of a damaged file."""
DAMAGE = (
    lmdb.BadTxnError,  # an earlier call found a damaged page, but could not return an error
    lmdb.CorruptedError,
    lmdb.CursorFullError,  # a tree is deeper than LMDB allows
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageFullError,
    lmdb.PageNotFoundError,
    lmdb.ProblemError,
    lmdb.VersionMismatchError,
)
"""Errors of LMDB that mean a damaged file."""


def storage_error(error: Exception, path: str) -> StorageError:
    code = getattr(error, "errno", None)
    text = str(error)
    if isinstance(error, StorageError):
        return error
    if "closed/deleted/dropped" in text:
        return Closed("the view is closed", path=path, hint="open another view")
    if isinstance(error, lmdb.MemoryError):
        return Full("no address space to map the file", path=path, hint="raise the limit (ulimit -v)")
    if isinstance(error, lmdb.MapFullError):
        return Full("the LMDB map is full and cannot grow", path=path, hint="free address space or raise the limit")
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or "No space left" in text or "File too large" in text:
        return Full(
            "no space left to write", path=path, hint="free disk space or lift the quota; nothing published is lost"
        )
    if code == errno.EIO or (isinstance(error, lmdb.Error) and "Input/output error" in text):
        if isinstance(error, lmdb.Error) and not _has_space(path):  # LMDB's error for a short write
            return Full("a write was cut short: no space left", path=path, hint="free disk space or lift the limit")
        return DeviceFailed(
            "input/output error: the device fails, or a quota cut a write short",
            path=path,
            hint="see the kernel's log; the group goes on from its last commit as soon as the disk works",
        )
    if (
        code in (errno.EACCES, errno.EROFS, errno.EPERM)
        or isinstance(error, lmdb.ReadonlyError)
        or any(part in text for part in ("Permission denied", "Read-only file system", "Operation not permitted"))
    ):
        return ReadOnly(
            "permission denied",
            path=path,
            hint="the process needs read and write access to the directory and its lock file",
        )
    if isinstance(error, lmdb.LockError) and "Resource temporarily unavailable" in text:
        return Locked(
            f"a process of another container (PID namespace) has it open under the same PID, {os.getpid()}; LMDB "
            "distinguishes readers by their PIDs",
            path=path,
            hint="let the containers share one PID namespace, or start this process under another PID",
        )
    if isinstance(error, lmdb.ReadersFullError):
        return Locked(f"all {READERS_MAX} reader slots are taken", path=path, hint="close readers, then try again")
    if isinstance(error, DAMAGE):
        return CorruptedError(f"the LMDB file is damaged or is none: {error}", path=path, hint=SET_ASIDE)
    if not isinstance(error, (lmdb.Error, OSError)):  # stored bytes made the store's own code fail
        return CorruptedError(
            f"the stored data contradicts itself: {type(error).__name__}: {error}",
            path=path,
            hint=SET_ASIDE,
        )
    hint = f"{RUN_CHECK}; if it finds damage, {SET_ASIDE}"
    reason = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
    return StorageError(
        f"{type(error).__name__}: {reason}", path=path, hint=hint if isinstance(error, lmdb.Error) else ""
    )


def refuse_unsound_lmdb() -> None:
    """Raise StorageError if py-lmdb is too old or lacks its patched LMDB: damaged pages could crash the process."""
    version = tuple(int(part) for part in lmdb.__version__.split(".")[:2])
    is_patched = bool(lmdb.version(subpatch=True)[3])
    if version < LMDB_VERSION_MIN or not is_patched:
        found = f"lmdb {lmdb.__version__} with LMDB {'.'.join(map(str, lmdb.version()))}"
        raise StorageError(
            f"{found}{'' if is_patched else ' of the system'} may end the process where a file is damaged",
            hint=f"install lmdb {'.'.join(map(str, LMDB_VERSION_MIN))} or newer, with the LMDB that it brings",
        )


def _identity_of(path: str, name: str = DATA_FILE) -> tuple[int, int]:
    """Return device and inode of a file; (0, 0) for a missing file."""
    try:
        found = os.stat(os.path.join(path, name))
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _check_is_there(path: str) -> None:
    """Raise CorruptedError if the data file is missing. LMDB's own error says less."""
    try:
        os.stat(os.path.join(path, DATA_FILE))
    except FileNotFoundError:
        raise CorruptedError("the group's data file is missing", path=path, hint=SET_ASIDE) from None
    except OSError as error:
        raise storage_error(error, path) from error


def _refuse_unregistered(path: str) -> None:
    """For a `path` on a read-only mount: raise ReadOnly if a process may be writing the environment.

    On such a mount LMDB silently registers no readers. A process that writes the files by another mount would reuse
    LMDB pages that are being read.
    """
    try:
        descriptor = os.open(os.path.join(path, WRITER_LOCK_FILE), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError:
        written = "perhaps"
    else:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except OSError:
            written = "now"
        finally:
            os.close(descriptor)
    raise _unregistered(path, f"a service writes it {written}")


def _unregistered(path: str, writer: str) -> ReadOnly:
    return ReadOnly(
        f"it is mounted read-only, where LMDB cannot register readers, and {writer}",
        path=path,
        hint="mount it writable: members of the service's readers_group cannot write data; or read by HTTP or an SDK",
    )


def _has_space(path: str) -> bool:
    """Return False if the disk is full, or if the file has reached the process's limit of file size."""
    try:
        file_system = os.statvfs(path)
        if file_system.f_bavail * file_system.f_frsize < SPACE_MIN:
            return False
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return limit == resource.RLIM_INFINITY or limit - os.stat(os.path.join(path, DATA_FILE)).st_size > SPACE_MIN
    except OSError:
        return True


class Environment:
    """The LMDB environment of a vbucket group, for any number of reading threads and at most one writer."""

    def __init__(
        self,
        path: str,
        vbids: Sequence[int],
        *,
        writable: bool = False,
        create: bool = False,
        sync: str = "safe",
        map_size: int = MAP_SIZE,
    ) -> None:
        """Open `path`. `vbids` are the vbuckets whose trees may be used; `sync` is safe, full or unsafe."""
        self.path = os.path.realpath(path)
        self.vbids = tuple(vbids)
        self.writable = writable
        self.inherited = False
        """True in a child that was forked after the environment was opened."""
        self._map_lock = threading.Lock()
        self._remap_count = 0
        self._commit = -1
        """The last commit that was found in the mapped file."""
        self.remapping = False
        """True while the map changes size; no read may begin."""
        # A list, because append and pop are one step for the interpreter, and += on a number is not.
        self.running: list[None] = []
        """An entry for each read transaction of this process. A thread adds its entry before it checks `remapping`."""
        self._handles: dict[bytes, Any] = {}
        self.history_id = secrets.randbits(64) or 1
        """The history id of the branches and positions that a writer of this environment creates."""
        if not create:
            _check_is_there(path)
        self._is_unregistered = not writable and bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        if self._is_unregistered:
            _refuse_unregistered(path)
        self.env = self._open(path, map_size, create=create, sync=sync)
        _environments.add(self)
        self._file, self._lock_file = _identity_of(self.path), _identity_of(self.path, LOCK_FILE)
        self._look_interval_s = UNREGISTERED_LOOK_INTERVAL_S if self._is_unregistered else LOOK_INTERVAL_S
        self.look_at = time.monotonic() + self._look_interval_s
        """Time of the next check by `look` (`time.monotonic`); 0: the next call checks."""
        self.replaced = False
        """True once the group's folder or file was moved, removed or replaced, or the map was lost. The open file is
        then no longer read.
        """
        try:
            # A page beyond the end of the file would end the process by SIGBUS.
            self._refuse_cut_short(tries=1 if writable else READER_TRIES)
            if writable and sync != "unsafe":
                self._settle_meta_pages()
        except BaseException:
            self.env.close()
            raise
        if writable:
            self.env.reader_check()

    def _open(self, path: str, map_size: int, *, create: bool, sync: str) -> lmdb.Environment:
        refuse_unsound_lmdb()
        if os.path.islink(os.path.join(path, LOCK_FILE)):  # LMDB would write to its target
            raise StorageError(f"{LOCK_FILE} is a symbolic link", path=path, hint="remove the link")
        try:
            return lmdb.open(
                path,
                map_size=map_size,
                max_dbs=2 * len(self.vbids) + len(keys.SHARED_DBS) + 8,
                max_readers=READERS_MAX,
                max_spare_txns=8,
                readonly=not self.writable,
                create=create,
                metasync=sync == "full",
                sync=sync != "unsafe",
                # Point reads would otherwise fill the memory with LMDB pages that are not requested.
                readahead=False,
                # Saves zeroing new LMDB pages. What is left in their gaps is as secret as the documents beside it.
                meminit=False,
                mode=0o600,
                lib_version=0,
            )
        except lmdb.Error as error:
            found = storage_error(error, path)
            if isinstance(found, ReadOnly) and not self.writable and os.access(os.path.join(path, DATA_FILE), os.R_OK):
                raise ReadOnly(
                    "permission denied",
                    path=os.path.join(path, LOCK_FILE),
                    hint="a reader needs write access to this file alone, in which LMDB registers readers: the setting "
                    "readers_group of the service gives it to a group; or read by HTTP or with an SDK",
                ) from error
            raise found from error

    def _settle_meta_pages(self) -> None:
        """Write the meta pages (LMDB's roots of the last two commits) from the kernel's cache to the disk.

        After a failed sync the kernel may regard a meta page as written although the disk has an older one. LMDB would
        then overwrite pages that the older meta page still needs. Writing the meta pages is safe, because the pages to
        which they refer were synced before.
        """
        try:
            descriptor = os.open(os.path.join(self.path, DATA_FILE), os.O_RDWR | os.O_CLOEXEC)
            try:
                pages = os.pread(descriptor, 2 * int(self.env.stat()["psize"]), 0)
                if os.pwrite(descriptor, pages, 0) != len(pages):
                    raise OSError(errno.ENOSPC, "write cut short")
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise storage_error(error, self.path) from error

    def look_now(self) -> bool:
        self.look_at = 0.0
        return self.look()

    def look(self) -> bool:
        """Return True once the open file is no longer at its path. Looks at most once per `_look_interval_s`.

        Raises ReadOnly if a writer runs and this reader is not registered.
        """
        now = time.monotonic()
        if now >= self.look_at and not self.replaced:
            self.look_at = now + self._look_interval_s
            if self._is_unregistered:
                _refuse_unregistered(self.path)
            self.replaced = _identity_of(self.path) != self._file
            if self.replaced:
                self.look_at = 0.0
        return self.replaced

    def missing_bytes(self) -> int:
        """Return the number of bytes that the file lacks up to the last page that LMDB counts.

        A sound file may lack a few pages at the end: LMDB does not write pages that a transaction took and gave back.
        Reading any other missing page ends the process by SIGBUS.
        """
        pages = int(self.env.info()["last_pgno"]) + 1
        return max(0, pages * int(self.env.stat()["psize"]) - self.file_bytes())

    def _refuse_cut_short(self, tries: int) -> None:
        """If pages are missing, verify the file. Raise CorruptedError if each of `tries` runs finds damage (see
        `READER_TRIES`).
        """
        missing = self.missing_bytes()
        if not missing:
            return
        from lmdb import verify

        file = os.path.join(self.path, DATA_FILE)
        if all(verify.verify(file) for _ in range(tries)):  # type: ignore[no-untyped-call]
            raise CorruptedError(
                f"the LMDB file is damaged: it is cut short by {missing} bytes", path=self.path, hint=SET_ASIDE
            )

    def db(self, name: bytes) -> Any:
        return self._handles[name]

    def open_all(self) -> None:
        """Open the handle of every tree. A writer creates missing trees."""
        with self._map_lock:
            if self._handles:
                return
            names = [*keys.SHARED_DBS, *(f(vbid) for vbid in self.vbids for f in (keys.rows_db, keys.keys_db))]
            try:
                if self.writable:
                    with self.env.begin(write=True) as txn:
                        self._handles = {name: self._open_db(name, txn=txn, create=True) for name in names}
                else:
                    # Not in a transaction of `read`: py-lmdb resets such a transaction instead of committing it, and
                    # LMDB then forgets the handles.
                    self._handles = {name: self._open_db(name, create=False) for name in names}
            except lmdb.NotFoundError as error:
                raise CorruptedError("a tree is missing", path=self.path, hint=RUN_CHECK) from error
            except lmdb.Error as error:
                raise storage_error(error, self.path) from error

    def _open_db(self, name: bytes, **options: Any) -> Any:
        dups = name[:1] == b"k" and name[1:].isdigit()
        return self.env.open_db(name, dupsort=dups, dupfixed=dups, **options)

    def begin(self, *, write: bool = False, buffers: bool = False) -> Any:
        """Begin a transaction on the newest commit. If the writer has grown the map, adopt the new size. A read counts
        in `running` until `end`. With `buffers` the transaction returns buffers of LMDB's map, which are invalid after
        the transaction.
        """
        if self.inherited:
            raise Closed("opened before a fork", path=self.path, hint=AFTER_FORK)
        if not self.writable and self.look():
            raise self._moved()
        while True:
            count = self._remap_count
            if not write:
                self.running.append(None)
            try:
                if write or not self.remapping:
                    txn = self.env.begin(write=write, buffers=buffers)  # type: ignore[call-overload]
                    if write or txn.id() == self._commit:
                        return txn
                    try:
                        self.check_map(txn)
                    except ViewInvalidated:
                        self.end(txn)
                        raise
                    return txn
            except lmdb.MapResizedError:
                pass
            except lmdb.ReadersFullError as error:
                # The slots of readers that were killed are free now, if there were any: then try again.
                if not self.env.reader_check():
                    self._forget_read(write)
                    raise storage_error(error, self.path) from error
            except lmdb.Error as error:
                self._forget_read(write)
                raise storage_error(error, self.path) from error
            self._forget_read(write)
            try:
                self._remap(0, count)
            except lmdb.Error as error:  # the map is lost; a view opens the file again
                self.env.close()
                if not self.writable:
                    self.replaced, self.look_at = True, 0.0
                raise storage_error(error, self.path) from error

    def check_map(self, txn: Any) -> None:
        """Raise ViewInvalidated if the transaction's commit is not in the mapped file.

        The file may be in the lower layer of an overlay (an image of a container). A writer then writes a copy in the
        upper layer, which has the same path and inode, but the map stays that of the lower file.
        """
        commit = txn.id()
        if commit > self.newest_commit():
            self.replaced, self.look_at = True, 0.0
            raise self._moved()
        self._commit = commit

    def _moved(self) -> ViewInvalidated:
        return ViewInvalidated(
            "the group's file was moved, removed or replaced", path=self.path, hint="start the read again"
        )

    def _forget_read(self, write: bool) -> None:
        if not write:
            self.running.pop()

    def end(self, txn: Any) -> None:
        """End a transaction of `begin`. Raises ReadOnly if the reader is not registered, and a writer may have
        overwritten pages of the transaction: it overwrites none before its third commit.
        """
        commit = txn.id() if self._is_unregistered else 0
        if not self.inherited:  # else it would end the parent's read
            txn.abort()
        self.running.pop()
        if self._is_unregistered and self.newest_commit() > commit + 1:
            raise _unregistered(self.path, "a service began to write it during the read")

    @contextlib.contextmanager
    def read(self, *, buffers: bool = False) -> Iterator[Transaction]:
        """Open a read transaction for a `with` block. Errors of LMDB and decoding in the block become StorageError."""
        txn = self.begin(buffers=buffers)
        try:
            yield Transaction(self, txn)
        except (lmdb.Error, struct.error, IndexError) as error:
            raise self.error(error) from error
        finally:
            self.end(txn)

    def error(self, error: Exception) -> StorageError:
        is_closed = isinstance(error, lmdb.Error) and self.replaced  # `retire` in another thread
        return self._moved() if is_closed else storage_error(error, self.path)

    def _remap(self, size: int, seen_count: int) -> None:
        """Map the file in another size (0: the size that the writer gave it). Do nothing if another thread mapped the
        file since `_remap_count` was `seen_count`.

        LMDB would move the map under open reads. So wait for their end, at most `REMAP_WAIT_S`; new reads wait for the
        new map.
        """
        with self._map_lock:
            if self._remap_count != seen_count:
                return
            self.remapping = True
            try:
                deadline = time.monotonic() + REMAP_WAIT_S
                while self.running:
                    if time.monotonic() > deadline:
                        raise StorageError(
                            "a read of this process stays open, and keeps the file from being mapped in its new size",
                            path=self.path,
                            hint="end it, or open a view of its own in another process",
                        )
                    time.sleep(REMAP_POLL_S)
                self.env.set_mapsize(size)
                self._remap_count += 1
            finally:
                self.remapping = False

    def grow(self) -> int:
        """Wait until no read of this process is open, double the map, and return its new size in bytes."""
        size = int(self.env.info()["map_size"]) * 2
        self._remap(size, self._remap_count)
        return size

    def newest_commit(self) -> int:
        """Return the number of the newest commit, without the cost of a transaction."""
        try:
            return int(self.env.info()["last_txnid"])
        except lmdb.Error as error:
            raise storage_error(error, self.path) from error

    def readers(self) -> list[tuple[int, int]]:
        """Return (process id, transaction number) of each reader in another process that reads an older commit."""
        newest = self.newest_commit()
        rows = (line.split() for line in self.env.readers().splitlines()[1:])
        found = [(int(process), int(number)) for process, _, number in rows if number.isdigit()]
        return [(process, number) for process, number in found if number < newest and process != os.getpid()]

    def file_bytes(self) -> int:
        try:
            return os.stat(os.path.join(self.path, DATA_FILE)).st_size
        except OSError as error:
            raise storage_error(error, self.path) from error

    def close(self) -> None:
        if not self.inherited:
            self.env.close()

    def retire(self) -> None:
        """Close the environment. Garbage collection closes a replaced one, which other threads may be reading, unless
        its lock file is still in place: LMDB must not open that twice.
        """
        if self.writable or not self.replaced or _identity_of(self.path, LOCK_FILE) == self._lock_file:
            self.close()

    def leave_to_parent(self) -> None:
        """In a forked child: keep the inherited environment open and untouched until the process ends.

        - Its transactions are rows of the reader table in lock.mdb, which all processes share. To abort one frees the
          parent's row for any process, and the parent, not knowing, frees that process's row later: the writer then
          overwrites pages that are being read. py-lmdb aborts its spare transaction with the last reference, at the
          latest at the end of the interpreter. So one reference is never given back.
        - To close its descriptor of lock.mdb would drop all locks of this process on that file (fcntl(2)), also those
          by which other processes see that this child reads.
        """
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.env))
        self.inherited = True
        self.remapping = True  # a point read then calls `begin`


_environments: weakref.WeakSet[Environment] = weakref.WeakSet()
"""The open environments of this process."""


class _Shared:
    """The open environments of this process by path. LMDB must not open a file twice in one process.

    `announce` adds a writer's environment; views in the writer's process then share it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: dict[str, tuple[Environment, int]] = {}

    def acquire(self, path: str, vbids: Sequence[int]) -> Environment:
        real = os.path.realpath(path)
        with self.lock:
            environment, count = self.open.get(real, (None, 0))
            if environment is not None and environment.look_now():  # the file was replaced
                environment.retire()
                environment, count = None, 0
            if environment is None:
                environment = Environment(real, vbids, map_size=MAP_SIZE)
            self.open[real] = (environment, count + 1)
            return environment

    def announce(self, environment: Environment) -> None:
        with self.lock:
            known = self.open.get(environment.path)
            assert known is None or known[0].look_now(), environment.path
            self.open[environment.path] = (environment, 1)

    def release(self, environment: Environment) -> None:
        with self.lock:
            known, count = self.open.get(environment.path, (None, 0))
            if known is not environment:
                return  # its file was replaced, or it is the parent's
            if count > 1:
                self.open[environment.path] = (environment, count - 1)
                return
            del self.open[environment.path]
            environment.retire()


SHARED = _Shared()


def _after_fork() -> None:
    SHARED.lock = threading.Lock()  # another thread of the parent may hold the old one
    SHARED.open = {}
    for environment in list(_environments):
        environment.leave_to_parent()
    _environments.clear()


os.register_at_fork(after_in_child=_after_fork)

_keys_of_files: Any = lmdb._envid.env_keys


def _keys_in_process(path: Any, subdir: bool) -> tuple[Any, ...]:
    """Let a child open the files of an inherited environment. py-lmdb refuses to open a file twice in one process, but
    takes what a child inherited for its own. It has no public interface for this.
    """
    return tuple((os.getpid(), *each) for each in _keys_of_files(path, subdir))


lmdb._envid.env_keys = _keys_in_process
