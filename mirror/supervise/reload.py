"""A reload: reads the settings again, and applies those that need no restart of the service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from mirror.config import AT_START, EFFECTS, Settings, required_source, to_wire
from mirror.errors import ConfigError, SupervisionError
from mirror.feed.connection.connection_string import parse
from mirror.log import get_logger
from mirror.messages import UseKvNodes
from mirror.ownership import readers_gid
from mirror.supervise.context import ServiceContext
from mirror.supervise.events.hook import Hook, words_of
from mirror.supervise.events.kinds import SettingsRead, SettingsRefused
from mirror.supervise.events.log import EventLog
from mirror.supervise.listeners.addresses import Listeners, kind_of, outdated_by, process_name
from mirror.supervise.processes.table import Processes
from mirror.supervise.reports.collector import REPORT_TIMEOUT_S, Reports
from mirror.supervise.reports.systemd import Notifier
from mirror.supervise.setup import Setup

log = get_logger("supervisor")


class Reload:
    def __init__(
        self,
        context: ServiceContext,
        setup: Setup,
        listeners: Listeners,
        hook: Hook,
        event_log: EventLog,
        processes: Processes,
        reports: Reports,
        notifier: Notifier,
        spawn_task: Callable[[Awaitable[None]], None],
        read: Callable[[], tuple[Settings, int | None]] | None,
    ) -> None:
        """`read` returns new settings, and the number of groups that they require."""
        self._context = context
        self._setup = setup
        self._listeners = listeners
        self._hook = hook
        self._event_log = event_log
        self._processes = processes
        self._reports = reports
        self._notifier = notifier
        self._spawn_task = spawn_task
        self._read = read

    def run(self) -> SettingsRead:
        """Read the settings again. If one setting is refused, now or by the next start, none changes.

        Raises ConfigError with the text of the event, SupervisionError.
        """
        context = self._context
        if self._read is None or context.stopping:
            raise SupervisionError(
                "the service reads no settings: it stops" if context.stopping else "no settings file"
            )
        self._notifier.reloading(context.clock.monotonic())
        try:
            found, required_groups = self._read()
            parse(required_source(found))
            if found.on_event is not None:
                words_of(found.on_event)
            readers_gid(found)
            if context.identity is not None:
                self._setup.check(found, context.identity, required_groups)
            self._listeners.change(found)
            self._hook.use(found.on_event)
        except ConfigError as error:
            refused = SettingsRefused(why=str(error))
            context.refused_settings = refused.text
            self._event_log.add(refused)
            raise ConfigError(refused.text) from error
        finally:
            if self._reports.was_ready:
                self._notifier.ready()
        context.refused_settings = None
        return self._use(found)

    def _use(self, found: Settings) -> SettingsRead:
        """Apply these settings, except those that need a restart of the service."""
        context = self._context
        different = [name for name in to_wire(found) if getattr(found, name) != getattr(context.settings, name)]
        changed = [name for name in different if EFFECTS[name] not in AT_START]
        need_restart = tuple(name for name in different if EFFECTS[name] in AT_START)
        context.settings = replace(found, **{name: getattr(context.settings, name) for name in need_restart})
        event = SettingsRead(in_force=tuple(changed), need_restart=need_restart)
        self._event_log.add(event)
        if context.identity is not None and "readers_group" in changed:
            self._setup.share()
        self._processes.replan()
        if context.leases is not None:
            context.leases.limit(seconds_max=found.lease_max_s, age_max_s=found.lease_age_max_s)
        if "kv_nodes" in changed or "kv" in changed:
            revision = self._listeners.renew(context.clock.wall_ms() // 1000)
            self._spawn_task(self._send_kv_nodes(revision))
        for child in self._processes.alive():
            child.outdated = child.outdated or outdated_by(child.slot, changed)
        return event

    async def _send_kv_nodes(self, revision: int) -> None:
        """Send the new `kv_nodes` to the KV processes, which tell their clients."""
        command = UseKvNodes(self._context.settings.kv_nodes, revision)
        for child in self._processes.alive():
            if kind_of(child.slot) == "kv" and not child.outdated:
                try:
                    await child.request(command, REPORT_TIMEOUT_S)
                except SupervisionError as error:
                    log.warning("map-not-taken", process=process_name(child.slot), error=str(error))
