"""The open environments of one view, and a `VbucketReader` for each vbucket that was read. Many threads may use them.

Every environment belongs to the mirror that was opened at first (`identity`). If a group's file is replaced, reads use
the new file after at most a second; the old file is closed once no read uses it.
"""

from __future__ import annotations

from threading import Lock
from time import monotonic

from storage.env import directory
from storage.env.environment import AFTER_FORK, SHARED, Environment
from storage.errors import Closed, NotHeld, StorageError
from storage.format import keys
from storage.model import Identity
from storage.read.vbucket_reader import ReadOptions, VbucketReader


class Groups:
    def __init__(self, path: str, reads: ReadOptions) -> None:
        self.path = path
        self.identity: Identity = directory.load(path)
        self.count = self.identity.group_count
        self.vbucket_count = self.identity.vbucket_count
        self.vbids = self.identity.vbids
        self.reads = reads
        self._environments: dict[int, Environment] = {}
        self.readers: dict[int, VbucketReader] = {}
        """The readers of vbuckets that were read before, by vbid. Once the time `environment.look_at` of a reader has
        passed, call the method `reader` instead.
        """
        self.inherited = False
        """True in a child that was forked after the view was opened."""
        self._closed: str | None = None
        self._lock = Lock()
        """Held while environments are opened or released."""

    def reader(self, vbid: int) -> VbucketReader:
        """Raises Closed, NotHeld, StorageError."""
        reader = self.readers.get(vbid)
        if reader is not None and (
            monotonic() < reader.environment.look_at or reader.environment.writable or not reader.environment.look()
        ):
            return reader
        environment = self.environment(vbid)
        reader = self.readers[vbid] = VbucketReader(environment, vbid, self.reads)
        return reader

    def environment(self, vbid: int) -> Environment:
        """Return the environment of a vbucket's group. Raises Closed, NotHeld, StorageError."""
        if vbid not in self.vbids:
            if not 0 <= vbid < self.vbucket_count:
                raise StorageError(f"there is no vbucket {vbid}; this bucket has {self.vbucket_count}", path=self.path)
            raise NotHeld(
                f"this mirror holds vbuckets {self.vbids[0]} to {self.vbids[-1]}",
                vbid=vbid,
                hint="ask the mirror that holds it",
            )
        group = vbid % self.count
        environment = self._environments.get(group)
        if environment is not None and not environment.look():
            return environment
        with self._lock:
            if self._closed:
                raise Closed(self._closed, path=self.path)
            environment = self._environments.get(group)
            if environment is not None and environment.look():
                self._leave_replaced()
                environment = None
            if environment is None:
                environment = self._environments[group] = self._open(group)
            return environment

    def _open(self, group: int) -> Environment:
        path = directory.group_path(self.path, group)
        environment = SHARED.acquire(path, self.identity.group_vbids(group))
        try:
            environment.open_all()
            with environment.read() as txn:
                stored = txn.get(keys.DB_META, b"identity")
                directory.check_identity(stored, self.identity, group, environment.path)
        except BaseException:
            SHARED.release(environment)
            raise
        return environment

    def _leave_replaced(self) -> None:
        """Release files that were moved, removed or replaced, so that the next use opens the new file."""
        identity = directory.load(self.path)
        if identity != self.identity:
            self._closed = "another mirror is at this path now; open another view"
            raise Closed(self._closed, path=self.path)
        for group, environment in list(self._environments.items()):
            if environment.look_now():
                del self._environments[group]
                SHARED.release(environment)
        self.readers.clear()

    def close(self) -> None:
        with self._lock:
            self._closed = self._closed or "the view is closed"
            self.readers.clear()
            for environment in self._environments.values():
                SHARED.release(environment)
            self._environments.clear()

    def leave_to_parent(self) -> None:
        """Close in a forked child, without a call of LMDB: LMDB's transactions belong to the parent."""
        self.inherited = True
        self._closed = f"opened before a fork; {AFTER_FORK}"
        self._lock = Lock()  # another thread of the parent may hold the old one
        self.readers.clear()
        self._environments.clear()
