"""The service: one loop that takes events from one queue and does what `plan` says.

Knows processes, signals, the control socket and the data directory's outside; never a row, a stream or an LMDB
environment. Every signal, message, death, command and tick becomes an event, so no two things ever happen at once.
Invariants: a group is owned by at most one living process; data is never deleted here; a clean stop waits for every
worker's last commit, and what does not go in time is killed and reaped before the service's lock is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mirror.clock import Clock
from mirror.config import OF_SOURCE, Settings, to_wire, vbucket_range
from mirror.errors import BucketChanged, ClusterError, ConfigError, ExitCode, MirrorError, SupervisionError
from mirror.feed.consumer import judge_streams
from mirror.health import CATCHING_UP, STARTING, assess
from mirror.ingest.selection import Selection
from mirror.ingest.topology import ClusterMap
from mirror.log import get_logger
from mirror.supervise.backoff import failures_after, restart_delay_ms
from mirror.supervise.channel import ANSWER, BEAT, FAILED, MAP, READY, START, STOP
from mirror.supervise.children import Child, Gone, Heard, Refused, server_command, spawn, worker_command
from mirror.supervise.control import ControlServer
from mirror.supervise.event_log import EventLog
from mirror.supervise.events import LeaseExpired, MapChanged, SettingsRead, SettingsRefused, WorkerEnded
from mirror.supervise.figures import Gauge
from mirror.supervise.heartbeat import Heartbeat
from mirror.supervise.hook import Hook, words_of
from mirror.supervise.leases import LeaseBook, Record
from mirror.supervise.listeners import FIXED, SLOTS_PER_KIND, Listeners, kind_of, outdated_by
from mirror.supervise.lock import ServiceLock
from mirror.supervise.maps import MapBook
from mirror.supervise.observer import Observer
from mirror.supervise.plan import Kill, Phase, Start, Stop, WorkerFacts, assign, plan
from mirror.supervise.quarantine import GroupMark, Quarantine
from mirror.supervise.sharing import readers_gid
from mirror.supervise.status import CatchUp, Row, Trend, reported_row, totals
from mirror.supervise.systemd import Notifier
from storage import access, directory
from storage.errors import StorageError
from storage.model import Identity

TICK_S = 0.2
"""How often deadlines and restart pauses are looked at."""
REPORT_INTERVAL_S = 1.0
"""How often workers are asked for a full report, at most."""
VBUCKETS_PER_REPORT_S = 256
"""Reports of more vbuckets than this come more rarely: they cost the supervisor some 0.1 ms each, and workers less."""
REPORT_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 2.0
"""What a `status` command waits for reports; those that are late are as of the report before."""
OWNER_TIMEOUT_S = 25.0
"""For a command to the owner of a vbucket; less than the control socket's own limit."""
SOURCE_RETRY_MIN_S = 0.5
SOURCE_RETRY_MAX_S = 10.0
COMPLAINT_INTERVAL_S = 60.0
EVENTS_SHOWN = 50
"""Events that the status document has; `dcp-mirror events` shows all that are kept."""
CATCH_UP_SOURCE_LIMIT_S = 60.0
"""With `--until-caught-up` somebody waits for the end: give up on a source that nobody can reach."""

log = get_logger("supervisor")


@dataclass(frozen=True, slots=True)
class Source:
    """What must be known of the bucket before a mirror of it can be made."""

    cluster_uuid: str
    bucket_name: str
    bucket_uuid: str
    vbucket_count: int
    cluster_map: ClusterMap | None = None
    """The newest of all nodes that answered."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """The service got a signal."""

    number: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A background task of the supervisor ended, or must be looked at."""

    task: asyncio.Task[None]


class Tick:
    """Time passed."""


Event = Signalled | Finished | Tick | Heard | Gone


class LookUp(Protocol):
    """Asks the source which bucket it serves."""

    def __call__(self, settings: Settings, bucket_uuid: str | None = None) -> Awaitable[Source]:
        """`bucket_uuid`: maps of other buckets count only where no node has one of this. Raises ClusterError."""
        ...


Progress = Callable[[dict[str, Any]], None]


@dataclass(slots=True)
class Slot:
    """A place for a worker, and its record over all the processes that stood in it."""

    child: Child | None = None
    failures: int = 0
    restarts: int = 0
    not_before_ms: int = 0
    last_exit: str | None = None
    last_error: str | None = None
    last_exit_ms: int | None = None


