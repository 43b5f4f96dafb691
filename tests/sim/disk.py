"""The disk under the file of a group: what of it a power cut leaves.

Knows the order in which LMDB writes under the flags of the environment: the pages of a transaction, a sync of the file,
then one of its two meta pages, which is synced at once (`full`) or by the next sync (`safe`). A power cut leaves all
that was synced, and of what was written since any sectors. A sync that fails leaves nothing of what was written before
it: Linux drops that, and counts it as written; so it is in the file, and on the disk only when it is written again.

What a commit wrote is found by comparing the file with what it was before.
"""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

PAGE = 4096
SECTOR = 512


class Disk:
    """The disk of one file, which is read again after each possible change."""

    def __init__(self, path: str, rng: Random) -> None:
        self.path = Path(path, "data.mdb")
        self.rng = rng
        self._file = b""
        self._durable = bytearray()
        self._dirty: set[int] = set()
        """Pages that were written and not synced."""
        self.txnid = 0
        """The id of the newest commit. A transaction without changes has none."""

    def _look(self) -> set[int]:
        """Return the pages that were written since the last look."""
        before, now = self._file, self.path.read_bytes()
        self._file = now
        return {at // PAGE for at in range(0, len(now), PAGE) if now[at : at + PAGE] != before[at : at + PAGE]}

    def _put(self, page: int) -> None:
        end = (page + 1) * PAGE
        if len(self._durable) < end:
            self._durable.extend(bytes(end - len(self._durable)))
        self._durable[page * PAGE : end] = self._file[page * PAGE : end]

    # --- what happens

    def written(self, offset: int, length: int) -> None:
        """Note a write past LMDB, perhaps of equal bytes."""
        self._dirty |= self._look() | set(range(offset // PAGE, (offset + length + PAGE - 1) // PAGE))

    def synced(self) -> None:
        self._dirty |= self._look()
        for page in self._dirty:
            self._put(page)
        self._dirty.clear()

    def sync_failed(self) -> None:
        """Note a failed sync: its pages will never be synced."""
        self._look()
        self._dirty.clear()

    def committed(self, env: Any) -> None:
        flags = env.flags()
        self._dirty |= self._look()
        self.txnid = env.info()["last_txnid"]
        if not flags["sync"]:
            return
        newest = self.txnid & 1
        for page in self._dirty - {newest}:
            self._put(page)
        self._dirty &= {newest}
        if flags["metasync"]:
            self.synced()

    def cut_in_commit(self, env: Any) -> None:
        """Note a commit whose pages were not synced and whose meta page was not written when the power failed."""
        newest = env.info()["last_txnid"] & 1
        self._dirty |= self._look() - {newest}

    def commit_failed(self, env: Any) -> None:
        """A transaction was committed, but let it be that its sync failed: its meta page was never written.

        The content of its pages is never read then. It is overwritten here, so that it counts as written again when the
        next transaction writes the same.
        """
        before = self._file
        newest = env.info()["last_txnid"] & 1
        changed = self._look()
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            for page in changed:
                old = before[page * PAGE : (page + 1) * PAGE] if page == newest else self.rng.randbytes(PAGE)
                os.pwrite(descriptor, old, page * PAGE)
        finally:
            os.close(descriptor)
        self.sync_failed()

    def cut(self) -> None:
        """Cut the power: the file becomes the contents of the disk."""
        mode = self.rng.choice(("all", "none", "some", "some", "some"))
        image = self._durable
        for page in sorted(self._dirty):
            for at in range(page * PAGE, (page + 1) * PAGE, SECTOR):
                if mode == "all" or (mode == "some" and self.rng.random() < 0.5):
                    if len(image) < at + SECTOR:
                        image.extend(bytes((page + 1) * PAGE - len(image)))
                    image[at : at + SECTOR] = self._file[at : at + SECTOR]
        self._file = bytes(image)
        self._dirty.clear()
        self.path.write_bytes(self._file)
        self.path.with_name("lock.mdb").unlink()


class WatchedOs:
    """The module `os` as the store's environment sees it, so that disks hear of what it writes and syncs itself."""

    def __init__(self) -> None:
        self.disks: dict[str, Disk] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _disk(self, descriptor: int) -> Disk | None:
        return self.disks.get(os.readlink(f"/proc/self/fd/{descriptor}"))

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        done = os.pwrite(descriptor, data, offset)
        if (disk := self._disk(descriptor)) is not None:
            disk.written(offset, done)
        return done

    def fdatasync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)
        if (disk := self._disk(descriptor)) is not None:
            disk.synced()


class FailingCommit:
    """A write transaction whose commit fails in its sync."""

    def __init__(self, txn: Any, env: Any, disk: Disk, error: Exception) -> None:
        self._txn, self._env, self._disk, self._error = txn, env, disk, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def commit(self) -> None:
        self._txn.commit()
        self._disk.commit_failed(self._env)
        raise self._error


class FailingSync:
    """An LMDB environment whose sync fails."""

    def __init__(self, env: Any, disk: Disk, error: Exception) -> None:
        self._env, self._disk, self._error = env, disk, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def sync(self, force: bool) -> None:
        self._disk.sync_failed()
        raise self._error
