"""A vbucket at work: how it reacts, with its machine and its store, to all that a source can answer and end with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mirror.ingest.reactions import Action, Reaction, on_refusal, on_stream_end
from mirror.wire import events as ev
from mirror.wire.codec_dcp import encode_failover_log, to_frame
from mirror.wire.constants import Feature, SnapshotFlag, Status, StreamEndReason
from storage.admin.check import check
from storage.read.view import open_view
from storage.write.background import Background
from storage.write.pending import PendingVbucket
from tests.feed.harness import Mirror
from tests.feed.recorded_source import Exchange, RecordedSource, Script, mirror_at

VBID, OTHER = 3, 4
LOG = encode_failover_log([(99, 0)])
FEATURES = frozenset((6, 7, 8, 10, 11, 18))
ANY = ev.StreamRequest(VBID, 0, 0, 0, 0, 0, 0)

pytestmark = pytest.mark.usefixtures("short_pauses")


def snapshot(first: int, last: int, flags: int = int(SnapshotFlag.MEMORY)) -> list[ev.Event]:
    items = [ev.Mutation(VBID, b"\0k%d" % seqno, seqno, 1, seqno, value=b"{}") for seqno in range(first, last + 1)]
    return [ev.SnapshotMarker(VBID, first, last, flags), *items]


def success(*events: ev.Event) -> Exchange:
    return Exchange(ANY, Status.SUCCESS, LOG, [to_frame(event) for event in events])


def script(*exchanges: Exchange) -> Script:
    other = [ev.SnapshotMarker(OTHER, 1, 1, 1), ev.Mutation(OTHER, b"\0other", 1, 1, 1, value=b"{}")]
    return Script(FEATURES, {VBID: list(exchanges), OTHER: [success(*other)]})


def stored(mirror: Mirror) -> list[int]:
    assert check(mirror.path).problems == []
    with open_view(mirror.path, partial=True) as view:
        return sorted(document.seqno for document in view.scan(VBID))


def one_of_a_kind(codes: list[int], reaction: Callable[[int], Reaction]) -> list[int]:
    """One code for each reaction. `tests/ingest/test_machine.py` has all codes with a reaction of their own."""
    return sorted({replace(reaction(code), text=""): code for code in reversed(codes)}.values())


@pytest.mark.parametrize("reason", one_of_a_kind([*StreamEndReason, 42], on_stream_end))
async def test_a_stream_is_requested_again_after_every_end_that_can_be_retried(reason: int, tmp_path: Path) -> None:
    ended = success(*snapshot(1, 3), ev.StreamEnd(VBID, reason))
    mirror = mirror_at(tmp_path)
    async with RecordedSource(script(ended, success(*snapshot(1, 3), *snapshot(4, 6)))) as source:
        mirror.start(source.connection_string)
        await mirror.until_published(OTHER, 1)
        if on_stream_end(reason).action is Action.STOP:
            await mirror.until_state(VBID, "refused")
            await mirror.until_published(VBID, 3)
            assert "restart" in mirror.row(VBID)["last_error"]
        else:
            await mirror.until_published(VBID, 6)
            requested = [request for request in source.requests if request.vbid == VBID]
            assert [(r.start_seqno, r.snap_start_seqno, r.snap_end_seqno, r.vbuuid) for r in requested[:2]] == [
                (0, 0, 0, 0),
                (3, 3, 3, 99),
            ], "a full request with the stored position: any end may hide a rollback"
        assert mirror.row(VBID)["last_error"] == on_stream_end(reason).text
        await mirror.stop()
    assert stored(mirror) == list(range(1, 4 if on_stream_end(reason).action is Action.STOP else 7))


of_the_bucket = partial(on_refusal, filtered=False)
KNOWN = [status for status in Status if status not in (Status.SUCCESS, Status.ROLLBACK)]


@pytest.mark.parametrize("status", one_of_a_kind([*KNOWN, 0x7777], of_the_bucket))
async def test_a_stream_is_requested_again_after_every_refusal_that_can_be_retried(status: int, tmp_path: Path) -> None:
    """From 0, where nothing is held; the other vbucket of the same connection is not touched by it."""
    refused = Exchange(ANY, status, b"")
    mirror = mirror_at(tmp_path)
    source = RecordedSource(script(refused, success(*snapshot(1, 3))))
    source.without_noops = True  # so that NOT_SUPPORTED, too, is played
    async with source:
        mirror.start(source.connection_string)
        await mirror.until_published(OTHER, 1)
        action = of_the_bucket(status).action
        if action is Action.STOP:
            await mirror.until_state(VBID, "refused")
        else:
            await mirror.until_published(VBID, 3)
            assert source.statuses_sent.count(status) == 1
        said = mirror.row(VBID)["last_error"]
        assert said.startswith(of_the_bucket(status).text), "what happened, what is done about it, what fixes it"
        await mirror.stop()
    assert stored(mirror) == ([] if action is Action.STOP else [1, 2, 3])


async def test_staged_changes_above_the_known_high_seqno_count_as_lag(tmp_path: Path) -> None:
    """Found by the simulation: the high seqno of a filtered mirror knows nothing of the end of a collection, so such a
    mirror was "caught up" while it served what the collection had held.
    """
    mirror = mirror_at(tmp_path)
    async with RecordedSource(script(success(*snapshot(1, 100)[:51]))) as source:
        vbucket = mirror.start(source.connection_string).vbuckets[VBID]
        await mirror.until(lambda: mirror.row(VBID)["staged_seqno"] == 50, "half of it")
        assert vbucket.host.session is not None
        vbucket.polled = (vbucket.host.session, 10)
        vbucket.host.session.seqnos_until = float("inf")  # as if that poll was answered just now
        assert mirror.row(VBID)["lag_seqnos"] == 50
        await mirror.stop()


async def test_a_marker_with_ack_is_answered_once_it_is_durable(tmp_path: Path) -> None:
    wants_ack = int(SnapshotFlag.MEMORY | SnapshotFlag.ACK)
    mirror = mirror_at(tmp_path)
    async with RecordedSource(script(success(*snapshot(1, 3, wants_ack)))) as source:
        mirror.start(source.connection_string)
        await mirror.until(lambda: bool(source.markers_answered), "the answer")
        assert mirror.row(VBID)["published_seqno"] == 3
        await mirror.stop()


@pytest.mark.parametrize("on_disk", [False, True], ids=["in memory", "on the disk"])
async def test_a_complete_snapshot_survives_a_violation_in_the_next_one(
    on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated row in the next snapshot drops that one alone: the stream is requested from the complete end."""
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", 0)
    index_step = Background.index_step
    held = True

    def step(self: Background, vbucket: PendingVbucket) -> None:
        if not held:
            index_step(self, vbucket)

    monkeypatch.setattr(Background, "index_step", step)
    large = [replace(event, value=b"x" * 40_000) for event in snapshot(1, 4)[1:] if isinstance(event, ev.Mutation)]
    part = [replace(large[0], seqno=seqno, key=b"\0k%d" % seqno) for seqno in (5, 6)]
    first = success(snapshot(1, 4)[0], *large, ev.SnapshotMarker(VBID, 5, 9, 1), *part)
    mirror = mirror_at(tmp_path, batch_bytes_max=64 * 1024)
    async with RecordedSource(script(first, success(*snapshot(5, 6)))) as source:
        consumer = mirror.start(source.connection_string)
        await mirror.until(lambda: mirror.row(VBID)["staged_seqno"] == 6, "staged")
        if on_disk:
            consumer.commits.groups[0].commit(flush_open=True)
        actor = consumer.vbuckets[VBID]
        assert actor.host.opaque is not None
        twice = mirror.writers[0].vbuckets[VBID].prefix + (6).to_bytes(8)
        actor.on_rows(actor.host.opaque, [(twice, b"not to be stored")], 100)
        assert mirror.row(VBID)["published_seqno"] == 0
        held = False
        await mirror.until_published(VBID, 6)
        requested = [request.start_seqno for request in source.requests if request.vbid == VBID]
        assert requested == [0, 4]
        await mirror.stop()
    assert stored(mirror) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("collections", [True, False])
