"""Consistency under fire: writers keep an invariant across documents of one vbucket, workers die, sources fail over.

The invariant: all documents of a vbucket carry the same number, because each write of it is one snapshot. `get_many`
and `scan`, multi-gets over HTTP and range scans on the KV port must never see two numbers; a single reader on one KV
connection may see a number fall only where a failover took the higher one back, once for each failover.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mirror import ViewInvalidated, open_view
from mirror import client as control
from mirror.messages import GetStatus
from mirror.sandbox import SandboxCluster, SandboxThread, vbucket_of
from mirror.wire import codec_kv
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame
from storage.errors import Unavailable
from tests.crash.service import Service, until
from tests.oracle import kv_client

VBUCKETS = 4
DOCUMENTS = 6
HEADER = struct.Struct(">BBHBBHIIQ")
PAIRS = json.dumps({"range": {"start": b64encode(b"pair-").decode(), "end": b64encode(b"pair-\xff").decode()}}).encode()
READS_MIN = 20
"""Least reads of each reader, also on a busy machine."""


def keys_of(vbid: int) -> list[str]:
    found: list[str] = []
    number = 0
    while len(found) < DOCUMENTS:
        if vbucket_of(f"pair-{number}".encode(), VBUCKETS) == vbid:
            found.append(f"pair-{number}")
        number += 1
    return found


KEYS = [keys_of(vbid) for vbid in range(VBUCKETS)]


class Source:
    """The sandbox, its one number per vbucket, and how often each was taken back."""

    def __init__(self, thread: SandboxThread) -> None:
        self.thread = thread
        self.number = 0
        self.failovers = [0] * VBUCKETS
        self.lock = threading.Lock()

    def write(self, vbid: int) -> None:
        with self.lock:
            self.number += 1
            document = {"n": self.number, "pad": "x" * 200}
            self.thread.call(self.thread.cluster.multi_write, vbid, [(key, document) for key in KEYS[vbid]])

    def fail_over(self, vbid: int, writes: int) -> None:
        """Take the last writes back, whole."""
        with self.lock:
            self.failovers[vbid] += 1
            self.thread.call(lambda: self.thread.cluster.failover(vbid, lose=writes * DOCUMENTS))


def seen_whole(read: Callable[[int], list[int] | None], stop: threading.Event) -> int:
    """Read vbuckets until the end: one number for all of a vbucket, or None where it cannot be read."""
    seen = 0
    while not stop.is_set() or seen <= READS_MIN:
        for vbid in range(VBUCKETS):
            if (found := read(vbid)) is not None:
                assert len(found) == DOCUMENTS
                assert len(set(found)) == 1, f"vbucket {vbid} had {found}"
                seen += 1
    return seen


def reader_of_many(path: str, stop: threading.Event) -> int:
    with open_view(path) as view:

        def read(vbid: int) -> list[int] | None:
            try:
                return [json.loads(each.value)["n"] for each in view.get_many(KEYS[vbid]).values()]
            except Unavailable:
                return None

        return seen_whole(read, stop)


def reader_of_scans(path: str, stop: threading.Event) -> int:
    with open_view(path) as view:

        def read(vbid: int) -> list[int] | None:
            try:
                return [json.loads(each.value)["n"] for each in view.scan(vbid, prefix="pair-")]
            except (ViewInvalidated, Unavailable):
                return None

        return seen_whole(read, stop)


def reader_over_http(url: str, stop: threading.Event) -> int:
    with httpx.Client(base_url=url, timeout=60) as http:

        def read(vbid: int) -> list[int] | None:
            answer = http.post("/v1/collections/_default/multi-get", json={"keys": KEYS[vbid]})
            if answer.status_code == 503:
                return None
            return [row["value"]["n"] for row in answer.raise_for_status().json()["documents"]]

        return seen_whole(read, stop)


def reader_of_range_scans(address: tuple[str, int], stop: threading.Event) -> int:
    """A range scan in several answers, or one that is cancelled."""
    with socket.create_connection(address) as line, line.makefile("rb") as answers:

        def ask(frame: Frame) -> Frame:
            line.sendall(fr.encode(frame))
            head = answers.read(24)
            return fr.decode(head + answers.read(HEADER.unpack(head)[6]))[0]

        def read(vbid: int) -> list[int] | None:
            made = ask(fr.request(Opcode.RANGE_SCAN_CREATE, vbucket=vbid, value=PAIRS, datatype=1))
            if made.status == Status.ETMPFAIL:
                return None
            assert made.status == Status.SUCCESS, made
            found: list[int] = []
            status = int(Status.RANGE_SCAN_MORE)
            while status == Status.RANGE_SCAN_MORE:
                extras = kv_client.encode_scan_continue(codec_kv.ScanLimits(made.value, 2))
                answer = ask(fr.request(Opcode.RANGE_SCAN_CONTINUE, vbucket=vbid, extras=extras))
                status = answer.status
                if answer.extras:
                    items = kv_client.decode_scan_items(answer.value, keys_only=False)
                    found += [json.loads(item.value or b"")["n"] for item in items]
            assert status in (Status.RANGE_SCAN_COMPLETE, Status.RANGE_SCAN_CANCELLED), answer
            assert len(set(found)) <= 1, f"a range scan saw {found}"
            return found if status == Status.RANGE_SCAN_COMPLETE else None

        return seen_whole(read, stop)


def reader_of_singles(address: tuple[str, int], source: Source, stop: threading.Event) -> int:
    """Single reads of one connection: a document's number falls at most once for each failover of its vbucket."""
    seen = 0
    with socket.create_connection(address) as line, line.makefile("rb") as answers:
        last = dict.fromkeys((key for names in KEYS for key in names), 0)
        falls = dict.fromkeys(last, 0)
        while not stop.is_set() or seen <= READS_MIN:
            for vbid, names in enumerate(KEYS):
                for key in names:
                    line.sendall(HEADER.pack(0x80, 0, len(key), 0, 0, 0, len(key), 0, 0) + key.encode())
                    _, _, _, extras, _, status, size, _, _ = HEADER.unpack(answers.read(24))
                    body = answers.read(size)
                    if status:
                        assert status == 0x86, f"status {status}"
                        continue
                    number = json.loads(body[extras:])["n"]
                    if number < last[key]:
                        falls[key] += 1
                        assert falls[key] <= source.failovers[vbid], f"{key} fell from {last[key]} to {number}"
                    last[key] = number
                    seen += 1
    return seen


