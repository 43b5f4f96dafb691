"""Examines a source, and a mirror's connections to the source: a list of checks (CHECKS), each yields findings.

It fetches no document: it requests streams that end at their start seqno, so the source only says if it would resume
there. Checks that depend on a failed check are left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

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
from mirror.wire.constants import Feature, Status
from storage.env import directory
from storage.errors import RUN_CHECK, StorageError
from storage.model import NO_VBUUID, Identity, Seqno, Vbuuid
from storage.read.states import vbuuid_at
from storage.read.view import View, open_view

PURGE_DAYS = 3
"""Default metadata purge interval of a bucket."""
CERTIFICATE_DAYS = 30
PATIENCE_S = 3.0
"""A node that takes longer to connect is a finding, although the mirror waits longer."""
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


CheckData = Callable[[Path, Settings], Identity | None]
"""Checks a data directory as `run` does, and returns the identity of its mirror, if there is one. Raises MirrorError,
StorageError.
"""


@dataclass(slots=True)
class Case:
    """The source and the data directory that are examined, and what earlier checks found."""

    access: Access
    data: Path | None
    check_data: CheckData
    status: Mapping[str, Any] | None
    clock: Clock
    opaques: Opaques = field(default_factory=Opaques)
    view: View | None = None
    reached: bool = False
    surveyed: Survey | None = None
    fits: bool = False
    """True if the data directory mirrors the source's bucket."""
    sessions: dict[NodeSession, _Answers] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        return self.access.settings

    @property
    def map(self) -> ClusterMap:
        assert self.surveyed is not None, "the check needs `surveyed`"
        return self.surveyed.newest

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        if self.view is not None:
            self.view.close()


Findings = AsyncIterator[Finding]
Check = Callable[[Case], Findings]


async def examine(
    settings: Settings,
    source: str,
    data: Path | None,
    *,
    check_data: CheckData,
    status: Mapping[str, Any] | None = None,
) -> Findings:
    """Yield the findings. `data` is the directory of a mirror, existing or planned; `status` is of its service.

    Raises ConfigError for a bad connection string.
    """
    case = Case(Access.of(parse(source), settings), data, check_data, status, SystemClock())
    try:
        for check, need in CHECKS:
            if need is None or getattr(case, need):
                async for finding in check(case):
                    yield finding
    finally:
        case.close()


def judged(step: str, fine: bool, text: str, remedy: str, bad: StepVerdict = WARN) -> Finding:
    return Finding(step, OK, text) if fine else Finding(step, bad, text, remedy)


def failure(step: str, error: MirrorError) -> Finding:
    return Finding(step, FAIL, error.what, error.hint, error.exit_code)


def unreadable(step: str, error: StorageError) -> Finding:
    return Finding(step, FAIL, error.what, error.hint or RUN_CHECK, ExitCode.DATA)


# -- this machine and its service ---------------------------------------------------------------------------------


async def open_data(case: Case) -> Findings:
    if case.data is None:
        return
    try:
        if case.check_data(case.data, case.settings) is not None:
            case.view = open_view(str(case.data), stale_reads=True, partial=True)
    except MirrorError as error:
        yield failure("data", error)
    except StorageError as error:
        yield unreadable("data", error)


async def service(case: Case) -> Findings:
    """Report the service's own state, so that the doctor does not contradict it."""
    if case.status is None:
        return
    if troubles := case.status["troubles"]:
        text = f"{case.status['state']}: {'; '.join(case.status['reasons'])}"
        yield Finding("service", WARN, text, f"see docs/{troubles[0]['procedure']}")
    else:
        yield Finding("service", OK, str(case.status["state"]))


async def disk(case: Case) -> Findings:
    data = case.data
    if data is None:
        return
    place = next(folder for folder in (data, *data.absolute().parents) if folder.exists())
    free_bytes = shutil.disk_usage(place).free
    free = f"{_size(free_bytes)} are free at {place}"
    if case.view is not None:
        held = sum(file.stat().st_size for file in data.glob("group-*/data.mdb"))
        remedy = "a resync of everything needs the space of a second copy: free some"
        yield judged("disk", free_bytes >= held, f"the mirror takes {_size(held)}, {free}", remedy)
    else:
        yield Finding("disk", OK, f"{free}; a mirror takes about {DISK_FACTOR:g} times the bucket's keys and values")


# -- connect and log in -------------------------------------------------------------------------------------------


