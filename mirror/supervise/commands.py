"""The commands of the control socket.

Each client has a task on the service's event loop; `stop` is queued as a signal is. A refused command
changes nothing, except that a lease ends if a worker refuses its renewal. A new lease is held by all workers of its
vbuckets, or by none.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, assert_never

from mirror.config import OF_SOURCE, to_wire
from mirror.errors import ConfigError, SupervisionError
from mirror.messages import (
    GetSource,
    GetStatus,
    GrantLease,
    HoldPositions,
    Ping,
    ReleaseLease,
    Reply,
    Resync,
    RollBack,
    StopService,
    control_command,
)
from mirror.supervise.context import ServiceContext
from mirror.supervise.leases import LeaseRecord
from mirror.supervise.processes.child import Child, WorkerRefused
from mirror.supervise.processes.table import Processes
from mirror.supervise.reports.collector import Reports

OWNER_TIMEOUT_S = 25.0
"""Limit for a worker's answer; less than `ANSWER_TIMEOUT_S` of the control socket."""


class Commands:
    def __init__(
        self,
        context: ServiceContext,
        processes: Processes,
        reports: Reports,
        signalled: Callable[[int], None],
    ) -> None:
        """`signalled` queues a signal as if the service had received it."""
        self._context = context
        self._processes = processes
        self._reports = reports
        self._signalled = signalled

    async def answer(self, message: Mapping[str, Any]) -> Reply:
        command = control_command(message)
        match command:
            case Ping():
                return {"pid": os.getpid()}
            case GetSource():
                settings = to_wire(self._context.settings)
                return {"settings": {name: value for name, value in settings.items() if name in OF_SOURCE}}
            case GetStatus():
                if self._processes.desired and not self._context.stopping:
                    await self._reports.collect()
                return {"status": self._reports.document()}
            case StopService():
                self._signalled(signal.SIGTERM)
                return {}
            case RollBack() | Resync():
                return {"result": await self._ask_owner(command)}
            case GrantLease():
                return await self._grant_lease(command)
            case ReleaseLease():
                return {"released": self._end_lease(command.id)}
            case _:
                assert_never(command)

    async def _ask_owner(self, command: RollBack | Resync) -> Reply:
        identity, vbid = self._context.identity, command.vbid
        if identity is None or vbid not in identity.vbids:
            raise ConfigError(f"this mirror holds no vbucket {vbid}", hint="see `dcp-mirror state`")
        owner = self._processes.owner_of(vbid % identity.group_count)
        if owner is None:
            raise SupervisionError(f"no worker has vbucket {vbid} at this moment", hint="try again in a second")
        return await owner.request(command, OWNER_TIMEOUT_S)

    async def _grant_lease(self, request: GrantLease) -> Reply:
        """Grant a lease at all workers of its vbuckets, or at none. Renew it unless a worker refuses."""
        identity, book = self._context.identity, self._context.leases
        if identity is None or book is None:
            raise SupervisionError("the service is still starting", hint="try again in a second", retryable=True)
        now_ms = self._context.clock.wall_ms()
        record = book.requested(request, identity.vbucket_count, now_ms)
        renewed = book.known(record, now_ms)
        orders = self._orders_of(record)
        covered = {position[0] for _, order in orders for position in order.positions}
        if not renewed and len(covered) < len(record.positions):
            raise SupervisionError("not all workers run", hint="try again in a second", retryable=True)
        answers = (child.request(order, OWNER_TIMEOUT_S) for child, order in orders)
        # All answers, because a lease that one worker refuses is ended at the others.
        results = await asyncio.gather(*answers, return_exceptions=True)
        failures = [each for each in results if isinstance(each, Exception)]
        # The refusal is shown, rather than the silence of another worker.
        failures.sort(key=lambda each: not isinstance(each, WorkerRefused))
        if failures and (not renewed or isinstance(failures[0], WorkerRefused)):
            self._end_lease(record.id)
            raise failures[0]
        book.enter(record)  # a worker that died during a renewal gets the lease from the book when it restarts
        return {"id": record.id, "until_ms": record.until_ms}

    def _end_lease(self, lease_id: str) -> bool:
        """End a lease at all workers, without waiting for them. Return True if it was granted."""
        for child in self._processes.running():
            if child.groups:
                child.send_command(ReleaseLease(lease_id))
        return self._context.leases is not None and self._context.leases.remove(lease_id) is not None

    def _orders_of(self, record: LeaseRecord) -> list[tuple[Child, HoldPositions]]:
        assert self._context.identity is not None, "leases are granted only when the directory is known"
        count = self._context.identity.group_count
        running = self._processes.running()
        return [(child, order) for child in running if (order := record.order(child.groups, count)) is not None]