async def test_a_key_that_cannot_be_stored_stops_only_its_vbucket(collections: bool, tmp_path: Path) -> None:
    """A key of 600 bytes once stopped every vbucket of its group until a restart, and the error named none."""
    key = b"\0" * collections + b"x" * 600
    bad = ev.Mutation(VBID, key, 4, 1, 4, value=b"{}")
    broken = success(*snapshot(1, 3), ev.SnapshotMarker(VBID, 4, 4, 1), bad)
    played = script(broken, *[broken] * 3, success(*snapshot(4, 6)))
    other = played.exchanges[OTHER][0]
    played.exchanges[OTHER] = [other, other]
    if not collections:
        played = replace(played, features=FEATURES - {int(Feature.COLLECTIONS)})
    mirror = mirror_at(tmp_path)
    async with RecordedSource(played) as source:
        mirror.start(source.connection_string)
        row: dict[str, Any] = {}

        def failing() -> bool:
            row.update(mirror.row(VBID))
            return bool(row["state"] == "failing")

        await mirror.until(failing, "failing")
        await mirror.until_published(OTHER, 1)
        assert f"vb {VBID}: " in row["text"]
        assert "the key b" in row["text"]
        assert "has 600 bytes; 250 is the most" in row["text"]
        assert row["last_error"] == row["text"]
        assert mirror.consumer is not None
        assert [group["error"] for group in mirror.consumer.status()["groups"]] == [None]
        await mirror.until_published(VBID, 6)
        assert mirror.row(VBID)["state"] == "streaming"
        await mirror.stop()
    assert stored(mirror) == [1, 2, 3, 4, 5, 6]
