"""SQL over HTTP: answers, bounds, rights, and processes that end with their clients."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pyarrow as pa
import pytest

from mirror.client import SOCKET_NAME
from mirror.config_reader import validated
from mirror.errors import ConfigError
from mirror.serve.access.auth import entry_of, new_salt_key
from mirror.serve.http.query_pool import Queries, QueryChild
from mirror.serve.http.query_process import LEFT_BYTES_MAX
from mirror.supervise.listeners import addresses
from mirror.supervise.listeners.addresses import check_servers
from storage.model import Collection, Seqno
from tests.crash.service import until
from tests.serve.http_site import VBUCKETS, Site, Source, made, running
from tests.spark.mirrors import SmallMirror

pytestmark = pytest.mark.xdist_group("sql_http")

ARROW = {"Accept": "application/vnd.apache.arrow.stream"}
ENDLESS = "SELECT count(*) FROM range(1000000000000) t(a) WHERE a % 7 = 3"
PASSWORD = "a good password"
OWN_BYTES = 512 << 20
FRESH_BYTES_MAX = 300 << 20
"""More than a process has before its first query."""
SHARED_BYTES = 200 << 20
"""No other server here has this bound: a process has it in its command."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with made(tmp_path_factory.mktemp("sql")) as opened:
        for vbid in range(VBUCKETS):
            opened.collections(vbid, Collection(9, 8, "orders", Seqno(0)))
        for number in range(50):
            opened.put(f"o{number}", b'{"city":"c%d","n":%d}' % (number % 3, number))
        opened.put("hidden", b'{"secret":true}', collection_id=9)
        yield opened


@pytest.fixture(scope="module")
def site(source: Source) -> Iterator[Site]:
    limits: dict[str, Any] = {"sql_rows_max": 40, "sql_timeout_s": 120, "sql_memory_bytes": SHARED_BYTES}
    with running(Path(source.path), source, sql=True, sql_processes=1, **limits) as served:
        yield served


def ask(site: Site, sql: str, status: int = 200, headers: Any = None, auth: Any = None, **more: Any) -> httpx.Response:
    answer = site.client.post("/v1/query", json={"sql": sql} | more, headers=headers, auth=auth)
    assert answer.status_code == status, answer.text
    return answer


def processes(memory_bytes: int = SHARED_BYTES) -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it may end meanwhile
            words = each.cmdline()[-2:]
            if (
                words == ["mirror.serve.http.query_process", str(memory_bytes)]
                and each.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(each)
    return found


def busy(memory_bytes: int = SHARED_BYTES) -> list[psutil.Process]:
    """Return the processes with a thread that runs, or would run on a machine with less to do."""
    found = []
    for each in processes(memory_bytes):
        with suppress(OSError):  # it may end meanwhile
            if any(") R " in (task / "stat").read_text() for task in Path(f"/proc/{each.pid}/task").iterdir()):
                found.append(each)
    return found


def begun(site: Site) -> tuple[Any, psutil.Process]:
    """A connection with a query that runs, and its process. The process was idle before: one that is still starting is
    kept for the next query when its client hangs up.
    """
    assert site.server.service.queries is not None
    memory_bytes = site.server.service.queries.settings.sql_memory_bytes
    ask(site, "SELECT 1")
    until("an idle process", lambda: processes(memory_bytes) and not busy(memory_bytes))
    line = site.connect()
    body = json.dumps({"sql": ENDLESS}).encode()
    line.sendall(b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    return line, until("a query", lambda: busy(memory_bytes))[0]


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join(60)
        return found[0]

    return wait


def test_an_answer_is_json(site: Site) -> None:
    answer = ask(site, "SELECT city, count(*) AS orders, sum(n) AS n FROM documents GROUP BY city ORDER BY city")
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert [each["name"] for each in found["columns"]] == ["city", "orders", "n"]
    assert found["rows"] == [["c0", 17, 408], ["c1", 17, 425], ["c2", 16, 392]]
    assert found["truncated"] is False


def test_an_answer_is_arrow_if_the_client_accepts_it(site: Site) -> None:
    answer = ask(site, "SELECT n, city FROM documents WHERE n < 5 ORDER BY n", headers=ARROW)
    assert answer.headers["content-type"] == ARROW["Accept"]
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.to_pydict() == {"n": [0, 1, 2, 3, 4], "city": ["c0", "c1", "c2", "c0", "c1"]}


@pytest.mark.parametrize(
    ("accept", "arrow"),
    [
        ("*/*", False),
        ("{arrow};q=0", False),
        ("{arrow};q=0.000, */*", False),
        ("{arrow};q=nonsense", False),
        ("application/json, {arrow};q=0.5", False),
        ("{arrow}2", False),
        ("{arrow};q=0.5", True),
        ("application/json;q=0.5, {ARROW}; Q=1.0", True),
        ("text/html, {arrow}", True),
    ],
)
def test_the_accept_header_is_a_list_with_weights(site: Site, accept: str, arrow: bool) -> None:
    name = ARROW["Accept"]
    answer = ask(site, "SELECT 1", headers={"Accept": accept.format(arrow=name, ARROW=name.upper())})
    assert answer.headers["content-type"] == (name if arrow else "application/json")


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT TIMETZ '12:00:00+02' AS t", "TIME WITH TIME ZONE"),
        ("SELECT [TIMETZ '12:00:00+02'] AS t", "TIME WITH TIME ZONE"),
        *((f"SELECT {value} AS t", "TIME") for value in (
            "TIME '24:00:00'", "[TIME '24:00:00']", "{'a': TIME '24:00:00'}", "map {'a': [TIME '24:00:00']}",
            "array_value(TIME '24:00:00')", "TIME '24:00:00'::TIME_NS",
        )),
    ],
)  # fmt: skip
def test_a_time_that_json_would_change_is_an_error_with_a_remedy(site: Site, sql: str, words: str) -> None:
    problem = ask(site, sql, 400).json()
    assert words in problem["detail"]
    assert "VARCHAR" in problem["hint"]
    shown = ask(site, "SELECT TIME '24:00:00'::VARCHAR, TIMETZ '12:00:00+02'::VARCHAR").json()
    assert shown["rows"] == [["24:00:00", "12:00:00+02"]]


