"""Has the running service resync vbuckets, and waits for the new copies.

The old copy stays until the new one is complete (`resync_reads` decides if readers get the old copy). If this process
ends early, the service goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mirror import client
from mirror.errors import SourceTimeout, SupervisionError
from mirror.messages import Resync
from storage.read.view import open_view

TIMEOUT_S = 60.0
"""Longest time without a finished vbucket."""
POLL_S = 0.05


def resync(
    path: str,
    vbids: Sequence[int],
    *,
    timeout_s: float = TIMEOUT_S,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> None:
    """Resync vbuckets; return once all new copies are served. Raises MirrorError, StorageError."""
    left: dict[int, int] = {}
    for vbid in vbids:
        answer = client.ask(Path(path), Resync(vbid))
        if answer is None:
            raise SupervisionError(f"no service runs on {path}", hint="start it: it copies the vbuckets again")
        left[vbid] = int(answer["result"]["staging_branch"])
    since = time.monotonic()
    with open_view(path, stale_reads=True, partial=True) as view:
        while left:
            for vbid, branch in list(left.items()):
                if view.state(vbid).branch >= branch and not view.stale(vbid):
                    del left[vbid]
                    since = time.monotonic()
                    progress(len(vbids) - len(left), len(vbids))
            if time.monotonic() - since > timeout_s:
                raise SourceTimeout(
                    f"vb {min(left)} and {len(left) - 1} more are not whole again after {timeout_s:g} s",
                    hint="`dcp-mirror status` says why; the service goes on with the resync",
                )
            time.sleep(POLL_S)
