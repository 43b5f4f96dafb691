"""Seeds of the mutation: valid samples of each format, and the findings so far (`corpus/<target>/*.hex`)."""

from __future__ import annotations

import json
from pathlib import Path

from mirror.serve.http.requests import Page, position_text, to_base64url
from mirror.wire import codec_dcp, codec_kv, xattr
from mirror.wire import events as ev
from mirror.wire.frame import encode, request
from storage.format import keys, records
from storage.model import (
    SEQNO_MAX,
    Branch,
    FailoverLog,
    Manifest,
    ManifestChange,
    ManifestUid,
    Rollback,
    Seqno,
    SnapshotRange,
    Vbuuid,
)
from storage.read.view import Pin, Token
from tests.storage.frames import encode_deletion

FOLDER = Path(__file__).parent / "corpus"

_EVENTS: tuple[ev.Event, ...] = (
    ev.SnapshotMarker(1, 0, 9, 1, opaque=1),
    ev.Mutation(1, b"\0key", 1, 2, 3, 4, 5, 0, 1, b'{"a":1}', opaque=1),
    ev.Mutation(1, b"\x88\x01key", 2, 2, 3, opaque=1),
    ev.Deletion(1, b"\0key", 3, 2, 3, opaque=1),
    ev.Expiration(1, b"\0key", 4, 2, 3, opaque=1),
    ev.SystemEvent(1, 5, 0, 0, b"orders", bytes(16), opaque=1),
    ev.Prepare(1, b"\0key", 6, 1, 1, value=b"{}", opaque=1),
    ev.Commit(1, b"\0key", 6, 7, opaque=1),
    ev.Abort(1, b"\0key", 6, 7, opaque=1),
    ev.SeqnoAdvanced(1, 8, opaque=1),
    ev.StreamEnd(1, 0, opaque=1),
    ev.StreamRequest(1, 0, 0, SEQNO_MAX, 0, 0, 0, b'{"collections":["8"]}', opaque=1),
)
_WIRE = [codec_dcp.encode(event) for event in _EVENTS]
_LOG = FailoverLog.of([(7, 0)])
_MAP = {
    "rev": 3,
    "revEpoch": 1,
    "name": "b",
    "uuid": "u",
    "nodesExt": [{"services": {"kv": 11210, "kvSSL": 11207}, "hostname": "a", "thisNode": True}],
    "vBucketServerMap": {"numReplicas": 1, "serverList": ["a:11210", "$HOST:11211"], "vBucketMap": [[0, -1], [1, 0]]},
}
_PAGE = Page(Pin(1, Branch(2), Seqno(3), 4, 5), b"next", 0, b"prefix", b"start", None, False, False, None)

SAMPLES: dict[str, list[bytes]] = {
    "wire_scan": [*_WIRE, b"".join(_WIRE)],
    "dcp_codec": [*_WIRE, codec_dcp.encode_failover_log([(7, 0)]), b'{"collections":["8"],"sid":1}'],
    "kv_codec": [
        encode(codec_kv.observe_seqno(1, 7, opaque=1)),
        encode(request(0x1F, key=b"client", value=b"\0\1\0\2", opaque=1)),
        encode(request(0x21, key=b"PLAIN", value=b"\0user\0password", opaque=1)),
        encode(request(0xD0, key=b"key", extras=b"\0", value=b"\xc5\0\0\4path", opaque=1)),
        b'{"range":{"start":"YQ==","end":"eg=="},"collection":"8"}',
        b"\0\1\0\0\0\0\0\0\0\7" + bytes(32),
    ],
    "xattrs": [b"\4" + xattr.join({b"_sync": b"{}"}, b'{"a":1}'), b"\1{}", b"\2\x05\x10hello", b"\0a.b[0].c`d`"],
    "cluster_map": [json.dumps(_MAP).encode()],
    "stored_records": [
        records.encode_mutation(b"key", b"value", 1),
        encode_deletion(b"key", 2),
        records.encode_branch(records.BranchRow(1, 2, 3, 4, 5)),
        records.encode_state(
            records.StateRow(1, 2, 1, 1, SnapshotRange(Seqno(1), Seqno(9)), _LOG, 0, 0, None, "collections 8")
        ),
        records.encode_manifest(ManifestChange.between(Manifest(ManifestUid(1)), Manifest.initial())),
        records.encode_rollback(Rollback(1, Branch(2), Seqno(3), Branch(4), Seqno(5), Vbuuid(6), Vbuuid(7), 8)),
        keys.PUB.pack(1, 2, 0, 0, 0, 0),
        _WIRE[6],
    ],
    "tokens": [
        b"1:2:3",
        b"1:2:3:00000000000000ff",
        b"1:281474976710655:9",
        b"couchbases://user@a:11207,[::1]/bucket?network=external",
    ],
    "http_parameters": [
        _PAGE.text().encode(),
        position_text({1: Token(1, Branch(2), Seqno(3), 4)}).encode(),
        position_text({vbid: Token(vbid, Branch(2), Seqno(3), 4) for vbid in range(9)}).encode(),
        b"as_of=2024-01-01T00:00:00Z&limit=3&key=" + to_base64url(b"k").encode(),
        b'{"keys":["a",{"base64url":"YQ"}]}',
    ],
    "control_socket": [b'{"op":"status"}\n', b'{"op":"rollback","vbid":1,"to":5}\n'],
}


def of(target: str) -> list[bytes]:
    """The samples of a target."""
    found = sorted((FOLDER / target).glob("*.hex")) if (FOLDER / target).is_dir() else []
    return SAMPLES[target] + [bytes.fromhex(path.read_text()) for path in found]
