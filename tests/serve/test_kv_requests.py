"""Requests of clients besides those for documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mirror.serve.access.auth import Reader, SourceUser
from mirror.serve.bucket.mirror_session import FAILED_LOGINS_MAX, GRANTED
from mirror.server.listener import Address
from mirror.wire import codec_dcp, codec_kv
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.sasl import HASHES, ScramClient
from storage.format.keys import vbid_of
from storage.model import Collection, Seqno
from tests.oracle import kv_client
from tests.serve.kv_rig import ALL_FEATURES, DEFAULT, Client, Endpoint, Store, serving

VBUCKETS = 4
ITEMS = Collection(8, 8, "items", Seqno(0), 60)
KEYS = [next(key for key in (b"k%d" % n for n in range(99)) if vbid_of(key, 4) == vbid) for vbid in range(4)]
"""One of each vbucket."""


async def scram(client: Client, mechanism: str, user: str, password: str) -> tuple[int, bytes]:
    """A whole exchange; the client checks the server, too."""
    side = ScramClient(mechanism, user, password)
    first = await client.ask(kv_client.sasl_auth(mechanism.encode(), side.first()))
    assert first.status == Status.AUTH_CONTINUE
    final = await client.ask(kv_client.sasl_step(mechanism.encode(), side.final(first.value)))
    if final.status == Status.SUCCESS:
        side.verify(final.value)
    return final.status, final.value


async def test_features_are_granted_in_the_order_of_the_request(endpoint: Endpoint) -> None:
    client = await endpoint.connect()
    granted = await client.hello(0x21, 0x12, 0x0A, 0x19, 0x04, 0xFFF)
    assert granted == (Feature.MUTATION_SEQNO, Feature.SNAPPY, Feature.COLLECTIONS)
    assert set(await client.hello(*ALL_FEATURES)) <= GRANTED
    odd = await client.ask(fr.request(Opcode.HELLO, key=b"x", value=b"\0"))
    assert odd.status == Status.EINVAL


@pytest.mark.parametrize("mechanism", HASHES)
async def test_a_login_succeeds_by_each_mechanism(endpoint: Endpoint, mechanism: str) -> None:
    client = await endpoint.connect()
    assert (await scram(client, mechanism, "demo", "demo"))[0] == Status.SUCCESS
    assert (await client.get(b"a")).status == Status.KEY_ENOENT
    assert (await scram(client, mechanism, "demo", "wrong"))[0] == Status.AUTH_ERROR
    assert (await client.get(b"a")).status == Status.EACCESS


async def test_repeated_wrong_passwords_end_the_connection(endpoint: Endpoint) -> None:
    client = await endpoint.connect()
    await client.hello(Feature.XERROR)
    for _ in range(FAILED_LOGINS_MAX):
        answer = await client.ask(kv_client.sasl_auth(b"PLAIN", b"\0demo\0wrong"))
        assert answer.status == Status.AUTH_ERROR
        assert set(json.loads(answer.value)["error"]) == {"ref"}
    assert await client.receive() is None


@pytest.mark.parametrize(
    ("mechanism", "data"),
    [(b"PLAIN", b"x"), (b"PLAIN", b"\0\xff\0x"), (b"CRAM-MD5", b""), (b"SCRAM-SHA1", b"n,,x"), (b"\xff" * 100, b"")],
)
async def test_a_malformed_login_is_refused(endpoint: Endpoint, mechanism: bytes, data: bytes) -> None:
    client = await endpoint.connect()
    assert (await client.ask(kv_client.sasl_auth(mechanism, data))).status == Status.AUTH_ERROR
    assert (await client.ask(kv_client.sasl_step(b"SCRAM-SHA1", b"c=biws,r=x,p=AAAA"))).status == Status.AUTH_ERROR
    side = ScramClient("SCRAM-SHA1", "demo", "demo")
    first = await client.ask(kv_client.sasl_auth(b"SCRAM-SHA1", side.first()))
    other = kv_client.sasl_step(b"SCRAM-SHA256", side.final(first.value))
    assert (await client.ask(other)).status == Status.AUTH_ERROR, "the steps of one mechanism are not another's"


async def test_a_reader_on_a_unix_socket_needs_no_login(store: Store, tmp_path: Path) -> None:
    async with serving(store.path, addresses=[Address(path=str(tmp_path / "kv"))]) as endpoint:
        assert (await (await endpoint.connect()).get(b"a")).status == Status.KEY_ENOENT


async def test_plain_is_not_offered_to_remote_clients_without_tls(store: Store) -> None:
    """Such a listener cannot be configured; were there one, PLAIN would not be taken."""

    users = SourceUser("demo", lambda: "demo")
    async with serving(store.path, readers=users) as endpoint:
        client = await endpoint.connect()
        await client.alive()
        session = next(iter(endpoint.server.connections)).session
        session.plain_allowed, session.reader = False, None
        assert b"PLAIN" not in (await client.ask(kv_client.sasl_list_mechs())).value
        assert await client.login() == Status.AUTH_ERROR
        assert (await scram(client, "SCRAM-SHA512", "demo", "demo"))[0] == Status.SUCCESS


async def test_only_the_bucket_of_the_mirror_can_be_selected(endpoint: Endpoint) -> None:
    client = await endpoint.connect()
    await client.hello(Feature.XERROR)
    wrong = await client.ask(kv_client.select_bucket(b"other"))
    assert wrong.status == Status.EACCESS
    assert "ref" in json.loads(wrong.value)["error"]
    assert (await client.ask(kv_client.select_bucket(b"orders"))).status == Status.SUCCESS
    assert (await client.ask(fr.request(Opcode.LIST_BUCKETS))).value == b"orders"


async def test_the_map_is_global_before_a_bucket_is_selected_and_not_sent_twice(endpoint: Endpoint) -> None:
    client = await endpoint.connect()
    config = json.loads((await client.ask(codec_kv.get_cluster_config())).value)
    assert "vBucketServerMap" not in config
    assert config["nodesExt"] == [{"services": {"mgmt": endpoint.port, "kv": endpoint.port}, "thisNode": True}]
    await client.ask(kv_client.select_bucket(b"orders"))
    config = json.loads((await client.ask(codec_kv.get_cluster_config((1, 4)))).value)
    assert config["vBucketServerMap"]["vBucketMap"] == [[0]] * 4
    assert (await client.ask(codec_kv.get_cluster_config((config["revEpoch"], config["rev"])))).value == b""


async def test_error_maps_are_sent_in_both_versions(endpoint: Endpoint) -> None:
    client = await endpoint.connect()
    for sent, got in ((1, 1), (2, 2), (7, 2)):
        assert json.loads((await client.ask(kv_client.get_error_map(sent))).value)["version"] == got
    assert (await client.ask(kv_client.get_error_map(0))).status == Status.EINVAL


async def test_ids_of_collections_and_scopes_are_returned(store: Store, endpoint: Endpoint) -> None:
    """A collection is known as soon as one vbucket has published it."""
    client = await endpoint.connect()
    await client.hello(Feature.XERROR)
    store.collections(3, {8: "inventory"}, DEFAULT, ITEMS, uid=3, vbids=[2])
    manifest = json.loads((await client.ask(kv_client.get_collections_manifest())).value)
    assert manifest == {
        "uid": "3",
        "scopes": [
            {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
            {"name": "inventory", "uid": "8", "collections": [{"name": "items", "uid": "8", "maxTTL": 60}]},
        ],
    }
    for path, found in ((b"inventory.items", 8), (b"_default._default", 0), (b".", 0)):
        answer = await client.ask(kv_client.get_collection_id(path))
        assert kv_client.decode_collection_id(answer.extras) == (3, found)
    for path, found in ((b"inventory", 8), (b"inventory.items", 8), (b"", 0)):
        answer = await client.ask(kv_client.get_scope_id(path))
        assert kv_client.decode_collection_id(answer.extras) == (3, found)
    for path, status in ((b"inventory.x", 0x88), (b"x.items", 0x88), (b"inventory", 0x04), (b"a.b.c", 0x04)):
        assert (await client.ask(kv_client.get_collection_id(path))).status == status
    unknown = await client.ask(kv_client.get_scope_id(b"nowhere"))
    assert (unknown.status, json.loads(unknown.value)["manifest_uid"]) == (Status.UNKNOWN_SCOPE, "3")


async def test_ids_are_returned_only_for_readable_collections(store: Store, endpoint: Endpoint) -> None:
    """An unreadable collection is answered like an unknown one, even if its scope has a readable one."""
    others = Collection(9, 8, "secret", Seqno(0)), Collection(10, 11, "only", Seqno(0))
    store.collections(3, {8: "inventory", 11: "hidden"}, DEFAULT, ITEMS, *others, uid=3)
    client = await endpoint.connect()
    for patterns, expected in (
        (("*",), [0, 0, 0, 0, 0]),
        (("inventory.items",), [0, 0x88, 0x88, 0, Status.UNKNOWN_SCOPE]),
    ):
        (connection,) = endpoint.server.connections
        connection.session.reader = Reader("limited", frozenset(patterns))
        paths = (b"inventory.items", b"inventory.secret", b"hidden.only")
        found = [(await client.ask(kv_client.get_collection_id(path))).status for path in paths]
        found += [(await client.ask(kv_client.get_scope_id(path))).status for path in (b"inventory", b"hidden")]
        assert found == expected


async def test_observed_seqnos_are_the_published_ones(store: Store, endpoint: Endpoint) -> None:
    store.log(1, (88, 5), (77, 0))
    store.put(KEYS[1], b"1", 9)
    store.put(KEYS[1], b"2", 12, publish=False)
    client = await endpoint.connect()

    async def observe(vbid: int, vbuuid: int) -> codec_kv.ObservedSeqno | int:
        answer = await client.ask(codec_kv.observe_seqno(vbid, vbuuid))
        return codec_kv.decode_observe_seqno(answer.value) if not answer.status else answer.status

    assert await observe(1, 88) == codec_kv.ObservedSeqno(1, 88, 9, 9)
    assert await observe(1, 77) == codec_kv.ObservedSeqno(1, 88, 9, 9, 77, 5)
    assert await observe(1, 66) == Status.KEY_ENOENT
    assert await observe(9, 77) == Status.NOT_MY_VBUCKET
    assert await seqnos(client) == {0: 0, 1: 9, 2: 0, 3: 0}
    assert await seqnos(client, 2) == {}
    log = await client.ask(fr.request(Opcode.GET_FAILOVER_LOG, vbucket=1))
    assert list(codec_dcp.decode_failover_log(log.value)) == [(88, 5), (77, 0)]


async def test_the_high_seqnos_of_one_collection_are_returned(store: Store, endpoint: Endpoint) -> None:
    store.collections(3, {8: "s"}, DEFAULT, Collection(8, 8, "c", Seqno(3)))
    store.put(KEYS[1], b"x", 5, cid=8)
    store.put(KEYS[1], b"x", 9)
    store.put(KEYS[2], b"x", 7)
    store.put(KEYS[1], b"x", 11, cid=8, publish=False)
    client = await endpoint.sdk()
    assert await seqnos(client, 1, 8) == {0: 3, 1: 5, 2: 3, 3: 3}
    for state in (1, 2):
        assert await seqnos(client, state, 9) == Status.UNKNOWN_COLLECTION
    assert await seqnos(client, 1, 0) == {0: 0, 1: 9, 2: 7, 3: 0}
    (connection,) = endpoint.server.connections
    connection.session.reader = Reader("some", frozenset({"s.c"}))
    assert await seqnos(client, 1, 0) == Status.EACCESS
    assert await seqnos(client, 1, 8) == {0: 3, 1: 5, 2: 3, 3: 3}


async def test_a_vbucket_under_resync_has_no_seqnos_to_observe(store: Store, endpoint: Endpoint) -> None:
    store.put(b"a", b"1", 1)
    vbid = endpoint.bucket.view.vbid_of(b"a")
    store.writer.vbuckets[vbid].begin_resync()
    store.log(vbid, (99, 0))
    client = await endpoint.connect()
    assert (await client.ask(codec_kv.observe_seqno(vbid, 99))).status == Status.ETMPFAIL
    assert (await client.ask(fr.request(Opcode.GET_FAILOVER_LOG, vbucket=vbid))).status == Status.ETMPFAIL


@pytest.mark.parametrize("deferred", [True, False])
async def test_a_seqno_of_the_served_history_is_never_given_with_the_history_that_is_staged(
    tmp_path: Path, deferred: bool
) -> None:
    """A scan consistent with seqno 60 of the new history succeeded, with documents that the source had lost."""
    store = Store(tmp_path, vbuckets=2, resync_reads="stale")
    store.logs(77)
    store.put(KEYS[1], b"kept", 5)
    store.put(KEYS[1], b"lost", 100)
    writer = store.writer.vbuckets[1]
    if deferred:
        writer.rollback(5, deferred=True)
    else:
        writer.begin_resync()
    store.log(1, (99, 5), (77, 0))
    async with serving(store.path) as endpoint:
        client = await endpoint.sdk()
        for vbuuid in (77, 99):
            required = {"vb_uuid": str(vbuuid), "seqno": 60}
            body = {"range": {"start": "", "end": "/w=="}, "snapshot_requirements": required}
            scan = fr.request(Opcode.RANGE_SCAN_CREATE, value=json.dumps(body).encode(), datatype=1, vbucket=1)
            assert (await client.ask(scan)).status == Status.ETMPFAIL
            assert (await client.ask(codec_kv.observe_seqno(1, vbuuid))).status == Status.ETMPFAIL
        assert (await client.ask(fr.request(Opcode.GET_FAILOVER_LOG, vbucket=1))).status == Status.ETMPFAIL
        for group in (b"vbucket-seqno", b"failovers"):
            found = await stats(client, group)
            assert isinstance(found, dict)
            assert found.keys() == {name for name in found if name.startswith("vb_0:")}
            assert await stats(client, group + b" 1") == {}
        key = b"\0" + KEYS[1]
        about = await client.ask(
            fr.request(Opcode.SUBDOC_GET, key=key, extras=b"\0\x09\x04", value=b"$document", vbucket=1)
        )
        assert json.loads(about.value)["vbucket_uuid"] == f"0x{77:016x}"
    store.close()


async def test_vbuckets_without_a_complete_snapshot_are_left_out_of_the_seqnos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kv_engine leaves out those that are not in the requested state; 0 would say that the source has nothing."""
    monkeypatch.setattr("mirror.serve.bucket.bucket.MANIFEST_FRESH_S", -1.0)
    store = Store(tmp_path, vbuckets=4)
    store.put(KEYS[1], b"1", 5)
    store.log(2, (77, 0))
    store.put(KEYS[2], b"1", 5, publish=False)
    store.log(3, (77, 0))
    store.publish(3, 0)
    async with serving(store.path) as endpoint:
        modern, plain = await endpoint.sdk(), await endpoint.connect()
        for client, request in ((modern, ()), (modern, (1,)), (modern, (1, 0)), (plain, (1,))):
            assert await seqnos(client, *request) == {1: 5, 3: 0}, request
        assert await seqnos(modern, 2) == {}
        store.publish(2, 5)
        assert await seqnos(modern, 1) == {1: 5, 2: 5, 3: 0}
        store.writer.vbuckets[1].begin_resync()
        assert await seqnos(modern, 1) == {2: 5, 3: 0}
        store.collections(9, {8: "s"}, DEFAULT, Collection(8, 8, "c", Seqno(9)), vbids=(2,))
        assert await seqnos(modern, 1, 8) == {2: 9}, "a vbucket that does not know the collection yet is left out"
    store.close()


