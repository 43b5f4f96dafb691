"""When the next group may commit: at once while commits are cheap or rare, in larger batches as load rises.

Knows times alone: it is given the clock's, and how long commits took. Groups commit in the order in which they began
to wait, one at a time, and after a commit that took t the next one waits until t is `COMMIT_SHARE_MAX` of the time
since it began. So an idle group commits at once, and whatever a commit costs on this disk, commits never take more of a
worker's time than their share. Only commits that were scheduled count: writing rows down because memory is full is the
work itself, not what is paid for making it visible early.
"""

from __future__ import annotations

COMMIT_SHARE_MAX = 1 / 3
"""Of a worker's time that scheduled commits take at most: with eight groups and 0.5 ms a commit, a change is visible
after 6 ms on average; and two thirds are left for receiving, which is then bounded by that and not by commits."""


class CommitPace:
    """The pace of one worker's commits."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s`: the least time between the commits of one group."""
        self._interval_s = interval_s
        self._free_at = 0.0

    def delay_s(self, now: float, group_committed_at: float) -> float:
        """How long the group must wait whose last commit began at `group_committed_at`."""
        return max(0.0, self._free_at - now, group_committed_at + self._interval_s - now)

    def committed(self, started: float, ended: float) -> None:
        """A scheduled commit took this long."""
        self._free_at = started + (ended - started) / COMMIT_SHARE_MAX
