"""A wrong wall clock, either way, costs a little history or a little space, and is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storage.env import directory
from storage.history.purge import Window
from storage.read.view import open_view
from storage.write.owner import HistoryClock
from storage.write.writer import GroupWriter, WriterOptions
from tests.storage.model import IDENTITY, keys_of, log
from tests.storage.rig import publish, snapshots

A, B = keys_of(0, 2)
MINUTE_MS, YEAR_MS = 60_000, 365 * 86_400_000
WINDOW = Window(time_ms=10 * MINUTE_MS)


class TwoClocks:
    """A wall clock that can be set, and a monotonic one."""

    def __init__(self) -> None:
        self.wall = 1_700_000_000_000
        self.monotonic = 5_000

    def wall_ms(self) -> int:
        return self.wall

    def monotonic_ms(self) -> int:
        return self.monotonic

    def advance(self, ms: int) -> None:
        self.wall += ms
        self.monotonic += ms


@pytest.fixture
def clocks() -> TwoClocks:
    return TwoClocks()


def opened(path: str, clocks: TwoClocks) -> GroupWriter:
    writer = GroupWriter(
        directory.group_path(path, 0),
        WriterOptions(
            group=0, identity=IDENTITY, clock_ms=clocks.wall_ms, monotonic_ms=clocks.monotonic_ms, window=WINDOW
        ),
    )
    writer.vbuckets[0].save(failover_log=log())
    return writer


def live(writer: GroupWriter, clocks: TwoClocks, minutes: int) -> None:
    """A new version of a document each minute, with the purger at work in between."""
    for _ in range(minutes):
        publish(writer, 0, [(A, b"v", writer.vbuckets[0].state.published_seqno + 1)])
        clocks.advance(MINUTE_MS)
        for _ in range(10):
            writer.step()


def kept(path: str) -> int:
    with open_view(path) as view:
        return len(view.boundaries(0))


def restart(writer: GroupWriter, path: str, clocks: TwoClocks) -> GroupWriter:
    writer.close()
    clocks.monotonic = 77
    return opened(path, clocks)


@pytest.mark.parametrize("step_ms", [YEAR_MS, -YEAR_MS])
def test_a_commit_with_a_wrong_clock_does_not_affect_the_history(path: str, clocks: TwoClocks, step_ms: int) -> None:
    writer = opened(path, clocks)
    live(writer, clocks, 30)
    assert 10 <= kept(path) <= 13
    clocks.wall += step_ms
    live(writer, clocks, 1)
    assert 10 <= kept(path) <= 13
    clocks.wall -= step_ms
    live(writer, clocks, 30)
    assert 10 <= kept(path) <= 13
    assert (writer.owner.clock.step_count, writer.owner.clock.last_step_ms) == (2, -step_ms)
    writer.close()


@pytest.mark.parametrize("step_ms", [YEAR_MS, -YEAR_MS])
def test_a_start_with_a_wrong_clock_loses_at_most_half_of_the_history(
    path: str, clocks: TwoClocks, step_ms: int
) -> None:
    writer = opened(path, clocks)
    live(writer, clocks, 30)
    clocks.wall += step_ms
    writer = restart(writer, path, clocks)
    live(writer, clocks, 1)
    assert kept(path) >= 6
    assert writer.owner.clock.step_count == (1 if step_ms < 0 else 0)  # a jump ahead may as well have been a long stop
    clocks.wall -= step_ms
    writer = restart(writer, path, clocks)
    assert writer.owner.clock.step_count == (1 if step_ms > 0 else 0)
    live(writer, clocks, 30)
    assert 10 <= kept(path) <= 13
    writer.close()


def test_retracted_rows_are_purged_by_age_and_not_by_the_wall_clock(path: str, clocks: TwoClocks) -> None:
    writer = opened(path, clocks)
    snapshots(writer, [(A, b"1", 1)], [(A, b"2", 2)])
    clocks.wall += YEAR_MS
    writer.vbuckets[0].rollback(1)
    clocks.wall -= YEAR_MS
    with open_view(path) as view:
        token = view.token(0, 1, 2)
    for _ in range(10):
        writer.step()
    with open_view(path) as view:
        assert [each.kind for each in view.changes(0, since=token)] == ["rollback", "retraction", "restoration"]
    clocks.advance(11 * MINUTE_MS)
    while writer.figures()["purged_rows"] == 0:
        writer.step()
        clocks.advance(1_000)
        assert clocks.monotonic < 20 * MINUTE_MS
    writer.close()


def test_a_lease_ends_on_time_after_any_change_of_the_clock(path: str, clocks: TwoClocks) -> None:
    writer = opened(path, clocks)
    live(writer, clocks, 5)
    clocks.wall += YEAR_MS
    writer.background.lease("job", {0: (1, 5)}, clocks.wall + 20 * MINUTE_MS)
    clocks.wall -= 2 * YEAR_MS
    live(writer, clocks, 19)
    assert kept(path) == 20  # 5 to 24
    live(writer, clocks, 5)
    assert kept(path) <= 13
    writer.background.lease("job", {0: (1, int(writer.vbuckets[0].state.published_seqno))}, clocks.wall + YEAR_MS)
    held = writer.background.leases.of(0, writer.owner.clock.now_ms() + 86_400_001)
    assert held == []  # a year is the error of some clock
    writer.close()


def test_the_idle_sync_happens_even_if_the_clock_goes_back(path: str, clocks: TwoClocks) -> None:
    writer = opened(path, clocks)
    publish(writer, 0, [(A, b"1", 1)])
    clocks.wall -= YEAR_MS
    clocks.advance(1_000)
    writer.step()
    assert writer.owner.unsynced_since is None
    writer.close()


@pytest.mark.parametrize(
    ("stored_wall_ms", "expected", "steps"),
    [
        (900_000, 500_000 + 100_000, 0),
        (100_000, 500_000 + 300_000, 0),
        (1_005_000, 500_000, 0),
        (9_000_000, 500_000, 1),
    ],
)
def test_the_time_between_two_writers_counts_if_believable(stored_wall_ms: int, expected: int, steps: int) -> None:
    wall: Callable[[], int] = lambda: 1_000_000  # noqa: E731
    clock = HistoryClock(wall, lambda: 3, stored_ms=500_000, stored_wall_ms=stored_wall_ms, downtime_max_ms=300_000)
    assert (clock.now_ms(), clock.step_count) == (expected, steps)
    assert HistoryClock(wall, lambda: 3).now_ms() == 1_000_000


def test_the_clock_never_goes_back() -> None:
    clocks = TwoClocks()
    clock = HistoryClock(clocks.wall_ms, clocks.monotonic_ms)
    before = clock.now_ms()
    clocks.wall -= YEAR_MS
    clocks.monotonic -= 1_000
    assert clock.now_ms() == before
    clocks.monotonic += 10
    assert clock.now_ms() == before + 10
