"""Examines a source, and a mirror's connections to the source, step by step.

It fetches no document: it requests streams that end at their start seqno, so the source only says if it would resume
there. Invariants: nothing is changed; each finding is one line with a verdict and, unless `ok`, a remedy; steps that
depend on a failed step are left out; every connection is closed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from mirror.clock import Clock, SystemClock
from mirror.config import Settings
from mirror.errors import (
    AuthRejected,
    BucketChanged,
    BucketMissing,
    ClusterError,
    ConfigError,
    ExitCode,
    MirrorError,
    NotSupported,
    OlderMap,
    PrivilegeMissing,
    TlsFailed,
)
from mirror.feed.cluster.discovery import Survey, look_up, survey
from mirror.feed.connection.bootstrap import FEATURES, Access, enter, fetch_manifest
from mirror.feed.connection.connection_string import NodeAddress, parse
from mirror.feed.connection.node_session import NodeSession, StreamAnswer
from mirror.feed.connection.tls import Tls
from mirror.feed.connection.transport import Link, Opaques, open_link
from mirror.ingest.events import KeyRefused, Row, StreamAccepted, StreamRollback
from mirror.ingest.instructions import RequestStream
from mirror.ingest.offset import StreamOffset
from mirror.ingest.reactions import on_refusal
from mirror.ingest.selection import StreamFilter
from mirror.ingest.topology import ClusterMap, MapVerdict, NewestMap, check_bucket, check_persists
from mirror.wire import events as ev
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame, request
from storage.env import directory
from storage.errors import RUN_CHECK, StorageError
from storage.model import NO_VBUUID, Seqno, VbucketState
from storage.read.view import View, open_view

PURGE_DAYS = 3
"""Default metadata purge interval of a bucket."""
CERTIFICATE_DAYS = 30
PATIENCE_S = 3.0
"""A node that takes longer to connect is a finding, even if the mirror's own timeout is longer."""
DISK_FACTOR = 1.4
"""Size of a mirror divided by the size of the bucket's data."""
FAILED_STEPS = {"tls": (TlsFailed,), "login": (AuthRejected, ConfigError), "bucket": (BucketMissing,)}
"""Step of the login -> errors that it fails with. Other errors belong to the step `handshake`."""


class StepVerdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = StepVerdict


@dataclass(frozen=True, slots=True)
class Finding:
    step: str
    verdict: StepVerdict
    text: str
    remedy: str = ""
    exit_code: ExitCode = ExitCode.FAILED
    """Exit code of the command if this is the first failure."""


@dataclass(slots=True)
class _StreamWait:
    vbid: int
    answer: asyncio.Future[StreamAnswer | ClusterError]

    def on_rows(self, opaque: int, rows: list[Row], byte_count: int) -> None: ...

    def on_event(self, event: ev.Event | KeyRefused) -> None: ...

    def on_answer(self, answer: StreamAnswer | ClusterError) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


@dataclass(slots=True)
class _Answers:
    waits: list[_StreamWait] = field(default_factory=list)

    def on_closed(self, session: NodeSession, error: ClusterError) -> None:
        for each in self.waits:
            each.on_answer(error)