@pytest.mark.parametrize(("limit", "count"), [(None, 40), (3, 3), (0, 0), (40, 40)])
def test_rows_above_the_limit_are_cut_and_the_answer_is_marked(limit: int | None, count: int, site: Site) -> None:
    for headers in ({}, ARROW):
        answer = ask(site, "SELECT n FROM documents ORDER BY n", headers=headers, limit_rows=limit)
        assert answer.headers["mirror-truncated"] == "true"
    assert len(ask(site, "SELECT n FROM documents", limit_rows=limit).json()["rows"]) == count
    assert ask(site, "SELECT n FROM documents LIMIT 40").headers["mirror-truncated"] == "false"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b"null", b'"SELECT 1"', b'{"sql": 1}', b'{"sql": null}', b'{"sql": "SELECT 1", "other": 1}',
        b'{"sql": "SELECT 1", "limit_rows": 41}', b'{"sql": "SELECT 1", "limit_rows": -1}',
        b'{"sql": "SELECT 1", "limit_rows": true}', b'{"sql": "SELECT 1", "limit_rows": "1"}',
        b'{"sql": "SELECT 1", "as_of": 1}', b'{"sql": "SELECT 1", "as_of": "soon"}',
        b'{"sql": "SELECT 1", "as_of": "2026-01-01T00:00:00"}', b'{"sql": "%b"}' % (b" " * 70_000),
        b'{"sql": ""}', b'{"sql": ";"}', b'{"sql": "-- nothing"}', b'{"sql": "SELECT"}', b'{"sql": "\\u0000"}',
        b'{"sql": "\\ud800"}', b'{"sql": "hello"}', b'{"sql": "SELECT nothing FROM documents"}',
        b'{"sql": "SELECT 1; SELECT 2"}', b'{"sql": "SELECT error(\'a\\nb\')"}', b"\xff",
        b'{"sql": "SELECT \'infinity\'::timestamp"}',
    ],
)  # fmt: skip
def test_a_malformed_request_is_one_clear_error(body: bytes, site: Site) -> None:
    answer = site.client.post("/v1/query", content=body)
    assert answer.status_code == 400, answer.text
    problem = answer.json()
    assert problem["detail"]
    assert "\n" not in problem["detail"]
    assert "Traceback" not in answer.text