class Supervisor:
    """The service of one data directory."""

    def __init__(
        self,
        settings: Settings,
        look_up: LookUp,
        *,
        clock: Clock,
        groups_asked: int | None = None,
        until_caught_up: bool = False,
        reload: Callable[[], Settings] | None = None,
        progress: Progress | None = None,
        notifier: Notifier | None = None,
        command: Callable[[int], Sequence[str]] = worker_command,
        server: Callable[[int], Sequence[str]] = server_command,
        announce: Callable[[str], None] | None = None,
        accept_older_map: bool = False,
    ) -> None:
        """`groups_asked` is a number the operator named, which must then fit; `progress` gets each new status, and
        `announce` a line for each address that readers can come to. With `accept_older_map` the first map that is
        found is followed, however old.
        """
        if settings.data is None:
            raise ConfigError("no data directory is given", hint="give --data DIR", setting="data")
        if settings.source is None:
            raise ConfigError("no source is given", hint="give --source couchbase://user@host/bucket", setting="source")
        self._settings = settings
        self._selection = Selection.of(settings.scope, settings.collections)
        self._data = settings.data
        if not directory.exists(str(settings.data)):
            judge_streams(settings, self._selection)
        readers_gid(settings)
        self._look_up = look_up
        self._clock = clock
        self._groups_asked = groups_asked
        self._until_caught_up = until_caught_up
        self._reload = reload
        self._progress = progress
        self._notifier = notifier or Notifier()
        self._command = command
        self._server = server
        self._announce = announce
        self._listeners = Listeners(settings, clock.wall_ms() // 1000)
        self._leases: LeaseBook | None = None
        self._maps: MapBook | None = None
        self._accept_older_map = accept_older_map
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._background: set[asyncio.Task[None]] = set()
        self._slots: dict[int, Slot] = {}
        self._desired: dict[int, tuple[int, ...]] = {}
        self._identity: Identity | None = None
        self._rows: dict[int, Row] = {}
        self._quarantine = Quarantine()
        self._trend = Trend()
        self._observer = Observer()
        self._hook = Hook(clock, settings.on_event)
        self._event_log = EventLog(clock, self._hook.put)
        self._catch_up: CatchUp | None = None
        self._state = STARTING
        self._message = ""
        self._reasons: tuple[str, ...] = ("no vbucket reported",)
        self._since_ms = clock.wall_ms()
        self._source_error: str | None = None
        self._stopping = False
        self._interrupts = 0
        self._exit = ExitCode.DONE
        self._failure: MirrorError | None = None
        self._was_ready = False
        self._started = clock.monotonic()
        self._fed_watchdog_s = float("-inf")
        self._next_complaint_s = float("-inf")
        self._had_terminal = has_terminal()
        self._gauge = Gauge(os.getpid())

    # the service's life

    async def run(self) -> ExitCode:
        """Serve until told to stop, or until caught up if that is the order. Raises what makes serving impossible."""
        lock = ServiceLock(self._data)
        control = ControlServer(self._data, self._command_arrived)
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._events.put_nowait, Signalled(number))
        loop.set_exception_handler(self._loop_failed)
        try:
            await control.start()
            self._listeners.reserve()
            if directory.exists(str(self._data)):
                self._identity = self._known(directory.load(str(self._data)))
                self._share()
                self._maps = self._open_maps(self._identity)
            self._spawn_task(self._ticks())
            self._spawn_task(self._meet_source())
            while not (self._stopping and not self._alive()):
                event = await self._events.get()
                if isinstance(event, Tick) and not self._stopping:
                    self._check_place(lock)
                self._handle(event)
                await self._act()
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
            loop.set_exception_handler(None)
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._end_children()
            for news in self._observer.due(self._now_ms(), at_once=True):
                self._event_log.add(news)
            await self._hook.close()
            await control.stop()
            self._listeners.release()
            self._notifier.close()
            lock.release()
        if self._failure is not None:
            raise self._failure
        return self._exit

    def _known(self, identity: Identity) -> Identity:
        asked = self._groups_asked
        if asked is not None and asked != identity.group_count:
            raise ConfigError(
                f"{self._data} was made with {identity.group_count} groups, not {asked}",
                hint=f"leave --groups out or give {identity.group_count}; another number needs a new directory",
                setting="groups",
            )
        selected, wanted = Selection.parse(identity.selection), self._selection
        if not wanted.whole and wanted != selected:
            raise ConfigError(
                f"{self._data} mirrors {selected}, not {wanted}",
                hint="leave --collection and --scope out or give the same; another choice needs a new data directory",
                setting="scope" if wanted.scope is not None else "collections",
            )
        judge_streams(self._settings, selected)
        vbuckets = self._settings.vbuckets
        held = (identity.vbids[0], identity.vbids[-1])
        if vbuckets is not None and vbucket_range(vbuckets, "vbuckets") != held:
            raise ConfigError(
                f"{self._data} was made to hold vbuckets {held[0]}-{held[1]}, not {vbuckets}",
                hint="leave the setting vbuckets out, or as it was; another range needs a new directory",
                setting="vbuckets",
            )
        return identity

    def stop(self, failure: MirrorError | None = None) -> None:
        """Begin the end: workers commit and go; then `run` returns, or raises `failure`."""
        if failure is not None and self._failure is None:
            self._failure = failure
        if not self._stopping:
            self._stopping = True
            self._set_state("stopping", "", ("the service stops",))
            self._notifier.stopping()
            if self._failure is None or self._alive():  # else the error alone says all
                log.info("stopping", workers=len(self._alive()))

    def _set_state(self, state: str, message: str, reasons: tuple[str, ...]) -> None:
        if state != self._state:
            self._since_ms = self._clock.wall_ms()
        self._reasons = reasons
        if (state, message) != (self._state, self._message):
            self._state, self._message = state, message
            self._notifier.status(f"{state}: {message}" if message else state)

    def _check_place(self, lock: ServiceLock) -> None:
        """End the service when its directory is gone: nothing that the workers could still commit would be found."""
        try:
            lock.check_place(made=self._identity is not None)
        except SupervisionError as error:
            self._kill_all()
            self.stop(error)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say that no connection can be accepted, once a minute; the loop tries again by itself every second."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            loop.default_exception_handler(context)
        elif self._clock.monotonic() >= self._next_complaint_s:
            self._next_complaint_s = self._clock.monotonic() + COMPLAINT_INTERVAL_S
            log.error(
                "the control socket cannot accept commands, trying on",
                error=error.strerror,
                hint="raise the limit of open files (ulimit -n, LimitNOFILE=)",
            )

    def _kill_all(self) -> None:
        for child in self._alive():
            child.phase = Phase.KILLED
            child.kill()

    def _spawn_task(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(lambda done: self._events.put_nowait(Finished(done)))

    async def _ticks(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            self._events.put_nowait(Tick())

    def _feed_watchdog(self) -> None:
        """Fed from the event loop's own work, so that a loop which stands still is noticed."""
        interval_s = self._notifier.watchdog_interval_s()
        now_s = self._clock.monotonic()
        if interval_s is not None and now_s >= self._fed_watchdog_s + interval_s:
            self._fed_watchdog_s = now_s
            self._notifier.watchdog()

    # the source

    async def _meet_source(self) -> None:
        """Learn which bucket it is; make the directory, or compare; then start work."""
        began = self._clock.monotonic()
        delay_s = SOURCE_RETRY_MIN_S
        limit_s = self._settings.bootstrap_timeout_s or (CATCH_UP_SOURCE_LIMIT_S if self._until_caught_up else 0)
        while True:
            try:
                known = self._identity
                source = await self._look_up(self._settings, None if known is None else known.bucket_uuid)
                if known is not None:
                    self._compare(source, known)
                if self._maps is not None and source.cluster_map is not None:
                    self._maps.check(source.cluster_map)
            except ClusterError as error:
                if not error.retryable or (limit_s and self._clock.monotonic() - began >= limit_s):
                    raise
                self._source_answers(str(error))
                self._judge([])
                if self._identity is not None:
                    self._begin_work()  # readers have what is there; workers try on by themselves
            else:
                break
            await self._clock.sleep(delay_s)
            delay_s = min(SOURCE_RETRY_MAX_S, delay_s * 2)
        self._source_answers(None)
        if self._identity is None:
            self._identity = self._make_directory(source)
            self._maps = self._open_maps(self._identity)
        if source.cluster_map is not None:
            self._follow_map(source.cluster_map)
        self._begin_work()

    def _source_answers(self, error: str | None) -> None:
        self._source_error = error
        for event in self._observer.source_answers(error, self._now_ms()):
            self._event_log.add(event)

    def _make_directory(self, source: Source) -> Identity:
        held, count = self._held(source), source.vbucket_count
        groups = min(self._settings.groups, held[1] - held[0] + 1 if held else count)
        selected = self._selection.text
        identity = Identity(source.cluster_uuid, source.bucket_name, source.bucket_uuid, count, groups, held, selected)
        directory.create(str(self._data), identity)
        self._share()
        self._observer.fill_begins()
        log.info(
            "made a new mirror",
            data=str(self._data),
            bucket=source.bucket_name,
            groups=groups,
            selection=str(self._selection),
        )
        return identity

    def _share(self) -> None:
        """Let the members of `readers_group` come in; each worker does the same for its groups."""
        name, gid = self._settings.readers_group, readers_gid(self._settings)
        if gid is None:
            return
        try:
            access.share(str(self._data), gid)
        except StorageError as error:
            log.error("readers_group cannot be let in", readers_group=name, error=str(error))
        else:
            closed = access.closed_parent(str(self._data), gid)
            if closed is not None:
                log.warning(
                    "readers_group cannot come to the data directory: its members may not enter one above it",
                    readers_group=name,
                    directory=closed,
                    hint=f"chmod o+x {closed}, or make {name} its group",
                )

    def _open_maps(self, identity: Identity) -> MapBook:
        return MapBook(str(self._data), identity.bucket_uuid, accept_older=self._accept_older_map)

    def _follow_map(self, found: ClusterMap) -> None:
        """Record a map if it is newer, and have all workers follow it."""
        assert self._maps is not None, "maps come when the directory is known"
        known = self._maps.current
        if self._maps.take(found):
            if known is not None:
                self._event_log.add(MapChanged(rev_epoch=found.rev_epoch, rev=found.rev, nodes=len(found.nodes)))
            for child in self._alive():
                if kind_of(child.slot) is None:
                    child.send({"op": MAP, "map": found.to_wire()})

    def _map_found(self, child: Child, found: ClusterMap) -> None:
        """A worker found a map that is newer than its own: all follow it, or it is the one that had missed a map."""
        self._follow_map(found)
        current = self._maps.current if self._maps is not None else None
        if current is not None and current is not found:
            child.send({"op": MAP, "map": current.to_wire()})

    def _held(self, source: Source) -> tuple[int, int] | None:
        """The vbuckets that a new mirror shall hold; None: all."""
        if self._settings.vbuckets is None:
            return None
        first, last = vbucket_range(self._settings.vbuckets, "vbuckets")
        if last >= source.vbucket_count:
            raise ConfigError(
                f"vbuckets {first}-{last} are asked for, and the bucket has {source.vbucket_count}",
                hint=f"give a range up to {source.vbucket_count - 1}",
                setting="vbuckets",
            )
        return None if last - first + 1 == source.vbucket_count else (first, last)

    def _compare(self, source: Source, identity: Identity) -> None:
        if source.bucket_uuid != identity.bucket_uuid:
            raise BucketChanged(
                f"{self._data} mirrors bucket {identity.bucket_name!r} ({identity.bucket_uuid}), and the source has "
                f"{source.bucket_name!r} ({source.bucket_uuid})"
            )
        if source.vbucket_count != identity.vbucket_count:
            raise BucketChanged(
                f"{self._data} mirrors {identity.vbucket_count} vbuckets, and the source has {source.vbucket_count}"
            )

    def _begin_work(self) -> None:
        assert self._identity is not None, "the directory is known before workers are planned"
        if self._desired:
            return
        settings = self._settings
        self._leases = LeaseBook(self._data, seconds_max=settings.lease_max_s, age_max_s=settings.lease_age_max_s)
        self._desired = self._wanted_now(self._identity)
        if self._until_caught_up:
            self._catch_up = CatchUp(len(self._identity.vbids))
        self._spawn_task(self._reports())

    def _wanted_now(self, identity: Identity) -> dict[int, tuple[int, ...]]:
        return assign(identity.group_count, self._settings.workers) | self._listeners.desired(self._settings)

    # events

    def _handle(self, event: Event) -> None:
        if isinstance(event, Tick):
            self._feed_watchdog()
            self._notice()
            return
        if isinstance(event, Heard):
            self._heard(event)
        elif isinstance(event, Gone):
            self._gone(event)
        elif isinstance(event, Signalled):
            self._signalled(event.number)
        else:
            self._finished(event.task)

    def _notice(self) -> None:
        """Report the news that are due."""
        for event in self._observer.due(self._now_ms()):
            self._event_log.add(event)
        for lease in self._leases.expire(self._clock.wall_ms()) if self._leases is not None else ():
            self._event_log.add(LeaseExpired(lease=lease.id, reader=lease.name, vbuckets=len(lease.positions)))

    def _heard(self, event: Heard) -> None:
        child, message = event.child, event.message
        kind = message["op"]
        child.heartbeat.beat(self._now_ms())
        if kind == READY and child.phase is Phase.STARTING:
            child.phase = Phase.RUNNING
            log.info(
                f"{kind_of(child.slot) or 'worker'} ready", slot=child.slot, pid=child.pid, groups=list(child.groups)
            )
            for line in () if child.outdated else self._listeners.ready(child.slot):
                if self._announce is not None:
                    self._announce(line)
                else:
                    log.info("listening", address=line)
        elif kind == ANSWER:
            child.answered(message)
        elif kind == MAP:
            self._map_found(child, ClusterMap.from_wire(message["map"]))
        elif kind == FAILED:
            child.last_words = message
        elif kind not in (BEAT, READY):  # one that is stopping may become ready yet
            log.warning("worker said something unknown", slot=child.slot, op=kind)

    def _gone(self, event: Gone) -> None:
        child = event.child
        slot = self._slots[child.slot]
        assert slot.child is child, "a slot holds one child at a time"
        slot.child = None
        slot.last_exit = exit_words(event.status)
        slot.last_exit_ms = self._clock.wall_ms()
        words = child.last_words or {}
        slot.last_error = str(words["message"]) if words.get("message") else None
        self._observer.forget(child.groups, self._rows.values())
        for row in self._rows.values():
            if row["group"] in child.groups:  # nobody asks the source now
                row |= {"state": "starting", "node": None}
                row["source_high_seqno"] = row["lag_seqnos"] = row["lag_s"] = None
        expected = child.phase is Phase.STOPPING and event.status == 0
        if expected or self._stopping:
            slot.failures = 0
            return
        group = child.mark.group if child.mark is not None else None
        if self._quarantine.note_death(group, event.status, self._now_ms()):
            assert group is not None, "only deaths in a group are counted"
            log.error("group quarantined", group=group, reason=self._quarantine.groups[group])
        slot.failures = failures_after(slot.failures, self._now_ms() - child.heartbeat.started_ms)
        delay_ms = restart_delay_ms(slot.failures)
        slot.not_before_ms = self._now_ms() + delay_ms
        self._event_log.add(
            WorkerEnded(
                process=f"{kind_of(child.slot) or 'worker'} {child.slot % SLOTS_PER_KIND}",
                pid=child.pid,
                exit=slot.last_exit,
                why=slot.last_error,
                pause_ms=delay_ms,
            )
        )
        if words.get("fatal") and self._until_caught_up:
            self.stop(ReportedFailure(words))

    def _signalled(self, number: int) -> None:
        if number == signal.SIGHUP and not (self._had_terminal and not has_terminal()):
            self._reload_settings()
            return
        if self._until_caught_up and not self._stopping:
            self._exit = ExitCode.INTERRUPTED
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts > 1:
            log.warning("interrupted again: killing the workers; nothing published is lost")
            self._kill_all()
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

    def _reload_settings(self) -> None:
        if self._reload is None or self._stopping:
            return
        self._notifier.reloading(self._clock.monotonic())
        try:
            fresh = self._reload()
            if fresh.on_event is not None:
                words_of(fresh.on_event)
            readers_gid(fresh)
            self._listeners.change(fresh)
            self._hook.use(fresh.on_event)
        except ConfigError as error:
            self._event_log.add(SettingsRefused(why=str(error)))
        else:
            found = [name for name in to_wire(fresh) if getattr(fresh, name) != getattr(self._settings, name)]
            fresh = replace(fresh, **{name: getattr(self._settings, name) for name in FIXED})
            changed = [name for name in found if name not in FIXED]
            self._settings = fresh
            need_restart = tuple(name for name in found if name in FIXED)
            self._event_log.add(SettingsRead(in_force=tuple(changed), need_restart=need_restart))
            if self._identity is not None and "readers_group" in changed:
                self._share()
            if self._desired and self._identity is not None:
                self._desired = self._wanted_now(self._identity)
            if self._leases is not None:
                self._leases.limit(seconds_max=fresh.lease_max_s, age_max_s=fresh.lease_age_max_s)
            if "kv_nodes" in changed or "kv" in changed:
                revision = self._listeners.renew(self._clock.wall_ms() // 1000)
                self._spawn_task(self._tell_map(revision))
            for child in self._alive():
                child.outdated = child.outdated or outdated_by(child.slot, changed)
        if self._was_ready:
            self._notifier.ready()

    async def _tell_map(self, revision: int) -> None:
        """Have the KV processes, and through them their clients, know the mirrors of the bucket as they are now."""
        command = {"op": "map", "kv_nodes": self._settings.kv_nodes, "revision": revision}
        for child in self._alive():
            if kind_of(child.slot) == "kv" and not child.outdated:
                try:
                    await child.request(command, REPORT_TIMEOUT_S)
                except SupervisionError as error:
                    log.warning("a KV process did not take the new map", slot=child.slot, error=str(error))

    # doing what the plan says

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1000)

    def _alive(self) -> list[Child]:
        return [slot.child for slot in self._slots.values() if slot.child is not None]

    def _facts(self, now_ms: int) -> list[WorkerFacts]:
        return [
            slot.child.facts(now_ms)
            if slot.child is not None
            else WorkerFacts(number, (), Phase.ABSENT, not_before_ms=slot.not_before_ms)
            for number, slot in self._slots.items()
        ]

    async def _act(self) -> None:
        now_ms = self._now_ms()
        grace_ms = int(self._settings.stop_timeout_s * 1000)
        for action in plan(self._desired, self._facts(now_ms), now_ms, stop_grace_ms=grace_ms, stopping=self._stopping):
            if isinstance(action, Start):
                await self._start(action)
                continue
            child = self._slots[action.slot].child
            assert child is not None, "only the living are stopped"
            if isinstance(action, Stop):
                child.phase = Phase.STOPPING
                child.stopping_since_ms = now_ms
                child.send({"op": STOP})
            elif isinstance(action, Kill):
                log.error("killing a worker", slot=child.slot, pid=child.pid, reason=action.reason)
                child.last_words = {"message": action.reason}
                child.phase = Phase.KILLED
                child.kill()

    async def _start(self, action: Start) -> None:
        assert self._identity is not None, "nothing is planned before the directory is known"
        slot = self._slots.setdefault(action.slot, Slot())
        deadline_ms = int(self._settings.worker_heartbeat_timeout_s * 1000)
        heartbeat = Heartbeat(self._now_ms(), deadline_ms)
        fields: dict[str, Any]
        try:
            if kind_of(action.slot) is None:
                descriptor = GroupMark.descriptor()
                fields = {"group_mark": descriptor, "quarantined": list(self._quarantine.groups.items())}
                try:
                    child = await spawn(action.slot, action.groups, heartbeat, self._command, [descriptor])
                except BaseException:
                    os.close(descriptor)
                    raise
                child.mark = GroupMark(descriptor)
            else:
                inherited = self._listeners.inherited(action.slot)
                fields = self._listeners.start_fields(action.slot)
                child = await spawn(action.slot, action.groups, heartbeat, self._server, inherited)
        except OSError as error:
            slot.failures += 1
            slot.last_error = f"cannot be started: {error.strerror}"
            slot.not_before_ms = self._now_ms() + restart_delay_ms(slot.failures)
            log.error("cannot start a worker", slot=action.slot, error=str(error))
            return
        if slot.last_exit is not None:
            slot.restarts += 1
        slot.child = child
        child.send(
            {
                "op": START,
                "slot": action.slot,
                "groups": list(action.groups),
                "settings": to_wire(self._settings),
                "leases": self._lease_orders(action.groups),
                "map": self._maps.current.to_wire() if self._maps is not None and self._maps.current else None,
                "map_floor": self._maps.floor if self._maps is not None else None,
                **fields,
            }
        )
        child.watch(self._events.put_nowait)

    async def _end_children(self) -> None:
        """Leave no child behind, whatever ended the service."""
        for child in self._alive():
            child.kill()
        while self._alive():
            event = await self._events.get()
            if isinstance(event, Gone):
                self._slots[event.child.slot].child = None

    # reports

    async def _reports(self) -> None:
        while True:
            await self._report()
            if self._maps is not None:
                self._maps.retry()
            await self._clock.sleep(max(REPORT_INTERVAL_S, len(self._rows) / VBUCKETS_PER_REPORT_S))

    async def _report(self) -> None:
        await self._look(REPORT_TIMEOUT_S)
        if self._progress is not None:
            self._progress(self.status_document())

    async def _look(self, timeout_s: float) -> None:
        """Have every running worker report, and judge what they said: rows and judgement are always of one moment."""
        children = [child for child in self._alive() if child.phase is Phase.RUNNING]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(self._ask_for_report(child) for child in children))
        counters: dict[str, int] = {}
        for child in self._alive():
            for name, value in (child.status.get("counters") or {}).items():
                counters[name] = counters.get(name, 0) + value
        rows = sorted(self._rows.values(), key=lambda row: row["vbid"])
        now_ms = self._now_ms()
        self._trend.observe(rows, counters, now_ms)
        self._trend.fill(rows, now_ms)
        self._judge(rows)
        groups = [row for child in self._alive() for row in child.status.get("groups") or ()]
        held_count = None if self._identity is None else len(self._identity.vbids)
        for event in self._observer.observe(rows, groups, held_count, now_ms):
            self._event_log.add(event)

    async def _ask_for_report(self, child: Child) -> None:
        assert self._identity is not None, "workers run only when the directory is known"
        try:
            child.status = await child.request({"op": "status"}, REPORT_TIMEOUT_S)
        except SupervisionError as error:
            log.debug("no report", slot=child.slot, error=str(error))
            return
        for report in child.status.get("vbuckets") or ():
            row = reported_row(report, report["vbid"] % self._identity.group_count)
            self._rows[row["vbid"]] = row

    def _judge(self, rows: list[Row]) -> None:
        """Judge how the mirror stands, and end when that was the order."""
        if self._stopping:
            return
        running = sum(child.phase is Phase.RUNNING for child in self._alive())
        if running and running == len(self._desired) and not self._was_ready:
            self._was_ready = True
            self._notifier.ready()
            log.info("all workers run", workers=running)
        held_count = None if self._identity is None else len(self._identity.vbids)
        limit_s = self._settings.ready_lag_limit_s
        health = assess(rows, held_count, lag_limit_s=limit_s, source_error=self._source_error)
        sums = totals(rows)
        figures = f"{sums['published_seqnos']:,} seqnos published"
        if health.state == CATCHING_UP and sums["lag_seqnos"] is not None:
            figures = f"{sums['lag_seqnos']:,} seqnos behind"
        self._set_state(health.state, "; ".join(health.reasons) or figures, health.reasons)
        if self._source_error is not None:
            return
        if self._catch_up is not None:
            failed = [group for child in self._alive() for group in child.status.get("failed_groups") or ()]
            if failed:
                self.stop(ReportedFailure(failed[0]))
            self._catch_up.observe(rows)
            if self._catch_up.done:
                log.info("caught up", **self._catch_up.progress())
                self.stop()

    def status_document(self) -> dict[str, Any]:
        """All that `status` shows, in the shape of cli/JSON.md."""
        rows = sorted(self._rows.values(), key=lambda row: row["vbid"])
        identity = self._identity
        return {
            "service": "up",
            "state": self._state,
            "message": self._message,
            "reasons": list(self._reasons),
            "since_ms": self._since_ms,
            "pid": os.getpid(),
            "uptime_s": round(self._clock.monotonic() - self._started, 1),
            "time_ms": self._clock.wall_ms(),
            "data": str(self._data),
            "source": self._settings.source,
            "source_error": self._source_error,
            "bucket": identity.bucket_name if identity else None,
            "bucket_uuid": identity.bucket_uuid if identity else None,
            "cluster_uuid": identity.cluster_uuid if identity else None,
            "vbucket_count": identity.vbucket_count if identity else None,
            "vbuckets_held": len(identity.vbids) if identity else None,
            "group_count": identity.group_count if identity else None,
            "selection": str(Selection.parse(identity.selection)) if identity else None,
            "sync": self._settings.sync,
            "warnings": self._warnings(),
            "supervisor": self._figures(self._gauge),
            "workers": [
                self._worker_row(number, slot)
                for number, slot in sorted(self._slots.items())
                if kind_of(number) is None
            ],
            "servers": [
                {"kind": kind_of(number)} | self._worker_row(number, slot)
                for number, slot in sorted(self._slots.items())
                if kind_of(number) is not None and (slot.child is not None or number in self._desired)
            ],
            "listeners": self._listeners.urls(),
            "leases": [
                {"id": lease.id, "name": lease.name, "until_ms": lease.until_ms, "vbuckets": len(lease.positions)}
                for lease in (self._leases.active(self._clock.wall_ms()) if self._leases is not None else ())
            ],
            "readers": [row for child in self._alive() for row in child.status.get("readers") or ()],
            "totals": totals(rows)
            | {
                "documents_per_s": self._trend.counter_rate("received_documents"),
                "bytes_per_s": self._trend.counter_rate("received_bytes"),
            },
            "catch_up": self._catch_up.progress() if self._catch_up is not None else None,
            "events": self._event_log.newest(EVENTS_SHOWN),
            "vbuckets": rows,
        }

    def _warnings(self) -> list[str]:
        """What people should know, each once."""
        found = [text for child in self._alive() for text in child.status.get("warnings") or ()]
        return list(dict.fromkeys([*self._quarantine.groups.values(), *found]))

    def _worker_row(self, number: int, slot: Slot) -> dict[str, Any]:
        child = slot.child
        now_ms = self._now_ms()
        return {
            "slot": number,
            "pid": child.pid if child else None,
            "phase": child.phase.value if child else Phase.ABSENT.value,
            "groups": list(child.groups if child else self._desired.get(number, ())),
            "uptime_s": round((now_ms - child.heartbeat.started_ms) / 1000, 1) if child else None,
            "heartbeat_age_s": round(child.heartbeat.age_ms(now_ms) / 1000, 2) if child else None,
            "restarts": slot.restarts,
            "last_exit": slot.last_exit,
            "last_exit_ms": slot.last_exit_ms,
            "last_error": slot.last_error,
            "counters": dict(child.status.get("counters") or {}) if child else {},
            "request_seconds": child.status.get("request_seconds") if child else None,
            **self._figures(child.gauge if child else None),
        }

    def _figures(self, gauge: Gauge | None) -> dict[str, Any]:
        figures = gauge.read() if gauge is not None else None
        return {
            "cpu_percent": figures.cpu_percent if figures else None,
            "private_bytes": figures.private_bytes if figures else None,
            "resident_bytes": figures.resident_bytes if figures else None,
            "threads": figures.thread_count if figures else None,
            "open_files": figures.open_files_count if figures else None,
        }

    # commands

    async def _command_arrived(self, request: dict[str, Any]) -> dict[str, Any]:
        operation = request["op"]
        if operation == "ping":
            return {"pid": os.getpid()}
        if operation == "source":
            return {"settings": {name: value for name, value in to_wire(self._settings).items() if name in OF_SOURCE}}
        if operation == "status":
            if self._desired and not self._stopping:
                await self._look(STATUS_TIMEOUT_S)
            return {"status": self.status_document()}
        if operation == "events":
            return await self._events_after(request)
        if operation == "reload":
            self._events.put_nowait(Signalled(signal.SIGHUP))
            return {}
        if operation == "stop":
            self._events.put_nowait(Signalled(signal.SIGTERM))
            return {}
        if operation in ("rollback", "refill"):
            return {"result": await self._ask_owner(request)}
        if operation == "lease":
            return await self._lease(request)
        if operation == "release":
            return await self._release(request)
        raise SupervisionError(
            f"unknown command {operation!r}",
            hint="ping, status, events, reload, stop, rollback, refill, lease, release",
        )

    async def _events_after(self, request: dict[str, Any]) -> dict[str, Any]:
        """The events above a number of this service; with `wait_s` the next one where there is none."""
        after, wait_s = request.get("after", 0), request.get("wait_s", 0)
        if not isinstance(after, int) or not isinstance(wait_s, int | float):
            raise ConfigError(f"events after {after!r}, wait {wait_s!r}", hint="give numbers")
        return {"pid": os.getpid(), "events": await self._event_log.after(after, wait_s)}

    # leases

    async def _lease(self, request: dict[str, Any]) -> dict[str, Any]:
        """Grant or renew a lease: by every worker that owns a part of it, or not at all."""
        identity, book = self._identity, self._leases
        if identity is None or book is None:
            raise SupervisionError("the service is still starting", hint="try again in a second", retryable=True)
        now_ms = self._clock.wall_ms()
        record = book.wanted(request, identity.vbucket_count, now_ms)
        renewed = book.known(record, now_ms)
        orders = self._lease_orders_of(record)
        asked = {position[0] for _, order in orders for position in order["positions"]}
        if not renewed and len(asked) < len(record.positions):
            raise SupervisionError("not all workers run", hint="try again in a second", retryable=True)
        told = (child.request(order, OWNER_TIMEOUT_S) for child, order in orders)
        failures = [each for each in await asyncio.gather(*told, return_exceptions=True) if isinstance(each, Exception)]
        failures.sort(key=lambda each: not isinstance(each, Refused))
        if failures and (not renewed or isinstance(failures[0], Refused)):
            await self._tell_release(record)
            book.strike(record.id)  # nor is what it held before under that id
            raise failures[0]
        book.enter(record)  # a worker that died meanwhile hears of a renewed one when it is back
        return {"id": record.id, "until_ms": record.until_ms}

    async def _release(self, request: dict[str, Any]) -> dict[str, Any]:
        record = self._leases.strike(request.get("id")) if self._leases is not None else None
        if record is not None:
            await self._tell_release(record)
        return {"released": record is not None}

    async def _tell_release(self, record: Record) -> None:
        order = {"op": "release", "id": record.id}
        told = (child.request(order, OWNER_TIMEOUT_S) for child, _ in self._lease_orders_of(record))
        await asyncio.gather(*told, return_exceptions=True)

    def _lease_orders_of(self, record: Record) -> list[tuple[Child, dict[str, Any]]]:
        """The running workers that own a part of a lease, with what each is told."""
        assert self._identity is not None, "leases are granted only when the directory is known"
        count = self._identity.group_count
        running = (child for child in self._alive() if child.phase is Phase.RUNNING)
        return [(child, order) for child in running if (order := record.order(child.groups, count)) is not None]

    def _lease_orders(self, groups: tuple[int, ...]) -> list[dict[str, Any]]:
        """What a worker that begins must know of leases."""
        if self._leases is None or self._identity is None:
            return []
        count = self._identity.group_count
        found = (record.order(groups, count) for record in self._leases.active(self._clock.wall_ms()))
        return [order for order in found if order is not None]

    async def _ask_owner(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the worker that owns a vbucket do something with it."""
        identity, vbid = self._identity, request.get("vbid")
        if identity is None or not isinstance(vbid, int) or vbid not in identity.vbids:
            raise ConfigError(f"there is no vbucket {vbid!r} here", hint="see `dcp-mirror state`")
        group = vbid % identity.group_count
        for child in self._alive():
            if group in child.groups and child.phase is Phase.RUNNING:
                return await child.request(request, OWNER_TIMEOUT_S)
        raise SupervisionError(f"no worker has vbucket {vbid} at this moment", hint="try again in a second")


class ReportedFailure(MirrorError):
    """A worker's own error, brought over the pipe with its exit code."""

    def __init__(self, words: dict[str, Any]) -> None:
        """`words` are those of a FAILED message."""
        super().__init__(str(words.get("message") or "a worker failed"))
        self.exit_code = ExitCode(words.get("exit_code") or ExitCode.FAILED)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal: one that is closed sends SIGHUP too, and means goodbye."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def exit_words(status: int) -> str:
    """How a process ended, for people."""
    if status >= 0:
        return f"exit {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
