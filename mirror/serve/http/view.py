"""One HTTP process's view of the mirror.

The view is opened when first needed. After a group was recreated, `refresh` closes it, and the next use opens another.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from storage.env import directory
from storage.read.states import Unreadable
from storage.read.view import View, open_view


class Mirror:
    def __init__(self, data: Path, *, verify_reads: bool = True) -> None:
        self.data = data
        self._verify_reads = verify_reads
        self._view: View | None = None
        self._files: list[tuple[int, int]] = []

    @property
    def view(self) -> View:
        """Raises NotAMirror while there is no mirror, and StorageError if it cannot be opened."""
        if self._view is None:
            opened = open_view(str(self.data), verify_reads=self._verify_reads)
            self._files = directory.group_files(opened.path, opened.identity.group_count)
            self._view = opened
        return self._view

    def refresh(self) -> None:
        """Release a view whose files were replaced. Call this from time to time."""
        view = self._view
        if view is not None and directory.group_files(view.path, view.identity.group_count) != self._files:
            self.close()

    def manifest_vbids(self) -> Iterable[int]:
        """Return one vbucket for each manifest uid in use. Raises StorageError if no group can be read."""
        unreadable: Unreadable = {}
        uids = self.view.manifest_uids(unreadable)
        if not uids:
            raise next(iter(unreadable.values()))
        return {uid: vbid for vbid, uid in uids.items()}.values()

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None
