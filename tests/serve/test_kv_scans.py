"""Range scans and samples over the wire, and with the official SDK in test_official_sdk.py."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.document import values
from mirror.serve.kv import scans as kv_scans
from mirror.serve.kv.scan_request import Requirements, ScanBounds, parse
from mirror.server.errors import Refused
from mirror.wire import frame as fr
from mirror.wire.codec_kv import ScanItem, ScanLimits
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame
from storage.model import Collection, Seqno
from tests.oracle import kv_client
from tests.serve.kv_rig import ALL_FEATURES, DEFAULT, Client, Endpoint, Store, serving

VBUCKETS = 1
VBUUID = 77
KEYS = [b"k%02d" % number for number in range(40)]


@pytest.fixture
def store(store: Store) -> Store:
    """A vbucket with forty documents."""
    for seqno, key in enumerate(KEYS, 1):
        store.put(key, b"value of " + key, seqno, cas=seqno + 100, flags=7)
    return store


@pytest.fixture
async def client(endpoint: Endpoint) -> Client:
    return await endpoint.sdk()


def b64(key: bytes) -> str:
    return base64.b64encode(key).decode()


def as_bytes(body: object) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def create(body: object, *, datatype: int = 1, vbid: int = 0) -> Frame:
    return fr.request(Opcode.RANGE_SCAN_CREATE, value=as_bytes(body), datatype=datatype, vbucket=vbid, opaque=5)


def between(start: bytes = b"", end: bytes = b"\xff", **more: Any) -> dict[str, Any]:
    return {"range": {"start": b64(start), "end": b64(end)}, **more}


def go_on(name: bytes, items: int = 0, size: int = 0, *, vbid: int = 0, opaque: int = 6) -> Frame:
    extras = kv_client.encode_scan_continue(ScanLimits(name, items, size))
    return fr.request(Opcode.RANGE_SCAN_CONTINUE, extras=extras, vbucket=vbid, opaque=opaque)


def cancel(name: bytes) -> Frame:
    return fr.request(Opcode.RANGE_SCAN_CANCEL, extras=name, opaque=8)


async def begin(client: Client, body: object) -> bytes:
    answer = await client.ask(create(body))
    assert answer.status == Status.SUCCESS, answer.value
    assert len(answer.value) == 16
    return answer.value


async def read(client: Client, name: bytes, *, items: int = 0, size: int = 0) -> tuple[list[ScanItem], int]:
    """All items, and how many answers they came in."""
    found: list[ScanItem] = []
    for count in range(1, 1000):
        answer = await client.ask(go_on(name, items, size))
        assert answer.status in (Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE), answer.value
        page = kv_client.decode_scan_items(answer.value, keys_only=answer.extras == bytes(4))
        assert len(page) <= (items or kv_scans.PAGE_ITEMS)
        found += page
        if answer.status == Status.RANGE_SCAN_COMPLETE:
            return found, count
        assert page, "an answer before the end has something"
    raise AssertionError("the scan never ended")


async def keys(client: Client, body: object) -> list[bytes]:
    return [item.key for item in (await read(client, await begin(client, body)))[0]]


async def test_documents_come_complete_and_in_pages_of_the_requested_size(client: Client) -> None:
    found, answers = await read(client, await begin(client, between()), items=7)
    assert answers == 6
    assert found[4] == ScanItem(b"k04", b"value of k04", 7, 0, 5, 105, 0)
    by_size, answers = await read(client, await begin(client, between()), size=30)
    assert by_size == found
    assert answers == 20
    one_by_one, answers = await read(client, await begin(client, between()), size=1)
    assert one_by_one == found
    assert answers == 40


async def test_a_scan_shows_one_moment_while_the_vbucket_is_written(store: Store, client: Client) -> None:
    name = await begin(client, between())
    first = await client.ask(go_on(name, 3))
    for seqno, key in enumerate(KEYS[:20], 100):
        store.put(key, b"later", seqno)
    store.put(b"k99", b"later", 200)
    store.delete(b"k30", 201)
    rest, _ = await read(client, name, items=4)
    found = kv_client.decode_scan_items(first.value, keys_only=False) + rest
    assert [(item.key, item.value) for item in found] == [(key, b"value of " + key) for key in KEYS]
    assert await keys(client, between(b"k29", b"k99")) == [*KEYS[29:30], *KEYS[31:], b"k99"]


async def test_a_resync_cancels_scans_and_new_ones_wait_for_its_end(store: Store, client: Client) -> None:
    name = await begin(client, between())
    store.writer.vbuckets[0].begin_resync()
    store.writer.commit()
    assert (await client.ask(go_on(name, 3))).status == Status.RANGE_SCAN_CANCELLED
    assert (await client.ask(create(between()))).status == Status.ETMPFAIL


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_scan_gives_every_document_of_the_range_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever the sizes of the documents, the limits of the answers, and the form of the values."""
    sizes = data.draw(st.lists(st.sampled_from((0, 1, 90, 5_000, 300_000, 1_100_000)), min_size=1, max_size=12))
    limits = st.tuples(st.sampled_from((0, 1, 2, 5)), st.sampled_from((0, 1, 100, 6_000, 1_000_000)))
    packed, xattrs, keys_only, snappy = (data.draw(st.booleans()) for _ in range(4))
    first, last = sorted(data.draw(st.integers(0, len(sizes))) for _ in "ab")
    bodies = [bytes([number]) * size for number, size in enumerate(sizes)]

    async def scanned() -> list[tuple[bytes, bytes]]:
        store = Store(tmp_path_factory.mktemp("scan"), vbuckets=1)
        for number, body in enumerate(bodies):
            value, datatype = values.join({b"_x": b"1"}, body, 0) if xattrs else (body, 0)
            if packed:
                value, datatype = bytes(cramjam.snappy.compress_raw(value)), datatype | values.SNAPPY
            store.put(b"%03d" % number, value, number + 1, datatype=datatype)
        found: list[ScanItem] = []
        async with serving(store.path) as endpoint:
            client = await endpoint.sdk()
            await client.hello(*{*ALL_FEATURES} - {Feature.TRACING, *(() if snappy else (Feature.SNAPPY,))})
            made = await client.ask(create(between(b"%03d" % first, b"%03d" % last, key_only=keys_only)))
            status = made.status
            while status in (Status.SUCCESS, Status.RANGE_SCAN_MORE):
                answer = await client.ask(go_on(made.value, *data.draw(limits)))
                found += kv_client.decode_scan_items(answer.value, keys_only=keys_only)
                status = Status(answer.status)
            assert status == Status.RANGE_SCAN_COMPLETE
        store.close()
        return [(each.key, values.inflate(each.value or b"", each.datatype)[0]) for each in found]

    expected = [(b"%03d" % number, b"" if keys_only else bodies[number]) for number in range(len(sizes))]
    assert asyncio.run(scanned()) == expected[first : last + 1]


