"""Faults, and what each channel must say about them: status, page, readyz, metrics, events and doctor.

A fault is put into a mirror of two workers that follows a live load of two nodes; a thread for each channel looks ten
times a second until its answer matches. Invariant: each fault begins with a mirror that follows, and its text is
matched only in what was said since.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

from mirror import client
from mirror.errors import MirrorError
from mirror.messages import GetStatus
from mirror.sandbox import SandboxCluster, SandboxThread
from mirror.server.cluster_config import NOWHERE
from mirror.server.session import ALL_PRIVILEGES, DCP_PRODUCER
from mirror.supervise.events.log import read_events
from mirror.wire.constants import Status
from tests.cli.conftest import COMMAND, call, environment
from tests.crash.load import Load
from tests.crash.service import Service, until
from tests.ports import fetched, free_port

LIMIT_S = 20.0
AGREE_S = 5.0
POLL_S = 0.1
SETTLED_S = 3.0
"""Some snapshots of each vbucket are published meanwhile, so that a rollback has boundaries to go to."""
VBUCKETS = 16


@dataclass
class Site:
    source: SandboxThread
    service: Service
    url: str
    first_source: str
    """The connection string of before the fault."""
    seen_event: int = 0

    @property
    def data(self) -> Path:
        return self.service.data

    def do(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self.source.call(function, *arguments, **named)

    def worker(self) -> int:
        return int(self.service.workers()[0]["pid"])


@dataclass(frozen=True)
class Fault:
    """A fault, and by channel the pattern that its answer must match; other channels cannot know of it."""

    inject: Callable[[Site], object]
    state: str = ""
    """The state of the service, which then is not ready; empty: it stays ready, and the events tell."""
    says: str = ""
    """In the reasons or in the events."""
    event: str = ""
    doctor: str = ""
    flags: tuple[str, ...] = ()
    full_disk: bool = False
    expected: dict[str, str] = field(default_factory=dict)
    """Patterns of single channels."""

    def patterns(self) -> dict[str, str]:
        found = {"status": self.says, "page": self.says}
        if self.state:
            found = dict.fromkeys(("status", "page"), f"^{self.state}: .*{self.says}")
            found |= {"readyz": f"^503 .*{self.says}"}
            found |= {"metrics": rf'ready 0.0(?s:.)*state{{state="{self.state}"}} 1.0'}
        if self.event:
            found["event"] = self.event
        if self.doctor:
            found["doctor"] = self.doctor
        return {name: text for name, text in (found | self.expected).items() if text}


def kill_nodes(*numbers: int) -> Callable[[Site], None]:
    def kill(site: Site) -> None:
        for number in numbers:
            site.source.run(site.source.cluster.kill_node(number))

    return kill


def silence(site: Site, node: int | None = None) -> None:
    site.do(site.source.cluster.faults.silence, node=node, dcp_only=False, future=True)


def recreate(site: Site) -> None:
    site.source.run(site.source.cluster.recreate_bucket())


def other_ports(site: Site) -> None:
    cluster = site.source.cluster

    async def move() -> None:
        await cluster.kill_node(1)
        await cluster.nodes[1].start("127.0.0.1", 0)
        cluster.bucket.map.nodes[1] = cluster.nodes[1].address
        cluster.bucket.map._cache.clear()

    site.source.run(move())


def change_user(site: Site, password: str = "demo", privileges: frozenset[str] = ALL_PRIVILEGES) -> None:
    cluster = site.source.cluster
    site.do(cluster.add_user, "demo", password, privileges)
    site.do(cluster.faults.cut, dcp_only=False)


def damage(site: Site) -> None:
    file = site.data / "group-0001" / "data.mdb"
    with file.open("r+b") as opened:
        for page in range(2, file.stat().st_size // 4096, 3):
            opened.seek(page * 4096)
            opened.write(random.Random(page).randbytes(4096))


def remove(site: Site) -> None:
    shutil.rmtree(site.data, ignore_errors=True)
    shutil.rmtree(site.data, ignore_errors=True)


def fill_disk(site: Site) -> None:
    with (site.data.parent / "ballast").open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(65536))
            file.flush()


def start_on_full_disk(site: Site) -> None:
    fill_disk(site)
    site.service.kill_supervisor()
    fill_disk(site)
    site.service.start()


def without_nodes(site: Site) -> None:
    bucket = site.source.cluster.bucket

    def change() -> None:
        for vbid in (3, 4, 5):
            bucket.map.owners[vbid] = NOWHERE
        bucket.map_changed(3, 4, 5)

    site.do(change)


def restored(site: Site) -> None:
    """All nodes have a map that is older than the one that was followed."""
    cluster = site.source.cluster

    def set_back() -> None:
        cluster.bucket.map.rev = 0
        cluster.bucket.map.bump()
        cluster.faults.cut(dcp_only=False)

    site.do(set_back)
    site.service.kill_supervisor()
    site.service.start()


def deep_failover(site: Site) -> None:
    vbucket = site.source.cluster.vbucket(2)
    site.do(lambda: site.source.cluster.failover(2, lose=vbucket.high_seqno))


def garbage(site: Site) -> None:
    site.do(site.source.cluster.faults.garble, 1_000_000, future=True)


def refuse(site: Site) -> None:
    faults = site.source.cluster.faults
    site.do(faults.streams.refuse, Status.EINTERNAL, [1, 2])
    site.do(faults.cut)


def to_listener(kind: str, number: signal.Signals) -> Callable[[Site], None]:
    def send(site: Site) -> None:
        document = site.service.status()
        assert document is not None
        os.kill(next(row["pid"] for row in document["servers"] if row["kind"] == kind), number)

    return send


def again_and_again(kind: str) -> Callable[[Site], None]:
    """Kill each process of a listener while the fault is measured: the pauses between two grow to seconds."""

    def pid(site: Site) -> int | None:
        found = client.ask(site.data, GetStatus())
        rows = found["status"]["servers"] if found else ()
        return next((row["pid"] for row in rows if row["kind"] == kind and row["phase"] == "running"), None)

    def kill(site: Site) -> None:
        end = time.monotonic() + LIMIT_S
        with suppress(OSError, MirrorError):
            while time.monotonic() < end:
                if (number := pid(site)) is not None:
                    os.kill(number, signal.SIGKILL)
                time.sleep(POLL_S)

    return lambda site: threading.Thread(target=kill, args=(site,), daemon=True).start()


def down_at_the_start(site: Site) -> None:
    site.service.kill_supervisor()
    kill_nodes(1)(site)
    site.service.start()


def slow_link(site: Site) -> None:
    """Less than the writes take; connections that are opened later are slow, too."""
    site.do(site.source.cluster.faults.slow, 4000, dcp_only=False, future=True)


def stop_flusher(site: Site) -> None:
    bucket = site.source.cluster.bucket
    site.do(bucket.persistence_holds.update, {(vbid, bucket.map.owners[vbid]): 0 for vbid in (3, 4)})


GONE = {"page": "^0 ", "readyz": "^0 ", "metrics": "^0 "}
"""The connection is refused."""

FAULTS = {
    "all nodes are killed": Fault(kill_nodes(0, 1), "source unreachable", "", "source-lost", "refused|unreachable"),
    "all nodes fall silent": Fault(silence, "source unreachable", "does not answer", "source-lost", "not answer"),
    "one node is killed": Fault(kill_nodes(1), "degraded", "without contact", "source-lost", "(?i)refused"),
    "one node falls silent": Fault(
        lambda site: silence(site, 1), "degraded", "without contact", "source-lost", "degraded|not answer"
    ),
    "the bucket is recreated": Fault(recreate, "degraded", "recreated", "degraded", "recreated"),
    "a node comes back at another port": Fault(other_ports, "", "map-changed", "map-changed", "refused"),
    "the password is changed": Fault(
        lambda site: change_user(site, "other"), "(source unreachable|degraded)", "", "source-lost", "login"
    ),
    "a privilege is withdrawn": Fault(
        lambda site: change_user(site, privileges=ALL_PRIVILEGES - {DCP_PRODUCER}),
        "(source unreachable|degraded)", "", "source-lost", "privileges",
    ),
    "a worker is stopped": Fault(
        lambda site: os.kill(site.worker(), signal.SIGSTOP), "degraded", "silent", "degraded"
    ),
    "a worker is killed": Fault(lambda site: os.kill(site.worker(), signal.SIGKILL), "", "SIGKILL", "worker-ended"),
    "the directory is removed": Fault(remove, expected={"status": "no such directory|no mirror", **GONE}),
    "a group is damaged": Fault(damage, "degraded", "damaged", "damage-found", "damaged"),
    "a data file is removed": Fault(
        lambda site: (site.data / "group-0001" / "data.mdb").unlink(), "degraded", "damaged",
        "damage-found", "move this group's folder away",
    ),
    "the disk is full": Fault(fill_disk, "disk full", "", "disk-full", full_disk=True),
    "a start on a full disk": Fault(start_on_full_disk, "disk full", "", "disk-full", full_disk=True),
    "a failover loses writes": Fault(
        lambda site: site.do(site.source.cluster.failover, 2, lose=2), "", "rollback", "rollback"
    ),
    "a failover loses everything": Fault(deep_failover, "", "resync", "resync-begun"),
    "the source sends garbage": Fault(
        garbage, "(source unreachable|degraded)", "", "source-lost", "fail|degraded|unreachable"
    ),
    "streams are refused": Fault(refuse, "degraded", "waiting|refused", "degraded", "degraded|EINTERNAL"),
    "vbuckets have no node": Fault(without_nodes, "degraded", "without a node", "degraded", "no active node"),
    "a start on a cluster that was set back": Fault(
        restored, "source unreachable", "revision", "source-unreachable", "revision"
    ),
    "a listener is killed": Fault(to_listener("http", signal.SIGKILL), "", "SIGKILL", "worker-ended"),
    "a listener is stopped": Fault(
        to_listener("kv", signal.SIGSTOP), "degraded", "kv 0, silent", "degraded", flags=("--kv", "0")
    ),
    "a listener dies again and again": Fault(
        again_and_again("kv"), "degraded", "kv does not listen: kv 0 ended: SIGKILL", "worker-ended", "degraded",
        flags=("--kv", "0"),
    ),
    "a node is down at the start": Fault(
        down_at_the_start, "degraded", "without contact", "source-lost", "(?i)refused"
    ),
    "a copy does not persist": Fault(
        stop_flusher, "degraded", r"held until every copy has persisted them.*the active copy at 127\.0\.0\.1:",
        "degraded", "the active copy at 127", flags=("--set", "publish=persisted", "--set", "ready_lag_limit_s=2"),
    ),
    "the link is slow": Fault(slow_link, "catching up", "of unknown lag", doctor="catching up|unknown lag"),
    "the service is killed": Fault(
        lambda site: os.kill(site.service.pid, signal.SIGKILL), expected={"status": "^stored: ", **GONE}
    ),
}  # fmt: skip


@contextmanager
def followed(fault: Fault) -> Iterator[Site]:
    """A mirror of two workers over two nodes with 100 writes a second."""
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=3)
    load = Load(cluster, 3, rate=100, keys=500, collections=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if fault.full_disk:
            stack.enter_context(small_disk(folder))
        (folder / "password").write_text("demo")
        (folder / "settings.toml").write_text(f'password_file = "{folder / "password"}"')
        source = stack.enter_context(SandboxThread(cluster))
        source.call(load.write, 2000)
        writing = source.call(lambda: asyncio.get_running_loop().create_task(load.run()))
        stack.callback(source.call, writing.cancel)
        flags = (
            "--groups",
            "4",
            "--workers",
            "2",
            "--http",
            str(free_port()),
            "--config",
            str(folder / "settings.toml"),
        )
        own = {name: value for name, value in environment().items() if name != "DCP_MIRROR_PASSWORD"}
        log = Path(tempfile.gettempdir()) / f"fault-{os.getpid()}.log"
        service = Service(source.connection_string, folder / "data", *flags, *fault.flags, env=own, log=log)
        stack.enter_context(service)
        service.start()
        (url,) = until("HTTP to listen", lambda: (service.status() or {}).get("listeners", {}).get("http"))
        until("the mirror to follow", lambda: fetched(f"{url}/readyz")[0] == 200)
        service.wait_workers(2)
        time.sleep(SETTLED_S)
        site = Site(source, service, url, source.connection_string)
        yield site


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def status_words(site: Site, document: dict[str, Any] | None) -> str:
    """A status as text: state, message, reasons, warnings, and events since the fault."""
    if document is None:
        return ""
    events = [event for event in document.get("events", ()) if event["number"] > site.seen_event]
    rest = [*document.get("reasons", ()), *document.get("warnings", ()), *(f"{e['event']} {e['text']}" for e in events)]
    return f"{document['state']}: {document['message']}; {'; '.join(rest)}"


def answer(url: str) -> tuple[int, str]:
    try:
        return fetched(url)
    except (OSError, HTTPException):  # it ended while it answered
        return 0, ""


def status_text(site: Site) -> str:
    try:
        found = client.ask(site.data, GetStatus())
    except MirrorError as error:
        return str(error)
    if found:
        return status_words(site, found["status"])
    shown = call("status", "--data", site.data, "--json")
    return status_words(site, shown.json) if shown.out else shown.err


def page_text(site: Site) -> str:
    code, text = answer(f"{site.url}/v1/status")
    return status_words(site, json.loads(text)) if code == 200 else f"{code} {text}"


def fetched_text(path: str) -> Callable[[Site], str]:
    def look(site: Site) -> str:
        code, text = answer(f"{site.url}{path}")
        return f"{code} {text}"

    return look


def event_text(site: Site) -> str:
    return "; ".join(event["event"] for event in read_events(site.data, site.seen_event))


def doctor_lines(site: Site) -> Iterator[str]:
    """Yield all that the doctor has said, after each line: it is read while it still examines."""
    command = [*COMMAND, "doctor", "--source", site.first_source, "--data", str(site.data)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            yield said
        process.kill()


def looked(channel: str, site: Site) -> Iterator[str]:
    """Yield the answer of a channel; of the doctor piece by piece."""
    return doctor_lines(site) if channel == "doctor" else iter([LOOKS[channel](site)])


LOOKS: dict[str, Callable[[Site], str]] = {
    "status": status_text,
    "page": page_text,
    "readyz": fetched_text("/readyz"),
    "metrics": fetched_text("/metrics"),
    "event": event_text,
}


@dataclass
class Outcome:
    """When each channel told the truth of one fault, in seconds; None: not within the limit."""

    seconds: dict[str, float | None] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    """The state at the end by the channels that name it: they must agree."""
    last: dict[str, str] = field(default_factory=dict)
    """The last answer of each channel."""


def measure(name: str) -> Outcome:
    """Put the fault into a mirror of its own, and look until every channel told it."""
    fault = FAULTS[name]
    result = Outcome()
    with followed(fault) as site:
        call("--version")  # the process that such commands are forked from has started
        site.seen_event = max((event["number"] for event in read_events(site.data)), default=0)
        began = time.monotonic()

        def watch(channel: str, pattern: str) -> None:
            result.seconds[channel] = None
            while time.monotonic() < began + LIMIT_S:
                look_began = time.monotonic()
                for text in looked(channel, site):
                    result.last[channel] = text
                    if re.search(pattern, text if channel == "metrics" else text.replace("\n", " ")):
                        result.seconds[channel] = time.monotonic() - began
                        return
                time.sleep(max(0.0, POLL_S - (time.monotonic() - look_began)))

        watches = [threading.Thread(target=watch, args=each, daemon=True) for each in fault.patterns().items()]
        fault.inject(site)
        for each in watches:
            each.start()
        for each in watches:
            each.join()
        end = time.monotonic() + AGREE_S
        while len(set((states := states_now(site)).values())) > 1 and time.monotonic() < end:
            time.sleep(POLL_S)  # they are of one moment only while nothing changes
        result.states = states
    return result


def states_now(site: Site) -> dict[str, str]:
    metrics = re.search(r'dcp_mirror_state{state="([^"]+)"} 1.0', LOOKS["metrics"](site))
    found = {"status": status_text(site).partition(":")[0], "page": page_text(site).partition(":")[0]}
    found |= {"metrics": metrics[1]} if metrics else {}
    ready = answer(f"{site.url}/readyz")[0]
    found |= {"readyz": "following" if ready == 200 else found["status"] if found["status"] != "following" else "503"}
    return {} if ready == 0 else found