def test_a_number_keeps_its_digits_and_types_that_json_lacks_become_text_or_null(site: Site) -> None:
    answer = ask(
        site,
        "SELECT 9007199254740993 AS a, 1.50::DECIMAL(4,2) AS b, 12345678901234567890.5::DECIMAL(38,1) AS c, "
        "'nan'::DOUBLE AS d, 'a'::BLOB AS e, DATE '2026-01-31' AS f, [1, NULL] AS g, {'a': 1} AS h, "
        "INTERVAL '1 month 2 days 3 seconds' AS i",
    )
    expected = [9007199254740993, 1.5, "12345678901234567890.5", None, "YQ==", "2026-01-31", [1, None], {"a": 1}]
    assert answer.json()["rows"] == [[*expected, {"months": 1, "days": 2, "nanoseconds": 3_000_000_000}]]


def test_a_query_may_be_as_of_an_earlier_time(site: Site, source: Source) -> None:
    def count(**more: Any) -> int:
        return int(ask(site, "SELECT count(*) FROM documents", **more).json()["rows"][0][0])

    as_of, before = datetime.fromtimestamp(source.now_ms / 1000 + 1, UTC).isoformat(), count()
    source.now_ms += 10_000
    source.put(b"later", b'{"n":1000}')
    assert count(as_of=as_of) == before == count() - 1
    source.put(b"later", None)


def test_sql_is_off_by_default(source: Source) -> None:
    with running(Path(source.path), source) as quiet:
        problem = ask(quiet, "SELECT 1", 404).json()
        assert "sql = true" in problem["hint"]
        assert not processes(OWN_BYTES)


def test_a_service_without_duckdb_does_not_start_with_sql(monkeypatch: pytest.MonkeyPatch) -> None:
    check_servers(validated({"sql": True}))
    monkeypatch.setattr(addresses, "find_spec", lambda _: None)
    check_servers(validated({}))
    with pytest.raises(ConfigError, match=r"dcp-mirror\[sql\]"):
        check_servers(validated({"sql": True}))


def test_a_query_that_takes_too_long_ends(source: Source) -> None:
    with running(Path(source.path), source, sql=True, sql_processes=1, sql_timeout_s=2) as site:
        assert ask(site, ENDLESS, 504).json()["type"].endswith("query-timeout")
        until("the processes", lambda: not busy(OWN_BYTES))
        queries = site.server.service.queries
        assert queries is not None
        queries.settings = replace(queries.settings, sql_timeout_s=60)  # the next one starts its process
        assert ask(site, "SELECT 1").json()["rows"] == [[1]]


def test_a_query_ends_when_its_client_hangs_up(site: Site) -> None:
    line, process = begun(site)
    line.close()
    until("the processes", lambda: not process.is_running())
    assert ask(site, "SELECT 1").json()["rows"] == [[1]]


def test_a_client_that_hangs_up_while_it_waits_takes_no_place(site: Site) -> None:
    line, process = begun(site)
    waiting = site.connect()
    body = b'{"sql": "SELECT 1"}'
    waiting.sendall(b"POST /v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    waiting.close()
    line.close()
    until("the processes", lambda: not process.is_running())
    assert ask(site, "SELECT 2").json()["rows"] == [[2]]
    assert len(processes()) == 1


def test_queries_above_the_number_of_processes_wait_for_their_turn(site: Site) -> None:
    waits = [in_thread(lambda: ask(site, "SELECT sum(a) FROM range(20000000) t(a)").status_code) for _ in range(4)]
    assert [wait() for wait in waits] == [200] * 4
    assert len(processes()) == 1


def test_a_killed_process_fails_only_its_own_query(site: Site) -> None:
    wait = in_thread(lambda: ask(site, ENDLESS, 503).json())
    until("a query", busy)[0].kill()
    assert "process" in wait()["detail"]
    assert ask(site, "SELECT 1").json()["rows"] == [[1]]
    (idle,) = processes()
    idle.kill()
    idle.wait(10)
    assert ask(site, "SELECT 2").json()["rows"] == [[2]]


async def test_a_process_that_is_killed_with_its_query_unread_leaves_no_traceback(
    untaken_errors: list[dict[str, Any]],
) -> None:
    child = await QueryChild.start(OWN_BYTES)
    child.process.send_signal(signal.SIGSTOP)
    child.writer.write(b"{}\n")
    child.process.kill()
    await child.end()
    del child
    await asyncio.sleep(0.01)  # the transport is let go of
    gc.collect()
    assert not untaken_errors


async def test_a_client_that_leaves_while_its_process_fails_to_start_frees_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = asyncio.Event()

    async def fails(memory_bytes: int) -> QueryChild:
        await left.wait()
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(QueryChild, "start", fails)
    queries = Queries(validated({"sql_processes": 1}))
    client = asyncio.create_task(queries.take("a user"))
    await asyncio.sleep(0)
    client.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client
    left.set()
    await asyncio.wait_for(queries.close(), 60)


@pytest.fixture(scope="module")
def small_site(source: Source) -> Iterator[Site]:
    with running(Path(source.path), source, sql=True, sql_processes=1, sql_memory_bytes=64 << 20) as served:
        yield served


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT list(a) FROM range(1000000000) t(a)",
        "SELECT repeat('x', 4000000000)",
        "SELECT sum(length(repeat('x', 1000000000)))",
        "(" * 10_000,
        "SELECT * FROM range(100000) a, range(100000) b ORDER BY hash(a.range) LIMIT 90000000",
        "SELECT json_valid(repeat('[', 50000000))",
    ],
    ids=lambda sql: sql[:30],
)
def test_a_query_that_needs_too_much_memory_is_refused(sql: str, small_site: Site) -> None:
    answer = small_site.client.post("/v1/query", json={"sql": sql})
    assert answer.status_code in (400, 413, 503), answer.text
    kept = processes(64 << 20)
    assert ask(small_site, "SELECT 1").json()["rows"] == [[1]]
    (process,) = processes(64 << 20)
    if process in kept:  # what it keeps, the queries of other users lack
        assert process.memory_info().data < FRESH_BYTES_MAX + LEFT_BYTES_MAX