@pytest.fixture
def source() -> Iterator[Source]:
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS)) as thread:
        made = Source(thread)
        for vbid in range(VBUCKETS):
            for _ in range(5):
                made.write(vbid)
        yield made


@pytest.mark.parametrize("failovers", [3, pytest.param(8, marks=pytest.mark.long)])
def test_a_reader_never_sees_part_of_a_write_or_goes_back_in_time(
    source: Source, tmp_path: Path, failovers: int
) -> None:
    data = tmp_path / "data"
    rng = random.Random(5)
    flags = ("--workers", "2", "--groups", "2", "--kv", "0", "--http", "0")
    with Service(source.thread.connection_string, data, *flags) as service:
        service.start()

        def listening() -> dict[str, list[str]] | None:
            status = (control.ask(data, GetStatus()) or {}).get("status")
            ready = status and status["servers"] and all(row["phase"] == "running" for row in status["servers"])
            return dict(status["listeners"]) if ready and status else None

        listeners = until("the KV port and the HTTP port", listening)
        port = int(listeners["kv"][0].rpartition(":")[2])
        with open_view(str(data), partial=True) as view:
            until("the first documents", lambda: all(len(view.get_many(names)) == DOCUMENTS for names in KEYS))
        stop = threading.Event()
        address = ("127.0.0.1", port)
        readers: list[Callable[[], int]] = [
            lambda: reader_of_many(str(data), stop),
            lambda: reader_of_scans(str(data), stop),
            lambda: reader_over_http(listeners["http"][0], stop),
            lambda: reader_of_range_scans(address, stop),
            *[lambda: reader_of_singles(address, source, stop)] * 3,
        ]
        with ThreadPoolExecutor(len(readers)) as pool, open_view(str(data)) as view:
            reading = [pool.submit(each) for each in readers]
            try:
                for step in range(failovers):
                    for _ in range(40):
                        source.write(rng.randrange(VBUCKETS))
                    vbid = rng.randrange(VBUCKETS)
                    source.fail_over(vbid, rng.randint(1, 3))
                    source.write(vbid)
                    if step % 3 == 1:
                        status = (control.ask(data, GetStatus()) or {})["status"]
                        os.kill(status["workers"][step % 2]["pid"], signal.SIGKILL)
                    target = source.number

                    def caught_up(vbid: int = vbid, target: int = target) -> bool:
                        document = view.get(KEYS[vbid][0])
                        assert not any(each.done() for each in reading), [
                            each.result() for each in reading if each.done()
                        ]
                        return document is not None and json.loads(document.value)["n"] >= target

                    until(f"failover {step} is over", caught_up)
            finally:
                stop.set()
            counts = [each.result() for each in reading]
        assert all(count > READS_MIN for count in counts), counts
        status = (control.ask(data, GetStatus()) or {})["status"]
        assert status["totals"]["rollback_count"] > failovers // 2, "the failovers took published data back"
        assert sum(worker["restarts"] for worker in status["workers"]) >= failovers // 3, "workers were killed"
