"""The service's main loop: handles a queue of events, and connects the parts that own the service's state.

Signals, ticks, and the messages and exits of processes are events, handled one after the other. The source look-up,
reports and commands are tasks on the same event loop, so they interleave with events only at an `await`. A clean stop
waits for the last commit of every worker; processes that do not exit in time are killed and reaped before the lock is
released.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from mirror.clock import Clock
from mirror.config import Settings, required_data, required_source
from mirror.errors import ClusterError, ConfigError, ExitCode, MirrorError, SupervisionError
from mirror.health import STOPPING, of_mirror
from mirror.ingest.topology import ClusterMap
from mirror.log import get_logger
from mirror.messages import Answer, Beat, ExitReport, NewClusterMap, Ready, Status, Turned
from mirror.supervise.commands import Commands
from mirror.supervise.context import ServiceContext
from mirror.supervise.events.kinds import LeaseExpired
from mirror.supervise.events.log import EventLog
from mirror.supervise.leases import LeaseBook
from mirror.supervise.listeners.addresses import Listeners, kind_of, process_name
from mirror.supervise.listeners.control import ControlServer
from mirror.supervise.lock import ServiceLock
from mirror.supervise.processes.child import Child, ChildExited, ChildMessage, worker_command
from mirror.supervise.processes.plan import ProcessPhase
from mirror.supervise.processes.table import Processes
from mirror.supervise.reports.collector import ReportedFailure, Reports
from mirror.supervise.reports.systemd import Notifier
from mirror.supervise.setup import LookUp, Setup

TICK_S = 0.2
"""Interval between checks of deadlines and restart pauses."""
COMPLAINT_INTERVAL_S = 60.0
SOURCE_PATIENCE_S = 0.5
"""Servers start after this long without an answer from the source; for a new mirror only HTTP servers."""
CATCH_UP_SOURCE_LIMIT_S = 60.0
"""With `--until-caught-up`, give up on an unreachable source after this long, because a caller waits."""

log = get_logger("supervisor")


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


@dataclass(frozen=True, slots=True)
class TaskFinished:
    task: asyncio.Task[None]


class Tick:
    pass


Event = Signalled | TaskFinished | Tick | ChildMessage | ChildExited

Progress = Callable[[Status], None]


@dataclass(frozen=True, slots=True)
class RunOptions:
    until_caught_up: bool = False
    required_groups: int | None = None
    """The number of groups that an existing directory must have."""


DEFAULTS = RunOptions()


class Supervisor:
    def __init__(
        self,
        settings: Settings,
        look_up: LookUp,
        *,
        clock: Clock,
        options: RunOptions = DEFAULTS,
        progress: Progress | None = None,
        notifier: Notifier | None = None,
        command: Callable[[int], Sequence[str]] = worker_command,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        """`progress` gets each new status; `announce` gets a line for each address that is open to readers."""
        required_source(settings)
        self._clock = clock
        self._options = options
        self._progress = progress
        self._announce = announce
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        post, caught_up = self._events.put_nowait, options.until_caught_up
        self._notifier = notifier = notifier or Notifier()
        self._context = context = ServiceContext(settings, required_data(settings), clock)
        self._setup = Setup(context, look_up, options.required_groups)
        self._listeners = listeners = Listeners(settings, clock.wall_ms() // 1000)
        self._event_log = event_log = EventLog(clock, context.data)
        self._processes = processes = Processes(context, listeners, event_log, post, command, ends_on_refusal=caught_up)
        self.reports = reports = Reports(
            context, processes, listeners, event_log, notifier, until_caught_up=caught_up, stop=self.stop
        )
        self._commands = Commands(context, processes, reports, lambda number: post(Signalled(number)))
        self._background: set[asyncio.Task[None]] = set()
        self._started_s = clock.monotonic()
        self._interrupts = 0
        self._exit = ExitCode.DONE
        self._failure: MirrorError | None = None
        self._fed_watchdog_s = self._next_complaint_s = float("-inf")

    # start and stop

    async def run(self) -> ExitCode:
        """Serve until stopped or, with `until_caught_up`, caught up. Raises the error that ended the service."""
        lock = ServiceLock(self._context.data)
        control = ControlServer(self._context.data, self._commands.answer)
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._events.put_nowait, Signalled(number))
        loop.set_exception_handler(self._loop_failed)
        try:
            await control.start()
            self._listeners.reserve()
            self._setup.load()
            self._spawn_task(self._ticks())
            self._spawn_task(self._resolve_source())
            self._spawn_task(self.reports.run(self._progress))
            while not (self._context.stopping and not self._processes.alive()):
                event = await self._events.get()
                if isinstance(event, Tick) and not self._context.stopping:
                    self._check_place(lock)
                self._handle(event)
                await self._processes.act()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            loop.set_exception_handler(None)
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._processes.reap_all(self._events)
            self.reports.add_due_events(at_once=True)
            await control.stop()
            self._listeners.release()
            self._notifier.close()
            # After the last child: a second service must not start beside a worker that still writes.
            lock.release()
        if self._failure is not None:
            raise self._failure
        return self._exit

    def stop(self, failure: MirrorError | None = None) -> None:
        """Begin to stop: workers commit and exit; then `run` returns, or raises `failure`."""
        if failure is not None and self._failure is None:
            self._failure = failure
        if not self._context.stopping:
            self._context.stopping = True
            self.reports.set_health(of_mirror(STOPPING, "the service stops"))
            self._notifier.stopping()
            workers = sum(kind_of(child.slot) is None for child in self._processes.alive())
            if self._failure is None or workers:  # else the error is shown, which is enough
                log.info("stopping", workers=workers)

    def _check_place(self, lock: ServiceLock) -> None:
        """End the service if its directory is gone, because later commits could not be found."""
        try:
            lock.check_place(made=self._context.identity is not None)
        except SupervisionError as error:
            self._processes.kill_all()
            self.stop(error)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Log, at most once a minute, that connections cannot be accepted. The event loop retries every second."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            loop.default_exception_handler(context)
        elif self._clock.monotonic() >= self._next_complaint_s:
            self._next_complaint_s = self._clock.monotonic() + COMPLAINT_INTERVAL_S
            log.error(
                "control-socket-refuses",
                error=error.strerror,
                hint="raise the limit of open files (ulimit -n, LimitNOFILE=)",
            )

    def _spawn_task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(lambda done: self._events.put_nowait(TaskFinished(done)))

    async def _ticks(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._events.put_nowait(Tick())

    async def _resolve_source(self) -> None:
        settings = self._context.settings
        limit_s = settings.bootstrap_timeout_s or (CATCH_UP_SOURCE_LIMIT_S if self._options.until_caught_up else 0)
        try:
            source = await self._setup.find_source(limit_s, self._source_unreachable)
        except (ClusterError, ConfigError) as error:
            serves_data = self._processes.serves_readers and self._context.identity is not None
            if error.retryable or not serves_data or self._options.until_caught_up:
                raise
            # The source may be coming back step by step. The workers show the refusal, and ask the source again.
            log.warning("source-refuses", error=str(error))
            self.reports.source_answered(None)
            self._begin_work()
            return
        self.reports.source_answered(None)
        if self._context.identity is None:
            self._setup.make(source)
            self.reports.observer.fill_begins()
        if source.cluster_map is not None:
            self._processes.follow_map(source.cluster_map)
        self._begin_work()

    def _source_unreachable(self, error: str) -> None:
        self.reports.source_answered(error)
        self._processes.serve_readers()
        if self._context.identity is not None:
            self._begin_work()  # workers keep trying

    def _begin_work(self) -> None:
        if self._processes.working:
            return
        context, settings = self._context, self._context.settings
        context.leases = LeaseBook(context.data, seconds_max=settings.lease_max_s, age_max_s=settings.lease_age_max_s)
        self._processes.begin()
        self.reports.work_begins()

    # events

    def _handle(self, event: Event) -> None:
        match event:
            case Tick():
                self._feed_watchdog()
                self.reports.add_due_events()
                self._expire_leases()
                waited_s = self._clock.monotonic() - self._started_s
                if not self._processes.serves_readers and waited_s >= SOURCE_PATIENCE_S:
                    self._processes.serve_readers()
            case ChildMessage():
                self._receive(event)
            case ChildExited():
                self._exited(event)
            case Signalled():
                self._signalled(event.number)
            case TaskFinished():
                self._finished(event.task)

    def _feed_watchdog(self) -> None:
        """Feed systemd's watchdog on a tick, so that systemd notices if events are no longer handled."""
        interval_s = self._notifier.watchdog_interval_s()
        now_s = self._clock.monotonic()
        if interval_s is not None and now_s >= self._fed_watchdog_s + interval_s:
            self._fed_watchdog_s = now_s
            self._notifier.watchdog()

    def _expire_leases(self) -> None:
        leases = self._context.leases
        for lease in leases.expire(self._clock.wall_ms()) if leases is not None else ():
            self._event_log.add(LeaseExpired(lease=lease.id, reader=lease.name, vbuckets=len(lease.positions)))

    def _receive(self, event: ChildMessage) -> None:
        child, message = event.child, event.message
        child.heartbeat.beat(self._context.now_ms())
        match message:
            case Beat():
                pass
            case Turned():
                self.reports.look_soon()
            case Ready():
                if child.phase is ProcessPhase.STARTING:  # a stopping child may still become ready
                    self._ready(child)
            case Answer():
                child.answered(message)
            case NewClusterMap():
                self._processes.map_found(child, ClusterMap.from_wire(message.cluster_map))
            case ExitReport():
                child.exit_report = message
            case _:
                log.warning("unexpected-message", process=process_name(child.slot), op=message.op)

    def _ready(self, child: Child) -> None:
        child.phase = ProcessPhase.RUNNING
        groups = {"groups": list(child.groups)} if child.groups else {}
        log.info("process-ready", process=process_name(child.slot), pid=child.pid, **groups)
        for line in self._listeners.ready(child.slot):
            if self._announce is not None:
                self._announce(line)
            else:
                log.info("listening", address=line)

    def _exited(self, event: ChildExited) -> None:
        self._processes.exited(event)
        self.reports.worker_exited(event.child)
        self.reports.look_soon()
        report = event.child.exit_report
        if report is not None and report.fatal and self._options.until_caught_up and not self._context.stopping:
            self.stop(ReportedFailure(report.message, report.exit_code))

    def _signalled(self, number: int) -> None:
        if self._options.until_caught_up and not self._context.stopping:
            self._exit = ExitCode.INTERRUPTED
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts > 1:
            log.warning("workers-killed-on-interrupt")
            self._processes.kill_all()
        self.stop()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._failure = self._failure or (error if isinstance(error, MirrorError) else None)
        if self._failure is None:
            raise error
        self.stop()
