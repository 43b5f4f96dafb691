"""The policy of Python's cyclic garbage collector in a worker.

The default one runs after every 700 new containers, and each row that waits for its commit is one: 8 % of the time of
a first backfill went into looking for cycles among rows, which have none. Reference counting frees rows; the cycles
that there are come from exceptions, tasks and connections that ended, a few for each event. So what the process begins
with is never looked at again, and a collection runs when 100,000 more containers are alive than at the last one: the
rows of a whole batch (`batch_bytes_max`, 8 MiB by default) are fewer, unless documents have less than 20 bytes. Garbage
in cycles is bounded by the same number.
"""

from __future__ import annotations

import gc

NEW_CONTAINERS_MAX = 100_000
"""New containers alive between two collections of the youngest generation; at some 100 bytes each, 10 MB."""
OLDER_EVERY = 10
"""Collections of one generation for one of the next, as by default."""


def settle_collector() -> None:
    """Apply the policy; to be called once, when everything that stays for life has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_CONTAINERS_MAX, OLDER_EVERY, OLDER_EVERY)
