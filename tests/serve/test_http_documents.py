"""Documents over HTTP: one, several, pages; what they say of themselves, and when they are not there."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

import cramjam
import pytest

from mirror.serve.http.requests import TOKENS_MAX, Page, collection_name
from mirror.wire import frame as fr
from mirror.wire.constants import Opcode, Status
from storage.format import records
from storage.history.purge import Window
from storage.model import Collection, FailoverLog, Seqno
from storage.read.bulk import EVERY_KEY, KeyRange
from storage.read.view import AsOf, Time
from tests.oracle import kv_client
from tests.serve.http_site import VBUCKETS, VBUUID, Site, Source, service_report
from tests.serve.kv_rig import Endpoint
from tests.serve.test_kv_scans import b64, create, go_on


def moment_text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def test_a_document_is_sent_as_its_bytes_with_metadata_in_headers(site: Site) -> None:
    site.source.put("a", b'{"price": 1.10}')
    answer = site.get(site.document("a"))
    assert answer.content == b'{"price": 1.10}'
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["etag"] == f'"{1 << 16:016x}"'
    assert answer.headers["mirror-vbid"] == str(site.source.vbid_of(b"a"))
    assert (answer.headers["mirror-seqno"], answer.headers["mirror-cas"]) == ("1", str(1 << 16))
    head = site.client.head(site.document("a"))
    assert (head.status_code, head.content) == (200, b"")
    assert {**head.headers, "date": ""} == {**answer.headers, "date": ""}


def test_a_version_known_by_its_etag_is_not_sent_again(site: Site) -> None:
    site.source.put("a")
    tag = site.get(site.document("a")).headers["etag"]
    for header in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = site.get(site.document("a"), 304, headers={"If-None-Match": header})
        assert (answer.content, answer.headers["etag"]) == (b"", tag)
    for lines in ((tag, '"other"'), ('"other"', tag), ('"other"', f'"x", W/{tag}')):
        site.get(site.document("a"), 304, headers=[("If-None-Match", line) for line in lines])
    site.get(site.document("a"), headers={"If-None-Match": '"x",' * 20_000 + tag})  # too long a list to take apart
    site.source.put("a", b'{"v":2}')
    answer = site.get(site.document("a"), headers={"If-None-Match": tag})
    assert answer.content == b'{"v":2}'
    assert answer.headers["etag"] != tag


def test_the_stored_form_has_the_bytes_of_the_source(site: Site) -> None:
    xattrs = b"\x00\x00\x00\x0a_x\x001234\x00\x00\x00"
    plain = len(xattrs[4:]).to_bytes(4, "big") + xattrs[4:] + b'{"v":1}'
    stored = bytes(cramjam.snappy.compress_raw(plain))
    site.source.put("a", stored, datatype=7)
    body = site.get(site.document("a"))
    assert (body.content, body.headers["mirror-datatype"]) == (b'{"v":1}', "1")
    raw = site.get(site.document("a"), params={"form": "stored"})
    assert (raw.content, raw.headers["mirror-datatype"]) == (stored, "7")
    assert raw.headers["content-type"] == "application/octet-stream"
    assert raw.headers["etag"] != body.headers["etag"]


ODD_KEYS = [b"a/b//c", b"/", b"//", b"\xff\x00\xfe", "schlüssel".encode(), b"%41", b"a?b#c", b".", b"..", b"a" * 250]


def test_every_key_can_be_requested_and_listed(site: Site) -> None:
    """A line feed at the end was dropped once, and another document sent."""
    base = "/v1/collections/_default/documents"
    bytes_at_places = (
        shape % bytes([byte]) for byte in range(256) for shape in (b"%b-at", b"at-%b-at", b"at-%b", b"%b")
    )
    keys = sorted({*bytes_at_places, *ODD_KEYS, b"order-1", b"order-1\n", b"\norder-1", b"order-1\n\n", b"order\n-1"})
    for vbid in range(VBUCKETS):
        there = [(key, b"value of " + key) for key in keys if site.source.vbid_of(key) == vbid]
        site.source.snapshot(vbid, *there, datatype=0)
    for key in keys:
        escaped = "".join(f"%{byte:02X}" for byte in key)
        coded = base64.urlsafe_b64encode(key).rstrip(b"=").decode()
        urls = [f"{base}/{coded}?key_encoding=base64url"]
        if key not in (b".", b".."):  # every client takes these for folders
            urls += [f"{base}/{escaped}", f"{base}/{quote(key)}"]
        for url in urls:
            answer = site.client.get(url)
            assert (answer.status_code, answer.content) == (200, b"value of " + key), url
        vbid = site.source.vbid_of(key)
        rows = site.client.get(f"{base}?prefix={escaped}&limit=1&vbid={vbid}").json()["documents"]
        assert [base64.b64decode(each["key_b64"]) if "key_b64" in each else each["key"].encode() for each in rows] == [
            key
        ]
    found = site.client.post(
        "/v1/collections/_default/multi-get",
        json={"keys_b64": [base64.urlsafe_b64encode(key).decode() for key in keys[:1000]]},
    ).json()
    assert (len(found["documents"]), found["missing"]) == (len(keys[:1000]), [])


@pytest.mark.parametrize("url", ["?prefix=%FF&as_of=%FF", "?vbid=%FF", "?%FF=1", "/a?form=%FF"])
def test_parameters_that_are_not_utf_8_are_bad_requests(site: Site, url: str) -> None:
    assert site.get(f"/v1/collections/_default/documents{url}", 400).json()["type"] == "urn:dcp-mirror:bad-request"


def test_a_missing_document_and_a_missing_collection_are_different_errors(site: Site) -> None:
    site.source.put("a")
    site.stands(service_report(site.data))
    assert site.get(site.document("a", "shop.orders"), 404).json()["type"] == "urn:dcp-mirror:no-collection"
    site.get(site.document("a", "99"), 404)
    site.source.put("a", None)
    site.source.put("b", b"{}", expiry=1_700_000_000)
    for key in ("none", "a", "b"):
        assert site.get(site.document(key), 404).json()["type"] == "urn:dcp-mirror:no-document"


def test_collections_are_listed_with_their_scope_and_expiry(site: Site) -> None:
    for vbid in range(VBUCKETS):
        site.source.collections(vbid, Collection(9, 8, "orders", Seqno(0), 60))
    assert site.get("/v1/collections").json()["collections"] == [
        {"collection_id": 0, "scope": "_default", "name": "_default", "max_ttl": None},
        {"collection_id": 9, "scope": "shop", "name": "orders", "max_ttl": 60},
    ]


def test_a_collection_that_one_vbucket_has_is_known(site: Site) -> None:
    """Vbuckets learn of a collection at different times; the first one alone was asked."""
    orders = Collection(9, 8, "orders", Seqno(0))
    site.source.collections(5, orders)
    site.source.put(site.source.key_of(5), b"1", collection_id=9)
    for collection in ("shop.orders", "9"):
        assert [row["value"] for page in site.pages(collection=collection, limit=1) for row in page["documents"]] == [1]
        assert [each["event"] for each in site.changes(collection=collection)] == ["system_event", "mutation", "end"]
        site.scan(404, collection=collection, vbid=0)
    site.scan(404, collection="shop.others")


def test_a_collection_has_in_each_vbucket_the_id_that_the_vbucket_knows(site: Site) -> None:
    """Pages resolved the name once, in the first vbucket. It was recreated there, so the documents of seven others
    were left out.
    """
    keys = [site.source.key_of(vbid) for vbid in range(VBUCKETS)]
    for vbid, key in enumerate(keys):
        site.source.collections(vbid, Collection(8, 8, "orders", Seqno(0)))
        site.source.put(key, collection_id=8)
    site.source.collections(0, Collection(9, 8, "orders", Seqno(0)))
    view = site.server.service.view
    for name in ("shop.orders", 8):
        assert [each.key for each in view.scan(collection=name)] == keys[1:]
        for limit in (1, 100):
            pages = site.pages(collection=name, limit=limit)
            assert [row["key"].encode() for page in pages for row in page["documents"]] == keys[1:]
        reading = view.reading()
        stored = [row for vbid in view.vbids for rows in reading.rows(vbid, [name]) for row in rows.stored]
        assert [records.key_of(row)[1:] for row in stored] == keys[1:]
    assert not any(page["documents"] for page in site.pages(collection="9"))


def test_a_multi_get_answers_in_the_requested_order(site: Site) -> None:
    site.source.put("a", b'{"big": 12345678901234567890123, "n":\n 1e400}')
    site.source.put(b"\xff", b"\x00\x01", datatype=0)
    query = {"keys": ["none", "a"], "keys_b64": ["_w"]}
    answer = site.client.post("/v1/collections/_default/multi-get", json=query)
    assert answer.status_code == 200
    assert b'"value":{"big": 12345678901234567890123, "n":  1e400}' in answer.content, "not a digit is lost"
    found = answer.json()
    assert [row.get("key", row.get("key_b64")) for row in found["documents"]] == ["a", "/w=="]
    assert found["documents"][1]["value_b64"] == "AAE="
    assert found["missing"] == [{"key": "none"}]


def test_pages_show_one_state_of_each_vbucket_while_it_is_written(site: Site) -> None:
    expected = {f"key-{number:02d}": 1 for number in range(40)}
    for key in expected:
        site.source.put(key, b"1")
    pages = [site.scan(limit=3)]
    while pages[-1]["next"] is not None:
        site.source.put(site.source.key_of(pages[-1]["at"]["vbid"], 90 + len(pages)), b"2")
        pages.append(site.scan(limit=3, page=pages[-1]["next"]))
    found = [(row["key"], row["value"]) for page in pages for row in page["documents"] if row["key"] in expected]
    assert sorted(found) == sorted(expected.items())
    assert all(len(page["documents"]) <= 3 for page in pages)
    at = [page["at"]["vbid"] for page in pages]
    assert at == sorted(at)


class Written(NamedTuple):
    seqno: int
    time_ms: int
    collection_id: int
    key: bytes
    """Empty: the collection was flushed."""
    expiry: int = 0
    deleted: bool = False


class Past:
    """Everything that was written, so the documents at each boundary."""

    def __init__(self, source: Source, rng: Random) -> None:
        self.source, self.rng = source, rng
        self.keys = sorted(source.key_of(vbid, number) for vbid in range(VBUCKETS) for number in range(12))
        self.moments: list[AsOf] = [None]
        self._written: dict[int, list[Written]] = {vbid: [] for vbid in range(VBUCKETS)}
        for _ in range(2):
            for vbid in range(VBUCKETS):
                self._flush(vbid)
            for number, key in enumerate(self.keys):
                expiry = 1 if number % 16 > 6 else rng.choice((0, source.now_ms // 1000 + 100))
                self._put(key, rng.choice((0, 9)), expiry)
                if number % 16 > 6 and number % 2:
                    self._put(key, rng.choice((0, 9)), None)
                if rng.random() < 0.1:
                    self._roll_back(source.vbid_of(key))
            self.moments += (Time(source.now_ms + after_ms) for after_ms in (100, 90_000, 101_000))
            source.now_ms += 1_000_000

    def _put(self, key: bytes, collection_id: int, expiry: int | None) -> None:
        value = None if expiry is None else b"1"
        more = {} if expiry is None else {"expiry": expiry}
        seqno = self.source.put(key, value, collection_id=collection_id, **more)
        found = Written(seqno, self.source.now_ms, collection_id, key, expiry or 0, expiry is None)
        self._written[self.source.vbid_of(key)].append(found)

    def _flush(self, vbid: int) -> None:
        seqno = self.source.seqnos.get(vbid, 0) + 1
        self.source.collections(vbid, Collection(9, 8, "orders", Seqno(seqno)))
        self._written[vbid].append(Written(seqno, self.source.now_ms, 9, b""))

    def _roll_back(self, vbid: int) -> None:
        to = self.source.rollback(vbid, self.rng.choice(self._written[vbid]).seqno)
        self._written[vbid] = [each for each in self._written[vbid] if each.seqno <= to]

    def at(
        self, vbid: int, collection_id: int, as_of: AsOf = None, *, deletions: bool = False, expired: bool = False
    ) -> list[Written]:
        """The documents of a vbucket; with `deletions` also tombstones and expired ones, which `expired` has alone."""
        limit = as_of.ms if isinstance(as_of, Time) else as_of
        at = [
            each
            for each in self._written[vbid]
            if limit is None or (each.time_ms if isinstance(as_of, Time) else each.seqno) <= limit
        ]
        now_ms = as_of.ms if isinstance(as_of, Time) else at[-1].time_ms if as_of is not None else time.time() * 1000
        found: dict[bytes, Written] = {}
        for each in at:
            if each.collection_id == collection_id and each.key:
                found[each.key] = each
            elif each.collection_id == collection_id:
                found.clear()
        return [
            each
            for _, each in sorted(found.items())
            if deletions or not (each.deleted or (not expired and 0 < each.expiry * 1000 <= now_ms))
        ]


@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_every_way_to_read_gives_the_documents_that_were_written(site: Site, limit: int) -> None:
    """`start` was forgotten behind the first vbucket, and a page that ended with its collection continued at the key of
    the next one. Expired and deleted keys fill a page without documents.
    """
    rng, view = Random(limit), site.server.service.view
    past = Past(site.source, rng)
    keys = past.keys
    for _ in range(20):
        encoding, collection = rng.choice(("utf8", "base64url")), rng.choice(("_default", "shop.orders", "9"))
        collection_id = 0 if collection == "_default" else 9
        bounds: dict[str, Any] = {"prefix": rng.choice((b"", b"", keys[0][:-1])), "start": rng.choice((b"", *keys))}
        bounds |= rng.choice(({}, {"end": rng.choice((b"", *keys))}))
        vbid, deletions, as_of = rng.choice((None, 0, 5)), rng.choice((True, False)), rng.choice(past.moments)
        if vbid is not None and rng.random() < 0.3:
            as_of = rng.choice(view.boundaries(vbid)).seqno
        vbids = range(VBUCKETS) if vbid is None else [vbid]
        named = collection_name(collection)

        def within(found: list[Written], bounds: dict[str, Any] = bounds) -> list[Written]:
            end = bounds.get("end", b"\xff")
            return [e for e in found if e.key.startswith(bounds["prefix"]) and bounds["start"] <= e.key < end]

        written = [within(past.at(each, collection_id, as_of, deletions=deletions)) for each in vbids]
        expected = [(each.key, each.seqno, each.deleted) for found in written for each in found]
        at: dict[str, Any] = {}
        if as_of is not None:
            at["as_of"] = moment_text(as_of.ms) if isinstance(as_of, Time) else as_of
        params: dict[str, Any] = {
            name: key.decode() if encoding == "utf8" else base64.urlsafe_b64encode(key).decode()
            for name, key in bounds.items()
        }
        params |= at | ({} if vbid is None else {"vbid": vbid})
        params |= {"key_encoding": encoding, "deletions": str(deletions).lower(), "collection": collection}
        pages = [row for page in site.pages(limit=limit, **params) for row in page["documents"]]
        assert [(row["key"].encode(), row["seqno"], row["deleted"]) for row in pages] == expected, params
        scan = view.scan(vbid, **bounds, collection=named, as_of=as_of, deletions=deletions)
        assert [(each.key, each.seqno, each.deleted) for each in scan] == expected, params

        chosen = [key for key in rng.sample(keys, 20) if site.source.vbid_of(key) in vbids]
        live = {each.key: each.seqno for vbid in vbids for each in past.at(vbid, collection_id, as_of)}
        there = {key: live[key] for key in chosen if key in live}
        multi = site.multi_get(chosen, collection=collection, params=at)
        assert {row["key"].encode(): row["seqno"] for row in multi["documents"]} == there
        assert [row["key"].encode() for row in multi["missing"]] == [key for key in chosen if key not in there]
        many = view.get_many(chosen, named, as_of=as_of)
        assert {key: each.seqno for key, each in many.items()} == there
        for key in chosen[:3]:
            answer = site.client.get(site.document(key.decode(), collection), params=at)
            assert (answer.status_code, answer.headers.get("mirror-seqno")) == (
                (200, str(there[key])) if key in there else (404, None)
            )
            document = view.get(key, named, as_of=as_of)
            assert (document and document.seqno) == there.get(key)

        key_range = KeyRange(bounds["start"], bounds["prefix"], bounds.get("end"))
        for each_range in (key_range, EVERY_KEY):
            for each in vbids:
                rows = view.reading(vbids, as_of=as_of).rows(each, [named], each_range)
                found = sorted(records.key_of(row)[1:] for part in rows for row in part.stored)
                stored = past.at(each, collection_id, as_of, expired=True)
                assert found == [row.key for row in (stored if each_range is EVERY_KEY else within(stored))]
    for vbid in range(VBUCKETS):
        assert view.count(vbid) == sum(len(past.at(vbid, each)) for each in (0, 9))
    asyncio.run(_ask_by_kv(past, limit))


async def _ask_by_kv(past: Past, limit: int) -> None:
    rng = past.rng
    async with Endpoint.serving(past.source.path) as endpoint:
        client = await endpoint.sdk()
        for _ in range(40):
            vbid, collection_id = rng.randrange(VBUCKETS), rng.choice((0, 9))
            names = rng.choice(("start", "excl_start")), rng.choice(("end", "excl_end"))
            start, end = rng.choice((b"", *past.keys)), rng.choice((b"\xff", *past.keys))
            body: dict[str, Any] = {
                "range": {names[0]: b64(start), names[1]: b64(end)},
                "collection": f"{collection_id:x}",
            }
            expected = [
                (each.key, each.seqno)
                for each in past.at(vbid, collection_id)
                if (start < each.key or (start == each.key and names[0] == "start"))
                and (each.key < end or (each.key == end and names[1] == "end"))
            ]
            if rng.random() < 0.2:
                body = {"sampling": {"samples": 1000}, "collection": f"{collection_id:x}"}
                expected = [(each.key, each.seqno) for each in past.at(vbid, collection_id)]
            made = await client.ask(create(body, vbid=vbid))
            found: list[tuple[bytes, int]] = []
            answer = made
            while made.status != Status.KEY_ENOENT and answer.status != Status.RANGE_SCAN_COMPLETE:
                answer = await client.ask(go_on(made.value, limit, vbid=vbid))
                assert answer.status in (Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE)
                found += [(each.key, each.seqno) for each in kv_client.decode_scan_items(answer.value, keys_only=False)]
            assert found == expected, body
        for key in past.keys:
            vbid = past.source.vbid_of(key)
            for collection_id in (0, 9):
                live = {each.key: each.seqno << 16 for each in past.at(vbid, collection_id)}
                request = fr.request(Opcode.GET, vbucket=vbid, key=bytes([collection_id]) + key)
                answer = await client.ask(request)
                assert (answer.cas if not answer.status else None) == live.get(key)


def test_a_rollback_between_two_pages_is_reported(site: Site) -> None:
    keys = [site.source.key_of(5, number) for number in range(6)]
    for key in keys:
        site.source.put(key)
    first = site.scan(vbid=5, limit=2)
    assert len(first["documents"]) == 2
    site.source.put(keys[0], b"2")
    assert len(site.scan(page=first["next"])["documents"]) == 4
    site.source.rollback(5, 4)
    page = Page.parse(first["next"], VBUCKETS, "_default._default")
    strange = replace(page, pin=replace(page.pin, history_id=page.pin.history_id ^ 1))
    site.scan(410, page=strange.text())
    problem = site.scan(410, page=first["next"])
    assert problem["type"] == "urn:dcp-mirror:view-invalidated"
    assert problem["hint"].startswith("start the read again")
    assert problem["vbid"] == 5
    assert {row["key"].encode() for row in site.scan(vbid=5)["documents"]} == set(keys[:4])


def test_a_page_of_a_rolled_back_collection_is_gone_not_the_last(site: Site) -> None:
    site.source.put(site.source.key_of(5, 9))
    site.source.collections(5, Collection(9, 8, "orders", Seqno(0)))
    for number in range(4):
        site.source.put(site.source.key_of(5, number), collection_id=9)
    pages = {each: site.scan(collection=each, vbid=5, limit=2)["next"] for each in ("shop.orders", "9")}
    site.scan(400, "_default", page=pages["9"])
    site.source.rollback(5, 1)
    background = site.source.writer(5).background
    background.purger.window = Window(time_ms=0)
    while (vbid := background.purger.plan(site.source.clock())) is not None:
        background.purge(vbid, site.source.clock())
    for collection, page in pages.items():
        assert site.scan(410, collection, page=page)["type"] == "urn:dcp-mirror:view-invalidated"


def test_an_impossible_scan_is_refused(site: Site) -> None:
    path = "/v1/collections/_default/documents"
    site.source.put(site.source.key_of(1))
    site.get(path, 410, params={"vbid": 1, "as_of": "2001-01-01T00:00:00Z"})
    queries: tuple[dict[str, str | int], ...] = (
        {"as_of": 3}, {"as_of": "yesterday", "vbid": 1}, {"limit": 0}, {"limit": 1001}, {"vbid": VBUCKETS + 1},
        {"unknown": 1}, {"page": "nonsense"}, {"page": "nonsense", "prefix": "a"}, {"deletions": "maybe"},
    )  # fmt: skip
    for wrong in queries:
        answer = site.client.get(path, params=wrong)
        assert answer.status_code in (400, 404), wrong
        assert answer.headers["content-type"] == "application/problem+json"


def test_a_read_waits_for_the_write_it_names(site: Site) -> None:
    key = site.source.key_of(4)
    site.source.put(key, b"1")
    name = key.decode()
    assert site.get(site.document(name), params={"token": f"4:{VBUUID}:1"}).content == b"1"
    late = site.get(site.document(name), 504, params={"token": f"4:{VBUUID}:2", "timeout_ms": 50}).json()
    assert late["type"] == "urn:dcp-mirror:not-published-in-time"
    timer = threading.Timer(0.2, site.source.put, (key, b"2"))
    timer.start()
    answer = site.get(site.document(name), params={"token": f"4:{VBUUID}:2", "timeout_ms": 20_000})
    timer.join()
    assert answer.content == b"2"
    assert site.multi_get([name], params={"token": f"4:{VBUUID}:2"})["documents"][0]["value"] == 2
    site.get(site.document(name), 400, params={"token": "4:2"})
    site.get(site.document(name), 400, params={"token": [f"4:{VBUUID}:1"] * (TOKENS_MAX + 1)})
    site.get(site.document(name), 404, params={"token": f"{VBUCKETS}:1:1"})


def test_a_write_that_was_rolled_back_is_reported_lost_at_once(site: Site) -> None:
    key = site.source.key_of(4)
    site.source.put(key, b"1")
    site.source.put(key, b"2")
    site.source.rollback(4, 1)
    writer = site.source.writer(4)
    writer.vbuckets[4].save(failover_log=FailoverLog.of([(77, 1), (VBUUID, 0)]))
    writer.commit()
    problem = site.get(site.document(key.decode()), 409, params={"token": f"4:{VBUUID}:2", "timeout_ms": 60_000}).json()
    assert (problem["type"], problem["hint"]) == ("urn:dcp-mirror:write-lost", "write it again")


def test_an_answer_beyond_its_limit_is_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirror.serve.http.documents.ANSWER_BYTES_MAX", 8 << 20)
    monkeypatch.setattr("mirror.serve.http.documents.PAGE_BYTES_MAX", 1 << 20)
    for number in range(4):
        site.source.put(b"big-%d" % number, b"x" * (17 << 17), datatype=0)
    site.stands(service_report(site.data))
    assert site.multi_get([f"big-{number}" for number in range(4)], 413)["type"] == "urn:dcp-mirror:too-large"
    assert len(site.get(site.document("big-1")).content) == 17 << 17
    assert sum(bool(page["documents"]) for page in site.pages()) == 4, "a page ends where its bytes are many"


def test_a_multi_get_without_keys_needs_an_existing_collection(site: Site) -> None:
    """Any name was answered by 200."""
    for collection, status in (("_default", 200), ("_default.none", 404), ("a b", 404)):
        site.multi_get([], status, collection)
