"""Rights, health, metrics, and errors that reveal no internals: everything around the routes."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mirror.serve.access.auth import entry_of
from mirror.serve.http.requests import Page
from mirror.serve.http.service import Service
from mirror.server.turns import Budget
from storage.errors import StorageError
from storage.model import Collection, Seqno
from tests.serve.http_site import (
    VBUCKETS,
    VBUUID,
    Site,
    Source,
    events,
    judged,
    request,
    running,
    service_report,
)
from tests.serve.kv_rig import with_users
from tests.serve.test_metrics import samples
from tests.supervise.conftest import eventually_now

DOCUMENTS = "/v1/collections/_default/documents"


@pytest.fixture
def guarded(source: Source, tmp_path: Path) -> Iterator[Site]:
    """Users: `all` reads everything, `shop` one scope; a login is required."""
    users = {"all": entry_of("secret"), "shop": entry_of("secret", ("shop.*",))}
    file = with_users(tmp_path / "users.json", users)
    for vbid in range(VBUCKETS):
        source.collections(vbid, Collection(9, 8, "orders", Seqno(0)))
    source.put("a", b"1")
    source.put("a", b"2", collection_id=9)
    with running(tmp_path / "data", source, users_file=file) as served:
        yield served


def test_readers_get_only_the_collections_they_may_read(guarded: Site) -> None:
    site = guarded
    answer = site.get(site.document("a"), 401)
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert answer.json()["type"] == "urn:dcp-mirror:not-authenticated"
    for wrong in (("all", "wrong"), ("unknown", "secret"), ("", "")):
        site.get(site.document("a"), 401, auth=wrong)
    site.get(site.document("a"), 401, headers={"Authorization": "Bearer x"})
    site.get(site.document("a"), 401, headers={"Authorization": "Basic !!!"})
    assert site.get(site.document("a"), auth=("all", "secret")).content == b"1"
    site.get(site.document("a"), 401, auth=("all", "other"))
    shop = ("shop", "secret")
    site.get(site.document("a"), 403, auth=shop)
    site.get(site.document("a", "0"), 403, auth=shop)
    site.get(site.document("none"), 403, auth=shop)
    site.get("/v1/collections/_default/documents", 403, auth=shop)
    site.multi_get(["a"], 403, "0", auth=shop)
    assert site.get(site.document("a", "shop.orders"), auth=shop).content == b"2"
    assert site.get(site.document("a", "9"), auth=shop).content == b"2"
    assert [each["name"] for each in site.get("/v1/collections", auth=shop).json()["collections"]] == ["orders"]
    for path in ("/v1/status", "/v1/vbuckets", "/v1/vbuckets/1", "/metrics", "/v1/changes"):
        site.get(path, 401)
    for path in ("/livez", "/", "/page.js", "/page.css", "/openapi.json"):
        site.get(path)


def within(lines: Iterator[str], seconds: float = 20.0) -> Iterator[str]:
    """The lines of a stream that has to end; one that does not has heartbeats."""
    ends_s = time.monotonic() + seconds
    for line in lines:
        assert time.monotonic() < ends_s, "the stream goes on"
        yield line


def test_a_stream_of_changes_ends_when_its_user_loses_the_right(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.serve.http.changes.RIGHTS_CHECK_S", 0.01)
    users = {name: entry_of("x") for name in ("ann", "bob")}
    file = with_users(tmp_path / "users.json", users)
    source.put("a", b"1")
    with running(tmp_path / "data", source, users_file=file) as site:
        for name, change in (("ann", lambda: users.pop("ann")), ("bob", lambda: users["bob"].update(read=["s.*"]))):
            with site.client.stream("GET", "/v1/changes", auth=(name, "x")) as stream:
                lines = stream.iter_lines()
                assert "retry" in next(lines)
                change()
                with_users(file, users)
                text = "\n".join(within(lines))
            assert events(text)[-1]["event"] == "problem"
            assert "were changed" in text
        eventually_now(lambda: not site.server.service.requests.streams)


def test_an_error_names_only_collections_that_its_reader_may_read(guarded: Site) -> None:
    """The hint once listed all that the store knows."""
    shop = ("shop", "secret")
    scan = "/v1/collections/shop.nosuch"
    found = [
        guarded.get(guarded.document("a", "shop.nosuch"), 404, auth=shop),
        guarded.get(f"{scan}/documents", 404, auth=shop),
        guarded.client.post(f"{scan}/multi-get", json={"keys": ["a"]}, auth=shop),
        guarded.get("/v1/changes", 404, auth=shop, params={"collection": "shop.nosuch", "follow": "false"}),
    ]
    for answer in found:
        assert answer.status_code == 404
        assert "_default" not in answer.text
        assert answer.json()["hint"] == "GET /v1/collections lists them"


@pytest.mark.parametrize("path", ["/v1/status", "/v1/vbuckets", "/v1/vbuckets/0"])
def test_the_status_is_for_readers_of_everything(guarded: Site, path: str) -> None:
    """It once showed every reader the path, process ids and the source's user."""
    guarded.get(path, auth=("all", "secret"))
    assert guarded.get(path, 403, auth=("shop", "secret")).json()["detail"].startswith("the status is for")