async def test_an_ended_or_cancelled_scan_is_gone(client: Client) -> None:
    ended = await begin(client, between())
    await read(client, ended)
    cancelled = await begin(client, between())
    assert (await client.ask(cancel(cancelled))).status == Status.SUCCESS
    for name in (ended, cancelled, bytes(16)):
        assert (await client.ask(go_on(name))).status == Status.KEY_ENOENT
        assert (await client.ask(cancel(name))).status == Status.KEY_ENOENT
    assert (await client.ask(go_on(await begin(client, between()), vbid=1))).status == Status.KEY_ENOENT


async def test_a_scan_belongs_to_its_connection_and_expires(
    endpoint: Endpoint, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = await begin(client, between())
    other = await endpoint.sdk()
    assert (await other.ask(go_on(name))).status == Status.KEY_ENOENT
    assert (await client.ask(go_on(name, 1))).status == Status.RANGE_SCAN_MORE
    monkeypatch.setattr(kv_scans, "LIFETIME_S", 0.0)
    short = await begin(client, between())
    assert (await client.ask(go_on(short, 1))).status == Status.KEY_ENOENT


async def test_a_connection_has_a_limited_number_of_scans(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_scans, "SCANS_MAX", 3)
    names = [await begin(client, between()) for _ in range(3)]
    assert (await client.ask(create(between()))).status == Status.EBUSY
    await client.ask(cancel(names[0]))
    await begin(client, between())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", Status.EINVAL),
        (between(collection="8"), Status.UNKNOWN_COLLECTION),
        (between(snapshot_requirements={"vb_uuid": "78", "seqno": 1}), Status.VB_UUID_NOT_EQUAL),
        (between(snapshot_requirements={"vb_uuid": "77", "seqno": 41}), Status.ETMPFAIL),
        (between(snapshot_requirements={"vb_uuid": "77", "seqno": 40, "seqno_exists": True}), Status.SUCCESS),
    ],
)
async def test_an_impossible_scan_is_refused_with_the_status_of_the_engine(
    client: Client, body: object, status: int
) -> None:
    assert (await client.ask(create(body))).status == status
    assert await client.alive()


