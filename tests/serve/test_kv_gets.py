"""The short way to a document against the long one: the same bytes, or none."""

from __future__ import annotations

from itertools import combinations
from math import inf
from typing import Any

import pytest

from mirror.document import values
from mirror.serve.access.auth import Reader
from mirror.serve.bucket.bucket import ServedBucket
from mirror.serve.bucket.mirror_session import MirrorSession
from mirror.serve.kv.gets import answer_gets
from mirror.server import dispatch, document_requests
from mirror.server.connection import BYTES_MAX, Counters
from mirror.server.session import Reply
from mirror.wire import frame as fr
from mirror.wire.constants import Feature, Opcode, Status
from mirror.wire.frame import Frame
from storage.env.environment import Environment
from storage.model import Collection, Seqno
from tests.serve.kv_rig import DEFAULT, Store, session_of

FEATURES = (Feature.COLLECTIONS, Feature.SNAPPY, Feature.JSON, Feature.TRACING)
BODY = b'{"n":"' + b"x" * 100 + b'"}'
VALUES = {b"plain": b"value", b"json": BODY, b"long": b"x" * (BYTES_MAX + 1)}
VBUCKETS = 1
READERS = (None, Reader("all"), Reader("some", frozenset({"s.c"})))


@pytest.fixture
def store(store: Store) -> Store:
    """A vbucket that has documents of every sort."""
    store.collections(1, {8: "s"}, DEFAULT, Collection(8, 8, "c", Seqno(0)), Collection(300, 8, "wide", Seqno(0)))
    store.put(b"plain", b"value", 2, flags=7, cas=99)
    store.put(b"json", BODY, 3, datatype=values.JSON)
    store.put(b"snappy", *values.deflate(BODY, 0)[:1], 4, datatype=values.SNAPPY | values.JSON)
    joined, datatype = values.join({b"k": b"1"}, BODY, values.JSON)
    store.put(b"xattr", joined, 5, datatype=datatype)
    store.put(b"old", b"x", 6, expiry=1)
    store.put(b"inside", b"x", 7, cid=8)
    store.put(b"inside", b"x", 8, cid=300)
    store.put(b"gone", b"x", 9)
    store.delete(b"gone", 10)
    store.put(b"long", b"x" * (BYTES_MAX + 1), 11)
    return store


def requests() -> list[Frame]:
    names = [b"plain", b"json", b"snappy", b"xattr", b"old", b"gone", b"none", b"inside"]
    keys = [*names, b"k" * 250, b"k" * 251, b"", b"\0"]
    prefixes = [b"", b"\0", b"\x08", b"\xac\x02", b"\x09", b"\x80"]
    return [
        *(fr.request(Opcode.GET, key=prefix + key, opaque=5) for key in keys for prefix in prefixes),
        fr.request(Opcode.GET, key=b"plain", vbucket=3),
        fr.request(Opcode.GET, key=b"\0plain", extras=b"abcd"),
        fr.request(Opcode.GET, key=b"\0plain", value=b"v"),
        fr.request(Opcode.GET, key=b"\0plain", framing=b"\x22\0\x05"),
    ]


def slowly(session: MirrorSession, frame: Frame) -> Reply | None:
    """The dispatch's answer; None for a refusal."""
    try:
        reply = dispatch.answer(session, document_requests.OPERATIONS, frame)
    except ValueError:
        return None
    assert isinstance(reply, Reply)
    return reply if reply.status == Status.SUCCESS else None


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("selected", [False, True])
def test_the_fast_path_of_gets_answers_as_the_general_one_or_not_at_all(
    bucket: ServedBucket, reader: Reader | None, selected: bool
) -> None:
    answered = 0
    for count in range(len(FEATURES) + 1):
        for granted in combinations(FEATURES, count):
            session = session_of(bucket, reader)
            session.grant(frozenset(map(int, granted)))
            session.bucket_selected = selected
            counters = Counters()
            for frame in requests():
                data = b"before" + fr.encode(frame)
                out: list[bytes] = []
                stopped, count, byte_count = answer_gets(session, counters, data, 6, out, 128, inf)
                short = b"".join(out)
                assert (stopped, count, byte_count) == ((len(data), 1, len(short)) if short else (6, 0, 0))
                if not count:
                    continue
                answered += 1
                sent, _ = fr.decode(short)
                reply = slowly(session, frame)
                assert reply is not None
                assert bool(sent.framing) is (Feature.TRACING in granted)
                assert (sent.status, sent.opcode, sent.opaque, sent.key) == (0, Opcode.GET, frame.opaque, b"")
                assert (sent.extras, sent.value, sent.cas) == (reply.extras, reply.value, reply.cas)
                assert sent.datatype == reply.datatype
            assert (counters.requests, counters.misses, counters.refused) == (counters.hits, 0, 0)
    assert (answered > 0) is (reader is not None and reader.reads_all)


def test_pipelined_gets_are_read_in_one_transaction_up_to_the_first_special_one(
    bucket: ServedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = bucket.view.reader(0).environment
    begun: list[bool] = []
    begin = Environment.begin

    def counted(environment: Environment, *, write: bool = False, buffers: bool = False) -> Any:
        begun.append(buffers)
        return begin(environment, write=write, buffers=buffers)

    monkeypatch.setattr(Environment, "begin", counted)
    session, counters = session_of(bucket, Reader("all")), Counters()

    def answered(*names: bytes, count_max: int = 128, turn_ends: float = inf) -> int:
        """Count the requests that got their own answer in their place."""
        sent = [fr.encode(fr.request(Opcode.GET, key=name, opaque=at)) for at, name in enumerate(names)]
        out: list[bytes] = []
        stopped, count, _ = answer_gets(session, counters, b"".join(sent), 0, out, count_max, turn_ends)
        assert stopped == sum(map(len, sent[:count]))
        assert environment.running == [], "a transaction is open"
        data, pos, found = b"".join(out), 0, []
        while pos < len(data):
            frame, pos = fr.decode(data, pos)
            found.append((frame.opaque, frame.value))
        assert found == [(at, VALUES[name]) for at, name in enumerate(names[:count])]
        return count

    assert answered(*[b"plain", b"json"] * 20) == 40
    assert begun == [False, True], "one transaction for keys, one for rows"
    assert answered(b"plain", b"none", b"plain") == 1
    assert answered(b"plain", b"xattr", b"plain") == 1
    assert answered(b"plain", b"plain", b"plain", count_max=2) == 2
    assert answered(b"plain", b"long", b"plain") == 2
    assert answered(b"plain", turn_ends=0.0) == 0
