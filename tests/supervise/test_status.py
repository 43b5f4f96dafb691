from __future__ import annotations

import functools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mirror.supervise.reports.progress import TREND_REPORTS_MAX, CatchUp, Trend
from mirror.supervise.status import VbucketRow, reported_row, stored_row, totals
from storage.model import Branch, FailoverLog, Manifest, Seqno, VbucketState


def row(vbid: int = 0, published: int = 0, high: int | None = 0, **more: Any) -> VbucketRow:
    report = {"vbid": vbid, "state": "streaming", "published_seqno": published, "source_high_seqno": high}
    report["rollback_count"] = 0
    report["lag_seqnos"] = None if high is None else max(0, high - published)
    return reported_row(report | more, group=0)


def lag_s(trend: Trend, now_ms: int, published: int, high: int | None) -> float | None:
    rows = [row(0, published, high)]
    trend.observe(rows, {}, now_ms)
    trend.fill(rows, now_ms)
    return rows[0]["lag_s"]


def test_a_stored_row_and_a_reported_row_have_the_same_shape() -> None:
    state = VbucketState(
        vbid=5,
        branch=Branch(2),
        published_seqno=Seqno(10),
        history_floor_seqno=Seqno(0),
        staging_branch=Branch(2),
        staged_seqno=Seqno(12),
        staging_published_seqno=Seqno(10),
        open_snapshot=None,
        failover_log=FailoverLog.of([(0xABC, 0)]),
        source_purge_seqno=Seqno(0),
        local_purge_seqno=Seqno(0),
        manifest=Manifest.initial(),
        rollback_count=1,
        last_rollback_ms=77,
    )
    stored = stored_row(state, group=1)
    assert list(stored) == list(row())
    assert (stored["vbid"], stored["group"], stored["vbuuid"]) == (5, 1, "000000000abc")
    assert (stored["published_seqno"], stored["staged_seqno"], stored["last_rollback_ms"]) == (10, 12, 77)
    assert stored["lag_seqnos"] is None


def test_an_unknown_figure_is_not_zero() -> None:
    rows = [row(published=5, high=5), row(published=5, high=None)]
    Trend().fill(rows, 0)
    sums = totals(rows)
    assert (sums["documents"], sums["source_high_seqnos"], sums["lag_seqnos"], sums["lag_s"]) == (None,) * 4
    assert (totals([])["vbuckets"], totals([])["lag_seqnos"]) == (0, None)
    damaged = reported_row({"vbid": 2, "state": "damaged", "text": "permission denied"}, group=0)
    assert [damaged[name] for name in ("branch", "published_seqno", "staged_seqno", "rollback_count")] == [None] * 4
    sums = totals([row(published=5), damaged])
    assert (sums["published_seqnos"], sums["rollback_count"]) == (5, None), "a counter must not fall"


def test_totals_are_the_sums_of_the_rows() -> None:
    sums = totals([row(0, 3, 5, documents=2), row(1, 4, 4, documents=1), row(2, 0, 0, documents=0)])
    assert (sums["documents"], sums["lag_seqnos"], sums["published_seqnos"]) == (3, 2, 7)
    assert sums["states"] == {"streaming": 3}


def test_lag_in_seconds_is_the_age_of_the_oldest_seqno_that_is_missing() -> None:
    seconds = functools.partial(lag_s, Trend())
    assert seconds(0, 5, 5) == 0.0
    assert seconds(1_000, 5, 8) == 0.0
    assert seconds(3_000, 5, 20) == 2.0
    assert seconds(4_000, 8, 20) == 1.0, "8 has come; 20 was first seen at 3,000"
    assert seconds(5_000, 20, 20) == 0.0
    assert seconds(6_000, 20, 30) == 0.0
    assert seconds(9_000, 20, 10) == 0.0, "the source went back: nothing is missing any more"


def test_a_source_that_always_runs_ahead_costs_no_memory_and_keeps_its_age() -> None:
    trend = Trend()
    for second in range(10 * TREND_REPORTS_MAX):
        trend.observe([row(0, 0, second)], {}, second * 1_000)
    rows = [row(0, 0, 10 * TREND_REPORTS_MAX)]
    trend.fill(rows, 10 * TREND_REPORTS_MAX * 1_000)
    assert rows[0]["lag_s"] == 10 * TREND_REPORTS_MAX - 1


def test_rates_are_over_the_last_seconds() -> None:
    trend = Trend()
    assert trend.counter_rate("rows") is None
    for second in range(100):
        trend.observe([row(0, second * 7, None)], {"rows": second * 50}, second * 1_000)
    rows = [row(0, 99 * 7, None)]
    trend.fill(rows, 99_000)
    assert rows[0]["seqnos_per_s"] == 7.0
    assert trend.counter_rate("rows") == 50.0


def test_a_replaced_worker_counts_from_zero_and_the_rate_stays_true() -> None:
    trend = Trend()
    for second, counter in enumerate([1_000, 1_100, 0, 100]):
        trend.observe([row()], {"rows": counter}, second * 1_000)
    assert trend.counter_rate("rows") == round(200 / 3, 1)


def test_the_mark_for_caught_up_is_the_first_seen_high_seqno() -> None:
    catch_up = CatchUp(2)
    catch_up.observe([row(0, 0, 5), row(1, 0, 0)])
    assert (catch_up.done, catch_up.vbuckets_done) == (False, 1)
    catch_up.observe([row(0, 5, 900)])
    assert catch_up.done


