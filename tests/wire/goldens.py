"""The packet examples of kv_engine docs/dcp/documentation/commands, and what is wrong with them.

`picture` is the example's hexadecimal picture, and `message` what its field list says. Where the two contradict each
other, or the picture cannot be true, `errata` says how, and the picture is as a server would send it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror.wire import events as ev
from mirror.wire.constants import MarkerVersion, Opcode
from mirror.wire.frame import Frame, request

LOG = ((0xFEEDDECA, 0x5432), (0xDECAFE, 0x1343214), (0xFEEDFACE, 4), (0xDEADBEEF, 0x6524))
LOG_HEX = (
    "00000000feeddeca0000000000005432 0000000000decafe0000000001343214"
    "00000000feedface0000000000000004 00000000deadbeef0000000000006524"
)
HELLO = b"hello".hex()
WORLD = b"world".hex()


@dataclass(frozen=True)
class Golden:
    name: str
    picture: str
    message: ev.Event | Frame
    errata: tuple[str, ...] = ()

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.picture)


GOLDENS = (
    Golden(
        "abort",
        "80630005 10000210 00000015 00001210 0000000000000000 0000000000000004 0000000000000005" + HELLO,
        ev.Abort(0x210, b"hello", 4, 5, opaque=0x1210),
    ),
    Golden(
        "buffer-ack",
        "805d0000 04000000 00000004 00000005 0000000000000000 00001000",
        ev.BufferAck(4096, opaque=5),
        ("extras length is 0 in the picture, 4 in the list",),
    ),
    Golden(
        "buffer-ack response",
        "815d0000 00000000 00000000 00000005 0000000000000000",
        ev.Response(Opcode.DCP_BUFFER_ACK, 0, opaque=5),
    ),
    Golden(
        "close-stream", "80520000 00000005 00000000 deadbeef 0000000000000000", ev.CloseStream(5, opaque=0xDEADBEEF)
    ),
    Golden(
        "commit",
        "80620005 10000210 00000015 00001210 0000000000000000 0000000000000004 0000000000000005" + HELLO,
        ev.Commit(0x210, b"hello", 4, 5, opaque=0x1210),
    ),
    Golden(
        "control",
        "805e000b 00000000 0000000f 00000001 0000000000000000" + b"enable_noop".hex() + b"true".hex(),
        ev.DcpControl(b"enable_noop", b"true", opaque=1),
        (
            "key length 0 and extras length 4 where there is a key of 11 bytes and no extras",
            "body length 4 where there are 15 bytes",
            "vbucket 5 on a message that has none",
        ),
    ),
    Golden(
        "control response",
        "815e0000 00000000 00000000 00000001 0000000000000000",
        ev.Response(Opcode.DCP_CONTROL, 0, opaque=1),
        ("opcode 0x51 in the picture, 0x5e in the list", "extras length and body length 4, and nothing follows"),
    ),
    Golden(
        "deletion",
        "80580005 12000210 00000017 00001210 0000000000000000 0000000000000005 0000000000000001 0000" + HELLO,
        ev.Deletion(0x210, b"hello", 5, 1, 0, opaque=0x1210),
        ("a byte and a prefix 'c::' before the key that no length accounts for", "the list has the key at 43-50"),
    ),
    Golden(
        "expiration",
        "80590005 14000210 00000019 00001210 0000000000000000 0000000000000005 0000000000000001 00000000" + HELLO,
        ev.Expiration(0x210, b"hello", 5, 1, 0, opaque=0x1210),
        ("extras length 0x12 where there are 20 bytes", "body length 0x17 where there are 25 bytes"),
    ),
    Golden(
        "failover-log", "80540000 00000000 00000000 deadbeef 0000000000000000", ev.GetFailoverLog(0, opaque=0xDEADBEEF)
    ),
    Golden(
        "failover-log response",
        "81540000 00000000 00000040 deadbeef 0000000000000000" + LOG_HEX,
        ev.FailoverLogResponse(
            Opcode.DCP_GET_FAILOVER_LOG, 0, bytes.fromhex(LOG_HEX), failover_log=LOG, opaque=0xDEADBEEF
        ),
    ),
    Golden(
        "get_seqno, all",
        "80480000 00000000 00000000 deadbeef 0000000000000000",
        request(Opcode.GET_ALL_VB_SEQNOS, opaque=0xDEADBEEF),
    ),
    Golden(
        "get_seqno, of a state",
        "80480000 04000000 00000004 deadbeef 0000000000000000 00000002",
        request(Opcode.GET_ALL_VB_SEQNOS, opaque=0xDEADBEEF, extras=bytes.fromhex("00000002")),
        ("the list translates the opaque 0xdeadbeef to 4735928559: it is 3735928559",),
    ),
    Golden(
        "get_seqno, of a collection",
        "80480000 08000000 00000008 deadbeef 0000000000000000 00000000 cafef00d",
        request(Opcode.GET_ALL_VB_SEQNOS, opaque=0xDEADBEEF, extras=bytes.fromhex("00000000cafef00d")),
    ),
    Golden(
        "get_seqno, of a state and a collection",
        "80480000 08000000 00000008 deadbeef 0000000000000000 00000002 cafef00d",
        request(Opcode.GET_ALL_VB_SEQNOS, opaque=0xDEADBEEF, extras=bytes.fromhex("00000002cafef00d")),
        ("the list has a body length of 0x80: it is 8",),
    ),
    Golden(
        "get_seqno response",
        "81480000 00000000 00000028 deadbeef 0000000000000000 000a 0000000000005432 000d 0000000001343214"
        "007f 0000000000000004 02d0 0000000000006524",
        Frame(
            0x81,
            Opcode.GET_ALL_VB_SEQNOS,
            opaque=0xDEADBEEF,
            value=bytes.fromhex("000a0000000000005432 000d0000000001343214 007f0000000000000004 02d00000000000006524"),
        ),
    ),
    Golden(
        "mutation",
        "80570005 1f000210 00000029 00001210 0000000000000000 0000000000000004 0000000000000001"
        "00000000 00000000 00000000 0000 00" + HELLO + WORLD,
        ev.Mutation(0x210, b"hello", 4, 1, 0, value=b"world", opaque=0x1210),
    ),
    Golden(
        "no-op",
        "805c0000 00000000 00000000 00000005 0000000000000000",
        ev.DcpNoop(opaque=5),
        ("four bytes after the header that no length accounts for", "opaque 0 in the picture, 5 in the list"),
    ),
    Golden(
        "no-op response",
        "815c0000 00000000 00000000 00000005 0000000000000000",
        ev.Response(Opcode.DCP_NOOP, 0, opaque=5),
    ),
    Golden(
        "open-connection",
        "80500018 08000000 00000020 00000001 0000000000000000 00000000 00000000" + b"bucketstream vb[100-105]".hex(),
        ev.DcpOpen(b"bucketstream vb[100-105]", 0, opaque=1),
    ),
    Golden(
        "open-connection response",
        "81500000 00000000 00000000 00000001 0000000000000000",
        ev.Response(Opcode.DCP_OPEN, 0, opaque=1),
    ),
    Golden(
        "oso_snapshot",
        "80650000 04000000 00000004 deadbeef 0000000000000000 00000001",
        ev.OsoSnapshot(0, 1, opaque=0xDEADBEEF),
        ("body length 0 in the picture, 4 in the list",),
    ),
    Golden(
        "persist_seqno",
        "80b70000 0800000c 00000008 00000000 0000000000000000 00000000feeddeca",
        request(Opcode.SEQNO_PERSISTENCE, vbucket=12, extras=bytes.fromhex("00000000feeddeca")),
        ("eight bytes of extras too many in the picture", "key length 0x0c in the list, and there is no key"),
    ),
    Golden(
        "prepare",
        "80600005 1f000210 00000029 00001210 0000000000000000 0000000000000004 0000000000000001"
        "00000000 00000000 00000000 000001" + HELLO + WORLD,
        ev.Prepare(0x210, b"hello", 4, 1, 0, value=b"world", durability=1, opaque=0x1210),
        ("opcode 0x57 (a mutation) in the picture, 0x60 in the list", "the list has a value of five bytes at 60-65"),
    ),
    Golden(
        "random_key response",
        "81b60008 00000000 00000008 00000000 0000000000000000" + b"rand_key".hex(),
        Frame(0x81, Opcode.GET_RANDOM_KEY, key=b"rand_key"),
        ("body length 16 in the picture, 8 in the list, and 8 bytes follow",),
    ),
    Golden(
        "seqno-advanced",
        "80640000 08000000 00000008 deadbeef 0000000000000000 0000000000000004",
        ev.SeqnoAdvanced(0, 4, opaque=0xDEADBEEF),
        (
            "opcode 0x65 in the picture, 0x64 in the list",
            "extras length 4 in the picture, 8 in the list",
            "body length 0 in the picture, 8 in the list",
        ),
    ),
    Golden(
        "snapshot-marker V1",
        "80560000 14000000 00000014 deadbeef 0000000000000000 0000000000000000 0000000000000008 00000001",
        ev.SnapshotMarker(0, 0, 8, 1, opaque=0xDEADBEEF),
        ("body length 0 in the picture, 0x14 in the list", "the list calls type 1 disk: it is memory"),
    ),
    Golden(
        "snapshot-marker V2.0",
        "80560000 01000000 00000025 deadbeef 0000000000000000 00 0000000000000001 0000000000000008 00000002"
        "0000000000000008 0000000000000007",
        ev.SnapshotMarker(0, 1, 8, 2, 8, 7, version=MarkerVersion.V2_0, opaque=0xDEADBEEF),
        ("extras length 0x14 in the picture, 1 in the list", "body length 0 in the picture, 0x25 in the list"),
    ),
    Golden(
        "stream-end",
        "80550000 04000000 00000004 deadbeef 0000000000000000 00000000",
        ev.StreamEnd(0, 0, opaque=0xDEADBEEF),
    ),
    Golden(
        "stream-request, resumed",
        "80530000 30000000 00000030 00001000 0000000000000000 00000000 00000000 0000000000ffeedd ffffffffffffffff"
        "00000000feeddeca 0000000000ffeedd 0000000000ffeeff",
        ev.StreamRequest(0, 0, 0xFFEEDD, 2**64 - 1, 0xFEEDDECA, 0xFFEEDD, 0xFFEEFF, opaque=0x1000),
        ("snapshot start 0xffeedd in the picture, 0 in the list: the picture is taken",),
    ),
    Golden(
        "stream-request rollback",
        "81530000 00000023 00000008 00001000 0000000000000000 0000000000000000",
        ev.StreamResponse(Opcode.DCP_STREAM_REQ, 0x23, bytes(8), rollback_seqno=0, opaque=0x1000),
    ),
    Golden(
        "stream-request, fresh",
        "80530000 30000000 00000030 00001000 0000000000000000 00000000 00000000 0000000000000000 ffffffffffffffff"
        "00000000feeddeca 0000000000000000 0000000000000000",
        ev.StreamRequest(0, 0, 0, 2**64 - 1, 0xFEEDDECA, 0, 0, opaque=0x1000),
        ("the picture ends before the snapshot's end seqno",),
    ),
    Golden(
        "stream-request response",
        "81530000 00000000 00000040 00001000 0000000000000000" + LOG_HEX,
        ev.StreamResponse(Opcode.DCP_STREAM_REQ, 0, bytes.fromhex(LOG_HEX), failover_log=LOG, opaque=0x1000),
    ),
    Golden(
        "system_event",
        "805f000c 0d000210 0000002d 00001210 0000000000000000 0000000000000004 00000000 01"
        + b"mycollection".hex()
        + "0000000000000002 00000000 00000008 00011940",
        ev.SystemEvent(
            0x210, 4, 0, 1, b"mycollection", bytes.fromhex("0000000000000002 00000000 00000008 00011940"), opaque=0x1210
        ),
        ("collection id before scope id: the structures below it, and real servers, have the scope first",),
    ),
)


def is_dcp(opcode: int) -> bool:
    return Opcode.DCP_OPEN <= opcode <= Opcode.DCP_CACHE_TRANSFER_END