def test_readiness_is_public_and_its_reasons_are_for_readers_of_everything(guarded: Site) -> None:
    """The reasons hold texts of errors, and these the paths of files."""
    path = "/srv/mirror/group-3/data.mdb"
    guarded.stands(service_report(guarded.data) | {"state": "degraded", "reasons": [f"8 vbuckets damaged ({path})"]})
    assert path in guarded.get("/readyz", 503, auth=("all", "secret")).json()["reasons"][0]
    for found in (guarded.get("/readyz", 503), guarded.get("/readyz", 503, auth=("shop", "secret"))):
        assert path not in found.text
        assert (found.json()["detail"], found.json()["reasons"]) == ("not ready: degraded", ["degraded"])
    guarded.get("/readyz", 401, auth=("all", "wrong"))
    guarded.stands(service_report(guarded.data))
    assert guarded.get("/readyz").json() == {"status": "ready"}


def test_readiness_of_a_store_that_cannot_be_read_names_no_path(guarded: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    async def report() -> None:
        raise StorageError("cannot open /srv/mirror/group-3/data.mdb")

    monkeypatch.setattr(guarded.server.service.status, "report", report)
    assert "/srv/mirror" in guarded.get("/readyz", 503, auth=("all", "secret")).text
    assert "/srv/mirror" not in guarded.get("/readyz", 503).text


@pytest.mark.parametrize(
    "request_line",
    [
        "GET {documents}/{key}?token=4:{vbuuid}:2",
        "GET {documents}?token=4:{vbuuid}:2&vbid=4",
        "POST /v1/collections/_default/multi-get?token=4:{vbuuid}:2",
        "GET /v1/changes?since=now&token=4:{vbuuid}:2",
        "HEAD {documents}/{key}?token=4:{vbuuid}:2",
    ],
)
def test_an_answer_that_waited_is_checked_against_the_rights_at_its_end(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_line: str
) -> None:
    """A removed user once got a document that was written 11 s after the removal."""
    waits, after = threading.Event(), Service.after

    def waiting(*arguments: Any, **more: Any) -> Any:
        waits.set()
        return after(*arguments, **more)

    monkeypatch.setattr(Service, "after", waiting)
    file = with_users(tmp_path / "users.json", {"ann": "x"})
    key = source.key_of(4)
    source.put(key, b"1")
    method, path = request_line.format(documents=DOCUMENTS, key=key.decode(), vbuuid=VBUUID).split(" ")
    with running(tmp_path / "data", source, users_file=file) as site, site.connect() as line:
        body = json.dumps({"keys": [key.decode()]})
        target = f"{path}&timeout_ms=60000"
        line.sendall(request(target, "Connection: close", method=method, body=body, user="ann:x"))
        assert waits.wait(20)
        with_users(file, {})
        source.put(key, b'"written after the removal"')
        answer = line.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 403 "), answer
        assert b"after the removal" not in answer
        assert site.server.service.budget.out_bytes == 0
        assert not site.server.service.requests.streams


def test_a_paused_stream_sends_nothing_more_to_a_removed_user(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream once completed its current event, of up to 20 MiB."""
    monkeypatch.setattr("mirror.serve.http.changes.RIGHTS_CHECK_S", 0.01)
    file = with_users(tmp_path / "users.json", {"ann": "x"})
    source.put(source.key_of(2), b"x" * 15_000_000, datatype=0)
    with running(tmp_path / "data", source, users_file=file) as site, site.connect() as line:
        line.sendall(request("/v1/changes?vbid=2", "Connection: close", user="ann:x"))
        (connection,) = eventually_now(lambda: site.server.gate.connections)
        eventually_now(lambda: connection.transport.get_write_buffer_size() > 64 * 1024)
        with_users(file, {})
        eventually_now(lambda: not site.server.gate.connections)
        with contextlib.suppress(ConnectionError):
            assert len(line.makefile("rb").read()) < 15_000_000


def ask_without_reading(site: Site, receive_buffer_bytes: int = 4096) -> socket.socket:
    line = site.connect()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    line.sendall(request("/v1/changes"))
    return line


def test_streams_that_are_not_read_hold_at_most_the_budget(site: Site) -> None:
    """64 of them once held two gigabytes: each a document of 20 MiB, and as much again in what read it."""
    size = 8 * 1024 * 1024  # more than the kernel takes for a connection
    vbid = 2
    site.source.snapshot(vbid, (site.source.key_of(vbid), b"1"), datatype=1)
    for number in range(1, 4):
        site.source.snapshot(vbid, (site.source.key_of(vbid, number), b'"' + b"x" * size + b'"'), datatype=1)
    service = site.server.service
    budget = service.budget = Budget(3 * size)
    site.get("/v1/changes", params={"vbid": 1, "follow": False})  # whatever is kept is kept by now
    with ExitStack() as closing:
        tracemalloc.start()
        closing.callback(tracemalloc.stop)
        lines = [closing.enter_context(ask_without_reading(site)) for _ in range(6)]
        eventually_now(lambda: budget.waiting_count == 4 and budget.out_bytes > 2 * size)
        lines.append(closing.enter_context(ask_without_reading(site, 1 << 20)))
        eventually_now(lambda: budget.waiting_count == 5)
        held, peak = tracemalloc.get_traced_memory()
        assert service.requests.streams.total() == 7
        assert budget.out_bytes <= 3 * size
        assert held < 4 * size, "what is in the budget, and no documents of those that wait"
        assert peak < 10 * size, "one is read at a time: with its JSON and its event it takes six times its size"
        tracemalloc.stop()
        for line in lines[:6]:
            line.close()
        received = bytearray()
        while len(received) < 3 * size or received.count(b"event: mutation") < 4:
            more = lines[6].recv(1 << 20)  # one that waited is given all, once there is budget
            assert more, "the stream ended"
            received += more
    eventually_now(lambda: budget.out_bytes == 0 and budget.waiting_count == 0)


def test_one_reader_does_not_take_all_streams(source: Source, tmp_path: Path) -> None:
    file = with_users(tmp_path / "users.json", {"ann": "x", "bob": "x", "carl": "x"})
    with running(tmp_path / "data", source, users_file=file, reader_connections_max=64) as site:
        assert site.server.service.streams.all_max == 8
        with contextlib.ExitStack() as stack:

            def opened(name: str) -> int:
                stream = site.client.stream("GET", "/v1/changes", auth=(name, "x"))
                return stack.enter_context(stream).status_code

            assert [opened("ann") for _ in range(6)] == [200] * 4 + [503] * 2
            assert [opened("bob") for _ in range(5)] == [200] * 4 + [503]
            assert opened("carl") == 503, "none is left"
            assert site.server.service.requests.streams == {"user ann": 4, "user bob": 4}
        eventually_now(lambda: not site.server.service.requests.streams)


def test_an_error_that_waited_is_checked_against_the_rights_at_its_end(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of an error's answer was a 500 in plain text."""
    after = Service.after
    file = with_users(tmp_path / "users.json", {"ann": "x"})

    async def removes(*arguments: Any, **more: Any) -> Any:
        with_users(file, {})
        return await after(*arguments, **more)

    monkeypatch.setattr(Service, "after", removes)
    with running(tmp_path / "data", source, users_file=file) as site:
        for path in ("/documents/none?token=1:1:1&timeout_ms=0", "/documents?vbid=1&token=1:1:1&timeout_ms=0"):
            with_users(file, {"ann": "x"})
            answer = site.client.get(f"/v1/collections/_default{path}", auth=("ann", "x"))
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:dcp-mirror:forbidden")


def test_every_answer_has_its_content_type_and_nosniff(site: Site) -> None:
    site.source.put("a")
    shown = site.get("/openapi.json").json()["paths"]
    for path, operations in shown.items():
        for filled in (
            path.format(collection="_default", key="a", vbid=1),
            path.format(collection="x", key="b", vbid=99),
        ):
            for method in operations:
                query = "?follow=false" if path == "/v1/changes" else ""
                answer = site.client.request(method, filled + query)
                assert answer.headers["x-content-type-options"] == "nosniff", (method, filled, answer.status_code)
    for path in ("/", "/page.js", "/openapi.json", "/nothing"):
        assert site.client.get(path).headers["x-content-type-options"] == "nosniff", path


def test_changes_are_not_sent_in_chunks_to_a_client_without_chunks(site: Site) -> None:
    answer = site.raw(b"GET /v1/changes?follow=false HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"transfer-encoding" not in answer.lower()
    assert b"use HTTP/1.1" in answer


def test_a_website_cannot_read_this_machine_by_a_name_of_its_own(site: Site) -> None:
    site.source.put("a")
    site.get(site.document("a"), 403, headers={"Host": "evil.example"})
    local = ("localhost", "localhost:8091", "127.0.0.1", "[::1]:80", "mirror.localhost")
    for host in (*local, "LOCALHOST", "localhost.", "LocalHost.:80", "Mirror.Localhost."):
        site.get(site.document("a"), headers={"Host": host})
    for path in ("/readyz", "/livez", "/openapi.json", "/", "/page.js", "/nothing"):
        site.get(path, 403, headers={"Host": "evil.example"})


def test_a_website_cannot_make_its_visitors_query_this_machine(site: Site) -> None:
    """As `<img src="http://localhost:8080/v1/...">` does: browsers say of such a request where it comes from."""
    site.source.put("a")
    page = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
    for path in (site.document("a"), "/v1/changes", "/v1/status", "/metrics", "/readyz", "/", "/page.js"):
        assert site.get(path, 403, headers=page).json()["type"] == "urn:dcp-mirror:forbidden"
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    site.get("/", headers=link)
    site.get("/v1/status", 403, headers=link)
    for own in ("same-origin", "same-site", "none"):
        site.get(site.document("a"), headers={"Sec-Fetch-Site": own})


def test_a_right_to_a_collection_follows_its_name_at_the_moment_read(source: Source, tmp_path: Path) -> None:
    """A collection that was dropped is in history under its number: only for those who could read it."""
    users = {"all": ("*",), "default": ("_default.*",), "shop": ("shop.orders",)}
    file = with_users(tmp_path / "users.json", {name: entry_of("x", patterns) for name, patterns in users.items()})
    for vbid in range(VBUCKETS):
        source.collections(vbid, Collection(9, 8, "orders", Seqno(0)))
    key = source.key_of(0).decode()
    there = source.put(key, b"1", collection_id=9)
    for vbid in range(VBUCKETS):
        source.collections(vbid)
    with running(tmp_path / "data", source, users_file=file) as site:
        scan = "/v1/collections/9/documents"
        at = {"as_of": str(there)}
        site.get(site.document(key, "9"), 404, auth=("all", "x"))
        for user, status in (("default", 403), ("all", 200), ("shop", 200)):
            auth = (user, "x")
            site.get(site.document(key, "9"), status, auth=auth, params=at)
            many = site.multi_get([key], status, "9", auth=auth, params=at)
            found = site.get(scan, status, auth=auth, params=at | {"vbid": "0"}).json()
            if status == 200:
                assert [each["key"] for each in many["documents"] + found["documents"]] == [key, key]
        for unknown in ("9", "12345"):
            site.get(site.document(key, unknown), 403, auth=("default", "x"))
            site.get(f"/v1/collections/{unknown}/documents", 403, auth=("default", "x"))
            site.get("/v1/changes", 403, auth=("default", "x"), params={"collection": unknown, "follow": "false"})
        pin = site.server.service.view.pin(0, there)
        page = Page(pin, b"", 9, b"", b"", None, True, False, there).text()
        site.get(scan, 403, auth=("default", "x"), params={"page": page})
        assert site.get(scan, auth=("shop", "x"), params={"page": page}).json()["documents"]


def test_a_mirror_is_ready_if_every_vbucket_is_published_and_near_its_source(site: Site) -> None:
    assert site.get("/livez").json() == {"status": "alive"}
    problem = site.get("/readyz", 503).json()
    assert problem["reasons"] == ["no service runs: nothing follows the source"]
    for vbid in range(VBUCKETS):
        site.source.put(site.source.key_of(vbid))
    report = service_report(site.data)
    for vbid, row, why in (
        (3, {"lag_seqnos": 10, "lag_s": 31.0}, f"1 of {VBUCKETS} vbuckets more than 30 s behind: 3"),
        (3, {"lag_seqnos": 10, "lag_s": 29.0}, None),
    ):
        report["vbuckets"][vbid] |= row
        site.stands(judged(report))
        assert site.get("/readyz", 503 if why else 200).json().get("reasons") == ([why] if why else None)


def test_the_metrics_agree_with_the_page(site: Site) -> None:
    site.source.put("a")
    site.stands(service_report(site.data))
    site.get(site.document("a"))
    site.get(site.document("b"), 404)
    answer = site.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.content)
    assert site.server.status()["counters"]["http_requests"] >= 2
    assert found["dcp_mirror_published_seqno", (("vbid", str(site.source.vbid_of(b"a"))),)] == 1
    assert found["dcp_mirror_vbucket_states", (("state", "streaming"),)] == VBUCKETS
    assert found["dcp_mirror_store_bytes", ()] > 0


def test_an_unknown_path_and_a_write_are_refused(site: Site) -> None:
    assert site.get("/nothing", 404).json()["type"] == "urn:dcp-mirror:not-found"
    answer = site.client.put(site.document("a"), content=b"{}")
    assert (answer.status_code, answer.json()["hint"]) == (405, "a mirror is only read; write to its source")
    assert "GET" in answer.headers["allow"]


def test_an_internal_error_reveals_no_internals(site: Site) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("/secret/path")

    site.server.service.status.rendered = broken  # type: ignore[assignment, method-assign]
    answer = site.get("/v1/status", 500)
    assert answer.json()["type"] == "urn:dcp-mirror:internal"
    assert "secret" not in answer.text
    site.get("/livez")


def test_a_vbucket_is_shown_with_its_history(site: Site) -> None:
    key = site.source.key_of(2)
    for _ in range(3):
        site.source.put(key)
    site.source.rollback(2, 1)
    site.stands({})
    found = site.get("/v1/vbuckets/2").json()
    assert found["status"]["published_seqno"] == 1
    assert [each["seqno"] for each in found["boundaries"]] == [1]
    assert [(each["from_seqno"], each["to_seqno"]) for each in found["rollbacks"]] == [(3, 1)]
    assert found["failover_log"] == [{"vbuuid": "00000000abcd", "seqno": 0}]
    site.get("/v1/vbuckets/99", 404)
    site.get("/v1/vbuckets/x", 400)
    assert len(site.get("/v1/vbuckets").json()["vbuckets"]) == VBUCKETS


def test_the_page_loads_nothing_from_elsewhere_and_cannot_be_framed(site: Site) -> None:
    answer = site.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "http://" not in answer.text
    assert "https://" not in answer.text