async def test_malformed_requests_are_refused(client: Client) -> None:
    assert (await client.ask(create(between(), datatype=0))).status == Status.EINVAL
    assert (await client.ask(create(between(), vbid=1))).status == Status.NOT_MY_VBUCKET
    for opcode in (Opcode.RANGE_SCAN_CREATE, Opcode.RANGE_SCAN_CONTINUE, Opcode.RANGE_SCAN_CANCEL):
        assert (await client.ask(fr.request(opcode, extras=b"short"))).status == Status.EINVAL


async def test_a_scan_that_requires_a_seqno_is_refused_without_it(store: Store, client: Client) -> None:
    store.put(KEYS[0], b"again", 50)
    for seqno, status in ((1, Status.NOT_STORED), (2, Status.SUCCESS), (45, Status.NOT_STORED), (50, Status.SUCCESS)):
        required = {"vb_uuid": str(VBUUID), "seqno": seqno, "seqno_exists": True}
        assert (await client.ask(create(between(snapshot_requirements=required)))).status == status


async def test_samples_have_about_the_requested_size_and_repeat_with_their_seed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mirror.serve.bucket.bucket.COUNT_KEYS", 3)
    assert await keys(client, {"sampling": {"samples": 40}}) == KEYS
    assert await keys(client, {"sampling": {"samples": 1000, "seed": 5}, "key_only": True}) == KEYS
    some = await keys(client, {"sampling": {"samples": 20, "seed": 5}})
    assert 8 <= len(some) <= 32
    assert some == await keys(client, {"sampling": {"samples": 20, "seed": 5}})
    assert some != await keys(client, {"sampling": {"samples": 20, "seed": 6}})
    assert await keys(client, {"sampling": {"samples": 0}}) == []


async def test_two_simultaneous_continues_of_a_scan_give_successive_pages(client: Client) -> None:
    name = await begin(client, between())
    await client.send(go_on(name, 1, opaque=1), go_on(name, 1, opaque=2))
    answers = [await client.answer() for _ in "ab"]
    assert [each.opaque for each in answers] == [1, 2]
    assert [kv_client.decode_scan_items(each.value, keys_only=False)[0].key for each in answers] == [b"k00", b"k01"]


