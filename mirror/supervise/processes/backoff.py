"""How long to wait before a worker that died is started again.

Knows how often a worker failed in a row, nothing else: pure, no clock. The pause doubles from the first failure to a
limit, so that a worker that cannot live costs little, and one that was killed once is back within a quarter of a
second. A worker that lived long enough has proven itself: the count starts again.
"""

from __future__ import annotations

FIRST_MS = 200
"""After the first death: long enough for its locks and sockets to be gone, short enough for a blink of lag."""

LIMIT_MS = 30_000
"""However often it died: an operator who fixes the cause waits no longer than this."""

PROVEN_MS = 60_000
"""A worker that lived this long is not in a crash loop."""


def restart_delay_ms(failures: int) -> int:
    """The pause before start number `failures` + 1; none before the first."""
    assert failures >= 0, "failures are counted from 0"
    if failures == 0:
        return 0
    return int(min(LIMIT_MS, FIRST_MS * 2 ** min(failures - 1, 16)))


def failures_after(failures: int, lived_ms: int) -> int:
    """The count after one more death, of a worker that had lived `lived_ms`."""
    return 1 if lived_ms >= PROVEN_MS else failures + 1
