"""The verdict on a mirror: what it publishes, held against the source's own history, key by key and field by field.

Knows the sandbox's record of everything that ever happened, and reads the mirror as any reader does. Invariant: the
judge takes nothing from the mirror on trust but its published seqnos; all else comes from the source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.item import Item
from mirror.wire.keys import encode_leb128
from storage.admin.check import check
from storage.env import directory
from storage.model import Document
from storage.read.view import View, open_view
from tests.crash.service import until
from tests.sandbox.past import state_at

Version = tuple[Any, ...]

SHOWN_MAX = 8
"""Differences in a failure's text: enough to see what kind they are."""


def version_of_item(item: Item) -> Version:
    """Return the fields that the mirror must have too; of a tombstone, those that every message carries."""
    if item.deleted:
        return ("deleted", item.seqno, item.cas, item.rev_seqno)
    return ("alive", item.seqno, item.cas, item.rev_seqno, item.flags, item.expiry, item.datatype, item.value)


def version_of_document(document: Document) -> Version:
    """The same of what the mirror holds, read raw."""
    if document.deleted:
        return ("deleted", document.seqno, document.cas, document.rev_seqno)
    return (
        "alive",
        document.seqno,
        document.cas,
        document.rev_seqno,
        document.flags,
        document.expiry,
        document.datatype,
        document.value,
    )


def published_seqnos(data: Path, vbids: Iterable[int] | None = None) -> dict[int, int]:
    """Return the published seqno of each vbucket, or of these; none before the mirror is made."""
    if not directory.exists(str(data)):
        return {}
    with open_view(str(data), partial=True) as view:
        states = view.states() if vbids is None else map(view.state, vbids)
        return {int(state.vbid): int(state.published_seqno) for state in states}


def wait_progress(data: Path, vbids: Collection[int], what: str) -> None:
    """Return when each of these vbuckets has published more than it has now."""
    before = published_seqnos(data, vbids)

    def is_further() -> bool:
        now = published_seqnos(data, vbids)
        return all(now.get(vbid, 0) > before.get(vbid, 0) for vbid in vbids)

    until(what, is_further, poll_s=0.1)


def high_seqnos(source: SandboxCluster) -> dict[int, int]:
    return {vbid: vbucket.high_seqno for vbid, vbucket in enumerate(source.vbuckets)}


def is_level(source: SandboxCluster, data: Path) -> bool:
    """Return True if all that the source has is published."""
    return published_seqnos(data) == high_seqnos(source)


def differences(source: SandboxCluster, view: View, vbid: int, seqno: int, *, pinned: bool) -> list[str]:
    """List the differences of a vbucket and the source at the same seqno. `pinned`: read it as of that boundary."""
    scan = view.scan(vbid, deletions=True, raw=True, as_of=seqno if pinned else None)
    found = {encode_leb128(each.collection_id) + each.key: version_of_document(each) for each in scan}
    purge_seqno = view.state(vbid).local_purge_seqno
    expected = {
        key: version_of_item(item)
        for key, item in state_at(source.vbucket(vbid), seqno, tombstones=True).items()
        if key in found
        or not item.deleted
        or item.seqno > purge_seqno  # the mirror forgets old tombstones, and says so
    }
    return [
        f"vb {vbid} at seqno {seqno}, key {key!r}: source {expected.get(key)}, mirror {found.get(key)}"
        for key in sorted(expected.keys() | found.keys())
        if expected.get(key) != found.get(key)
    ]


def judge(source: SandboxCluster, data: Path, *, live: bool) -> dict[int, int]:
    """Fail unless every published state is the source's at a snapshot end, and the store is whole.

    Returns vbid -> published_seqno. `live`: a service writes meanwhile, so each vbucket is read as of the boundary
    that was the newest when it was looked at; otherwise as it stands.
    """
    report = check(str(data))
    assert not report.problems, f"check of {data}: {report.problems[:SHOWN_MAX]}"
    published: dict[int, int] = {}
    wrong: list[str] = []
    with open_view(str(data), partial=True) as view:
        for vbid in range(len(source.vbuckets)):
            seqno = published[vbid] = int(view.state(vbid).published_seqno)
            if not seqno:
                if not live:
                    wrong += [f"vb {vbid} published nothing and shows {each.key!r}" for each in view.scan(vbid)]
                continue
            if seqno not in source.sent(vbid).snapshot_ends:
                wrong.append(f"vb {vbid} published seqno {seqno}, at which the source announced no snapshot's end")
            wrong += differences(source, view, vbid, seqno, pinned=live)
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong[:SHOWN_MAX])
    return published
