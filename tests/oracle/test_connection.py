"""A consumer and a producer, joined by a wire that is only bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mirror.wire import codec_dcp, codec_kv
from mirror.wire import events as ev
from mirror.wire.constants import ControlKey, Opcode, Status, StreamEndReason
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.frame import Frame, encode, request, response
from tests.oracle import kv_client
from tests.oracle.connection import Connection, Signal
from tests.oracle.states import ConnectionState, Role, StreamState

LOG = ((77, 10), (5, 0))


class Pair:
    """Both ends. What one says the other hears, in pieces of any size; both must then agree."""

    def __init__(self, piece: int = 1 << 20) -> None:
        self.consumer = Connection(Role.CONSUMER)
        self.producer = Connection(Role.PRODUCER)
        self.piece = piece

    def say(self, who: Connection, message: ev.Event | Frame, opaque: int | None = None) -> list[ev.Event | Frame]:
        return self.carry(who, who.send(message, opaque=opaque))

    def carry(self, who: Connection, data: bytes) -> list[ev.Event | Frame]:
        other = self.producer if who is self.consumer else self.consumer
        received: list[ev.Event | Frame] = []
        for pos in range(0, len(data), self.piece):
            other.receive_data(data[pos : pos + self.piece])
            while not isinstance(event := other.next_event(), Signal):
                received.append(event)
            assert event is Signal.NEED_DATA
        assert {o: s.state for o, s in self.consumer.streams.items()} == {
            o: s.state for o, s in self.producer.streams.items()
        }
        assert self.consumer.state == self.producer.state
        assert self.consumer.requested_count == self.producer.owed_count
        return received

    def ask(self, message: ev.Event | Frame, status: int = 0, **more: object) -> ev.Event | Frame:
        """The consumer asks, the producer answers; returns what the consumer hears."""
        [sent] = self.say(self.consumer, message)
        if isinstance(sent, Frame):
            [answer] = self.say(self.producer, response(sent, status, **more))  # type: ignore[arg-type]
        elif isinstance(sent, ev.StreamRequest):
            said = ev.StreamResponse(Opcode.DCP_STREAM_REQ, status, opaque=sent.opaque, **more)  # type: ignore[arg-type]
            [answer] = self.say(self.producer, said)
        else:
            [answer] = self.say(self.producer, codec_dcp.answer(sent, status))
        assert isinstance(answer, ev.Response)
        assert answer.request == message
        return answer

    def open(self, window: int = 0) -> Pair:
        self.ask(codec_kv.hello(b"test", (6, 8), opaque=self.consumer.next_opaque()))
        self.ask(codec_kv.select_bucket(b"demo", opaque=self.consumer.next_opaque()))
        self.ask(ev.DcpOpen(b"test:1", 1, opaque=self.consumer.next_opaque()))
        if window:
            self.ask(ev.DcpControl(ControlKey.CONNECTION_BUFFER_SIZE, b"%d" % window, opaque=9))
        return self

    def stream(self, vbid: int, opaque: int, stream_id: int | None = None) -> ev.Event | Frame:
        value = b"" if stream_id is None else b'{"sid":%d}' % stream_id
        sent = ev.StreamRequest(vbid, 0, 0, 2**64 - 1, 0, 0, 0, value, opaque=opaque)
        return self.ask(sent, failover_log=LOG)


def document(vbid: int, seqno: int, opaque: int, size: int = 10) -> ev.Mutation:
    return ev.Mutation(vbid, b"\0k%d" % seqno, seqno, 1, 99, value=b"v" * size, opaque=opaque)


@pytest.mark.parametrize("piece", [1, 7, 24, 1000])
def test_a_whole_conversation_however_its_bytes_are_cut(piece: int) -> None:
    pair = Pair(piece)
    states = [pair.consumer.state]
    pair.open()
    states.append(pair.consumer.state)
    assert states == [ConnectionState.PLAIN, ConnectionState.DCP]
    accepted = pair.stream(3, 0x100)
    assert isinstance(accepted, ev.StreamResponse)
    assert accepted.failover_log == LOG
    said = [
        ev.SnapshotMarker(3, 0, 2, 1, opaque=0x100),
        document(3, 1, 0x100),
        ev.Deletion(3, b"\0k1", 2, 2, 100, opaque=0x100),
        ev.SeqnoAdvanced(3, 3, opaque=0x100),
    ]
    for event in said:
        assert pair.say(pair.producer, event) == [event]
    [noop] = pair.say(pair.producer, ev.DcpNoop(opaque=5))
    assert isinstance(noop, ev.DcpNoop)
    assert pair.consumer.owed_count == 1
    [answer] = pair.say(pair.consumer, codec_dcp.answer(noop))
    assert isinstance(answer, ev.Response)
    assert (answer.op, answer.opaque, answer.request) == (Opcode.DCP_NOOP, 5, noop)
    end = ev.StreamEnd(3, StreamEndReason.STATE_CHANGED, opaque=0x100)
    assert pair.say(pair.producer, end) == [end]
    assert pair.consumer.streams == pair.producer.streams == {}


def test_answers_are_matched_by_opaque_not_by_order() -> None:
    pair = Pair().open()
    questions = [ev.GetFailoverLog(vbid, opaque=0x200 + vbid) for vbid in range(4)]
    for question in questions:
        pair.say(pair.consumer, question)
    for question in reversed(questions):
        said = ev.FailoverLogResponse(Opcode.DCP_GET_FAILOVER_LOG, 0, failover_log=LOG, opaque=question.opaque)
        [received] = pair.say(pair.producer, said)
        assert isinstance(received, ev.FailoverLogResponse)
        assert received.request == question
    assert pair.consumer.requested_count == 0


def test_equal_opaques_are_answered_in_their_order() -> None:
    pair = Pair()
    for key in (b"a", b"b"):
        pair.say(pair.consumer, request(Opcode.GET, key=key))
    for key in (b"a", b"b"):
        [received] = pair.say(pair.producer, response(request(Opcode.GET), Status.KEY_ENOENT))
        assert isinstance(received, ev.Response)
        assert isinstance(received.request, Frame)
        assert received.request.key == key


def test_a_rollback_or_a_refusal_ends_the_stream_before_it_began() -> None:
    pair = Pair().open()
    sent = ev.StreamRequest(3, 0, 50, 2**64 - 1, 77, 50, 50, opaque=1)
    received = pair.ask(sent, Status.ROLLBACK, rollback_seqno=40)
    assert isinstance(received, ev.StreamResponse)
    assert received.rollback_seqno == 40
    assert pair.consumer.streams == {}
    pair.ask(ev.StreamRequest(3, 0, 0, 1, 0, 0, 0, opaque=2), Status.NOT_MY_VBUCKET)
    assert pair.consumer.streams == {}
    with pytest.raises(LocalProtocolError, match="over"):
        pair.producer.send(document(3, 1, 2))


def test_what_was_under_way_when_a_stream_ended_is_dropped_and_acknowledged() -> None:
    """docs/protocol.md 2.1 and 2.8: not handed out, but counted, or the window leaks shut."""
    pair = Pair().open(window=1000)
    pair.stream(3, 0x100)
    late = encode(codec_dcp.to_frame(document(3, 1, 0x100, 300)))
    pair.say(pair.producer, ev.StreamEnd(3, 0, opaque=0x100))
    pair.consumer.receive_data(late)
    assert pair.consumer.next_event() is Signal.NEED_DATA
    assert pair.consumer.stale_count == 1
    assert pair.consumer.ledger.unacked == len(late) + 28


def test_closing_a_stream_lets_what_is_under_way_through() -> None:
    pair = Pair().open()
    pair.stream(3, 0x100)
    pair.say(pair.consumer, ev.CloseStream(3, opaque=7))
    assert pair.consumer.streams[0x100].state is StreamState.CLOSING
    assert pair.say(pair.producer, document(3, 1, 0x100)) == [document(3, 1, 0x100)]
    pair.say(pair.producer, codec_dcp.answer(ev.CloseStream(3, opaque=7)))
    end = ev.StreamEnd(3, StreamEndReason.CLOSED, opaque=0x100)
    assert pair.say(pair.producer, end) == [end]
    assert pair.consumer.streams == {}


@pytest.mark.parametrize(
    ("status", "left"),
    [(Status.KEY_ENOENT, None), (Status.EINVAL, StreamState.OPEN), (Status.SUCCESS, StreamState.CLOSING)],
)
def test_the_answer_to_a_close_decides_about_the_stream(status: Status, left: StreamState | None) -> None:
    pair = Pair().open()
    pair.stream(3, 0x100)
    pair.ask(ev.CloseStream(3, opaque=7), status)
    assert (pair.consumer.streams[0x100].state if pair.consumer.streams else None) is left


def test_two_streams_of_a_vbucket_are_distinguished_by_their_id() -> None:
    pair = Pair().open()
    pair.stream(3, 0x100, 5)
    pair.stream(3, 0x101, 6)
    pair.ask(ev.CloseStream(3, opaque=7, stream_id=6))
    states = {opaque: stream.state for opaque, stream in pair.producer.streams.items()}
    assert states == {0x100: StreamState.OPEN, 0x101: StreamState.CLOSING}


def test_a_marker_may_be_answered_and_an_error_may_be() -> None:
    pair = Pair().open()
    pair.stream(3, 0x100)
    [marker] = pair.say(pair.producer, ev.SnapshotMarker(3, 0, 2, 9, opaque=0x100))
    assert isinstance(marker, ev.SnapshotMarker)
    [received] = pair.say(pair.consumer, codec_dcp.answer(marker))
    assert isinstance(received, ev.Response)
    assert (received.op, received.opaque) == (Opcode.DCP_SNAPSHOT_MARKER, 0x100)


def test_a_stat_has_as_many_answers_as_it_needs() -> None:
    pair = Pair()
    sent = request(Opcode.STAT, opaque=4)
    pair.say(pair.consumer, sent)
    for key in (b"a", b"b"):
        pair.say(pair.producer, response(sent, key=key, value=b"1"))
        assert pair.consumer.requested_count == 1
    pair.say(pair.producer, response(sent))
    assert pair.consumer.requested_count == 0


def test_a_quiet_request_waits_for_nothing() -> None:
    pair = Pair()
    pair.say(pair.consumer, request(Opcode.GETQ, opaque=4, key=b"k"))
    assert pair.consumer.requested_count == 0
    [received] = pair.say(pair.producer, response(request(Opcode.GETQ, opaque=4), extras=bytes(4)))
    assert isinstance(received, ev.Response)


def test_a_duplex_server_may_push_a_cluster_map() -> None:
    pair = Pair()
    pushed = codec_kv.clustermap_notification(1, 2, b"demo", b"{}")
    assert pair.say(pair.producer, pushed) == [pushed]
    assert pair.consumer.owed_count == 0
    with pytest.raises(LocalProtocolError, match="not for the consumer"):
        pair.consumer.send(pushed)
    with pytest.raises(LocalProtocolError, match="not for the producer"):
        pair.producer.send(kv_client.noop())
    [received] = pair.say(pair.consumer, response(pushed))
    assert isinstance(received, ev.Response)


def test_the_window_shuts_and_acks_open_it_again() -> None:
    pair = Pair().open(window=1000)
    pair.stream(3, 0x100)
    for seqno in range(1, 100):
        if not pair.producer.window.is_open:
            break
        pair.say(pair.producer, document(3, seqno, 0x100, 100))
    assert seqno == 8, "seven documents of 158 bytes are out: the seventh overshot"
    ack = pair.consumer.take_ack()
    [received] = pair.carry(pair.consumer, ack)
    assert isinstance(received, ev.BufferAck)
    assert received.count >= 1000
    assert pair.producer.window.is_open
    assert pair.consumer.take_ack(force=True) == b""
    with pytest.raises(LocalProtocolError, match="acknowledging 5"):
        pair.consumer.send(ev.BufferAck(5))
    pair.producer.receive_data(codec_dcp.encode(ev.BufferAck(5)))
    with pytest.raises(RemoteProtocolError, match="acknowledged 5 bytes"):
        pair.producer.next_event()


def test_a_window_that_is_no_number_changes_nothing() -> None:
    pair = Pair().open()
    for value in (b"many", b"-1", b"99999999999", b"4294967296"):
        pair.ask(ev.DcpControl(ControlKey.CONNECTION_BUFFER_SIZE, value))
        assert pair.producer.window.window_bytes == pair.consumer.ledger.window_bytes == 0
    pair.ask(ev.DcpControl(ControlKey.CONNECTION_BUFFER_SIZE, b"100"), Status.EINVAL)
    assert pair.producer.window.window_bytes == 0


ILLEGAL_TO_SAY = [
    (Role.CONSUMER, ev.StreamRequest(1, 0, 0, 1, 0, 0, 0), "plain"),
    (Role.CONSUMER, ev.DcpControl(b"a", b"b"), "plain"),
    (Role.CONSUMER, ev.DcpNoop(), "not for the consumer"),
    (Role.CONSUMER, document(1, 1, 1), "not for the consumer"),
    (Role.PRODUCER, ev.DcpOpen(b"n", 1), "not for the producer"),
    (Role.PRODUCER, ev.DcpNoop(), "plain"),
    (Role.PRODUCER, document(1, 1, 1), "plain"),
    (Role.PRODUCER, ev.Response(Opcode.DCP_OPEN, 0, opaque=3), "no question"),
    (Role.CONSUMER, Frame(0x80, 0xEE), "no such command"),
    (Role.CONSUMER, Frame(0x80, Opcode.SET, key=b"k"), "extras of 0 bytes"),
]


@pytest.mark.parametrize(("role", "message", "words"), ILLEGAL_TO_SAY)
def test_what_must_not_be_said_is_the_speakers_error_and_the_listeners_proof(
    role: Role, message: ev.Event | Frame, words: str
) -> None:
    speaker, listener = Connection(role), Connection(role.peer)
    with pytest.raises(LocalProtocolError, match=words):
        speaker.send(message)
    assert (speaker.state, speaker.requested_count, speaker.streams) == (ConnectionState.PLAIN, 0, {})
    frame = message if isinstance(message, Frame) else codec_dcp.to_frame(message)
    listener.receive_data(encode(frame) + encode(frame))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match=words) as caught:
            listener.next_event()
        assert caught.value.op == frame.opcode
        assert caught.value.opaque == (None if frame.is_response else frame.opaque)
    assert listener.next_event() is Signal.NEED_DATA, "the bytes could be followed: the connection lives"


def test_a_producer_may_answer_what_broke_the_rules() -> None:
    producer = Connection(Role.PRODUCER)
    producer.receive_data(encode(Frame(0x80, 0xEE, opaque=6)))
    with pytest.raises(RemoteProtocolError) as caught:
        producer.next_event()
    assert (caught.value.status, caught.value.opaque) == (Status.UNKNOWN_COMMAND, 6)
    assert producer.send(Frame(0x81, 0xEE, vbucket=caught.value.status, opaque=6))


def test_a_second_open_and_a_message_of_another_vbucket_are_illegal() -> None:
    pair = Pair().open()
    with pytest.raises(LocalProtocolError, match="dcp"):
        pair.consumer.send(ev.DcpOpen(b"again", 1))
    pair.stream(3, 0x100)
    with pytest.raises(LocalProtocolError, match="stream of vb 3"):
        pair.producer.send(document(4, 1, 0x100))
    with pytest.raises(LocalProtocolError, match="names another stream"):
        pair.consumer.send(ev.StreamRequest(4, 0, 0, 1, 0, 0, 0, opaque=0x100))
    pair.consumer.receive_data(codec_dcp.encode(document(4, 1, 0x100)))
    with pytest.raises(RemoteProtocolError, match="stream of vb 3"):
        pair.consumer.next_event()


def test_a_stream_says_nothing_before_it_is_accepted() -> None:
    pair = Pair().open()
    pair.say(pair.consumer, ev.StreamRequest(3, 0, 0, 1, 0, 0, 0, opaque=1))
    with pytest.raises(LocalProtocolError, match="requested"):
        pair.producer.send(document(3, 1, 1))


def test_an_open_that_was_refused_may_be_tried_again() -> None:
    pair = Pair()
    pair.ask(ev.DcpOpen(b"n", 1, opaque=1), Status.EACCESS)
    states = [pair.producer.state]
    pair.ask(ev.DcpOpen(b"n", 1, opaque=2))
    states.append(pair.producer.state)
    assert states == [ConnectionState.PLAIN, ConnectionState.DCP]


def test_the_end_of_bytes_closes_and_a_cut_frame_is_named() -> None:
    clean = Connection(Role.CONSUMER)
    clean.receive_data(b"")
    assert clean.next_event() is Signal.CLOSED
    assert clean.next_event() is Signal.CLOSED
    with pytest.raises(LocalProtocolError, match="closed"):
        clean.send(kv_client.noop())
    with pytest.raises(LocalProtocolError, match="end of bytes"):
        clean.receive_data(b"x")
    cut = Connection(Role.CONSUMER)
    cut.receive_data(b"\x81\x00")
    assert cut.next_event() is Signal.NEED_DATA
    cut.receive_data(b"")
    with pytest.raises(RemoteProtocolError, match="2 bytes of it came"):
        cut.next_event()


def test_bytes_of_another_protocol_are_refused_at_the_first() -> None:
    connection = Connection(Role.PRODUCER)
    connection.receive_data(b"G")
    with pytest.raises(RemoteProtocolError, match="magic") as caught:
        connection.next_event()
    assert caught.value.opaque is None


def test_opaques_do_not_repeat_and_start_again_at_the_end() -> None:
    connection = Connection(Role.CONSUMER)
    assert [connection.next_opaque() for _ in range(3)] == [1, 2, 3]
    connection._last_opaque = 0xFFFF_FFFF
    assert connection.next_opaque() == 1


def test_a_stream_id_is_read_from_the_json_of_the_request() -> None:
    pair = Pair().open()
    for opaque, (value, stream_id) in enumerate(
        [(b'{"sid":71}', 71), (b"{}", None), (b"[1]", None), (b"{", None), (b'{"sid":"x"}', None)], 1
    ):
        pair.say(pair.consumer, ev.StreamRequest(3, 0, 0, 1, 0, 0, 0, value, opaque=opaque))
        assert pair.producer.streams[opaque].stream_id == stream_id


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_any_conversation_by_the_tables_leaves_both_ends_agreed(rng: random.Random, steps: int) -> None:
    """Each step one end says something it may say (what is refused locally is not said); `Pair` checks agreement."""
    pair = Pair(rng.choice((5, 64, 4096)))
    pair.open(window=500)
    unanswered: list[ev.Event] = []
    for _ in range(steps):
        vbid, opaque = rng.randrange(3), rng.randrange(1, 6)
        choice = rng.randrange(8)
        try:
            match choice:
                case 0:
                    sent = ev.StreamRequest(vbid, 0, 0, 9, 0, 0, 0, opaque=opaque)
                    pair.say(pair.consumer, sent)
                    unanswered.append(sent)
                case 1:
                    sent_close = ev.CloseStream(vbid, opaque=opaque)
                    pair.say(pair.consumer, sent_close)
                    unanswered.append(sent_close)
                case 2 if unanswered:
                    question = unanswered.pop(rng.randrange(len(unanswered)))
                    status = rng.choice((Status.SUCCESS, Status.KEY_ENOENT, Status.EINVAL))
                    pair.say(pair.producer, codec_dcp.answer(question, status))
                case 3:
                    pair.say(pair.producer, ev.StreamEnd(vbid, 0, opaque=opaque))
                case 4:
                    pair.carry(pair.consumer, pair.consumer.take_ack(force=rng.random() < 0.5))
                case _ if pair.producer.window.is_open:
                    pair.say(pair.producer, document(vbid, 1, opaque, rng.randrange(200)))
                case _:
                    pass
        except LocalProtocolError:
            continue
        assert pair.consumer.ledger.unacked == pair.producer.window.outstanding
    assert pair.consumer.stale_count == 0
