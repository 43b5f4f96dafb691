"""When the next group may commit: at once while commits are cheap or rare, in larger batches as load rises.

Knows times alone: it is given the clock's, and how long commits took. Groups commit in the order in which they began
to wait, one at a time. A commit that took t is paid for by t divided by `COMMIT_SHARE` of the worker's time, and the
next one waits until the ones before it are paid for. Time without commits pays in advance, for as long as a group may
wait (`commit_interval_ms`): so all groups of a worker that was idle commit at once, and a timer that is late does not
delay the commits after it. Commits take more than their share, averaged over that interval, only where groups would
otherwise wait for longer than they may: a slow disk does not delay what becomes visible by several times what its
commits take. Only commits that were scheduled count: writing rows down because memory is full is the work itself, not
what is paid for making it visible early.
"""

from __future__ import annotations

COMMIT_SHARE = 1 / 2
"""Of a worker's time for scheduled commits; half is left for receiving."""


class CommitPace:
    """The pace of one worker's commits."""

    def __init__(self, wait_max_s: float) -> None:
        """`wait_max_s`: no group waits for longer because of what commits cost."""
        self._wait_max_s = wait_max_s
        self._paid_at = 0.0
        """When all commits so far are paid for."""

    def delay_s(self, now: float, waiting_since: float) -> float:
        """How long the group must still wait that has something to commit since then."""
        return max(0.0, min(self._paid_at, waiting_since + self._wait_max_s) - now)

    def committed(self, started: float, ended: float) -> None:
        """A scheduled commit took this long."""
        self._paid_at = max(self._paid_at, started - self._wait_max_s) + (ended - started) / COMMIT_SHARE