@contextmanager
def service_that_answers(data: str, answer: bytes) -> Iterator[None]:
    """A service that gives one answer to every command."""

    class Answering(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answer)

    path = Path(data) / SOCKET_NAME
    with socketserver.ThreadingUnixStreamServer(str(path), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            path.unlink()


def refused(error: str, *, retryable: bool) -> bytes:
    return json.dumps({"ok": False, "error": error, "exit_code": 1, "retryable": retryable}).encode() + b"\n"


@pytest.mark.parametrize(
    ("answer", "status", "name"),
    [
        (refused("worker 0 did not answer within 25 s", retryable=True), 503, "unavailable"),
        (b"[]\n", 503, "unavailable"),  # a service that does not answer at all takes longer
        (refused("{data}: too many leases are held", retryable=False), 503, "unavailable"),
    ],
    ids=["a worker hangs", "the supervisor is strange", "no lease is left"],
)
def test_errors_of_the_service_are_not_bad_requests_and_show_no_paths(
    site: Site, source: Source, answer: bytes, status: int, name: str
) -> None:
    with service_that_answers(source.path, answer.replace(b"{data}", source.path.encode())):
        found = site.client.post("/v1/query", json={"sql": "SELECT count(*) FROM documents"})
    assert (found.status_code, found.json()["type"]) == (status, f"urn:dcp-mirror:{name}")
    assert (found.headers.get("retry-after") == "1") == (status == 503)
    for secret in (source.path, "worker", "kill", "Traceback"):
        assert secret not in found.text
    assert ask(site, "SELECT count(*) FROM documents").headers["x-content-type-options"] == "nosniff"


def test_a_user_without_readable_collections_takes_no_place(source: Source, tmp_path: Path) -> None:
    write_users(tmp_path / "users.json", nil=("nope.nope",))
    with running(Path(source.path), source, sql=True, users_file=tmp_path / "users.json") as site:
        assert ask(site, "SELECT 1", 403, auth=("nil", PASSWORD)).json()["type"].endswith("forbidden")
        assert not processes(OWN_BYTES)


def test_a_user_holds_at_most_one_place_while_others_wait(source: Source, tmp_path: Path) -> None:
    """Two queries of one user stopped those of all others for as long as they liked."""
    write_users(tmp_path / "users.json", ann=("*",), bob=("*",))
    with running(Path(source.path), source, sql=True, sql_processes=2, users_file=tmp_path / "users.json") as site:

        def endless() -> httpx.Response:
            return site.client.post("/v1/query", json={"sql": ENDLESS}, auth=("bob", PASSWORD))

        first = in_thread(endless)
        until("a query", lambda: len(busy(OWN_BYTES)) == 1)
        second = in_thread(endless)
        until("both queries", lambda: len(busy(OWN_BYTES)) == 2)
        assert ask(site, "SELECT 1 AS a", auth=("ann", PASSWORD)).json()["rows"] == [[1]]
        ended = second()
        assert (ended.status_code, ended.json()["type"]) == (503, "urn:dcp-mirror:too-busy")
        assert ended.headers["retry-after"] == "1"
        until("the first query", lambda: busy(OWN_BYTES))[0].kill()
        assert first().status_code == 503


class Place:
    """A process that has always answered."""

    idle = answers = True
    displaced = False

    async def end(self) -> None: ...


async def test_places_go_to_users_without_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QueryChild, "start", lambda _: asyncio.sleep(0, Place()))
    queries = Queries(validated({"sql_processes": 2}))
    first = [await queries.take("ann"), await queries.take("bob")]
    order: list[str] = []

    async def wait(name: str) -> QueryChild:
        child = await queries.take(name[:3])
        order.append(name)
        return child

    names = ("bob2", "ann2", "bob3", "cat1", "cat2")
    waiting = {name: asyncio.create_task(wait(name)) for name in names}
    await asyncio.sleep(0)
    queries.give_back(first[0])
    await waiting["ann2"]
    assert order == ["ann2"], "bob came first, but holds a place"
    waiting["bob3"].cancel()
    queries.give_back(first[1])
    await waiting["bob2"]
    assert order == ["ann2", "bob2"], "now bob holds none, and came before"
    queries.give_back(await waiting["bob2"])
    queries.give_back(await waiting["ann2"])
    await asyncio.gather(waiting["cat1"], waiting["cat2"])
    for name in ("cat1", "cat2"):
        queries.give_back(waiting[name].result())
    await asyncio.wait_for(queries.close(), 60)


