"""Scopes and collections: every form, and FlatBuffers that lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire import events as ev
from mirror.wire.constants import SystemEventId
from mirror.wire.errors import LocalProtocolError, RemoteProtocolError
from mirror.wire.system_events import decode_system_event, encode_system_event
from tests.wire.shapes import names, u32, u64

plain = st.one_of(
    st.builds(ev.CollectionCreated, u64, u32, u32, names, st.none() | u32),
    st.builds(ev.CollectionDropped, u64, u32, u32),
    st.builds(ev.ScopeCreated, u64, u32, names),
    st.builds(ev.ScopeDropped, u64, u32),
)
rich = st.one_of(
    *(
        st.builds(kind, u64, u32, u32, names, st.none() | u32, st.booleans(), st.booleans(), u64, u64)
        for kind in (ev.CollectionCreated, ev.CollectionModified)
    ),
    st.builds(ev.CollectionDropped, u64, u32, u32, st.booleans()),
    st.builds(ev.ScopeCreated, u64, u32, names),
    st.builds(ev.ScopeDropped, u64, u32, st.booleans()),
)


@given(plain)
def test_the_fixed_forms_are_read_as_they_were_written(content: ev.SystemEventContent) -> None:
    event = encode_system_event(content, vbid=1, seqno=2)
    assert (event.vbid, event.seqno) == (1, 2)
    assert event.version == (1 if isinstance(content, ev.CollectionCreated) and content.max_ttl is not None else 0)
    assert decode_system_event(event) == content


@given(rich)
def test_flatbuffers_are_read_as_they_were_written(content: ev.SystemEventContent) -> None:
    event = encode_system_event(content, vbid=1, seqno=2, version=2)
    assert event.version == 2
    assert decode_system_event(event) == content


@given(rich, st.data())
def test_corrupted_flatbuffers_are_a_remote_error_at_most(content: ev.SystemEventContent, data: st.DataObject) -> None:
    event = encode_system_event(content, vbid=1, seqno=2, version=2)
    value = bytearray(event.value)
    for _ in range(data.draw(st.integers(1, 3))):
        value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
    value = value[: data.draw(st.integers(0, len(value)))]
    try:
        content = decode_system_event(ev.SystemEvent(1, 2, event.event, 2, event.key, bytes(value)))
    except RemoteProtocolError:
        return
    assert isinstance(content, ev.SystemEventContent)


def test_fields_missing_from_a_table_have_their_default() -> None:
    """A vtable of two fields, its table (scope id at 4, manifest uid at 8), and no third field: as servers send it."""
    vtable = b"".join(n.to_bytes(2, "little") for n in (8, 16, 8, 4))
    table = (8).to_bytes(4, "little") + (9).to_bytes(4, "little") + (4).to_bytes(8, "little")
    value = (12).to_bytes(4, "little") + vtable + table
    event = ev.SystemEvent(1, 2, SystemEventId.SCOPE_DROP, 2, b"", value)
    assert decode_system_event(event) == ev.ScopeDropped(4, 9, system_scope=False)


@pytest.mark.parametrize(
    ("event", "version", "key", "value"),
    [
        (0, 0, b"c", bytes(20)),
        (0, 1, b"c", bytes(16)),
        (1, 0, b"", bytes(12)),
        (3, 0, b"s", bytes(16)),
        (0, 0, b"\xff", bytes(16)),
        (2, 0, b"", b""),
        (5, 1, b"", bytes(20)),
        (0, 3, b"", bytes(20)),
        (0, 2, b"", b""),
        (0, 2, b"", b"\xff\xff\xff\xff"),
    ],
)
def test_malformed_system_events_are_refused(event: int, version: int, key: bytes, value: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_system_event(ev.SystemEvent(1, 2, event, version, key, value))


def test_a_modification_has_no_fixed_form() -> None:
    with pytest.raises(LocalProtocolError):
        encode_system_event(ev.CollectionModified(1, 2, 3, "c"), vbid=1, seqno=2, version=1)
