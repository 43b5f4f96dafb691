"""The bounded reader against the embedded source: whole snapshots, bounds, faults, rollbacks, refusals."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirror.config_reader import validated
from mirror.errors import (
    AuthRejected,
    BucketMissing,
    ClusterError,
    ConfigError,
    ConnectFailed,
    MirrorError,
    OlderMap,
    PrivilegeMissing,
    SourceTimeout,
)
from mirror.feed.cluster.map_queries import MapQueries
from mirror.feed.read.reader import Position, ReadEnded, Snapshot, SourceReader, SourceRolledBack
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.env.directory import MapRecord
from storage.model import Kind
from tests.sandbox.past import state_at
from tests.supervise.conftest import eventually_now as eventually

VBUCKETS = 8
WAIT_S = 30.0
TURNS = 60


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=3)) as running:
        yield running


def reader_of(source: SandboxThread, **options: Any) -> SourceReader:
    settings = validated(
        {
            "noop_interval_s": 0.5,
            "connection_buffer_size": 64 * 1024,
            "map_poll_interval_s": 0.1,
            "retry_delay_max_ms": 100,
            **options.pop("settings", {}),
        }
    )
    options = {"password": "demo", "timeout_s": WAIT_S, "settings": settings, **options}
    return SourceReader(options.pop("url", source.connection_string), **options)


def write(source: SandboxThread, count: int, name: str = "doc", size: int = 20, **where: Any) -> None:
    def each() -> None:
        for number in range(count):
            source.cluster.set(f"{name}-{number}", {"name": name, "text": "x" * size}, **where)

    source.call(each)


class Copy:
    """Keeps all that a read yields: key -> newest version, positions and counts."""

    def __init__(self) -> None:
        self.positions = {vbid: Position() for vbid in range(VBUCKETS)}
        self.keys: dict[int, dict[bytes, tuple[int, int, int, bool]]] = {vbid: {} for vbid in range(VBUCKETS)}
        self.ended: list[ReadEnded] = []
        self.rolled_back: list[SourceRolledBack] = []
        self.snapshots = 0
        self.rows = 0

    def take(self, item: Snapshot | SourceRolledBack | ReadEnded) -> None:
        if isinstance(item, ReadEnded):
            assert item.position == self.positions[item.vbid] or item.position.seqno == 0
            self.ended.append(item)
        elif isinstance(item, SourceRolledBack):
            self.rolled_back.append(item)
        else:
            assert item.start_seqno == self.positions[item.vbid].seqno, "nothing is left out, nothing comes twice"
            seqno = item.start_seqno
            for document in item.documents():
                assert seqno < document.seqno <= item.end_seqno
                seqno = document.seqno
                version = (document.seqno, document.cas, document.rev_seqno, document.deleted)
                if document.kind is not Kind.SYSTEM_EVENT:
                    self.keys[item.vbid][b"\0" + document.key] = version
                self.rows += 1
            self.positions[item.vbid] = item.position
            self.snapshots += 1

    def take_rows(self, items: Iterator[Snapshot | SourceRolledBack | ReadEnded], count: int) -> None:
        while self.rows < count:
            self.take(next(items))

    def assert_equal(self, source: SandboxThread) -> None:
        for vbid, position in self.positions.items():
            state = source.call(state_at, source.cluster.vbucket(vbid), position.seqno)
            expected = {key: (item.seqno, item.cas, item.rev_seqno, False) for key, item in state.items()}
            assert {key: version for key, version in self.keys[vbid].items() if not version[3]} == expected


def read_all(reader: SourceReader, copy: Copy | None = None) -> Copy:
    copy = copy or Copy()
    for item in reader.read(copy.positions, reader.high_seqnos()):
        copy.take(item)
    return copy


# -- what is there ------------------------------------------------------------------------------------------------


def test_a_read_returns_whole_snapshots_over_reused_connections(source: SandboxThread) -> None:
    write(source, 300)
    with reader_of(source) as reader:
        assert reader.vbucket_count == VBUCKETS
        assert reader.bucket_uuid == source.cluster.bucket.map.bucket_uuid
        copy = read_all(reader)
        assert sorted(each.vbid for each in copy.ended) == list(range(VBUCKETS))
        copy.assert_equal(source)
        connections = source.call(lambda: [id(each) for each in source.cluster.faults.connections()])
        assert len(connections) == 2
        write(source, 50)
        source.call(source.cluster.delete, "doc-3")
        assert read_all(reader, copy).rows in (350, 351), "the source may have passed over the version it deleted"
        copy.assert_equal(source)
        source.call(source.cluster.bucket.to_disk)
        write(source, 50, "more")
        read_all(reader, copy).assert_equal(source)
        assert copy.rolled_back == []
        assert source.call(lambda: [id(each) for each in source.cluster.faults.connections()]) == connections


def test_a_bucket_without_documents_ends_at_once(source: SandboxThread) -> None:
    with reader_of(source) as reader:
        assert reader.high_seqnos() == dict.fromkeys(range(VBUCKETS), 0)
        copy = read_all(reader)
        assert (len(copy.ended), copy.snapshots) == (VBUCKETS, 0)


def test_a_read_without_an_end_follows_until_it_is_closed(source: SandboxThread) -> None:
    write(source, 20)
    copy = Copy()
    with reader_of(source) as reader:
        items = reader.read(copy.positions)
        copy.take_rows(items, 20)
        write(source, 20)
        copy.take_rows(items, 40)
        items.close()
        copy.assert_equal(source)
        write(source, 20)
        assert read_all(reader, copy).rows == 60, "another read begins where that one stood"


def test_a_read_resumes_inside_a_vbucket_at_its_position(source: SandboxThread) -> None:
    write(source, 100)
    with reader_of(source, parallel=1) as reader:
        until = reader.high_seqnos()
        first = Copy()
        for item in reader.read(first.positions, until):
            first.take(item)
            if first.ended:
                break
        assert len(first.ended) == 1, "one vbucket at a time"
        assert read_all(reader, first).rows == 100


# -- bounds -------------------------------------------------------------------------------------------------------


def test_snapshots_larger_than_memory_wait_on_disk(source: SandboxThread) -> None:
    write(source, 400, size=1000)
    with reader_of(source, memory_bytes=8192) as reader:
        copy, on_disk = Copy(), 0
        for item in reader.read(copy.positions, reader.high_seqnos()):
            on_disk = max(on_disk, reader._core._file.size_bytes)
            copy.take(item)
        copy.assert_equal(source)
        assert copy.snapshots == VBUCKETS
        assert on_disk >= 50_000
        assert reader._core._file.size_bytes == 0


def test_a_reader_that_does_not_take_items_makes_the_source_wait(source: SandboxThread) -> None:
    write(source, 8)
    copy = Copy()
    with reader_of(source, memory_bytes=4096) as reader:
        items = reader.read(copy.positions)
        copy.take_rows(items, 8)
        for turn in range(TURNS):
            write(source, 20, f"turn-{turn}", size=500)
        sent = sum(source.call(source.cluster.sent, vbid).bytes for vbid in range(VBUCKETS))
        eventually(lambda: reader._core.connections.acks_held)
        assert sum(source.call(source.cluster.sent, vbid).bytes for vbid in range(VBUCKETS)) < TURNS * 20 * 500 / 2
        assert sent < TURNS * 20 * 500 / 2
        copy.take_rows(items, 8 + TURNS * 20)
        items.close()
        copy.assert_equal(source)


def test_a_temporary_folder_that_cannot_be_written_is_reported(
    source: SandboxThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    write(source, 100, size=1000)
    with reader_of(source, memory_bytes=4096) as reader, pytest.raises(MirrorError, match="TMPDIR"):
        read_all(reader)


# -- rollbacks ----------------------------------------------------------------------------------------------------


def test_a_rollback_is_reported_and_never_followed(source: SandboxThread) -> None:
    write(source, 200)
    with reader_of(source) as reader:
        copy = read_all(reader)
        before = copy.positions[3].seqno
        source.call(source.cluster.failover, 3, lose=2)
        read_all(reader, copy)
        assert copy.rolled_back == [SourceRolledBack(3, before - 2)]
        assert sorted(each.vbid for each in copy.ended[VBUCKETS:]) == [0, 1, 2, 4, 5, 6, 7]


def test_a_failover_that_lost_nothing_read_is_not_a_rollback(source: SandboxThread) -> None:
    write(source, 200)
    with reader_of(source) as reader:
        copy = read_all(reader)
        source.call(source.cluster.failover, 3, lose=0)
        write(source, 100)
        read_all(reader, copy).assert_equal(source)
        assert copy.rolled_back == []
        assert copy.positions[3].vbuuid == source.cluster.vbucket(3).vbuuid


def test_a_position_of_an_unknown_history_rolls_back_to_zero(source: SandboxThread) -> None:
    write(source, 100)
    with reader_of(source) as reader:
        items = list(reader.read({2: Position(12345, 5)}, reader.high_seqnos()))
        assert items == [SourceRolledBack(2, 0)]


def test_purged_tombstones_are_a_rollback_to_zero(source: SandboxThread) -> None:
    source.call(source.cluster.set, "kept", {}, vbid=1)
    with reader_of(source) as reader:
        copy = read_all(reader)
        for number in range(5):
            source.call(source.cluster.set, f"gone-{number}", {}, vbid=1)
            source.call(source.cluster.delete, f"gone-{number}", vbid=1)
        source.call(source.cluster.set, "last", {}, vbid=1)
        source.call(source.cluster.bucket.to_disk)
        source.call(source.cluster.bucket.purge)
        read_all(reader, copy)
        assert copy.rolled_back == [SourceRolledBack(1, 0)]


# -- faults -------------------------------------------------------------------------------------------------------


def test_a_broken_connection_neither_loses_nor_repeats_rows(source: SandboxThread) -> None:
    write(source, 400, size=500)
    source.call(source.cluster.bucket.to_disk)
    with reader_of(source, parallel=VBUCKETS) as reader:
        source.call(source.cluster.faults.slow, 200_000.0)
        copy = Copy()
        items = reader.read(copy.positions, reader.high_seqnos())
        for item in items:
            copy.take(item)
            if copy.snapshots == 1:
                source.call(source.cluster.faults.cut)
        copy.assert_equal(source)
        assert len(copy.ended) == VBUCKETS


def test_moved_vbuckets_are_followed(source: SandboxThread) -> None:
    write(source, 200)
    with reader_of(source, parallel=1) as reader:
        copy = Copy()
        for item in reader.read(copy.positions, reader.high_seqnos()):
            copy.take(item)
            if len(copy.ended) == 1:
                for vbid in range(VBUCKETS):
                    source.call(source.cluster.move, vbid, vbid % 2 ^ 1)
        copy.assert_equal(source)
        assert len(copy.ended) == VBUCKETS
        assert reader.high_seqnos() == {vbid: copy.positions[vbid].seqno for vbid in range(VBUCKETS)}


def test_a_source_that_falls_silent_is_reported_in_time(source: SandboxThread) -> None:
    write(source, 20)
    with reader_of(source, timeout_s=3) as reader:
        until = reader.high_seqnos()
        source.call(source.cluster.faults.silence, dcp_only=False, future=True)
        with pytest.raises(SourceTimeout, match="brought nothing of vb"):
            list(reader.read(dict.fromkeys(until, Position()), until))


# -- collections --------------------------------------------------------------------------------------------------


def test_a_read_of_collections_has_their_documents_and_events_only(source: SandboxThread) -> None:
    source.call(source.cluster.bucket.create_scope, "shop")
    source.call(source.cluster.bucket.create_collection, "shop", "orders")
    source.call(source.cluster.bucket.create_collection, "shop", "items")
    write(source, 40, "order", collection="shop.orders")
    write(source, 40, "item", collection="shop.items")
    write(source, 40, "plain")

    def names(**options: Any) -> tuple[set[str], set[Kind]]:
        with reader_of(source, **options) as reader:
            until = reader.high_seqnos()
            found, kinds = set(), set()
            for item in reader.read(dict.fromkeys(until, Position()), until):
                if isinstance(item, Snapshot):
                    for document in item.documents():
                        kinds.add(document.kind)
                        if document.kind is not Kind.SYSTEM_EVENT:
                            found.add(document.key.decode().partition("-")[0])
            return found, kinds

    both = {Kind.MUTATION, Kind.SYSTEM_EVENT}
    assert names(collections=["shop.orders"]) == ({"order"}, both)
    assert names(collections=["shop.items", "_default._default"]) == ({"item", "plain"}, both)
    assert names(collections=["shop"]) == ({"order", "item"}, both)
    assert names() == ({"order", "item", "plain"}, both)


def test_a_refusal_is_one_clear_error_without_the_password(source: SandboxThread) -> None:
    with pytest.raises(AuthRejected, match="wrong user or password"), reader_of(source, password="wrong"):
        pass
    text = source.connection_string
    with pytest.raises(BucketMissing), SourceReader(text.removesuffix("/demo") + "/other", password="demo"):
        pass
    with pytest.raises(ConnectFailed), SourceReader("couchbase://demo@127.0.0.1:1/demo", password="demo"):
        pass
    assert "secret" not in repr(SourceReader(text, password="secret").__dict__)


def test_a_missing_privilege_is_reported_at_once(source: SandboxThread) -> None:
    write(source, 10)
    source.call(source.cluster.add_user, "weak", "weak", frozenset({"DcpProducer", "Read", "MetaRead"}))
    text = source.connection_string.replace("demo@", "weak@")
    with SourceReader(text, password="weak", timeout_s=WAIT_S) as reader, pytest.raises(PrivilegeMissing):
        list(reader.read({0: Position()}, {0: 1}))


def test_invalid_arguments_are_refused_before_a_request(source: SandboxThread) -> None:
    with reader_of(source) as reader:
        with pytest.raises(ConfigError, match="vb 99"):
            reader.read({99: Position()})
        with pytest.raises(ConfigError, match="no seqno for vb 1"):
            reader.read({0: Position(), 1: Position()}, {0: 5})
        assert list(reader.read({}, {})) == []
    with pytest.raises(ConfigError, match="context manager"):
        reader.high_seqnos()
    with pytest.raises(ConfigError):
        SourceReader("http://nonsense")
    with pytest.raises(ConfigError):
        reader_of(source, memory_bytes=0)


def host(source: SandboxThread, number: int) -> str:
    return f"couchbase://demo@127.0.0.1:{source.cluster.nodes[number].port}/demo"


def fail_over_node_1(source: SandboxThread) -> None:
    source.call(source.cluster.split_off, 1)
    source.run(source.cluster.failover_node(1))
    write(source, 50, "good")


def test_a_read_follows_the_newer_map_of_another_node(source: SandboxThread) -> None:
    write(source, 50)
    fail_over_node_1(source)
    with reader_of(source, url=host(source, 1)) as reader:
        assert reader.followed is not None
        assert reader.followed.rev == source.cluster.bucket.map.rev
        read_all(reader).assert_equal(source)


def test_a_map_older_than_the_last_followed_is_refused_at_once(source: SandboxThread) -> None:
    with reader_of(source) as reader:
        fail_over_node_1(source)
        newest = source.cluster.bucket.map
    source.run(source.cluster.kill_node(0))
    followed = MapRecord(newest.bucket_uuid, newest.epoch, newest.rev)
    with pytest.raises(OlderMap), reader_of(source, url=host(source, 1), followed=followed):
        pass
    assert reader.vbucket_count == VBUCKETS


def test_a_read_leaves_a_stale_node_that_was_failed_over(source: SandboxThread) -> None:
    """Its streams bring nothing that the cluster does not have once the newer map is known."""
    write(source, 50)
    with reader_of(source) as reader:
        copy = read_all(reader)
        fail_over_node_1(source)
        eventually(lambda: reader.followed is not None and reader.followed.rev == source.cluster.bucket.map.rev)
        read_all(reader, copy).assert_equal(source)


def test_a_bucket_that_was_recreated_is_refused_before_a_stream_is_requested(
    source: SandboxThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its uuid is compared before anything else (docs/protocol.md 2.5). The reader requested the streams, and took the
    answers of the other bucket for rollbacks.
    """
    monkeypatch.setattr(MapQueries, "wake", lambda _follower: None)
    write(source, 20)
    with reader_of(source, settings={"map_poll_interval_s": 600}) as reader:
        copy = Copy()
        items = reader.read(copy.positions)
        copy.take_rows(items, 20)

        def requested_seqnos() -> list[int]:
            return [len(source.cluster.sent(vbid).stream_requests) for vbid in range(VBUCKETS)]

        before = source.call(requested_seqnos)
        source.run(source.cluster.recreate_bucket())
        with pytest.raises(ClusterError, match="was recreated at the source"):
            list(items)
        assert source.call(requested_seqnos) == before


