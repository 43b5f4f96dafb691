"""Changes as server-sent events: in order, resumed by id, through rollbacks, and with readers that take nothing."""

from __future__ import annotations

import json
import select
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from mirror.server.turns import Budget
from storage.errors import CorruptedError
from storage.model import Collection, Seqno
from tests.serve.http_site import VBUCKETS, Site, events, request
from tests.supervise.conftest import eventually_now


class Listener:
    def __init__(self, response: Any) -> None:
        self.lines = response.iter_lines()
        self.last_id = ""

    def event(self) -> dict[str, Any]:
        block: list[str] = []
        for line in self.lines:
            block.append(line)
            if not line:
                found: dict[str, Any] = dict(*events("\n".join(block)))
                self.last_id = found.get("id", self.last_id)
                if "data" in found:
                    return found
                block.clear()
        raise EOFError

    def events(self, count: int) -> list[dict[str, Any]]:
        return [self.event() for _ in range(count)]


@contextmanager
def listening(site: Site, last_id: str = "", **params: Any) -> Iterator[Listener]:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    with site.client.stream("GET", "/v1/changes", params=params, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Listener(response)


def reported(event: dict[str, Any]) -> tuple[str, Any]:
    document = event["data"].get("document", {})
    return event["event"], document.get("value")


def test_an_event_is_one_line_for_clients_that_split_by_unicode(site: Site) -> None:
    """httpx's `iter_lines` is such a client."""
    text = "a\x85b\u2028c\u2029d"
    site.source.put(text, json.dumps(text, ensure_ascii=False).encode())
    with listening(site, follow="false", vbid=site.source.vbid_of(text.encode())) as listener:
        event = listener.event()
    assert (event["data"]["document"]["key"], event["data"]["document"]["value"]) == (text, text)


def test_a_stream_begins_with_stored_events_and_continues_with_new_ones(site: Site) -> None:
    key = site.source.key_of(2)
    site.source.put(key, b"1")
    site.source.put(key, b"2")
    with listening(site, vbid=2) as listener:
        assert [reported(event) for event in listener.events(2)] == [("mutation", 1), ("mutation", 2)]
        site.source.put(key, None)
        event = listener.event()
        assert (event["event"], event["data"]["document"]["deleted"]) == ("deletion", True)
        assert event["id"] == event["data"]["token"] == str(site.server.service.view.token(2, 1, 3))


def test_a_browser_that_reconnects_continues_after_its_last_event_not_at_the_position_of_its_url(site: Site) -> None:
    """EventSource repeats its URL unchanged, and adds the last id that it got as a header."""
    for number in range(5):
        site.source.put(site.source.key_of(2), b"%d" % number)
    page_load = str(site.server.service.view.token(2, 1, 1))
    with listening(site, vbid=2, since=page_load) as listener:
        assert [reported(event)[1] for event in listener.events(2)] == [1, 2]
        last = listener.last_id
    for since in (page_load, "now", str(site.server.service.view.token(2, 1, 5))):
        with listening(site, last, vbid=2, since=since, follow="false") as listener:
            found = [reported(event) for event in listener.events(3)]
        assert found == [("mutation", 3), ("mutation", 4), ("end", None)], since


def test_a_line_that_breaks_before_the_first_event_loses_none(site: Site) -> None:
    """EventSource repeats `since=now` in its URL; the position of the first request comes before all events."""
    site.source.put(site.source.key_of(2), b"1")
    with listening(site, since="now") as listener:
        lines = iter(listener.lines)
        last = next(line.removeprefix("id: ") for line in lines if line.startswith("id: "))
    site.source.put(site.source.key_of(2), b"2")
    with listening(site, last, since="now", follow="false") as listener:
        assert [reported(event) for event in listener.events(2)] == [("mutation", 2), ("end", None)]


def test_an_empty_last_id_leaves_the_position_of_the_url(site: Site) -> None:
    for number in range(2):
        site.source.put(site.source.key_of(2), b"%d" % number)
    params = {"vbid": 2, "since": str(site.server.service.view.token(2, 1, 1)), "follow": "false"}
    found = events(site.get("/v1/changes", params=params, headers={"Last-Event-ID": ""}).text)
    assert [reported(each) for each in found if "event" in each] == [("mutation", 1), ("end", None)]


def test_a_rollback_between_two_connections_is_reported_with_its_events(site: Site) -> None:
    a, b = site.source.key_of(2), site.source.key_of(2, 1)
    site.source.put(a, b"1")
    site.source.put(a, b"2")
    site.source.put(b, b"3")
    with listening(site, vbid=2) as listener:
        listener.events(3)
        last = listener.last_id
    site.source.rollback(2, 1)
    site.source.put(b, b"4")
    with listening(site, last_id=last, vbid=2) as listener:
        found = listener.events(5)
        expected = [("rollback", None), ("retraction", 2), ("restoration", 1), ("retraction", 3), ("mutation", 4)]
        assert [reported(event) for event in found] == expected
        assert found[0]["data"]["rollback"]["to_seqno"] == 1
        assert {event["id"] for event in found[:3]} == {last}, "until it is sent whole, it would be sent again"
        middle = found[3]["id"]
    with listening(site, last_id=middle, vbid=2) as listener:
        assert reported(listener.event()) == ("mutation", 4)


def test_a_rollback_under_a_listening_reader_is_reported_to_it(site: Site) -> None:
    key = site.source.key_of(2)
    site.source.put(key, b"1")
    with listening(site, vbid=2) as listener:
        assert reported(listener.event()) == ("mutation", 1)
        site.source.put(key, b"2")
        assert reported(listener.event()) == ("mutation", 2)
        site.source.rollback(2, 1)
        assert [reported(event)[0] for event in listener.events(3)] == ["rollback", "retraction", "restoration"]
        site.source.put(key, b"3")
        assert reported(listener.event()) == ("mutation", 3)


def test_all_vbuckets_resume_by_one_id(site: Site) -> None:
    for vbid in range(VBUCKETS):
        site.source.put(site.source.key_of(vbid), b"%d" % vbid)
    last = site.changes()[-1]["id"]
    assert last.startswith("z")
    for vbid in range(VBUCKETS):
        site.source.put(site.source.key_of(vbid), b"%d" % (vbid + 100))
    found = [reported(event) for event in site.changes(since=last)]
    assert sorted(found) == [("end", None), *(("mutation", vbid + 100) for vbid in range(VBUCKETS))]


def test_a_resync_ends_the_stream_with_a_reset_and_refuses_its_position(site: Site) -> None:
    key = site.source.key_of(2)
    site.source.put(key, b"1")
    with listening(site, vbid=2) as listener:
        listener.event()
        last = listener.last_id
        writer = site.source.writer(2)
        writer.vbuckets[2].begin_resync()
        writer.commit()
        site.source.seqnos[2] = 0
        site.source.put(key, b"9")
        event = listener.event()
        assert event["event"] == "reset"
        assert event["data"]["type"] == "urn:dcp-mirror:view-invalidated"
        assert event["data"]["vbid"] == 2
    problem = site.get("/v1/changes", 410, params={"vbid": 2}, headers={"Last-Event-ID": last}).json()
    assert problem["hint"] == "read it from the beginning"
    with listening(site, vbid=2) as listener:
        assert reported(listener.event()) == ("mutation", 9)


def test_a_stream_of_one_collection_sends_only_its_events(site: Site) -> None:
    site.source.collections(2, Collection(9, 8, "orders", Seqno(0)))
    key = site.source.key_of(2)
    site.source.put(key, b"1")
    site.source.put(key, b"2", collection_id=9)
    for collection in ("shop.orders", "9"):
        found = site.changes(vbid=2, collection=collection)
        assert [reported(each) for each in found] == [("system_event", None), ("mutation", 2), ("end", None)]
    assert [each["event"] for each in site.changes(vbid=2, collection="_default")] == ["mutation", "end"]
    assert [each["event"] for each in site.changes(vbid=2)] == ["system_event", "mutation", "mutation", "end"]


def test_an_idle_stream_sends_heartbeats_and_ends_at_a_stop(site: Site) -> None:
    site.server.service.heartbeat_s = 0.05
    with listening(site, since="now") as listener:
        for line in listener.lines:
            if line == ": heartbeat":
                break

        async def stop() -> None:
            site.server.service.stopping.set()
            site.server.service.watch.wake()

        site.call(stop())
        assert all(line in ("", ": heartbeat") for line in listener.lines)


def test_invalid_positions_are_refused(site: Site) -> None:
    for since in ("nonsense", "1:2", "znonsense", "zeJwDAAAAAAE", f"{VBUCKETS}:1:1", "1:1:1,1:1:2"):
        answer = site.client.get("/v1/changes", params={"since": since, "follow": "false"})
        assert answer.status_code in (400, 404), since
    site.get("/v1/changes", 400, params={"since": "1:1:1", "vbid": 2})
    site.get("/v1/changes", 410, params={"since": "1:77:1:00000000000000ff", "vbid": 1})
    site.source.put(site.source.key_of(2), b"1")
    known = site.server.service.view.token(2)
    site.get("/v1/changes", 410, params={"since": str(replace(known, history_id=known.history_id ^ 1)), "vbid": 2})
    problem = site.get("/v1/changes", 400, params={"since": "1:1:1", "vbid": 1}).json()
    assert "of an earlier version" in problem["detail"]
    assert site.client.head("/v1/changes").status_code == 200


@pytest.mark.parametrize(
    "error", [CorruptedError("row 7 is damaged", hint="run `dcp-mirror check`"), RuntimeError("/secret")]
)
def test_an_error_in_the_middle_is_reported_as_an_event_and_the_stream_can_be_resumed(
    site: Site, error: Exception
) -> None:
    key = site.source.key_of(2)
    site.source.put(key, b"1")
    view = site.server.service.view
    whole = view.changes
    with listening(site, vbid=2) as listener:
        assert reported(listener.event()) == ("mutation", 1)
        last = listener.last_id

        def broken(*_: Any, **__: Any) -> Any:
            raise error

        view.changes = broken  # type: ignore[method-assign]
        site.source.put(key, b"2")
        event = listener.event()
        assert event["event"] == "problem"
        if isinstance(error, CorruptedError):
            assert event["data"]["type"] == "urn:dcp-mirror:damaged"
            assert (event["data"]["detail"], event["data"]["hint"]) == (error.message, error.hint)
        else:
            assert event["data"]["type"] == "urn:dcp-mirror:internal"
            assert "secret" not in json.dumps(event)
        assert list(listener.lines) == [], "the answer ends as it should"
        view.changes = whole  # type: ignore[method-assign]
    with listening(site, last_id=last, vbid=2) as listener:
        assert reported(listener.event()) == ("mutation", 2)


def test_events_of_a_rollback_wait_for_the_budget_like_others(site: Site) -> None:
    """They once ended the stream, and were not counted until they were sent."""
    size = 400_000
    values = [b'"' + bytes([letter]) * size + b'"' for letter in b"abc"]
    keys = [site.source.key_of(2, number) for number in range(3)]
    site.source.put(keys[0], b"1")
    for key, value in zip(keys, values, strict=True):
        site.source.put(key, value)
    since = str(site.server.service.view.token(2))
    site.source.rollback(2, 1)
    budget = site.server.service.budget = Budget(2 * size)
    assert budget.try_take(2 * size)
    with listening(site, since=since, vbid=2) as listener:
        eventually_now(lambda: budget.waiting_count == 1)

        async def give_back() -> None:
            budget.give_back(2 * size)

        site.call(give_back())
        found = listener.events(5)
        kinds = ["rollback", "retraction", "restoration", "retraction", "retraction"]
        assert [each["event"] for each in found] == kinds
        given = [reported(each)[1] for each in found if each["event"] == "retraction"]
        assert given == [json.loads(value) for value in values]
    eventually_now(lambda: budget.out_bytes == 0)


def test_a_malformed_retracted_value_is_named_and_does_not_end_the_stream(site: Site) -> None:
    key = site.source.key_of(2)
    site.source.put(key, b"1")
    site.source.put(key, b"\xff\xff\xff\xff\x0f", datatype=3)
    since = str(site.server.service.view.token(2))
    site.source.rollback(2, 1)
    found = site.changes(vbid=2, since=since)
    assert [each["event"] for each in found] == ["rollback", "retraction", "restoration", "end"]
    document = found[1]["data"]["document"]
    assert (document["datatype"], document["value_b64"]) == (3, "/////w8=")
    assert document["problem"] == "a compressed value claims 4294967295 bytes; at most 33554432 are possible"


def test_one_stream_begins_in_each_turn(site: Site) -> None:
    """Eight clients that asked for the head alone once kept another waiting for the eight of them: 15 ms."""
    steps: list[Any] = []
    site.server.service.turns.call = steps.append  # type: ignore[method-assign,assignment]
    with site.connect() as line:
        line.sendall(request("/v1/changes?since=now", method="HEAD"))
        eventually_now(lambda: steps)
        assert not select.select([line], [], [], 0)[0]
        site.loop.call_soon_threadsafe(steps.pop())
        assert line.recv(100).startswith(b"HTTP/1.1 200")
