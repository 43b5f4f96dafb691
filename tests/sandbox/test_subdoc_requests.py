"""Sub-document requests: all paths or none, one version each, and what the answers carry."""

from __future__ import annotations

from mirror.sandbox import SandboxCluster
from mirror.wire import frame as fr
from mirror.wire.codec_kv import LookupSpec, MutationSpec
from mirror.wire.constants import Opcode, Status
from mirror.wire.frame import Frame
from tests.oracle import kv_client

from .client import Client

KEY = b"\0k"


def single(opcode: Opcode, path: bytes, value: bytes = b"", flags: int = 0, document_flags: int | None = None) -> Frame:
    extras = len(path).to_bytes(2) + bytes((flags,))
    if document_flags is not None:
        extras += bytes((document_flags,))
    return fr.request(opcode, extras=extras, key=KEY, value=path + value)


def mutation(*specs: MutationSpec, extras: bytes = b"") -> Frame:
    return fr.request(
        Opcode.SUBDOC_MULTI_MUTATION, key=KEY, extras=extras, value=kv_client.encode_mutation_specs(specs)
    )


def lookup(*specs: LookupSpec, extras: bytes = b"") -> Frame:
    return fr.request(Opcode.SUBDOC_MULTI_LOOKUP, key=KEY, extras=extras, value=kv_client.encode_lookup_specs(specs))


async def test_a_request_with_one_path_is_answered(cluster: SandboxCluster) -> None:
    cluster.set("k", {"a": {"b": [1, 2]}})
    client = await Client.login(cluster)
    assert (await client.ask(single(Opcode.SUBDOC_GET, b"a.b[1]"))).value == b"2"
    assert (await client.ask(single(Opcode.SUBDOC_GET_COUNT, b"a.b"))).value == b"2"
    assert (await client.ask(single(Opcode.SUBDOC_EXISTS, b"a.c"))).status == Status.SUBDOC_PATH_ENOENT
    answer = await client.ask(single(Opcode.SUBDOC_COUNTER, b"n", b"5"))
    assert (answer.status, answer.value, len(answer.extras)) == (0, b"5", 16)
    assert (await client.ask(single(Opcode.SUBDOC_DICT_ADD, b"n", b"1"))).status == Status.SUBDOC_PATH_EEXISTS
    assert cluster.vbucket(0).high_seqno == 2


async def test_a_request_with_many_paths_changes_all_or_none(cluster: SandboxCluster) -> None:
    before = cluster.set("k", {"a": 1})
    client = await Client.login(cluster)
    answer = await client.ask(
        mutation(MutationSpec(Opcode.SUBDOC_DICT_UPSERT, b"b", b"2"), MutationSpec(Opcode.SUBDOC_REPLACE, b"zz", b"1"))
    )
    assert answer.status == Status.SUBDOC_MULTI_PATH_FAILURE
    failed = kv_client.decode_mutation_results(answer.value)
    assert [(r.index, r.status) for r in failed] == [(1, Status.SUBDOC_PATH_ENOENT)]
    assert cluster.bucket.get("k") is before
    answer = await client.ask(
        mutation(
            MutationSpec(Opcode.SUBDOC_DICT_UPSERT, b"x.y", b"1", 0x05),
            MutationSpec(Opcode.SUBDOC_DICT_UPSERT, b"b", b"2"),
            MutationSpec(Opcode.SUBDOC_COUNTER, b"c", b"3"),
        )
    )
    assert [(r.index, r.value) for r in kv_client.decode_mutation_results(answer.value)] == [(2, b"3")]
    assert cluster.vbucket(0).high_seqno == 2
    found = await client.ask(lookup(LookupSpec(Opcode.SUBDOC_GET, b"x", 4), LookupSpec(Opcode.GET, b"")))
    assert [r.value for r in kv_client.decode_lookup_results(found.value)] == [b'{"y":1}', b'{"a":1,"b":2,"c":3}']


async def test_document_flags_create_add_or_delete_the_document(cluster: SandboxCluster) -> None:
    client = await Client.login(cluster)
    put = MutationSpec(Opcode.SUBDOC_DICT_UPSERT, b"a", b"1")
    assert (await client.ask(mutation(put))).status == Status.KEY_ENOENT
    assert (await client.ask(mutation(put, extras=b"\x02"))).status == 0
    assert (await client.ask(mutation(put, extras=b"\x02"))).status == Status.KEY_EEXISTS
    assert (await client.ask(mutation(put, extras=b"\x01"))).status == 0
    assert (await client.ask(mutation(put, extras=b"\x03"))).status == Status.EINVAL
    assert (await client.ask(mutation(put, extras=b"\x08"))).status == Status.NOT_SUPPORTED
    answer = await client.ask(mutation(put, extras=(60).to_bytes(4) + b"\x01"))
    assert answer.status == 0
    item = cluster.bucket.get("k")
    assert item is not None
    assert item.expiry > 0
    gone = mutation(MutationSpec(Opcode.DELETE, b""))
    assert (await client.ask(gone)).status == 0
    assert cluster.bucket.get("k") is None