def test_a_vbucket_that_is_not_streaming_yet_is_not_done_even_when_empty() -> None:
    catch_up = CatchUp(1)
    catch_up.observe([row(0, 0, 0, state="connecting")])
    assert not catch_up.done
    catch_up.observe([row(0, 0, 0)])
    assert catch_up.done


def test_a_rollback_clears_the_mark_and_the_next_report_sets_it() -> None:
    catch_up = CatchUp(1)
    catch_up.observe([row(0, 50, 100)])
    catch_up.observe([row(0, 40, None, rollback_count=1)])
    assert not catch_up.done
    catch_up.observe([row(0, 40, 60, rollback_count=1)])
    assert not catch_up.done
    catch_up.observe([row(0, 60, 70, rollback_count=1)])
    assert catch_up.done


def test_a_source_that_lost_its_newest_seqnos_lowers_the_mark() -> None:
    catch_up = CatchUp(1)
    catch_up.observe([row(0, 50, 100)])
    catch_up.observe([row(0, 50, 50)])
    assert catch_up.done


def test_the_lag_without_contact_counts_from_the_last_contact() -> None:
    seconds = functools.partial(lag_s, Trend())
    assert seconds(0, 5, None) is None, "there was none yet"
    assert seconds(1_000, 5, 5) == 0.0
    assert seconds(21_000, 5, None) == 20.0
    assert seconds(22_000, 5, 8) == 21.0, "the missing seqnos were written since the last contact"
    assert seconds(24_000, 8, 9) == 0.0
    assert seconds(30_000, 8, None) == 6.0, "what was missing then is still missing"


def test_the_lag_is_unknown_until_the_seqnos_of_the_first_contact_are_published() -> None:
    """A mirror that was down for 40 s was `following` with lag 0 while its answers were 100 s old."""
    seconds = functools.partial(lag_s, Trend())
    assert seconds(0, 5, 900) is None
    assert seconds(60_000, 800, 1_000) is None
    assert seconds(61_000, 900, 1_050) == 1.0, "1,000 was first seen a second ago"


def test_a_served_copy_of_another_history_does_not_make_a_resync_current() -> None:
    """Its published seqno, 900, was compared with the high seqno of the new history: lag 0, and ready."""
    trend = Trend()
    for now_ms in (0, 1_000):
        trend.observe([row(0, 5, 5)], {}, now_ms)
    for now_ms in (2_000, 42_000):
        resyncing = row(0, 900, 100, lag_seqnos=100, staged_seqno=10)
        trend.observe([resyncing], {}, now_ms)
        trend.fill([resyncing], now_ms)
    assert resyncing["lag_s"] == 40.0


class Life:
    """A vbucket, its source and its times, with the true age of what the mirror lacks."""

    def __init__(self) -> None:
        self.trend = Trend()
        self.now_ms = 0
        self.written: list[int] = []
        """Time of each seqno, from 1."""
        self.published = 0
        self.lost_ms: int | None = 0

    def pass_time(self, writes: int, publishes: int, contact: str) -> float | None:
        """Let a second pass, or five without contact or answers; return the lag that is shown then."""
        if contact == "restarted":
            self.trend, self.lost_ms = Trend(), None
        elif contact == "good":
            self.lost_ms = None
        notices_late = contact == "upstream away" and self.lost_ms is None
        if contact in ("away", "upstream away") and self.lost_ms is None:
            self.lost_ms = self.now_ms
        known_high, begin_ms = len(self.written), self.now_ms
        for second in range(1 if self.lost_ms is None and contact != "slow" else 5):
            self.now_ms += 1_000
            self.written += [self.now_ms - 500] * writes
            if self.lost_ms is None and contact == "slow":  # rows come, and an answer of five seconds ago
                self.published = min(self.published + publishes, len(self.written))
                silent_ms = self.now_ms - begin_ms
                shown = row(0, self.published, known_high, lag_seqnos=None, silent_ms=silent_ms)
            elif self.lost_ms is None:
                known_high = len(self.written)
                self.published = min(self.published + publishes, known_high)
                shown = row(0, self.published, known_high)
            elif notices_late and second < 3:  # the mirror that is the source has not noticed it yet
                shown = row(0, self.published, known_high)
            else:
                shown = row(0, self.published, None, silent_ms=self.now_ms - self.lost_ms)
            self.trend.observe([shown], {}, self.now_ms)
            self.trend.fill([shown], self.now_ms)
        return shown["lag_s"]

    @property
    def true_s(self) -> float:
        missing = self.written[self.published :]
        return (self.now_ms - missing[0]) / 1000 if missing else 0.0


CONTACTS = ["good"] * 4 + ["away", "upstream away", "slow", "restarted"]
STEPS = st.tuples(st.integers(0, 3), st.integers(0, 5), st.sampled_from(CONTACTS))


@given(st.lists(STEPS, max_size=40))
def test_the_shown_lag_is_never_younger_than_the_oldest_missing_change(steps: list[tuple[int, int, str]]) -> None:
    """By more than the second between two looks. It is 0 if all is published, and known once all was."""
    life = Life()
    known = False
    for writes, publishes, contact in steps:
        shown = life.pass_time(writes, publishes, contact)
        assert shown is None or shown >= life.true_s - 1.0
        if life.lost_ms is None and life.true_s == 0 and contact != "slow":
            assert shown == 0
            known = True
        elif contact == "restarted":
            known = False
        assert shown is not None or not known