async def test_a_page_without_documents_yields_the_worker_to_others(
    store: Store, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        store.put(b"x%03d" % number, b"", 1000 + 2 * number)
        store.delete(b"x%03d" % number, 1001 + 2 * number)
    store.put(b"y", b"", 2000)
    monkeypatch.setattr(kv_scans, "PAGE_S", 0.0)
    name = await begin(client, between(b"x"))
    found, answers = await read(client, name, items=7)
    assert ([item.key for item in found], answers) == ([b"y"], 1)


async def test_a_scan_ends_at_a_document_that_cannot_be_unpacked(store: Store, client: Client) -> None:
    store.put(b"bad", b"\xff\xff", 60, datatype=values.SNAPPY | values.XATTR)
    name = await begin(client, between(b"bad", b"bad"))
    assert (await client.ask(go_on(name))).status == Status.EINTERNAL
    assert (await client.ask(go_on(name))).status == Status.KEY_ENOENT


async def test_an_empty_collection_has_no_sample(store: Store, client: Client) -> None:
    store.collections(50, {8: "s"}, DEFAULT, Collection(8, 8, "c", Seqno(0)))
    assert (await client.ask(create({"sampling": {"samples": 3}, "collection": "8"}))).status == Status.KEY_ENOENT
    store.put(b"inside", b"x", 51, cid=8)
    assert await keys(client, {"sampling": {"samples": 3}, "collection": "8"}) == [b"inside"]
    assert await keys(client, between(collection="8")) == [b"inside"]


async def test_values_are_sent_in_the_form_that_the_client_negotiated(
    store: Store, endpoint: Endpoint, client: Client
) -> None:
    body = b'{"n":"' + b"x" * 200 + b'"}'
    joined, datatype = values.join({b"meta": b'{"k":"v"}'}, body, values.JSON)
    packed, datatype = values.deflate(joined, datatype)
    store.put(b"xattr", packed, 60, datatype=datatype)
    (plain,), _ = await read(client, await begin(client, between(b"xattr", b"xattr")))
    assert (plain.value, plain.datatype) == (body, values.JSON)
    (whole,), _ = await read(client, await begin(client, between(b"xattr", b"xattr", include_xattrs=True)))
    assert (whole.value, whole.datatype) == (packed, datatype)
    old = await endpoint.connect()
    await old.hello(Feature.JSON, Feature.XATTR, Feature.COLLECTIONS)
    await old.login()
    (whole,), _ = await read(old, await begin(old, between(b"xattr", b"xattr", include_xattrs=True)))
    assert (whole.value, whole.datatype) == (joined, datatype & ~values.SNAPPY)
    await old.hello(Feature.JSON)
    refused = await old.ask(create(between(include_xattrs=True)))
    assert refused.status == Status.NOT_SUPPORTED


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[" * 5000,
        b"\xff",
        [],
        {},
        {"range": []},
        {"range": None},
        {"range": {"start": "", "end": ""}, "sampling": {"samples": 1}},
        {"range": {"start": ""}},
        {"range": {"start": "", "excl_start": "", "end": ""}},
        {"range": {"start": "!", "end": ""}},
        {"range": {"start": b64(b"x" * 251), "end": ""}},
        between(name="n" * 51),
        between(key_only=1),
        between(key_only=True, include_xattrs=True),
        between(collection="zz"),
        between(collection="100000000"),
        {"sampling": {}},
        {"sampling": {"samples": -1}},
        {"sampling": {"samples": True}},
        {"sampling": {"samples": 2**64}},
        between(snapshot_requirements={"seqno": 1}),
        between(snapshot_requirements={"vb_uuid": 77, "seqno": 1}),
        between(snapshot_requirements={"vb_uuid": "77x", "seqno": 1}),
        between(snapshot_requirements={"vb_uuid": "77"}),
    ],
)
def test_a_malformed_scan_body_is_refused(body: object) -> None:
    with pytest.raises(Refused) as caught:
        parse(as_bytes(body), takes_xattrs=True)
    assert caught.value.status == Status.EINVAL
    assert caught.value.context


def test_a_range_with_every_field_is_parsed() -> None:
    body = {
        "collection": "f2",
        "key_only": True,
        "name": "mine",
        "unknown": 1,
        "range": {"excl_start": b64(b"a"), "end": b64(b"b\xff")},
        "snapshot_requirements": {"vb_uuid": "16627788222", "seqno": 1000, "seqno_exists": True, "timeout_ms": 2000},
    }
    required = Requirements(16627788222, 1000, True)
    expected = ScanBounds(0xF2, True, False, b"a\0", b"b\xff\0", None, 0, required)
    assert parse(as_bytes(body), takes_xattrs=False) == expected
