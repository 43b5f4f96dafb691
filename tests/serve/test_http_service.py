"""An HTTP process from start to end, and what waits in it: reads for a write, for their turn, for their client."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.messages import Resync
from mirror.serve.http.problems import Problem
from mirror.serve.http.server import HttpServer
from mirror.serve.http.service import leaves_line
from mirror.server.admission import LOCAL, Admission, Slot
from mirror.server.listener import Address
from mirror.server.turns import Turns
from mirror.supervise.status import stored_status
from storage.model import FailoverLog, Seqno, Vbuuid
from storage.read.reading import BoundaryRead
from storage.read.view import View
from storage.read.wait import MutationToken
from tests.serve.http_site import VBUUID, Site, Source, request, running, serving_http
from tests.serve.kv_rig import with_users
from tests.supervise.conftest import eventually, eventually_now


def a_request(*, gone: bool = False) -> Request:
    transport = SimpleNamespace(is_closing=lambda: gone)
    slot = Slot(Admission(Settings(), Turns()), LOCAL)
    return Request({"type": "http", "state": {"slot": slot, "transport": transport}})


def test_a_rollback_between_the_wait_and_the_read_is_a_lost_write(site: Site) -> None:
    """The read itself sees the older value; the token is looked at again before it is given away."""
    key = site.source.key_of(4)
    site.source.put(key, b"1")
    site.source.put(key, b"2")
    service = site.server.service

    def read() -> bytes | None:
        site.source.rollback(4, 1)
        writer = site.source.writer(4)
        writer.vbuckets[4].save(failover_log=FailoverLog.of([(77, 1), (VBUUID, 0)]))
        writer.commit()
        found = service.view.get(key)
        return found and found.value

    token = MutationToken(4, Vbuuid(VBUUID), Seqno(2))
    with pytest.raises(Problem) as caught:
        site.call(service.after(a_request(), [token], 10, read))
    assert caught.value.name == "write-lost"


def test_bulk_reads_run_one_at_a_time_outside_of_the_event_loop(site: Site) -> None:
    """Multi-gets once ran on the event loop: one of a large document blocked all clients for a second."""
    service = site.server.service
    running = most = 0

    def read() -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert site.call(answering()) == "the loop answers", "it would not, if this ran on it"
        running -= 1
        return threading.get_ident()

    async def answering() -> str:
        return "the loop answers"

    async def reads() -> list[int]:
        bulk = (service.after(a_request(), [], 1, read, in_bulk=True) for _ in range(4))
        return await asyncio.gather(*bulk)

    assert len(site.call(reads())) == 4
    assert most == 1


@pytest.mark.parametrize(
    ("method", "path", "owner", "read"),
    [
        ("GET", "/v1/collections/_default/documents?limit=10", BoundaryRead, "page"),
        ("POST", "/v1/collections/_default/multi-get", View, "get_many"),
    ],
)
def test_a_document_is_not_read_for_a_client_that_is_gone(
    site: Site, monkeypatch: pytest.MonkeyPatch, method: str, path: str, owner: type, read: str
) -> None:
    """Pages of 20 MiB documents, requested and abandoned, once took 2 GiB. They leave the line at once: thousands of
    them once made each garbage collection a step of 0.2 s."""
    site.source.put("a", b"1")
    worker, state, begun, busy = site.server.service.worker, site.server.gate, threading.Event(), threading.Event()
    reads: list[str] = []
    monkeypatch.setattr(owner, read, lambda *_args, **_more: reads.append(read))

    def block() -> bool:
        begun.set()
        return busy.wait()

    blocked = asyncio.run_coroutine_threadsafe(worker.run(block), site.loop)
    assert begun.wait(10)
    with site.connect() as line:
        line.sendall(request(path, method=method, body='{"keys": ["a"]}'))
        eventually_now(lambda: worker._thread._work_queue.qsize() == 1)
    eventually_now(lambda: not state.connections)
    eventually_now(lambda: not state.answering)
    busy.set()
    assert blocked.result(10)
    site.call(worker.run(lambda: None))
    assert reads == []


def test_a_client_that_is_gone_before_its_request_is_not_queued() -> None:
    """It was not told that the client was gone: such a query once ran until its time was over."""
    with pytest.raises(Problem, match="the client is gone"), leaves_line(a_request(gone=True)):
        pytest.fail("waits")


def test_a_read_that_waits_for_a_write_ends_with_its_client(site: Site) -> None:
    with site.connect() as line:
        path = f"/v1/collections/_default/documents/a?token=4:{VBUUID}:1000&timeout_ms=60000"
        line.sendall(request(path))
        eventually_now(lambda: site.server.gate.answering)
    eventually_now(lambda: not site.server.gate.answering)


def test_a_bulk_read_that_waits_for_a_write_does_not_block_others(site: Site) -> None:
    service = site.server.service

    async def reads() -> str:
        token = MutationToken(4, Vbuuid(VBUUID), Seqno(1_000))
        waiting = asyncio.create_task(service.after(a_request(), [token], 60, lambda: "late", in_bulk=True))
        await asyncio.sleep(0)
        found = await service.after(a_request(), [], 1, lambda: "now", in_bulk=True)
        assert not waiting.done()
        waiting.cancel()
        return found

    assert site.call(reads()) == "now"


def test_one_user_does_not_take_all_places_to_wait_for_writes(source: Source, tmp_path: Path) -> None:
    file = with_users(tmp_path / "users.json", {"ann": "x", "bob": "x"})
    with running(tmp_path / "data", source, users_file=file, reader_connections_max=16) as site, ExitStack() as stack:
        path = site.document("a") + f"?token=4:{VBUUID}:1000&timeout_ms=60000"
        for _ in range(3):
            stack.enter_context(site.connect()).sendall(request(path, user="bob:x"))
        eventually_now(lambda: site.server.service.waiting.held == {"user bob": 2})
        answer = site.get(path, 503, auth=("bob", "x"))
        assert answer.json()["type"] == "urn:dcp-mirror:too-busy"
        assert answer.headers["retry-after"] == "1"
        site.get(path.replace("60000", "1"), 504, auth=("ann", "x"))
    eventually_now(lambda: not site.server.service.waiting.held)


@pytest.mark.parametrize("path", ["/v1/collections/_default/multi-get", "/v1/query"])
def test_request_bodies_count_from_their_first_byte_and_are_bounded_per_user(
    source: Source, tmp_path: Path, path: str
) -> None:
    """1,000 unfinished bodies of a megabyte once took a gigabyte, which no budget knew of."""
    file = with_users(tmp_path / "users.json", {"ann": "x", "bob": "x"})
    size, budget_bytes = 512 * 1024, 2 * 1024 * 1024
    more: dict[str, Any] = {"users_file": file, "reader_unsent_bytes_max": budget_bytes, "sql": True}
    with running(tmp_path / "data", source, **more) as site, ExitStack() as stack:
        service = site.server.service
        for _ in range(5):
            line = stack.enter_context(site.connect())
            line.sendall(request(path, f"Content-Length: {size}", method="POST", user="bob:x") + b" " * (size - 1))
        eventually_now(lambda: budget_bytes // 2 - 20_000 < service.bodies.held["user bob"] <= budget_bytes // 2)
        assert service.budget.out_bytes == service.bodies.held["user bob"]
        assert site.multi_get(["a"], auth=("ann", "x"))["missing"] == [{"key": "a"}]
    eventually_now(lambda: service.budget.out_bytes == 0)
    assert not service.bodies.held


def test_requests_that_ended_hold_no_memory_even_before_a_garbage_collection(source: Source, tmp_path: Path) -> None:
    """Connections, and the errors that refused their bodies, once kept 64 KiB each in cycles of references."""
    size, count = 256 * 1024, 40
    path = "/v1/collections/_default/multi-get"
    with running(tmp_path / "data", source, reader_unsent_bytes_max=1024 * 1024) as site:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            with ExitStack() as stack:
                for _ in range(count):
                    line = stack.enter_context(site.connect())
                    with suppress(ConnectionError):
                        line.sendall(request(path, f"Content-Length: {size}", method="POST") + b" " * (size - 1))
                eventually_now(lambda: site.server.service.requests.request_total > count // 2)
            eventually_now(lambda: not site.server.gate.connections)
            eventually_now(lambda: tracemalloc.get_traced_memory()[0] < count * 16 * 1024)
        finally:
            tracemalloc.stop()
            gc.enable()


async def test_a_stop_finishes_requests_under_way_and_ends_streams(source: Source) -> None:
    key = source.key_of(4).decode()
    token = {"token": "4:43981:1", "timeout_ms": "60000"}
    async with httpx.AsyncClient() as client:
        async with serving_http(Settings(data=Path(source.path))) as (server, address):
            url = f"http://{address.authority}"
            waiting = asyncio.create_task(client.get(f"{url}/v1/collections/_default/documents/{key}", params=token))
            stream = asyncio.create_task(client.get(f"{url}/v1/changes", params={"since": "now"}))
            await eventually(lambda: server.service.requests.streams.total() and len(server.gate.answering) == 2)
            status = server.status()
            assert (status["streams"], status["connections"]) == (1, 2)
        assert (await waiting).status_code == 504, "it was answered, not cut off"
        assert (await stream).text.startswith("retry:")
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/livez")


async def test_a_unix_socket_is_served_too(source: Source, tmp_path: Path) -> None:
    source.put("a", b"1")
    path = str(tmp_path / "http.sock")
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with (
        serving_http(Settings(data=Path(source.path)), Address("", 0, path)),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        assert (await client.get("/v1/collections/_default/documents/a")).content == b"1"


async def test_a_remote_client_cannot_be_anonymous(source: Source) -> None:
    async with (
        serving_http(Settings(data=Path(source.path)), Address("0.0.0.0")) as (_, address),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{address.port}") as client,
    ):
        assert (await client.get("/v1/status")).status_code == 401
        assert (await client.get("/livez")).status_code == 200


async def test_missing_data_and_foreign_commands_are_refused(source: Source) -> None:
    with pytest.raises(ConfigError, match="data"):
        HttpServer(Settings(), [], stored_status, SystemClock())
    server = HttpServer(Settings(data=Path(source.path)), [], stored_status, SystemClock())
    with pytest.raises(ConfigError, match="knows no command"):
        await server.request(Resync(1))
    assert server.status()["counters"]["http_requests"] == 0
