"""Documents over the wire: the recorded session of an SDK against the same documents, then case by case."""

from __future__ import annotations

import json
from pathlib import Path

import cramjam
import pytest

from mirror.document import values
from mirror.serve.access.auth import FileUsers, entry_of
from mirror.serve.bucket.mirror_session import CHANGES
from mirror.wire import codec_kv
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame
from storage.model import Collection, Seqno
from tests.oracle import kv_client
from tests.recordings import frames
from tests.sandbox.recorded import answers
from tests.serve.kv_rig import DEFAULT, Client, Endpoint, Store, serving, with_users

RECORDED_AT = 1_795_234_123.0
SCOPES = {0: "_default", 8: "inventory"}
ITEMS = Collection(8, 8, "items", Seqno(0))
NEWER = {Feature.SUBDOC_REPLICA_READ, Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP}
"""Asked for by the recorded client, granted by servers after the recorded one, and here."""

NOT_GRANTED = (Feature.DUPLEX, Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.UNORDERED_EXECUTION)
"""A mirror sends no map without a request, and answers in order."""


def shape(value: object) -> object:
    """Names and kinds of a JSON value, without its numbers and words."""
    if isinstance(value, dict):
        return {name: shape(content) for name, content in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


class Replay:
    """The recorded changes, made to a store instead."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.held: dict[bytes, tuple[bytes, int, int, int, int]] = {}
        """Wire key -> value, datatype, flags, expiry, revision."""

    def change(self, request: Frame, answer: Frame) -> None:
        key = request.key
        value, datatype, flags, expiry, rev = self.held.get(key, (b"", 0, 0, 0, 0))
        seqno = kv_client.decode_mutation_token(answer.extras)[1] if len(answer.extras) == 16 else 7
        if request.opcode in (Opcode.SET, Opcode.REPLACE):
            value, datatype, flags = request.value, request.datatype, int.from_bytes(request.extras[:4])
            relative = int.from_bytes(request.extras[4:])
            expiry = 1_795_234_122 + relative if relative else 0
        elif request.opcode == Opcode.SUBDOC_MULTI_MUTATION:
            value, datatype = values.join({b"meta": b'{"k":"v"}'}, value, datatype)
        elif request.opcode == Opcode.TOUCH:
            expiry = 1_795_234_122 + int.from_bytes(request.extras)
        elif request.opcode == Opcode.DELETE:
            self.store.delete(key[1:], seqno, cid=key[0], cas=answer.cas)
            self.held.pop(key)
            return
        elif request.opcode == Opcode.INCREMENT:
            value, datatype = b"5", values.JSON
        self.held[key] = (value, datatype, flags, expiry, rev + 1)
        vbid = self.store.put(
            key[1:], value, seqno, cid=key[0], cas=answer.cas, rev=rev + 1, flags=flags, expiry=expiry,
            datatype=datatype,
        )  # fmt: skip
        assert vbid == request.vbucket


@pytest.mark.parametrize("name", ["sdk_72_conn1", "sdk_72_conn2"])
async def test_each_recorded_request_is_answered_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Changes are refused and made in the store instead; a lock is not known to a mirror."""
    monkeypatch.setattr("storage.format.tokens.time.time", lambda: RECORDED_AT)
    session = answers(frames(name))
    store = Store(tmp_path, uuid="0123456789abcdef0123456789abcdef")
    store.collections(1, SCOPES, DEFAULT, ITEMS)
    for request, answer in session:
        if len(answer.extras) == 16:
            vbuuid, _ = kv_client.decode_mutation_token(answer.extras)
            store.log(request.vbucket, (vbuuid, 0))
    replay = Replay(store)
    compared = 0
    async with serving(store.path) as endpoint:
        client = await endpoint.connect()
        for request, answer in session:
            if request.opcode in (Opcode.SASL_AUTH, Opcode.SASL_STEP):
                if request.opcode == Opcode.SASL_STEP:
                    assert await client.login() == Status.SUCCESS
                continue
            ours = await client.ask(request)
            assert (ours.magic, len(ours.framing)) == (answer.magic, len(answer.framing))
            if request.opcode in CHANGES:
                assert ours.status == Status.NOT_SUPPORTED
                assert "read-only" in kv_client.error_context(ours.value, ours.datatype)
                if answer.status == Status.SUCCESS and request.opcode not in (Opcode.GAT, Opcode.GET_LOCKED):
                    replay.change(request, answer)
                continue
            compared += 1
            what = f"{Opcode(request.opcode).name} {request.key!r} {request.value!r}"
            assert (ours.status, ours.datatype, ours.key) == (answer.status, answer.datatype, answer.key), what
            assert ours.extras == answer.extras, what
            if request.opcode in (Opcode.GET_CLUSTER_CONFIG, Opcode.GET_ERROR_MAP):
                reported, expected = json.loads(ours.value), json.loads(answer.value)
                if request.opcode == Opcode.GET_ERROR_MAP:
                    assert {shape(each) is not None for each in reported["errors"].values()} == {True}
                    assert set(reported) == set(expected)
                else:
                    assert ("mirror" in reported) is ("name" in reported), (
                        "a bucket's map says that it is a mirror's own"
                    )
                    reported.pop("mirror", None)
                    assert shape(reported) == shape(expected)
                continue
            if request.opcode == Opcode.HELLO:
                granted, expected = (codec_kv.decode_features(each.value) for each in (ours, answer))
                known = tuple(each for each in granted if each not in NEWER)
                assert known == tuple(each for each in expected if each not in NOT_GRANTED), what
                continue
            assert ours.value == answer.value, what
            assert ours.cas == answer.cas or answer.cas == 2**64 - 1, what
    store.close()
    assert compared > (2 if name.endswith("1") else 25)


# Case by case.


@pytest.fixture
def store(store: Store) -> Store:
    store.collections(1, SCOPES, DEFAULT, ITEMS)
    return store


def at(endpoint: Endpoint, key: bytes, opcode: int = Opcode.GET, *, cid: int = 0, **fields: object) -> Frame:
    """A request as an SDK sends it."""
    vbid = endpoint.bucket.view.vbid_of(key)
    return fr.request(opcode, vbucket=vbid, key=bytes([cid]) + key, opaque=9, **fields)  # type: ignore[arg-type]


def lookup(endpoint: Endpoint, key: bytes, *specs: LookupSpec, flags: int = 0) -> Frame:
    extras = bytes([flags]) if flags else b""
    return at(endpoint, key, Opcode.SUBDOC_MULTI_LOOKUP, extras=extras, value=kv_client.encode_lookup_specs(specs))


async def test_a_document_is_sent_in_the_form_that_the_client_negotiated(store: Store, endpoint: Endpoint) -> None:
    body = b'{"pad": "' + b"abc " * 200 + b'"}'
    packed = bytes(cramjam.snappy.compress_raw(body))
    store.put(b"packed", packed, 2, flags=5, datatype=3)
    with_xattrs, datatype = values.join({b"u": b"1"}, body, values.JSON)
    store.put(b"xattrs", bytes(cramjam.snappy.compress_raw(with_xattrs)), 3, datatype=datatype | 2)
    both = (Feature.JSON, Feature.SNAPPY)
    for features in ((), (Feature.JSON,), (Feature.SNAPPY,), both):
        client = await endpoint.connect()
        await client.hello(*features)
        got = await client.get(b"packed")
        assert got.datatype == (1 if Feature.JSON in features else 0) + (2 if Feature.SNAPPY in features else 0)
        assert (got.value == packed) is (Feature.SNAPPY in features)
        assert got.value in (packed, body)
        assert (got.extras, got.cas) == ((5).to_bytes(4), 2)
        got = await client.get(b"xattrs")
        assert (got.value, got.datatype) == (body, 1 if Feature.JSON in features else 0)


async def test_getters_return_keys_or_stay_quiet_as_requested(store: Store, endpoint: Endpoint) -> None:
    store.put(b"a", b"1", 2)
    client = await endpoint.connect()
    for opcode in (Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_REPLICA):
        got = await client.get(b"a", opcode=opcode)
        assert (got.status, got.value) == (Status.SUCCESS, b"1")
        assert got.key == (b"a" if opcode in (Opcode.GETK, Opcode.GETKQ) else b"")
    assert (await client.get(b"none")).status == Status.KEY_ENOENT
    assert (await client.get(b"none", opcode=Opcode.GETK)).status == Status.KEY_ENOENT
    quiet = [fr.request(opcode, key=b"none") for opcode in (Opcode.GETQ, Opcode.GETKQ, Opcode.GETQ_META)]
    await client.send(*quiet, kv_client.noop(opaque=5))
    answer = await client.answer()
    assert (answer.opcode, answer.opaque) == (Opcode.NOOP, 5)


async def test_a_plain_memcached_client_needs_neither_bucket_nor_login(store: Store, endpoint: Endpoint) -> None:
    store.put(b"a", b"1", 2)
    client = await endpoint.connect()
    assert (await client.get(b"a", vbid=60_000)).value == b"1"
    assert (await client.ask(fr.request(Opcode.VERSION))).value == b"7.2.0"
    refused = await client.ask(fr.request(Opcode.SET, key=b"a", value=b"2", extras=bytes(8)))
    assert (refused.status, refused.value) == (Status.NOT_SUPPORTED, b"")


async def test_every_change_is_refused_at_once(endpoint: Endpoint) -> None:
    """Whatever shape it has, and however large it is."""
    client = await endpoint.sdk()
    for opcode in sorted(CHANGES):
        for value in (b"", b"x" * 100, b"x" * 3_000_000):
            refused = await client.ask(at(endpoint, b"a", opcode, value=value, extras=bytes(8)))
            assert refused.status == Status.NOT_SUPPORTED, Opcode(opcode).name
            assert "read-only mirror" in kv_client.error_context(refused.value, refused.datatype)
    assert await client.alive()


async def test_a_foreign_vbucket_is_refused_and_a_key_in_the_wrong_one_is_absent(
    store: Store, endpoint: Endpoint
) -> None:
    vbid = store.put(b"a", b"1", 2)
    client = await endpoint.sdk()
    elsewhere = await client.ask(fr.request(Opcode.GET, vbucket=16, key=b"\0a"))
    assert elsewhere.status == Status.NOT_MY_VBUCKET
    assert json.loads(elsewhere.value)["name"] == "orders"
    assert (await client.ask(fr.request(Opcode.GET, vbucket=vbid, key=b"\0a"))).value == b"1"
    assert (await client.ask(fr.request(Opcode.GET, vbucket=(vbid + 1) % 16, key=b"\0a"))).status == Status.KEY_ENOENT


async def test_a_key_is_read_in_the_collection_of_its_prefix(store: Store, endpoint: Endpoint) -> None:
    store.put(b"a", b"default", 2)
    store.put(b"a", b"item", 3, cid=8)
    client = await endpoint.sdk()
    assert (await client.ask(at(endpoint, b"a"))).value == b"default"
    assert (await client.ask(at(endpoint, b"a", cid=8))).value == b"item"
    for opcode in (Opcode.GET, Opcode.GET_META, Opcode.GETQ):
        unknown = await client.ask(at(endpoint, b"a", opcode, cid=9))
        assert unknown.status == Status.UNKNOWN_COLLECTION
        assert json.loads(unknown.value) == {
            "error": {"context": "Unknown scope or collection in operation"},
            "manifest_uid": "1",
        }
    store.collections(5, SCOPES, DEFAULT)
    assert (await client.ask(at(endpoint, b"a", cid=8))).status == Status.UNKNOWN_COLLECTION


async def test_a_key_of_an_impossible_length_is_refused(endpoint: Endpoint) -> None:
    client = await endpoint.sdk()
    for key in (b"", b"\0", b"\0" + b"x" * 251, b"\x80", b"\x80\x00x", b"\xff\xff\xff\xff\xff\x01x"):
        assert (await client.ask(fr.request(Opcode.GET, key=key))).status == Status.EINVAL
    assert (await client.ask(fr.request(Opcode.GET, key=b"\0" + b"x" * 250))).status != Status.EINVAL
    plain = await endpoint.connect()
    assert (await plain.get(b"x" * 251)).status == Status.EINVAL
    assert (await plain.get(b"x" * 250)).status == Status.KEY_ENOENT


async def test_a_reader_gets_only_collections_that_it_may_read(store: Store, users_file: Path) -> None:
    store.put(b"a", b"default", 2)
    store.put(b"a", b"item", 3, cid=8)

    limited = with_users(users_file, {"demo": entry_of("demo", ("inventory.*",))}, ["_default._default"])
    async with serving(store.path, readers=FileUsers(limited)) as endpoint:
        client = await endpoint.connect()
        assert (await client.get(b"a")).value == b"default"
        client = await endpoint.sdk()
        for opcode in (Opcode.GET, Opcode.GET_META, Opcode.GETQ):
            assert (await client.ask(at(endpoint, b"a", opcode))).status == Status.EACCESS
            assert (await client.ask(at(endpoint, b"none", opcode))).status == Status.EACCESS
        assert (await client.ask(at(endpoint, b"a", cid=8))).value == b"item"
        assert (await client.ask(at(endpoint, b"a", cid=9))).status == Status.UNKNOWN_COLLECTION


async def test_metadata_of_documents_and_tombstones_is_returned(store: Store, endpoint: Endpoint) -> None:
    store.put(b"a", b"1", 2, cas=99, rev=4, flags=3, datatype=1)
    client = await endpoint.sdk()
    for version, datatype in ((1, None), (2, 1)):
        answer = await client.ask(at(endpoint, b"a", Opcode.GET_META, extras=bytes([version])))
        assert kv_client.decode_meta(answer.extras) == codec_kv.Meta(False, 3, 0, 4, datatype)
        assert answer.cas == 99
    store.delete(b"a", 3)
    answer = await client.ask(at(endpoint, b"a", Opcode.GET_META))
    assert kv_client.decode_meta(answer.extras).deleted
    assert (await client.ask(at(endpoint, b"a"))).status == Status.KEY_ENOENT
    assert (await client.ask(at(endpoint, b"b", Opcode.GET_META))).status == Status.KEY_ENOENT


async def test_an_expired_document_is_a_tombstone_for_those_that_ask_for_tombstones(
    store: Store, endpoint: Endpoint
) -> None:
    value, datatype = values.join({b"_s": b'{"x":1}', b"u": b"2"}, b'{"n":3}', values.JSON)
    store.put(b"a", value, 2, cas=99, rev=4, flags=3, datatype=datatype, expiry=7)
    client = await endpoint.sdk()
    answer = await client.ask(at(endpoint, b"a", Opcode.GET_META, extras=b"\2"))
    assert kv_client.decode_meta(answer.extras) == codec_kv.Meta(True, 3, 7, 4, datatype)
    assert (answer.status, answer.cas) == (Status.SUCCESS, 99)
    for path, flags, found in (
        (b"_s.x", 4, b"1"),
        (b"u", 4, None),
        (b"$document.deleted", 4, b"true"),
        (b"n", 0, None),
    ):
        extras = len(path).to_bytes(2) + bytes((flags, 4))
        answer = await client.ask(at(endpoint, b"a", Opcode.SUBDOC_GET, extras=extras, value=path))
        assert (answer.status, answer.value) == (Status.SUBDOC_SUCCESS_DELETED, found) if found else answer.status
        alive = await client.ask(at(endpoint, b"a", Opcode.SUBDOC_GET, extras=extras[:3], value=path))
        assert alive.status == Status.KEY_ENOENT


async def test_lookups_of_one_and_of_several_paths_are_answered(store: Store, endpoint: Endpoint) -> None:
    value, datatype = values.join({b"_s": b'{"x":1}'}, b'{"n": [1, 2]}', values.JSON)
    store.put(b"a", value, 2, datatype=datatype)
    client: Client = await endpoint.sdk()
    get, exists = int(Opcode.SUBDOC_GET), int(Opcode.SUBDOC_EXISTS)
    one = await client.ask(at(endpoint, b"a", get, extras=b"\0\x04\0", value=b"n[1]"))
    assert (one.status, one.value, one.cas) == (Status.SUCCESS, b"2", 2)
    missing = await client.ask(at(endpoint, b"a", get, extras=b"\0\x01\0", value=b"m"))
    assert missing.status == Status.SUBDOC_PATH_ENOENT
    extra = await client.ask(at(endpoint, b"a", get, extras=b"\0\x01\0", value=b"mm"))
    assert extra.status == Status.EINVAL
    many = await client.ask(
        lookup(endpoint, b"a", LookupSpec(get, b"_s.x", 4), LookupSpec(exists, b"m"), LookupSpec(int(Opcode.GET), b""))
    )
    assert many.status == Status.SUBDOC_MULTI_PATH_FAILURE
    results = kv_client.decode_lookup_results(many.value)
    assert [(each.status, each.value) for each in results] == [
        (Status.SUCCESS, b"1"),
        (Status.SUBDOC_PATH_ENOENT, b""),
        (Status.SUCCESS, b'{"n": [1, 2]}'),
    ]
    wrong = {
        Status.SUBDOC_INVALID_XATTR_ORDER: [LookupSpec(get, b"n"), LookupSpec(get, b"_s", 4)],
        Status.SUBDOC_INVALID_COMBO: [LookupSpec(int(Opcode.SUBDOC_DELETE), b"n")],
    }
    for status, specs in wrong.items():
        assert (await client.ask(lookup(endpoint, b"a", *specs))).status == status
    assert (
        await client.ask(lookup(endpoint, b"a", *[LookupSpec(get, b"n")] * 17))
    ).status == Status.SUBDOC_INVALID_COMBO
    assert (
        await client.ask(lookup(endpoint, b"a", LookupSpec(get, b"\xff")))
    ).status == Status.SUBDOC_MULTI_PATH_FAILURE
    assert (await client.ask(lookup(endpoint, b"a", LookupSpec(get, b"n"), flags=0x01))).status == Status.EINVAL
    assert (await client.ask(lookup(endpoint, b"none", LookupSpec(get, b"n")))).status == Status.KEY_ENOENT


async def test_a_path_of_a_deleted_document_is_found_only_on_request(store: Store, endpoint: Endpoint) -> None:
    store.put(b"a", b"{}", 2, datatype=1)
    store.delete(b"a", 3)
    client = await endpoint.sdk()
    spec = LookupSpec(int(Opcode.SUBDOC_GET), b"$document.deleted", 4)
    assert (await client.ask(lookup(endpoint, b"a", spec))).status == Status.KEY_ENOENT
    found = await client.ask(lookup(endpoint, b"a", spec, flags=0x04))
    assert found.status == Status.SUBDOC_SUCCESS_DELETED
    assert kv_client.decode_lookup_results(found.value)[0].value == b"true"
    path = LookupSpec(int(Opcode.SUBDOC_GET), b"n")
    found = await client.ask(lookup(endpoint, b"a", path, flags=0x04))
    assert found.status == Status.SUBDOC_MULTI_PATH_FAILURE_DELETED
    one = at(endpoint, b"a", Opcode.SUBDOC_GET, extras=b"\0\x11\x04\x04", value=b"$document.deleted")
    assert (await client.ask(one)).status == Status.SUBDOC_SUCCESS_DELETED
