"""When the next group may commit: at once while commits are cheap or rare, in larger batches as load rises.

Knows times alone: it is given the clock's, and how long commits took. Groups commit in the order in which they began
to wait, one at a time, and after a commit that took t the next one waits until t is `COMMIT_SHARE` of the time since it
began. So an idle group commits at once, and commits take more of a worker's time than their share only where groups
would otherwise wait for longer than they may (`commit_interval_ms`): a slow disk does not delay what becomes visible
by several times what its commits take. Only commits that were scheduled count: writing rows down because memory is full
is the work itself, not what is paid for making it visible early.
"""

from __future__ import annotations

COMMIT_SHARE = 1 / 3
"""Of a worker's time for scheduled commits; two thirds are left for receiving."""


class CommitPace:
    """The pace of one worker's commits."""

    def __init__(self, wait_max_s: float) -> None:
        """`wait_max_s`: no group waits for longer because of what commits cost."""
        self._wait_max_s = wait_max_s
        self._free_at = 0.0

    def delay_s(self, now: float, waiting_since: float) -> float:
        """How long the group must still wait that has something to commit since then."""
        return max(0.0, min(self._free_at, waiting_since + self._wait_max_s) - now)

    def committed(self, started: float, ended: float) -> None:
        """A scheduled commit took this long."""
        self._free_at = started + (ended - started) / COMMIT_SHARE
