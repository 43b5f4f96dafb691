"""Maps that a client declines or is told of, and statistics in steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mirror.clock import SystemClock
from mirror.serve.access.auth import Reader
from mirror.serve.kv.bucket import KvBucket
from mirror.serve.kv.map import ServedMap, named_nodes
from mirror.serve.kv.session import KvSession
from mirror.wire import codec_kv
from mirror.wire.constants import Feature
from tests.serve.kv_rig import Store, session_of

VBUCKETS = 64


@pytest.fixture
def session(store: Store) -> Iterator[KvSession]:
    bucket = KvBucket(store.path, SystemClock(), stale_allowed=False)
    yield session_of(bucket)
    bucket.close()


NOTIFY, BRIEF = Feature.CLUSTERMAP_CHANGE_NOTIFICATION, Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF


@pytest.mark.parametrize(
    ("features", "logged_in", "bucket", "reported"),
    [
        ((), True, True, None),
        ((Feature.DUPLEX,), True, True, None),
        ((NOTIFY,), True, True, None),
        ((Feature.DUPLEX, NOTIFY), False, True, None),
        ((Feature.DUPLEX, NOTIFY), True, True, "of_bucket"),
        ((Feature.DUPLEX, NOTIFY), True, False, "of_node"),
        ((Feature.DUPLEX, NOTIFY, BRIEF), True, True, ""),
        ((Feature.DUPLEX, BRIEF), True, False, ""),
    ],
)
def test_a_changed_map_is_announced_as_requested(
    session: KvSession, features: tuple[int, ...], logged_in: bool, bucket: bool, reported: str | None
) -> None:
    session.grant(frozenset(map(int, features)))
    session.reader = Reader("r") if logged_in else None
    session.bucket_selected = bucket
    changed = ServedMap(session.bucket.identity, named_nodes("a:1"), 2)
    session.cluster_map = changed
    frame = session.map_notification()
    if reported is None:
        assert frame is None
        return
    assert frame is not None
    config = getattr(changed, reported) if reported else b""
    assert codec_kv.decode_clustermap_notification(frame) == (1, 2, b"orders" if bucket else b"", config)