async def seqnos(client: Client, *request: int) -> dict[int, int] | int:
    """Of all vbuckets, by state and collection; or the status."""
    extras = codec_dcp.encode_all_vb_seqnos_request(*request) if request else b""
    answer = await client.ask(fr.request(Opcode.GET_ALL_VB_SEQNOS, extras=extras))
    return answer.status or dict(codec_dcp.decode_all_vb_seqnos(answer.value))


async def stats(client: Client, group: bytes) -> dict[str, str] | int:
    await client.send(fr.request(Opcode.STAT, key=group, opaque=4))
    found: dict[str, str] = {}
    while True:
        answer = await client.answer()
        if answer.status or not answer.key:
            return answer.status or found
        found[answer.key.decode()] = answer.value.decode()


async def test_statistics_are_returned_by_group(store: Store, endpoint: Endpoint) -> None:
    store.log(1, (88, 5), (77, 0))
    client = await endpoint.connect()
    assert await stats(client, b"") == {"version": "7.2.0", "ep_bucket_type": "persistent", "bucket": "orders"}
    assert await stats(client, b"vbucket") == {f"vb_{vbid}": "active" for vbid in range(4)}
    assert await stats(client, b"failovers 1") == {
        "vb_1:num_entries": "2",
        "vb_1:0:id": "88",
        "vb_1:0:seq": "5",
        "vb_1:1:id": "77",
        "vb_1:1:seq": "0",
    }
    found = await stats(client, b"vbucket-seqno")
    assert isinstance(found, dict)
    assert (found["vb_1:uuid"], found["vb_3:high_seqno"]) == ("88", "0")
    assert await stats(client, b"vbucket-seqno 4") == Status.NOT_MY_VBUCKET
    assert await stats(client, b"vbucket-seqno x") == Status.EINVAL
    assert await stats(client, b"nothing") == Status.KEY_ENOENT
