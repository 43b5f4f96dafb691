"""The open mirror of one HTTP process: one view, opened when first needed and again after a group was recreated.

Knows the data directory and the store's `View`; never a request. Invariants: a replaced file of a group is noticed
within a second; an unused view is closed; only the reading process opens files.
"""

from __future__ import annotations

from pathlib import Path

from storage.env import directory
from storage.model import Manifest
from storage.read.view import View, open_view


class Mirror:
    def __init__(self, data: Path, *, verify_reads: bool = True) -> None:
        self.data = data
        self._verify_reads = verify_reads
        self._view: View | None = None
        self._files: list[tuple[int, int]] = []

    @property
    def view(self) -> View:
        """The view. Raises NotAMirror while there is none, and what opening it raises."""
        if self._view is None:
            opened = open_view(str(self.data), verify_reads=self._verify_reads)
            self._files = self._files_of(opened)
            self._view = opened
        return self._view

    @staticmethod
    def _files_of(view: View) -> list[tuple[int, int]]:
        return directory.group_files(view.path, view.identity.group_count)

    def refresh(self) -> None:
        """Let go of a view whose files were replaced. Call it now and then."""
        if self._view is not None and self._files_of(self._view) != self._files:
            self.close()

    def file_bytes(self) -> int:
        total = 0
        for path in self.data.glob("group-*/data.mdb"):
            try:
                total += path.stat().st_blocks * 512
            except OSError:
                continue
        return total

    def collection_names(self) -> dict[int, tuple[str, str]]:
        found: dict[int, tuple[str, str]] = {}
        uids = set()
        for vbid in self.view.vbids:
            manifest: Manifest = self.view.manifest(vbid)
            if manifest.uid in uids:
                continue
            uids.add(manifest.uid)
            for entry in manifest.collections.values():
                found[entry.collection_id] = (manifest.scopes.get(entry.scope_id, "?"), entry.name)
        return found

    def close(self) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None