async def addresses(case: Case) -> Findings:
    source = case.access.source
    named = source.addresses
    if source.srv_name is not None:
        record = f"_couchbase{'s' if source.tls else ''}._tcp.{source.srv_name}"
        found = await look_up(record)
        names = ", ".join(map(str, found)) if found else "no such records, the name is taken as a host"
        yield Finding("dns srv", OK, f"{record}: {names}")
        named = found or named
    errors = {address: await _try(case, address) for address in named}
    reached = list(errors.values()).count(None)
    case.reached = reached > 0
    verdict, remedy = (
        (WARN, "take the host out of the connection string, or have it answer")
        if reached
        else (FAIL, "check host, port, DNS, and that the data service runs there and a firewall lets it through")
    )
    for address, error in errors.items():
        if error is not None:
            yield Finding("connect", verdict, f"{address}: {error}", remedy)
    if reached:
        yield Finding("connect", OK, f"{reached} of {len(named)} addresses take connections")


async def _try(case: Case, address: NodeAddress) -> str | None:
    if case.access.source.tls:
        with contextlib.suppress(MirrorError):  # a failure is reported below, or by the step `tls`
            tls = Tls.of(case.settings)
            (await open_link(address, tls=tls, timeout_s=PATIENCE_S, clock=case.clock)).close()
            return None
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.get_running_loop().getaddrinfo(address.host, address.port)
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.close()
            with contextlib.suppress(OSError):  # otherwise asyncio may log the stream's error
                await writer.wait_closed()
    except TimeoutError:
        return f"no answer within {PATIENCE_S:g} s"
    except socket.gaierror as error:
        return f"the name cannot be resolved: {error.strerror}"
    except OSError as error:
        return os.strerror(error.errno).lower() if error.errno else str(error)
    except UnicodeError as error:
        return f"this cannot be a host's name: {error}"
    return None


async def login(case: Case) -> Findings:
    access, source = case.access, case.access.source
    bucket_uuid = None if case.view is None else case.view.identity.bucket_uuid
    try:
        surveyed = await survey(access, case.clock, bucket_uuid=bucket_uuid)
        found = surveyed.newest
        node = next((a for each in found.nodes if (a := access.address_of(each)) is not None), None)
        link, handshake = await enter(access, node or source.addresses[0], case.clock)
    except MirrorError as error:
        if isinstance(error, BucketMissing):
            yield Finding("login", OK, f"user {source.user or '(certificate)'}")
        failed = (step for step, kinds in FAILED_STEPS.items() if isinstance(error, kinds))
        yield failure(next(failed, "handshake"), error)
        return
    try:
        yield _tls(link, case.clock)
        yield Finding("login", OK, f"user {source.user or 'of the client certificate'}")
        yield Finding("bucket", OK, f"{source.bucket}, uuid {found.bucket_uuid or 'unknown'}")
        missing = [feature for feature in FEATURES if feature not in handshake.features]
        names = ", ".join(feature.name.lower() for feature in missing)
        older = ": the server is older than 7.0" if Feature.COLLECTIONS in missing else ""
        granted = f"{len(FEATURES) - len(missing)} of {len(FEATURES)} are granted"
        yield Finding("features", OK, granted + (f", not {names}" if names else "") + older)
    finally:
        link.close()
    case.surveyed = surveyed


def _tls(link: Link, clock: Clock) -> Finding:
    if not link.secure:
        local = link.address.host in ("localhost", "127.0.0.1", "::1")
        text = "not encrypted" + (", on this machine alone" if local else ": others on the network can read documents")
        return judged("tls", local, text, "write couchbases:// and give the cluster's CA as tls_ca_file")
    tls = link.tls_object
    certificate: Any = tls.getpeercert() if tls is not None else None
    ends_s = ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None
    version = tls.version() if tls is not None else "TLS"
    days = None if ends_s is None else (ends_s - clock.wall_ms() / 1000) / 86_400
    if days is not None and days < CERTIFICATE_DAYS:
        return Finding("tls", WARN, f"{version}; the node's certificate ends in {days:.0f} days", "have it renewed")
    return Finding("tls", OK, f"{version}, verified" + (f", for {days:.0f} days" if days is not None else ""))


# -- the cluster and the service ----------------------------------------------------------------------------------


async def cluster_map(case: Case) -> Findings:
    found = case.map
    without = [vbid for vbid in range(found.vbucket_count) if found.node_of(vbid) is None]
    text = f"{found.vbucket_count} vbuckets on {len(found.nodes)} nodes"
    if found.vbucket_count == 0:
        yield Finding("map", FAIL, "the bucket has no vbuckets", "memcached buckets cannot be mirrored")
    else:
        if without:
            text += f"; {len(without)} have no active node, the first is {without[0]}"
        remedy = "fail the missing node over, or bring it back: the mirror waits for them"
        yield judged("map", not without, text, remedy)
    if case.settings.publish == "persisted":
        try:
            check_persists(found, case.access.source.bucket)
        except NotSupported as error:
            yield failure("bucket", error)
    if case.view is not None:
        try:
            check_bucket(case.view.identity, found.bucket_uuid, found.vbucket_count)
        except BucketChanged as error:
            yield failure("identity", error)
            return
        case.fits = True
        yield Finding("identity", OK, "the data directory mirrors this bucket")


