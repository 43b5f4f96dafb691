"""Questions of a reader: high seqnos, failover logs and collections, of all nodes or one clear error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mirror.errors import ConfigError
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from tests.feed.test_reader import VBUCKETS, reader_of, write


@pytest.fixture
def source() -> Iterator[SandboxThread]:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=3)) as running:
        yield running


def test_high_seqnos_and_failover_logs_are_those_of_all_nodes(source: SandboxThread) -> None:
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


def test_a_collection_that_was_dropped_has_no_high_seqno_and_the_others_have(source: SandboxThread) -> None:
    bucket = source.cluster.bucket
    source.call(bucket.create_scope, "shop")
    for name in ("orders", "carts"):
        source.call(bucket.create_collection, "shop", name)
    with reader_of(source, collections=["shop.orders", "shop.carts"], timeout_s=5) as reader:
        write(source, 50, collection="shop.carts")
        carts = reader.high_seqnos()
        write(source, 50, collection="shop.orders")
        source.call(bucket.drop_collection, "shop.orders")
        assert reader.high_seqnos() == carts


# -- refusals and mistakes ----------------------------------------------------------------------------------------


def test_collections_have_their_names(source: SandboxThread) -> None:
    source.call(source.cluster.bucket.create_scope, "shop")
    source.call(source.cluster.bucket.create_collection, "shop", "orders")
    with reader_of(source) as reader:
        names = reader.collection_names()
    assert names[0] == "_default._default"
    assert "shop.orders" in names.values()
