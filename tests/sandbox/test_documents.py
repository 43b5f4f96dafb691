"""Document operations: CAS, revisions, expiry, locks, xattrs of tombstones, durable writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest

from mirror.document import values
from mirror.sandbox.data.bucket import Bucket
from mirror.sandbox.data.documents import DocumentError, Mode
from mirror.sandbox.data.item import ABORT, EXPIRATION, PREPARE
from mirror.wire.constants import Status
from tests.manual_clock import ManualClock
from tests.sandbox.past import state_at


class World:
    """A vbucket, and a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bucket = Bucket(
            "demo", vbuckets=1, clock=self.clock, rng=Random(1), checkpoint_items_max=100, checkpoints_kept=2
        )
        self.documents = self.bucket.documents
        self.vbucket = self.bucket.vbuckets[0]


@contextmanager
def refused(status: Status) -> Iterator[None]:
    with pytest.raises(DocumentError) as error:
        yield
    assert error.value.status == status


@pytest.fixture
def world() -> World:
    return World()


def test_modes_and_cas_are_honoured(world: World) -> None:
    store, vb = world.documents.store, world.vbucket
    with refused(Status.KEY_ENOENT):
        store(vb, b"\0k", b"1", mode=Mode.REPLACE)
    first = store(vb, b"\0k", b"1", mode=Mode.ADD, flags=7)
    with refused(Status.KEY_EEXISTS):
        store(vb, b"\0k", b"1", mode=Mode.ADD)
    second = store(vb, b"\0k", b"2", cas=first.cas)
    assert (second.rev_seqno, second.seqno, second.cas > first.cas) == (2, 2, True)
    with refused(Status.KEY_EEXISTS):
        store(vb, b"\0k", b"3", cas=first.cas)
    assert vb.high_seqno == 2
    deleted = world.documents.remove(vb, b"\0k", cas=second.cas)
    assert (deleted.deleted, deleted.rev_seqno) == (True, 3)
    again = store(vb, b"\0k", b"4", mode=Mode.ADD)
    assert again.rev_seqno == 4


def test_a_document_expires_when_it_is_read(world: World) -> None:
    world.documents.store(world.vbucket, b"\0k", b"1", expiry=10)
    assert world.documents.find(world.vbucket, b"\0k") is not None
    world.clock.advance(11)
    assert world.documents.find(world.vbucket, b"\0k") is None
    gone = world.vbucket.log[-1]
    assert (gone.kind, gone.rev_seqno, gone.expiry) == (EXPIRATION, 2, world.documents.now())
    assert world.documents.find(world.vbucket, b"\0k") is None
    assert world.vbucket.high_seqno == 2


def test_expiry_is_relative_or_absolute_and_bounded_by_the_collection(world: World) -> None:
    now = world.documents.now()
    store = world.documents.store
    assert store(world.vbucket, b"\0a", b"1", expiry=60).expiry == now + 60
    assert store(world.vbucket, b"\0a", b"1", expiry=now + 99).expiry == now + 99
    assert store(world.vbucket, b"\0a", b"2", preserve_expiry=True).expiry == now + 99
    assert store(world.vbucket, b"\0a", b"2").expiry == 0
    world.bucket.create_collection("_default", "brief", max_ttl=50)
    assert store(world.vbucket, b"\x08a", b"1").expiry == now + 50
    assert store(world.vbucket, b"\x08a", b"1", expiry=10).expiry == now + 10


def test_a_tombstone_keeps_only_system_xattrs(world: World) -> None:
    value, datatype = values.join({b"_sync": b'{"a":1}', b"user": b"1"}, b"{}", values.JSON)
    value, datatype = values.deflate(value + b" " * 200, datatype)
    world.documents.store(world.vbucket, b"\0k", value, datatype=datatype)
    gone = world.documents.remove(world.vbucket, b"\0k")
    assert values.split(gone.value, gone.datatype) == ({b"_sync": b'{"a":1}'}, b"")


def test_a_durable_write_is_a_prepare_and_a_commit(world: World) -> None:
    committed = world.documents.store(world.vbucket, b"\0k", b"1", durability=1)
    assert committed.seqno == 2
    assert world.vbucket.log[0].kind == PREPARE
    assert world.vbucket.log[0].next_seqno == 2
    world.documents.prepare(world.vbucket, b"\0k", b"2")
    world.documents.abort(world.vbucket, b"\0k")
    assert world.vbucket.log[-1].kind == ABORT
    assert world.documents.get(world.vbucket, b"\0k").value == b"1"
    assert state_at(world.vbucket).keys() == {b"\0k"}


def test_a_pending_durable_write_is_invisible_to_readers_and_refuses_writers(world: World) -> None:
    documents, vb = world.documents, world.vbucket
    documents.store(vb, b"\0k", b"1", expiry=10)
    prepare = documents.prepare(vb, b"\0k", b"2", level=3)
    assert (prepare.kind, prepare.rev_seqno, prepare.frame[54]) == (PREPARE, 2, 3)
    world.clock.advance(11)
    assert documents.expire_all(vb) == 0
    assert documents.get(vb, b"\0k").value == b"1"
    attempts: tuple[Callable[[], object], ...] = (
        lambda: documents.store(vb, b"\0k", b"3"),
        lambda: documents.store(vb, b"\0k", b"3", durability=1),
        lambda: documents.remove(vb, b"\0k"),
        lambda: documents.prepare(vb, b"\0k", b"3"),
        lambda: documents.prepare_removal(vb, b"\0k"),
        lambda: documents.expire(vb, documents.get(vb, b"\0k")),
    )
    for attempt in attempts:
        with refused(Status.SYNC_WRITE_IN_PROGRESS):
            attempt()
    assert vb.high_seqno == 2
    assert vb.max_visible_seqno == 1
    committed = documents.commit(vb, b"\0k")
    assert (committed.value, committed.cas, committed.rev_seqno, committed.seqno) == (b"2", prepare.cas, 2, 3)
    with refused(Status.KEY_ENOENT):
        documents.abort(vb, b"\0k")


def test_a_durable_delete_removes_the_document_unless_aborted(world: World) -> None:
    documents, vb = world.documents, world.vbucket
    value, datatype = values.join({b"_sync": b"{}"}, b"1", values.JSON)
    documents.store(vb, b"\0k", value, datatype=datatype)
    prepare = documents.prepare_removal(vb, b"\0k")
    assert prepare.deletes
    documents.abort(vb, b"\0k")
    assert documents.get(vb, b"\0k").seqno == 1
    gone = documents.remove(vb, b"\0k", durability=2)
    assert (gone.deleted, gone.rev_seqno, gone.seqno) == (True, 2, 5)
    assert values.split(gone.value, gone.datatype) == ({b"_sync": b"{}"}, b"")
    assert documents.find(vb, b"\0k") is None


@pytest.mark.parametrize(
    ("key", "status"),
    [
        (b"\x09k", Status.UNKNOWN_COLLECTION),
        (b"\0", Status.EINVAL),
        (b"\x80", Status.EINVAL),
        (b"\x80\0k", Status.EINVAL),
    ],
)
def test_an_invalid_key_is_refused(world: World, key: bytes, status: Status) -> None:
    with refused(status):
        world.documents.store(world.vbucket, key, b"1")
    assert world.vbucket.high_seqno == 0