async def revisions(case: Case) -> Findings:
    """Report nodes with an older map, and a newest map older than the mirror's record."""
    assert case.surveyed is not None, "the check needs it"
    newest = case.map
    same_bucket = {at: each for at, each in case.surveyed.answers.items() if each.bucket_uuid == newest.bucket_uuid}
    older = [str(at) for at, each in same_bucket.items() if each.revision < newest.revision and not each.of_mirror]
    if older:
        text = f"an older map than revision {newest.rev} of epoch {newest.rev_epoch} is at {', '.join(older)}"
        remedy = "if this lasts, the node was failed over or is cut off: take it out of the connection string"
        yield Finding("map", WARN, text, f"{remedy}; the mirror does not follow it")
    if case.view is None:
        return
    maps = NewestMap(case.view.identity.bucket_uuid)
    try:
        record = directory.load_map(str(case.data), case.view.identity.bucket_uuid)
    except StorageError as error:
        yield Finding("map", FAIL, error.what, error.hint, ExitCode.DATA)
        return
    maps.floor = None if record is None else record.revision
    if maps.floor is not None and maps.judge(newest) is MapVerdict.OLDER:
        yield failure("map", OlderMap.of(newest.revision, maps.floor))


async def nodes(case: Case) -> Findings:
    name = f"dcp-mirror:doctor:{case.clock.unique()}"
    failed: list[MirrorError] = []
    for node in case.map.nodes:
        address = case.access.address_of(node)
        if address is None or not case.map.vbids_of(node):
            continue
        owner = _Answers()
        session = NodeSession(case.access, address, owner, case.clock, name=name, opaques=case.opaques)
        try:
            await session.open()
        except MirrorError as error:
            failed.append(error)
        else:
            case.sessions[session] = owner
    for refusal in failed:
        yield failure("privileges" if isinstance(refusal, PrivilegeMissing) else "nodes", refusal)
    if case.sessions:
        yield Finding("nodes", OK, f"DCP opens at {len(case.sessions)} of {len(case.sessions) + len(failed)}")


async def controls(case: Case) -> Findings:
    session = next(iter(case.sessions))
    refused = [name for name, yes in session.controls.items() if not yes]
    unknown = f"; this server does not know {', '.join(refused)}" if refused else ""
    yield Finding("controls", OK, f"{len(session.controls) - len(refused)} taken{unknown}")
    if not session.sends_purge_seqno:
        text = "before 8.0 a first fill of a vbucket with purged deletions that breaks off begins again"
        yield Finding("resume", OK, text)
    every = session.noop_interval_s
    accepted = session.controls.get("set_noop_interval", False)
    text = f"every {every:g} s: a silent connection is noticed after {2 * every:g} s"
    remedy = "set noop_interval_s to whole seconds, 20 or more: this server takes no other"
    yield judged("noop", accepted, text, remedy)


async def collections(case: Case) -> Findings:
    session = next(iter(case.sessions))
    if not session.handshake.collections:
        return
    try:
        manifest = await fetch_manifest(session.link, case.settings)
    except MirrorError as error:
        yield failure("collections", error)
        return
    text = f"{len(manifest.collections)} in {len(manifest.scopes)} scopes"
    hidden = manifest.hides_system and case.map.system_collections
    if hidden:
        text += "; the server's own scope _system is hidden from this user, and will not be mirrored"
    remedy = "grant the privilege SystemCollectionLookup (role Data DCP Reader) if it is needed"
    yield judged("collections", not hidden, text, remedy)


# -- stream requests ----------------------------------------------------------------------------------------------

Answers = dict[int, StreamAnswer | ClusterError]


class ServedPosition(NamedTuple):
    seqno: Seqno = Seqno(0)
    vbuuid: Vbuuid = NO_VBUUID
    stream_filter: str | None = None


