"""Values that lie about their lengths: an error of that document alone, whichever way it is read."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import cramjam
import pyarrow as pa
import pytest

from mirror.spark.source.columns import change_row
from mirror.typed.bodies import Bodies, DocumentDoesNotFit, Reading
from mirror.typed.rows import Documents
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec
from mirror.wire.constants import Opcode
from storage.format import records
from storage.read.view import open_view
from tests.oracle import kv_client
from tests.serve.http_site import Site, made, running
from tests.serve.kv_rig import serving

BODY = b'{"good": 1}'
PAIR = b"\0\0\0\x06_x\x001\0\0"
BOMB = "a compressed value of four gigabytes"
SECTIONS = {
    BOMB: b"\xff\xff\xff\xff\x0f",
    "longer than the value": b"\0\0\1\0" + BODY,
    "four gigabytes": b"\xff\xff\xff\xff" + BODY,
    "one byte too long": len(BODY + b"x").to_bytes(4, "big") + BODY,
    "no length at all": b"\0\0",
}
"""What is said of the section as a whole: where the body begins is not known."""
PAIRS = {
    "a pair longer than its section": b"\0\0\0\x08\0\0\1\0_x\0\0" + BODY,
    "a pair of four gigabytes": b"\0\0\0\x08\xff\xff\xff\xff_x\0\0" + BODY,
    "a pair without its zeros": b"\0\0\0\x08\0\0\0\4abcd" + BODY,
    "half a length": b"\0\0\0\2\0\0" + BODY,
}
"""What is said inside of it: the attributes cannot be read, the body can."""
LOOKUP = kv_client.encode_lookup_specs(
    [LookupSpec(int(Opcode.SUBDOC_GET), b"_x", 4), LookupSpec(int(Opcode.SUBDOC_GET), b"good", 0)]
)


async def by_kv(path: str, keys: dict[str, bytes]) -> None:
    """GET, a lookup in the attributes, and a good document on the same connection after each."""
    async with serving(path) as endpoint:
        client = await endpoint.connect()
        for name, key in keys.items():
            lying = name != "good"
            for vbid, opcode, value in ((2, Opcode.GET, b""), (2, Opcode.SUBDOC_MULTI_LOOKUP, LOOKUP)):
                answer = await client.ask(fr.request(opcode, vbucket=vbid, key=key, value=value))
                if opcode == Opcode.GET:
                    assert (answer.status != 0) is lying, name
                assert len(answer.value) < 300, name
            good = await client.get(keys["good"], vbid=2)
            assert (good.status, good.value) == (0, BODY)


def by_http(site: Site, keys: dict[str, bytes]) -> None:
    texts = {name: key.decode() for name, key in keys.items()}
    for name, key in texts.items():
        answer = site.get(site.document(key), 500 if name in SECTIONS else 200)
        assert name not in SECTIONS or answer.json()["type"] == "urn:dcp-mirror:damaged"
    changes = [each["data"]["document"] for each in site.changes(vbid=2) if each["event"] == "mutation"]
    for found in (site.multi_get(texts.values())["documents"], site.scan(vbid=2)["documents"], changes):
        by_key = {each["key"]: each for each in found}
        for name, key in texts.items():
            if name in SECTIONS:
                section = "the xattr section of a value is longer than the value"
                bomb = "a compressed value claims 4294967295 bytes; at most 33554432 are possible"
                assert by_key[key]["problem"] == (bomb if name == BOMB else section)
                assert by_key[key]["value_b64"] == base64.b64encode(SECTIONS[name]).decode()
            else:
                assert by_key[key]["value"] == {"good": 1}
        assert len(by_key) == len(texts)


def test_wrong_lengths_are_errors_of_their_own_documents(tmp_path: Path) -> None:
    """A value of 19.7 MB once grew to a gigabyte; changes and multi-get broke off at it."""
    values = SECTIONS | PAIRS | {"good": PAIR.join((b"\0\0\0\x0a", BODY))}
    with made(tmp_path) as source:
        keys = {name: source.key_of(2, number) for number, name in enumerate(values)}
        for name, value in values.items():
            source.snapshot(2, (keys[name], value), datatype=3 if name == BOMB else 5)
        asyncio.run(by_kv(source.path, keys))
        with running(tmp_path / "data", source) as site:
            by_http(site, keys)
        with open_view(source.path) as view:
            documents = [each.document for each in view.changes(2) if each.document is not None]
        found = {row[0]: row[9] for row in (change_row(each, "c", "mutation", 0, 0, (1, 1)) for each in documents)}
        assert found == {keys[n]: value if n in SECTIONS else BODY for n, value in values.items()}


def stored(*values: tuple[bytes, int]) -> Documents:
    frames = [records.encode_mutation(b"k%d" % n, value, n, datatype=kind) for n, (value, kind) in enumerate(values)]
    documents = Documents()
    documents.add(0, "s.c", 1, frames, sum(map(len, frames)))
    documents.close()
    return documents


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        (SECTIONS["four gigabytes"], 5),
        (bytes(cramjam.snappy.compress_raw(SECTIONS["four gigabytes"])), 7),
        (b"\xff\xff\xff\xff\x0f", 3),
        (b"\x80\x80\x80\x10" + bytes(20), 3),
        (bytes(cramjam.snappy.compress_raw(bytes(records.VALUE_LENGTH_MAX + 1))), 3),
    ],
    ids=["xattrs", "compressed xattrs", "claims 4 GiB", "claims 32 MiB and has none", "inflates beyond the bound"],
)
def test_a_malformed_value_is_named_and_does_not_affect_other_documents(value: bytes, datatype: int) -> None:
    """A single such document once failed the whole job."""
    documents = stored((BODY, 1), (value, datatype), (BODY, 1))
    assert documents.values.to_pylist() == [BODY, value, BODY]
    assert list(documents.datatypes) == [1, datatype, 1]
    schema = pa.schema([("good", pa.int64()), ("_corrupt", pa.string())])
    lenient = Bodies(schema, Reading(mode="permissive", corrupt_record="_corrupt"))
    parsed = lenient.columns(documents.values, documents.datatypes, documents.keys)
    assert list(parsed.misfits) == [1]
    assert parsed.columns[0].to_pylist() == [1, None, 1]
    with pytest.raises(DocumentDoesNotFit, match="'k1' does not fit the schema: the value cannot be decompressed"):
        Bodies(pa.schema([("good", pa.int64())])).columns(documents.values, documents.datatypes, documents.keys)