# -- questions -----------------------------------------------------------------------------------------------------


def test_high_seqnos_and_failover_logs_come_from_all_nodes(source: SandboxThread) -> None:
    write(source, 100)
    with reader_of(source) as reader:
        vbuckets = source.cluster.vbuckets
        assert reader.high_seqnos() == {vbid: each.high_seqno for vbid, each in enumerate(vbuckets)}
        for vbid, each in enumerate(vbuckets):
            assert reader.failover_log(vbid) == each.failover_log
        with pytest.raises(ConfigError, match="there is no vb 8"):
            reader.failover_log(VBUCKETS)


def test_an_unknown_collection_is_named(source: SandboxThread) -> None:
    with (
        pytest.raises(ConfigError, match=r"no collection 'shop\.nothing'"),
        reader_of(source, collections=["shop.nothing"]),
    ):
        pass
    with pytest.raises(ConfigError, match="no scope 'nothing'"), reader_of(source, collections=["nothing"]):
        pass


def test_a_dropped_collection_has_no_high_seqno_and_the_others_do(source: SandboxThread) -> None:
    bucket = source.cluster.bucket
    source.call(bucket.create_scope, "shop")
    for name in ("orders", "carts"):
        source.call(bucket.create_collection, "shop", name)
    with reader_of(source, collections=["shop.orders", "shop.carts"]) as reader:
        write(source, 50, collection="shop.carts")
        carts = reader.high_seqnos()
        write(source, 50, collection="shop.orders")
        source.call(bucket.drop_collection, "shop.orders")
        assert reader.high_seqnos() == carts


def test_collection_names_are_read_from_the_source(source: SandboxThread) -> None:
    source.call(source.cluster.bucket.create_scope, "shop")
    source.call(source.cluster.bucket.create_collection, "shop", "orders")
    with reader_of(source) as reader:
        names = reader.collection_names()
    assert names[0] == "_default._default"
    assert "shop.orders" in names.values()