class Doctor:
    def __init__(
        self,
        settings: Settings,
        source: str,
        data: Path | None,
        *,
        clock: Clock | None = None,
        status: Mapping[str, Any] | None = None,
    ) -> None:
        """`data` is the directory of a mirror, existing or planned. Raises ConfigError for a bad connection string."""
        self.findings: list[Finding] = []
        self.on_finding: Callable[[Finding], None] = lambda _finding: None
        self._settings = replace(settings, connect_timeout_s=min(settings.connect_timeout_s, PATIENCE_S))
        self._access = Access.of(parse(source), self._settings)
        self._data = data
        self._status = status
        self._clock = clock or SystemClock()
        self._opaques = Opaques()
        self._sessions: dict[NodeSession, _Answers] = {}

    async def examine(self) -> list[Finding]:
        view = self._open_data()
        self._judge_service()
        try:
            if not await self._reach():
                return self.findings
            found = await self._log_in(view)
            if found is None:
                return self.findings
            cluster_map = found.newest
            fits = self._judge_map(cluster_map, view)
            self._judge_revisions(found, view)
            self._judge_followed(cluster_map)
            await self._open_sessions(cluster_map)
            if self._sessions:
                self._judge_controls()
                await self._collections(cluster_map)
                await self._dry_run(cluster_map, view if fits else None)
            await self._disk(view)
            return self.findings
        finally:
            for session in self._sessions:
                session.close()
            if view is not None:
                view.close()

    def _say(
        self, step: str, verdict: StepVerdict, text: str, remedy: str = "", exit_code: ExitCode = ExitCode.FAILED
    ) -> None:
        finding = Finding(step, verdict, text, remedy, exit_code)
        self.findings.append(finding)
        self.on_finding(finding)

    def _judge(self, step: str, fine: bool, text: str, remedy: str, bad: StepVerdict = WARN) -> None:
        self._say(step, *((OK, text) if fine else (bad, text, remedy)))

    def _fail(self, step: str, error: MirrorError) -> None:
        self._say(step, FAIL, error.what, error.hint, error.exit_code)

    # -- connect and log in ---------------------------------------------------------------------------------------

    async def _reach(self) -> bool:
        source = self._access.source
        addresses = source.addresses
        if source.srv_name is not None:
            record = f"_couchbase{'s' if source.tls else ''}._tcp.{source.srv_name}"
            found = await look_up(record, self._settings.dns_server)
            names = ", ".join(map(str, found)) if found else "no such records, the name is taken as a host"
            self._say("dns srv", OK, f"{record}: {names}")
            addresses = found or addresses
        errors = {address: await self._try(address) for address in addresses}
        reached = list(errors.values()).count(None)
        verdict, remedy = (
            (WARN, "take the host out of the connection string, or have it answer")
            if reached
            else (FAIL, "check host, port, DNS, and that the data service runs there and a firewall lets it through")
        )
        for address, error in errors.items():
            if error is not None:
                self._say("connect", verdict, f"{address}: {error}", remedy)
        if reached:
            self._say("connect", OK, f"{reached} of {len(addresses)} addresses take connections")
        return reached > 0

    async def _try(self, address: NodeAddress) -> str | None:
        loop = asyncio.get_running_loop()
        if self._access.source.tls:
            with contextlib.suppress(MirrorError):  # a failure is reported below, or by the step `tls`
                timeout_s = self._settings.connect_timeout_s
                tls = Tls.of(self._settings)
                (await open_link(address, tls=tls, timeout_s=timeout_s, clock=self._clock)).close()
                return None
        try:
            async with asyncio.timeout(self._settings.connect_timeout_s):
                await loop.getaddrinfo(address.host, address.port)
                _, writer = await asyncio.open_connection(address.host, address.port)
                writer.close()
                with contextlib.suppress(OSError):  # otherwise asyncio may log the stream's error
                    await writer.wait_closed()
        except TimeoutError:
            return f"no answer within {self._settings.connect_timeout_s:g} s"
        except socket.gaierror as error:
            return f"the name cannot be resolved: {error.strerror}"
        except OSError as error:
            return os.strerror(error.errno).lower() if error.errno else str(error)
        except UnicodeError as error:
            return f"this cannot be a host's name: {error}"
        return None

    async def _log_in(self, view: View | None) -> Survey | None:
        source = self._access.source
        try:
            surveyed = await survey(
                self._access, self._clock, bucket_uuid=None if view is None else view.identity.bucket_uuid
            )
            found = surveyed.newest
            node = next((a for each in found.nodes if (a := self._access.address_of(each)) is not None), None)
            link, handshake = await enter(self._access, node or source.addresses[0], self._clock)
        except MirrorError as error:
            if isinstance(error, BucketMissing):
                self._say("login", OK, f"user {source.user or '(certificate)'}")
            failed = (step for step, kinds in FAILED_STEPS.items() if isinstance(error, kinds))
            self._fail(next(failed, "handshake"), error)
            return None
        try:
            self._judge_tls(link)
            self._say("login", OK, f"user {source.user or 'of the client certificate'}")
            self._say("bucket", OK, f"{source.bucket}, uuid {found.bucket_uuid or 'unknown'}")
            missing = [feature for feature in FEATURES if feature not in handshake.features]
            names = ", ".join(feature.name.lower() for feature in missing)
            older = ": the server is older than 7.0" if Feature.COLLECTIONS in missing else ""
            granted = f"{len(FEATURES) - len(missing)} of {len(FEATURES)} are granted"
            self._say("features", OK, granted + (f", not {names}" if names else "") + older)
        finally:
            link.close()
        return surveyed

    def _judge_tls(self, link: Link) -> None:
        if not link.secure:
            local = link.address.host in ("localhost", "127.0.0.1", "::1")
            text = "not encrypted" + (
                ", on this machine alone" if local else ": everybody on the way can read documents"
            )
            self._judge("tls", local, text, "write couchbases:// and give the cluster's CA as tls_ca_file")
            return
        tls = link.tls_object
        certificate: Any = tls.getpeercert() if tls is not None else None
        ends_s = ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None
        version = tls.version() if tls is not None else "TLS"
        days = None if ends_s is None else (ends_s - self._clock.wall_ms() / 1000) / 86_400
        if days is not None and days < CERTIFICATE_DAYS:
            self._say("tls", WARN, f"{version}; the node's certificate ends in {days:.0f} days", "have it renewed")
        else:
            self._say("tls", OK, f"{version}, verified" + (f", for {days:.0f} days" if days is not None else ""))

    # -- the cluster and the service ------------------------------------------------------------------------------

    def _judge_map(self, found: ClusterMap, view: View | None) -> bool:
        """Report on the cluster map; return True if it belongs to the bucket of the data directory."""
        without = [vbid for vbid in range(found.vbucket_count) if found.node_of(vbid) is None]
        text = f"{found.vbucket_count} vbuckets on {len(found.nodes)} nodes"
        if found.vbucket_count == 0:
            self._say("map", FAIL, "the bucket has no vbuckets", "memcached buckets cannot be mirrored")
        else:
            if without:
                text += f"; {len(without)} have no active node, the first is {without[0]}"
            remedy = "fail the missing node over, or bring it back: the mirror waits for them"
            self._judge("map", not without, text, remedy)
        if self._settings.publish == "persisted":
            try:
                check_persists(found, self._access.source.bucket)
            except NotSupported as error:
                self._fail("bucket", error)
        if view is None:
            return False
        try:
            check_bucket(view.identity, found.bucket_uuid, found.vbucket_count)
        except BucketChanged as error:
            self._fail("identity", error)
            return False
        self._say("identity", OK, "the data directory mirrors this bucket")
        return True

    def _judge_revisions(self, found: Survey, view: View | None) -> None:
        """Report nodes with an older or contradicting map, and a newest map older than the mirror's record."""
        newest = found.newest
        same_bucket = {at: each for at, each in found.answers.items() if each.bucket_uuid == newest.bucket_uuid}
        older = [str(at) for at, each in same_bucket.items() if each.revision < newest.revision and not each.of_mirror]
        if older:
            text = f"an older map than revision {newest.rev} of epoch {newest.rev_epoch} is at {', '.join(older)}"
            remedy = "if this lasts, the node was failed over or is cut off: take it out of the connection string"
            self._say("map", WARN, text, f"{remedy}; the mirror does not follow it")
        content = _content(newest)
        others = [
            str(at)
            for at, each in same_bucket.items()
            if each.revision == newest.revision and _content(each) != content
        ]
        if others:
            text = f"another map of the same revision {newest.rev} is at {', '.join(others)}"
            remedy = "the cluster was restarted with other ports: take the old ones out of the connection string"
            self._say("map", WARN, text, remedy)
        if view is None or self._data is None:
            return
        maps = NewestMap(view.identity.bucket_uuid)
        try:
            record = directory.load_map(str(self._data), view.identity.bucket_uuid)
        except StorageError as error:
            self._say("map", FAIL, error.what, error.hint, ExitCode.DATA)
            return
        maps.floor = None if record is None else record.revision
        if maps.floor is not None and maps.judge(newest) is MapVerdict.OLDER:
            self._fail("map", OlderMap.of(newest.revision, maps.floor))

    def _judge_service(self) -> None:
        """Report the service's own state, so that the doctor does not contradict it."""
        if self._status is None:
            return
        troubles = self._status["troubles"]
        if troubles:
            remedy = f"see docs/{troubles[0]['procedure']}"
            self._say("service", WARN, f"{self._status['state']}: {'; '.join(self._status['reasons'])}", remedy)
        else:
            self._say("service", OK, str(self._status["state"]))

    def _judge_followed(self, found: ClusterMap) -> None:
        away: Counter[str] = Counter()
        for row in self._status["vbuckets"] if self._status is not None else ():
            node = found.node_of(row["vbid"])
            if row["node"] is not None and node is not None and row["node"] != str(self._access.address_of(node)):
                away[row["node"]] += 1
        if away:
            streamed = ", ".join(f"{count} vbuckets from {node}" for node, count in away.items())
            text = f"the service streams {streamed}, and the map names other nodes for them"
            remedy = f"if this lasts for more than {self._settings.map_poll_interval_s:g} s, restart the service"
            self._say("map", WARN, text, remedy)

    async def _open_sessions(self, found: ClusterMap) -> None:
        name = f"dcp-mirror:doctor:{self._clock.unique()}"
        failed: list[MirrorError] = []
        for node in found.nodes:
            address = self._access.address_of(node)
            if address is None or not found.vbids_of(node):
                continue
            owner = _Answers()
            session = NodeSession(self._access, address, owner, self._clock, name=name, opaques=self._opaques)
            try:
                await session.open()
            except MirrorError as error:
                failed.append(error)
            else:
                self._sessions[session] = owner
        for failure in failed:
            self._fail("privileges" if isinstance(failure, PrivilegeMissing) else "nodes", failure)
        if self._sessions:
            self._say("nodes", OK, f"DCP opens at {len(self._sessions)} of {len(self._sessions) + len(failed)}")

    def _judge_controls(self) -> None:
        session = next(iter(self._sessions))
        refused = [name for name, yes in session.controls.items() if not yes]
        unknown = f"; this server does not know {', '.join(refused)}" if refused else ""
        self._say("controls", OK, f"{len(session.controls) - len(refused)} taken{unknown}")
        if not session.sends_purge_seqno:
            text = "before 8.0 a first fill of a vbucket with purged deletions that breaks off begins again"
            self._say("resume", OK, text)
        every = session.noop_interval_s
        accepted = session.controls.get("set_noop_interval", False)
        text = f"every {every:g} s: a silent connection is noticed after {2 * every:g} s"
        remedy = "set noop_interval_s to whole seconds, 20 or more: this server takes no other"
        self._judge("noop", accepted, text, remedy)

    async def _collections(self, found: ClusterMap) -> None:
        session = next(iter(self._sessions))
        if not session.handshake.collections:
            return
        try:
            manifest = await fetch_manifest(session.link, self._settings)
        except MirrorError as error:
            self._fail("collections", error)
            return
        text = f"{len(manifest.collections)} in {len(manifest.scopes)} scopes"
        hidden = manifest.hides_system and found.system_collections
        if hidden:
            text += "; the server's own scope _system is hidden from this user, and will not be mirrored"
        remedy = "grant the privilege SystemCollectionLookup (role Data DCP Reader) if it is needed"
        self._judge("collections", not hidden, text, remedy)

    # -- stream requests ------------------------------------------------------------------------------------------

    async def _dry_run(self, found: ClusterMap, view: View | None) -> None:
        states = self._states(view)
        answers: dict[int, StreamAnswer | ClusterError] = {}
        for session in self._sessions:
            mine = [
                vbid
                for vbid in range(found.vbucket_count)
                if (node := found.node_of(vbid)) is not None and self._access.address_of(node) == session.address
            ]
            probed = [vbid for vbid in mine if vbid in states] if states else mine[:1]
            answers |= await self._ask(session, probed, states)
        refused = {
            vbid: answer for vbid, answer in answers.items() if not isinstance(answer, StreamAccepted | StreamRollback)
        }
        for status, count in Counter(getattr(answer, "status", None) for answer in refused.values()).items():
            why = "the connection broke" if status is None else on_refusal(status).text
            text = f"{count} of {len(answers)} stream requests are refused: {why}"
            if status == Status.EACCESS:
                remedy = "grant the user the role Data DCP Reader on the bucket"
                self._say("privileges", FAIL, text, remedy, PrivilegeMissing.exit_code)
            else:
                self._say("streams", WARN, text, "the mirror asks again")
        if answers and not refused:
            self._say("privileges", OK, "the user may open DCP connections and streams")
        if states:
            self._judge_positions(states, answers, view)

    def _states(self, view: View | None) -> dict[int, VbucketState]:
        if view is None:
            return {}
        try:
            return {int(state.vbid): state for state in view.states()}
        except StorageError as error:
            self._say("data", FAIL, error.what, error.hint or RUN_CHECK, ExitCode.DATA)
            return {}

    async def _ask(
        self, session: NodeSession, vbids: list[int], states: dict[int, VbucketState]
    ) -> dict[int, StreamAnswer | ClusterError]:
        owner = self._sessions[session]
        loop = asyncio.get_running_loop()
        filters = {state.stream_filter for vbid, state in states.items() if vbid in vbids and state.stream_filter}
        chosen = StreamFilter.parse(next(iter(filters))) if len(filters) == 1 else None
        for vbid in vbids:
            state = states.get(vbid)
            seqno = state.published_seqno if state is not None else Seqno(0)
            vbuuid = state.failover_log.vbuuid_at(seqno) if state is not None else NO_VBUUID
            wait = _StreamWait(vbid, loop.create_future())
            owner.waits.append(wait)
            if session.ready:
                offset = StreamOffset.between_snapshots(seqno, vbuuid)
                request = RequestStream(offset, int(seqno))
                session.request_stream(vbid, request, bytes(4), wait, chosen.fields if chosen is not None else None)
            else:
                wait.on_answer(ClusterError("the connection is over"))
        results = await asyncio.gather(*(wait.answer for wait in owner.waits))
        return dict(zip(vbids, results, strict=True))

    def _judge_positions(
        self, states: dict[int, VbucketState], answers: dict[int, StreamAnswer | ClusterError], view: View | None
    ) -> None:
        assert view is not None, "states are of a view"
        undone: list[int] = []
        resynced: list[int] = []
        for vbid, answer in answers.items():
            if isinstance(answer, StreamRollback):
                kept = [each for each in view.boundaries(vbid) if each.seqno and each.seqno <= answer.seqno]
                (undone if kept else resynced).append(vbid)
        fresh = sum(1 for state in states.values() if not state.published_seqno)
        on = len(answers) - len(undone) - len(resynced)
        text = f"{on - fresh} vbuckets resume where they are" + (f", {fresh} begin" if fresh else "")
        self._say("positions", OK, text)
        if undone:
            text = f"{len(undone)} vbuckets would go back to a kept boundary: the source lost history in a failover"
            self._say("positions", WARN, text, "nothing to do: the service does it in one transaction")
        if resynced:
            text = f"{len(resynced)} vbuckets would be resynced, the first is {resynced[0]}: the source has purged "
            text += "deletions since, or lost more history than is kept here"
            remedy = "keep space for a second copy of them; keep downtimes below the bucket's metadata purge interval, "
            self._say("positions", WARN, text, f"{remedy}and history_s above the time of a failover")
        self._judge_downtime(view)

    def _judge_downtime(self, view: View) -> None:
        times = [boundaries[0].time_ms for vbid in view.vbids if (boundaries := view.boundaries(vbid))]
        if self._status is not None or not times:
            return
        days = (self._clock.wall_ms() - max(times)) / 86_400_000
        text = f"nothing was published for {days:.1f} days; buckets purge deletions after {PURGE_DAYS} days by default"
        remedy = "start the service; raise the metadata purge interval for longer downtimes"
        self._judge("downtime", days < PURGE_DAYS * 0.7, text, remedy)

    # -- this machine ---------------------------------------------------------------------------------------------

    def _open_data(self) -> View | None:
        if self._data is None or not (self._data / "mirror.json").exists():
            return None
        try:
            return open_view(str(self._data), stale_reads=True)
        except StorageError as error:
            self._say("data", FAIL, error.what, error.hint or RUN_CHECK, ExitCode.DATA)
            return None

    async def _disk(self, view: View | None) -> None:
        if self._data is None:
            return
        place = next(folder for folder in (self._data, *self._data.absolute().parents) if folder.exists())
        free_bytes = shutil.disk_usage(place).free
        free = f"{_size(free_bytes)} are free at {place}"
        if view is not None:
            held = sum(file.stat().st_size for file in self._data.glob("group-*/data.mdb"))
            remedy = "a resync of everything needs the space of a second copy: free some"
            self._judge("disk", free_bytes >= held, f"the mirror takes {_size(held)}, {free}", remedy)
            return
        size = await self._bucket_bytes()
        if size is None:
            self._say("disk", OK, f"{free}; this user may not query the size of the bucket")
            return
        need = size * DISK_FACTOR
        text = f"the bucket holds {_size(size)}, its mirror takes about {_size(need)}; {free}"
        self._judge("disk", free_bytes >= need, text, "take a larger disk", FAIL)

    async def _bucket_bytes(self) -> int | None:
        total = 0
        for session in self._sessions:
            try:
                stats = await _statistics(session.link, self._settings.request_timeout_s)
            except (MirrorError, TimeoutError):
                return None
            found = stats.get("ep_db_data_size")
            if found is None or not found.isdigit():
                return None
            copies = 1 + int(stats.get("ep_vb_replica_num", "0") or 0) / max(1, int(stats.get("vb_active_num", "1")))
            total += int(int(found) / copies)
        return total


