"""A bucket of many collections: what its manifests take, on the disk and in memory, is proportional to their number."""

from __future__ import annotations

import gc
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mirror.ingest.assembler import Assembler
from mirror.wire.events import SnapshotMarker, SystemEvent
from storage.admin.check import check
from storage.env import directory
from storage.errors import ViewInvalidated
from storage.format import keys
from storage.history import manifests
from storage.history.purge import Window
from storage.model import Collection, Identity, Kind, Manifest, ManifestChange, ManifestUid, Seqno
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import DEFAULT, SCOPES, keys_of, log, manifest_at, row, span
from tests.storage.rig import Clock, commit, purge, put, system_event

A, B = keys_of(0, 2)


def entries_in_memory() -> int:
    """Collections that some manifest or change holds, each as often as it is held."""
    gc.collect()
    held = [each for each in gc.get_objects() if isinstance(each, (Manifest, ManifestChange))]
    return sum(len(each.collections) for each in held)


@pytest.fixture
def counted_heap() -> Iterator[None]:
    """Have `entries_in_memory` pass over what earlier tests left: that takes seconds."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def create_collections(writer: GroupWriter, vbids: range, count: int) -> tuple[int, int]:
    """As a first backfill brings them: each in each vbucket, before the documents. How many entries that held in memory
    before anything was published, and how many bytes of it were counted.
    """
    assemblers = [Assembler(lambda _out: None) for _ in vbids]
    for vbid, assembler in zip(vbids, assemblers, strict=True):
        assembler.load(writer.vbuckets[vbid].state)
        assembler.begin_stream(inside_snapshot=False, collections_granted=True)
        writer.vbuckets[vbid].save(failover_log=log())
        assembler.marker(SnapshotMarker(vbid, 0, count + 1, 2, opaque=1), [])
    before = entries_in_memory()
    rows = 0
    for number in range(count):
        content = struct.pack(">QII", number + 1, 8 + number // 100, 8 + number)
        for vbid, assembler in zip(vbids, assemblers, strict=True):
            event = SystemEvent(vbid, number + 1, 0, 0, b"collection_%04d" % number, content, opaque=1)
            out: list[Any] = []
            assembler.system_event(event, out)
            for instruction in out:
                writer.vbuckets[vbid].system_event(
                    instruction.seqno,
                    instruction.row_value,
                    instruction.manifest,
                    instruction.open_snapshot,
                    change=instruction.change,
                )
                rows += len(instruction.row_value)
    found = entries_in_memory() - before, writer.pending_bytes - rows
    for vbid in vbids:
        writer.vbuckets[vbid].stage(
            [row(writer.vbuckets[vbid].prefix, b"k%d" % vbid, b"v", count + 1)], 0, span(0, count + 1)
        )
        writer.vbuckets[vbid].publish(count + 1, 0)
    writer.commit()
    return found


def manifest_bytes(writer: GroupWriter) -> int:
    with writer.environment.read() as txn:
        stat = txn.stat(keys.DB_MANIFEST)
    return int(stat["psize"] * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]))


def fill(path: Path, vbuckets: int, count: int) -> dict[str, int]:
    identity = Identity("cluster", "bucket", "uuid", vbuckets, 1)
    directory.create(str(path), identity)
    writer = GroupWriter(
        directory.group_path(str(path), 0), WriterOptions(group=0, identity=identity, clock_ms=Clock(), sync="unsafe")
    )
    entries, counted = create_collections(writer, range(vbuckets), count)
    found = {"staged": entries, "counted bytes": counted, "on the disk": manifest_bytes(writer)}
    with open_view(str(path)) as view:
        manifests._shared.clear()
        before = entries_in_memory()
        for vbid in range(vbuckets):
            assert len(view.manifest(vbid).collections) == count + 1
            assert len(view.state(vbid).manifest.collections) == count + 1
        found["read"] = entries_in_memory() - before
    assert writer.pending_bytes == 0
    writer.close()
    return found


@pytest.mark.parametrize("vbuckets", [4, pytest.param(1_024, marks=[pytest.mark.long, pytest.mark.timeout(3_600)])])
def test_a_thousand_collections_take_a_thousand_times_one(tmp_path: Path, vbuckets: int, counted_heap: None) -> None:
    few, many = (fill(tmp_path / str(count), vbuckets, count) for count in (100, 1_000))
    assert all(found < 11 * few[what] for what, found in many.items()), (few, many)
    assert many["staged"] < 3 * 1_001 * vbuckets, "the manifest as it stands, and each change"
    assert many["read"] < 3 * 1_001, "vbuckets share what is equal: a million objects took the collector 0.2 s"
    assert many["on the disk"] < 200 * 1_000 * vbuckets
    assert many["counted bytes"] > 100 * 1_000 * vbuckets


def rows_stored(writer: GroupWriter) -> int:
    with writer.environment.read() as txn:
        return int(txn.stat(keys.DB_MANIFEST)["entries"])


def change_one(rng: Random, manifest: Manifest, seqno: int) -> Manifest:
    """Create, flush or drop a collection."""
    cid = 8 + rng.randrange(4)
    known = dict(manifest.collections)
    if cid in known and rng.random() < 0.5:
        del known[cid]
    else:
        known[cid] = Collection(cid, 8, f"c{cid}", Seqno(seqno))
    return Manifest(ManifestUid(seqno), SCOPES, known)


def test_manifests_are_correct_at_every_boundary_and_old_ones_are_removed(
    writer: GroupWriter, path: str, view: View
) -> None:
    """A rollback, an abandoned snapshot, a restart of readers or the purger may come between."""
    rng = Random(13)
    expected: dict[int, Manifest] = {0: Manifest.initial()}
    stored = []
    for _ in range(250):
        seqno = writer.vbuckets[0].state.published_seqno
        for at in range(seqno + 1, seqno + rng.choice((2, 3))):
            manifest = change_one(rng, writer.vbuckets[0].state.manifest, at)
            system_event(writer, at, *manifest.collections.values(), scopes=manifest.scopes)
            if rng.random() < 0.3:
                writer.commit(flush_open=True)
            if rng.random() < 0.1:
                writer.vbuckets[0].abandon()
                assert writer.vbuckets[0].state.manifest == expected[seqno]
                break
        else:
            assert writer.pending_bytes >= 0
            commit(writer, at)
            expected[at] = manifest
        assert writer.pending_bytes == 0
        if rng.random() < 0.05 and len(kept := [each.seqno for each in view.boundaries(0)]) > 1:
            writer.vbuckets[0].rollback(kept[1])
            expected = {at: each for at, each in expected.items() if at <= kept[1]}
        if rng.random() < 0.2:
            purge(writer, Window(boundaries=20))
            stored.append(rows_stored(writer))
        assert writer.vbuckets[0].state.manifest == expected[writer.vbuckets[0].state.published_seqno]
        assert view.manifest(0) == view.state(0).manifest == writer.vbuckets[0].state.manifest
        if rng.random() < 0.1:
            with open_view(path) as fresh:
                for boundary in fresh.boundaries(0):
                    found = manifest_at(fresh, boundary.branch, boundary.seqno)
                    assert found == expected[boundary.seqno]
                    pin = fresh.pin(0, boundary.seqno)
                    assert sorted(fresh.reading(pins=[pin]).manifest(0).names()) == sorted(
                        expected[boundary.seqno].collections
                    )
    assert check(path).problems == []
    assert max(stored) < 100, "some more than the boundaries that are kept, and not one for each change"


def test_a_follower_from_before_purged_manifests_begins_again(writer: GroupWriter, view: View) -> None:
    """Only manifests say that a collection was dropped."""
    put(writer, A, 1, publish=True)
    token = view.token(0)
    for seqno in range(2, 62, 2):
        orders = Collection(9, 8, "orders", Seqno(seqno))
        system_event(writer, seqno, DEFAULT, orders, scopes=SCOPES)
        system_event(writer, seqno + 1, DEFAULT, scopes=SCOPES)
    commit(writer, 61)
    system_event(writer, 62, DEFAULT, Collection(10, 8, "kept", Seqno(62)), scopes=SCOPES)
    put(writer, B, 63, cid=10, publish=True)
    assert len(list(view.changes(0, since=token))) == 62
    before = rows_stored(writer)
    purge(writer, Window(boundaries=1))
    assert rows_stored(writer) < before
    with pytest.raises(ViewInvalidated, match="gone from history"):
        list(view.changes(0, since=token))
    for change in view.changes(0):  # from the beginning nothing is missing
        document = change.document
        assert document is not None
        names = manifest_at(view, document.branch, document.seqno).collections
        assert document.kind is Kind.SYSTEM_EVENT or document.collection_id in names