async def streams(case: Case) -> Findings:
    served: dict[int, ServedPosition] = {}
    if case.view is not None and case.fits:
        try:
            served = {vbid: _position(case.view, vbid) for vbid in case.view.vbids}
        except StorageError as error:
            yield unreadable("data", error)
    answers: Answers = {}
    for session, owner in case.sessions.items():
        mine = [
            vbid
            for vbid in range(case.map.vbucket_count)
            if (node := case.map.node_of(vbid)) is not None and case.access.address_of(node) == session.address
        ]
        probed = [vbid for vbid in mine if vbid in served] if served else mine[:1]
        answers |= await _ask(session, owner, probed, served)
    refused = {
        vbid: answer for vbid, answer in answers.items() if not isinstance(answer, StreamAccepted | StreamRollback)
    }
    for status, count in Counter(getattr(answer, "status", None) for answer in refused.values()).items():
        filtered = any(each.stream_filter for each in served.values())
        why = "the connection broke" if status is None else on_refusal(status, filtered=filtered).text
        text = f"{count} of {len(answers)} stream requests are refused: {why}"
        if status == Status.EACCESS:
            remedy = "grant the user the role Data DCP Reader on the bucket"
            yield Finding("privileges", FAIL, text, remedy, PrivilegeMissing.exit_code)
        else:
            yield Finding("streams", WARN, text, "the mirror asks again")
    if answers and not refused:
        yield Finding("privileges", OK, "the user may open DCP connections and streams")
    if served and case.view is not None:
        answered = {vbid: answer for vbid, answer in answers.items() if vbid not in refused}
        for finding in _positions(served, answered, case.view) if answered else ():
            yield finding
        if case.status is None:
            for finding in _downtime(case.view, case.clock):
                yield finding


def _position(view: View, vbid: int) -> ServedPosition:
    pin = view.pin(vbid)
    return ServedPosition(pin.seqno, vbuuid_at(view.reader(vbid), pin), view.state(vbid).stream_filter)


async def _ask(
    session: NodeSession, owner: _Answers, vbids: list[int], served: Mapping[int, ServedPosition]
) -> Answers:
    filters = {position.stream_filter for vbid, position in served.items() if vbid in vbids and position.stream_filter}
    chosen = StreamFilter.parse(next(iter(filters))) if len(filters) == 1 else None
    for vbid in vbids:
        seqno, vbuuid, _ = served.get(vbid, ServedPosition())
        wait = _StreamWait(vbid, asyncio.get_running_loop().create_future())
        owner.waits.append(wait)
        if session.ready:
            request = RequestStream(StreamOffset.between_snapshots(seqno, vbuuid), int(seqno))
            session.request_stream(vbid, request, bytes(4), wait, chosen.fields if chosen is not None else None)
        else:
            wait.on_answer(ClusterError("the connection is over"))
    results = await asyncio.gather(*(wait.answer for wait in owner.waits))
    return dict(zip(vbids, results, strict=True))


def _positions(served: Mapping[int, ServedPosition], answers: Answers, view: View) -> Iterator[Finding]:
    undone: list[int] = []
    unsure: list[int] = []
    for vbid, answer in answers.items():
        if isinstance(answer, StreamRollback):
            kept = [each for each in view.boundaries(vbid) if each.seqno and each.seqno <= answer.seqno]
            (undone if kept else unsure).append(vbid)
    fresh = sum(not served[vbid].seqno for vbid in answers)
    on = len(answers) - len(undone) - len(unsure) - fresh
    yield Finding("positions", OK, f"{on} vbuckets resume where they are" + (f", {fresh} begin" if fresh else ""))
    if undone:
        text = f"{len(undone)} vbuckets would go back to a kept boundary: the source lost history in a failover"
        yield Finding("positions", WARN, text, "nothing to do: the service does it in one transaction")
    if unsure:  # the service then gets the source's failover log, and goes back to the newest common history
        text = f"{len(unsure)} vbuckets, the first is {unsure[0]}, would go back to the history that they share with "
        text += "the source, or be resynced: the source has purged deletions since, or lost more than is kept here"
        remedy = "keep space for a second copy of them; keep downtimes below the bucket's metadata purge interval, "
        yield Finding("positions", WARN, text, f"{remedy}and history_s above the time of a failover")


def _downtime(view: View, clock: Clock) -> Iterator[Finding]:
    times = [boundaries[0].time_ms for vbid in view.vbids if (boundaries := view.boundaries(vbid))]
    if times:
        days = (clock.wall_ms() - max(times)) / 86_400_000
        text = f"nothing was published for {days:.1f} days; buckets purge deletions after {PURGE_DAYS} days by default"
        remedy = "start the service; raise the metadata purge interval for longer downtimes"
        yield judged("downtime", days < PURGE_DAYS * 0.7, text, remedy)


CHECKS: tuple[tuple[Check, str | None], ...] = (
    (open_data, None),
    (service, None),
    (addresses, None),
    (login, "reached"),
    (cluster_map, "surveyed"),
    (revisions, "surveyed"),
    (nodes, "surveyed"),
    (controls, "sessions"),
    (collections, "sessions"),
    (streams, "sessions"),
    (disk, "surveyed"),
)
"""The checks in order, each with the field of `Case` that an earlier check must have set."""


def _size(byte_count: float) -> str:
    return f"{byte_count / 2**30:.1f} GiB" if byte_count >= 2**30 else f"{byte_count / 2**20:.1f} MiB"