def test_query_processes_lack_the_service_environment_and_end_with_it(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "a secret")
    with running(Path(source.path), source, sql=True, sql_processes=2) as site:
        line, _ = begun(site)
        ask(site, "SELECT 1")
        started = processes(OWN_BYTES)
        assert len(started) == 2
        assert not [name for each in started for name in each.environ() if name.startswith("DCP_MIRROR")]
    line.close()
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in started)


def write_users(path: Path, **patterns: tuple[str, ...]) -> None:
    users = {name: entry_of(PASSWORD, each) for name, each in patterns.items()}
    path.write_text(json.dumps({"users": users, "salt_key": new_salt_key()}))


def test_a_user_can_query_readable_collections_until_removed(source: Source, tmp_path: Path) -> None:
    write_users(tmp_path / "users.json", ann=("*",), bob=("_default._default",), eve=("shop.*",))
    with running(Path(source.path), source, sql=True, users_file=tmp_path / "users.json") as site:
        ask(site, "SELECT 1", 401)
        for user, default, orders in (("ann", 200, 200), ("bob", 200, 400), ("eve", 400, 200)):
            ask(site, "SELECT * FROM documents", default, auth=(user, PASSWORD))
            ask(site, "SELECT * FROM shop.orders", orders, auth=(user, PASSWORD))
        sql = "SELECT sum(a % 7) FROM range(400000000) t(a)"
        wait = in_thread(lambda: site.client.post("/v1/query", json={"sql": sql}, auth=("bob", PASSWORD)))
        until("the processes", lambda: bool(busy(OWN_BYTES)))
        write_users(tmp_path / "users.json", ann=("*",))
        assert wait().status_code == 403


def test_a_vbucket_that_is_not_published_is_an_error_not_an_empty_table(tmp_path: Path) -> None:
    filling = SmallMirror(tmp_path / "data", filled=False)
    filling.put({"a": b'{"n":1}'})
    try:
        with running(filling.path, Source(str(filling.path)), sql=True) as site:
            problem = ask(site, "SELECT count(*) FROM documents", 503).json()
            assert "not filled" in problem["detail"]
            assert ask(site, "SELECT 1").json()["rows"] == [[1]]
    finally:
        filling.close()


def test_a_query_ends_when_its_http_process_is_killed() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "mirror.serve.http.query_process", str(OWN_BYTES)]
    with theirs:
        process = subprocess.Popen(command, stdin=theirs.fileno(), cwd=Path(__file__).parents[2])
    ours.close()
    assert process.wait(60) in (0, 1)
