"""Leases: the service keeps a mirror's history from a reader's positions on, until the reader releases the lease.

The service grants a lease for some seconds, and a thread of this module renews it. Without a service nothing is purged;
if a service starts later, the thread requests the lease then. If the positions are not held any more, `lost` has the
reason.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from mirror.client import AccessDenied, ServiceSaidNo, ask
from mirror.errors import MirrorError
from mirror.messages import GrantLease, ReleaseLease
from storage.errors import Unavailable

SECONDS = 60.0
"""A lease ends this long after its last renewal."""
FIRST_TRIES_S = 10.0
FIRST_RETRY_S = 0.25


class Lease:
    """A lease that a thread renews. `hold` also releases it."""

    def __init__(
        self,
        path: str | Path,
        positions: Mapping[int, tuple[int, int]],
        *,
        name: str,
        seconds: float = SECONDS,
        lease_id: str | None = None,
    ) -> None:
        """Request the lease. If other processes hold a lease with this `lease_id`, share that lease.

        Raises ServiceSaidNo if the service refuses, for instance because a position is no longer kept, and
        SupervisionError if the service does not answer. If this user may not use the control socket, `lost` says so.
        """
        self._directory = Path(path)
        self._positions = [[vbid, branch, seqno] for vbid, (branch, seqno) in sorted(positions.items())]
        self._name = name
        self._seconds = seconds
        self._pid = os.getpid()
        self._ended = threading.Event()
        self.id = lease_id or uuid.uuid4().hex
        self.lost: MirrorError | None = None
        """The reason why the positions are no longer held; None while they are."""
        try:
            self._ask_first()
        except AccessDenied as error:
            self.lost = error
            self._ended.set()
            warnings.warn(f"no lease: {error.what}; if the read outlasts history_s, it may fail", stacklevel=2)
            return
        self._renewing = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewing.start()

    def _ask(self) -> None:
        if self._positions:  # an empty mirror has no history to hold
            ask(self._directory, GrantLease(self.id, self._name, self._seconds, self._positions))

    def _ask_first(self) -> None:
        ends_s = time.monotonic() + FIRST_TRIES_S
        while True:
            try:
                return self._ask()
            except ServiceSaidNo as error:
                if not error.retryable or time.monotonic() > ends_s:
                    raise
            time.sleep(FIRST_RETRY_S)

    def _renew(self) -> None:
        while not self._ended.wait(self._seconds / 3):
            try:
                self._ask()
            except MirrorError as error:
                if not error.retryable:
                    self.lost = error
                    return

    def leave(self) -> bool:
        """Stop renewing. The lease ends if no other process renews it. Return False if this was called before, or in a
        forked child: the lease is its parent's.
        """
        if os.getpid() != self._pid or self._ended.is_set():
            return False
        self._ended.set()
        self._renewing.join()
        return True

    def release(self) -> None:
        """End the lease. Harmless if repeated, or if the service is gone."""
        if not self.leave():
            return
        try:
            ask(self._directory, ReleaseLease(self.id))
        except MirrorError:  # the lease ends by itself, because it is not renewed
            return


class NoLease(Unavailable):
    """The service grants no lease; the message has its reason."""


def of_reading(
    path: str | Path, name: str, *, seconds: float = SECONDS, lease_id: str | None = None
) -> Callable[[Mapping[int, tuple[int, int]]], AbstractContextManager[Lease]]:
    """Return the `lease` for `View.reading`, which raises NoLease. At its end a lease with an id is left, as others may
    share it.
    """

    @contextmanager
    def holding(positions: Mapping[int, tuple[int, int]]) -> Iterator[Lease]:
        try:
            lease = Lease(path, positions, name=name, seconds=seconds, lease_id=lease_id)
        except MirrorError as error:
            raise NoLease(f"no lease: {error.what}", path=str(path), hint=error.hint) from error
        try:
            yield lease
        finally:
            if lease_id is None:
                lease.release()
            else:
                lease.leave()

    return holding


@contextmanager
def hold(
    path: str | Path, positions: Mapping[int, tuple[int, int]], *, name: str, seconds: float = SECONDS
) -> Iterator[Lease]:
    """Keep the history of the mirror at `path` from `positions` (vbid -> branch, seqno) on, while the block runs.

    `status` shows `name`. If this process dies, the lease ends within `seconds`. Raises what `Lease` raises.
    If the lease ends early, `lease.lost` is the reason.
    """
    lease = Lease(path, positions, name=name, seconds=seconds)
    try:
        yield lease
    finally:
        lease.release()
