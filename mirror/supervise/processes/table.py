"""The table of the worker and server processes of one service: desired, running and ended.

Executes the actions of `plan`. A slot keeps its record when its process ends. An unexpected exit leads to a restart
after a growing pause.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mirror.config import to_wire
from mirror.ingest.topology import ClusterMap
from mirror.log import get_logger
from mirror.messages import ExitReport, NewClusterMap, StartMessage, StartWorker, StopWork
from mirror.supervise.context import ServiceContext
from mirror.supervise.events.kinds import MapChanged, WorkerEnded
from mirror.supervise.events.log import EventLog
from mirror.supervise.listeners.addresses import Listeners, kind_of, process_name
from mirror.supervise.processes.child import Child, ChildExited, ChildMessage, server_command, spawn
from mirror.supervise.processes.plan import (
    Heartbeat,
    KillProcess,
    ProcessPhase,
    StartProcess,
    StopProcess,
    WorkerFacts,
    assign,
    failures_after,
    plan,
    restart_delay_ms,
)
from mirror.supervise.processes.quarantine import GroupMark, Quarantine

log = get_logger("supervisor")


@dataclass(slots=True)
class ProcessSlot:
    """The record of a slot: its process, and the failures and last exit of earlier processes."""

    child: Child | None = None
    failures: int = 0
    restarts: int = 0
    not_before_ms: int = 0
    last_exit: str | None = None
    last_error: str | None = None
    last_exit_ms: int | None = None


class Processes:
    def __init__(
        self,
        context: ServiceContext,
        listeners: Listeners,
        event_log: EventLog,
        post: Callable[[ChildMessage | ChildExited], None],
        command: Callable[[int], Sequence[str]],
        *,
        ends_on_refusal: bool,
    ) -> None:
        """`post` gets the messages and exits of all processes. `command` starts a worker; `StartWorker` explains
        `ends_on_refusal`.
        """
        self._context = context
        self._listeners = listeners
        self._event_log = event_log
        self._post = post
        self._command = command
        self._ends_on_refusal = ends_on_refusal
        self.slots: dict[int, ProcessSlot] = {}
        self.desired: dict[int, tuple[int, ...]] = {}
        """Slot -> groups of the process that should run there."""
        self.working = False
        """True once the bucket is known and workers are planned."""
        self.serves_readers = False
        """True once servers are planned, with or without workers."""
        self.quarantine = Quarantine()

    def alive(self) -> list[Child]:
        return [slot.child for slot in self.slots.values() if slot.child is not None]

    def running(self) -> list[Child]:
        return [child for child in self.alive() if child.phase is ProcessPhase.RUNNING]

    def end_of(self, number: int) -> str:
        slot, name = self.slots[number], process_name(number)
        if slot.last_exit is None:
            return f"{name} {slot.last_error}"
        return ": ".join(filter(None, (f"{name} ended", slot.last_exit, slot.last_error)))

    def failure_of(self, number: int) -> str | None:
        """Return `end_of` if the process failed and its successor does not run yet."""
        slot = self.slots.get(number)
        if slot is None or not slot.failures or (slot.child is not None and slot.child.phase is ProcessPhase.RUNNING):
            return None
        return self.end_of(number)

    def owner_of(self, group: int) -> Child | None:
        return next((child for child in self.running() if group in child.groups), None)

    def begin(self) -> None:
        self.working = True
        self.replan()

    def serve_readers(self) -> None:
        """Plan the servers before the source has answered; for a new mirror only HTTP servers, which show its state."""
        self.serves_readers = True
        self.replan()

    def replan(self) -> None:
        settings, identity = self._context.settings, self._context.identity
        servers = self._listeners.desired(settings)
        if self.working:
            assert identity is not None, "the directory is known before workers are planned"
            self.desired = assign(identity.group_count, settings.workers) | servers
        elif self.serves_readers:
            self.desired = {slot: () for slot in servers if identity is not None or kind_of(slot) == "http"}

    # executing the plan

    async def act(self) -> None:
        now_ms = self._context.now_ms()
        grace_ms = int(self._context.settings.stop_timeout_s * 1000)
        stopping = self._context.stopping
        for action in plan(self.desired, self._facts(now_ms), now_ms, stop_grace_ms=grace_ms, stopping=stopping):
            if isinstance(action, StartProcess):
                await self._start(action)
                continue
            child = self.slots[action.slot].child
            assert child is not None, "only the living are stopped"
            if isinstance(action, StopProcess):
                child.phase = ProcessPhase.STOPPING
                child.stopping_since_ms = now_ms
                child.send(StopWork())
            elif isinstance(action, KillProcess):
                log.error("process-killed", process=process_name(child.slot), pid=child.pid, reason=action.reason)
                child.exit_report = ExitReport(action.reason)
                child.phase = ProcessPhase.KILLED
                child.kill()

    def _facts(self, now_ms: int) -> list[WorkerFacts]:
        deadline_ms = int(self._context.settings.worker_heartbeat_timeout_s * 1000)
        return [
            slot.child.facts(now_ms, deadline_ms)
            if slot.child is not None
            else WorkerFacts(number, ProcessPhase.ABSENT, not_before_ms=slot.not_before_ms)
            for number, slot in self.slots.items()
        ]

    async def _start(self, action: StartProcess) -> None:
        context = self._context
        slot = self.slots.setdefault(action.slot, ProcessSlot())
        heartbeat = Heartbeat(context.now_ms())
        start: StartMessage
        try:
            if kind_of(action.slot) is None:
                descriptor = GroupMark.descriptor()
                start = self._worker_start(action, descriptor)
                try:
                    child = await spawn(action.slot, action.groups, heartbeat, self._command, [descriptor])
                except BaseException:
                    os.close(descriptor)
                    raise
                child.mark = GroupMark(descriptor)
            else:
                inherited = self._listeners.inherited(action.slot)
                start = self._listeners.start_message(action.slot, to_wire(context.settings))
                child = await spawn(action.slot, action.groups, heartbeat, server_command, inherited)
        except OSError as error:
            slot.failures += 1
            slot.last_error = f"cannot be started: {error.strerror}"
            slot.not_before_ms = context.now_ms() + restart_delay_ms(slot.failures)
            log.error("process-not-started", process=process_name(action.slot), error=str(error))
            return
        if slot.last_exit is not None:
            slot.restarts += 1
        slot.child = child
        child.send(start)
        child.watch(self._post)

    def _worker_start(self, action: StartProcess, mark_descriptor: int) -> StartWorker:
        identity, maps, leases = self._context.identity, self._context.maps, self._context.leases
        assert identity is not None, "the directory is known before workers are planned"
        assert maps is not None, "maps are opened with the directory"
        assert leases is not None, "leases are read before workers are planned"
        return StartWorker(
            slot=action.slot,
            groups=list(action.groups),
            settings=to_wire(self._context.settings),
            leases=leases.orders(action.groups, identity.group_count, self._context.clock.wall_ms()),
            cluster_map=None if maps.current is None else maps.current.to_wire(),
            map_floor=None if maps.floor is None else list(maps.floor),
            group_mark=mark_descriptor,
            quarantined=[list(each) for each in self.quarantine.groups.items()],
            ends_on_refusal=self._ends_on_refusal,
        )

    # exits

    def exited(self, event: ChildExited) -> None:
        """Record how a process ended and set the pause before its replacement."""
        child, now_ms = event.child, self._context.now_ms()
        slot = self.slots[child.slot]
        assert slot.child is child, "a slot holds one child at a time"
        slot.child = None
        slot.last_exit = exit_words(event.status)
        slot.last_exit_ms = self._context.clock.wall_ms()
        slot.last_error = child.exit_report.message if child.exit_report is not None else None
        if self._context.stopping or (child.phase is ProcessPhase.STOPPING and event.status == 0):
            slot.failures = 0
            return
        group = child.mark.group if child.mark is not None else None
        if self.quarantine.note_death(group, event.status, now_ms):
            assert group is not None, "only deaths in a group are counted"
            log.error("group-quarantined", group=group, reason=self.quarantine.groups[group])
        slot.failures = failures_after(slot.failures, now_ms - child.heartbeat.started_ms)
        delay_ms = restart_delay_ms(slot.failures)
        slot.not_before_ms = now_ms + delay_ms
        self._event_log.add(
            WorkerEnded(
                process=process_name(child.slot),
                pid=child.pid,
                exit=slot.last_exit,
                why=slot.last_error,
                pause_ms=delay_ms,
            )
        )

    def kill_all(self) -> None:
        for child in self.alive():
            child.phase = ProcessPhase.KILLED
            child.kill()

    async def reap_all(self, events: asyncio.Queue[Any]) -> None:
        """Kill the remaining processes and wait for their exits in the service's queue."""
        for child in self.alive():
            child.kill()
        while self.alive():
            event = await events.get()
            if isinstance(event, ChildExited):
                self.slots[event.child.slot].child = None

    # the cluster map

    def follow_map(self, found: ClusterMap) -> None:
        """If this cluster map is newer, record it and send it to all workers."""
        maps = self._context.maps
        assert maps is not None, "maps come when the directory is known"
        known = maps.current
        if maps.take(found):
            if known is not None:
                self._event_log.add(MapChanged(rev_epoch=found.rev_epoch, rev=found.rev, nodes=len(found.nodes)))
            for child in self.alive():
                if kind_of(child.slot) is None:
                    child.send(NewClusterMap(found.to_wire()))

    def map_found(self, child: Child, found: ClusterMap) -> None:
        """Send a worker's map to all workers if it is the newest, else send the newest map to this worker."""
        self.follow_map(found)
        current = self._context.maps.current if self._context.maps is not None else None
        if current is not None and current is not found:
            child.send(NewClusterMap(current.to_wire()))


def exit_words(status: int) -> str:
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