def _size(byte_count: float) -> str:
    return f"{byte_count / 2**30:.1f} GiB" if byte_count >= 2**30 else f"{byte_count / 2**20:.1f} MiB"


async def _statistics(link: Link, timeout_s: float) -> dict[str, str]:
    """Return a node's bucket statistics. The node sends an answer for each statistic, then an empty answer."""
    found: dict[str, str] = {}
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    deadline = time.monotonic() + timeout_s

    def next_answer(outcome: Frame | ClusterError) -> None:
        if done.done():
            return
        if not isinstance(outcome, Frame):
            done.set_exception(outcome)
        elif outcome.status != Status.SUCCESS or not outcome.key or time.monotonic() > deadline:
            done.set_result(None)
        else:
            found[outcome.key.decode(errors="replace")] = outcome.value.decode(errors="replace")
            link.expect(outcome.opaque, next_answer)

    link.ask(request(Opcode.STAT, opaque=link.next_opaque()), next_answer)
    async with asyncio.timeout(timeout_s):
        await done
    return found


def _content(found: ClusterMap) -> tuple[list[tuple[int | None, int | None]], tuple[int, ...]]:
    """Return a map's ports and active nodes. Maps of one revision must agree on these; host names may differ."""
    return [(node.kv_port, node.tls_port) for node in found.nodes], found.active
