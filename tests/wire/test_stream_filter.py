"""The value of a stream request: what it asks for, and every value that asks for nothing that can be meant."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.wire.constants import Opcode, Status
from mirror.wire.errors import RemoteProtocolError
from mirror.wire.stream_filter import KEYS, FilterRequest, parse_filter

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.from_regex(r"[0-9a-f]{1,17}", fullmatch=True),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"", FilterRequest()),
        (b'{"uid":"fF"}', FilterRequest()),
        (b'{"scope":"0"}', FilterRequest(scope_id=0)),
        (b'{"scope":"8","other":[]}', FilterRequest(scope_id=8)),
        (b'{"collections":["0","aB","ab"]}', FilterRequest(collections=frozenset((0, 0xAB)))),
        (b'{"purge_seqno":"18446744073709551615"}', FilterRequest(purge_seqno=2**64 - 1)),
        (b'{"sid":null,"purge_seqno":null}', FilterRequest()),
    ],
)
def test_a_filter_is_parsed_to_its_request(value: bytes, expected: FilterRequest) -> None:
    assert parse_filter(value, has_stream_ids=False) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"{}", "no known key"),
        (b'{"other":1}', "no known key"),
        (b"[1]", "JSON object"),
        (b"{oops", "JSON object"),
        (b"\xff", "JSON object"),
        (b"[" * 100_000, "JSON object"),
        (b'{"sid":' + b"9" * 5_000 + b"}", "JSON object"),
        (b'{"uid":7}', "hexadecimal"),
        (b'{"uid":"' + b"1" * 17 + b'"}', "hexadecimal"),
        (b'{"scope":8}', "hexadecimal"),
        (b'{"scope":null}', "hexadecimal"),
        (b'{"scope":"0x8"}', "hexadecimal"),
        (b'{"scope":"8","collections":["9"]}', "both"),
        (b'{"collections":[]}', "list of ids"),
        (b'{"collections":"9"}', "list of ids"),
        (b'{"collections":[9]}', "hexadecimal"),
        (b'{"collections":["9",""]}', "hexadecimal"),
        (b'{"purge_seqno":5}', "decimal"),
        (b'{"purge_seqno":"x"}', "decimal"),
        (b'{"purge_seqno":"' + b"1" * 21 + b'"}', "decimal"),
    ],
)
def test_an_invalid_filter_is_refused_with_einval(value: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words) as caught:
        parse_filter(value, has_stream_ids=False)
    assert (caught.value.status, caught.value.op) == (Status.EINVAL, Opcode.DCP_STREAM_REQ)


@pytest.mark.parametrize("sid", ["0", "-1", "65536", '"5"', "true", "5.0", "null"])
def test_a_stream_id_is_a_number_of_16_bits(sid: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_filter(f'{{"sid":{sid}}}'.encode(), has_stream_ids=True)
    assert caught.value.status == Status.DCP_STREAM_ID_INVALID


def test_a_stream_id_is_required_exactly_if_the_connection_uses_them() -> None:
    assert parse_filter(b'{"sid":1}', has_stream_ids=True).stream_id == 1
    assert parse_filter(b'{"sid":65535,"scope":"8"}', has_stream_ids=True) == FilterRequest(8, None, 65535)
    for value, turned_on, words in (
        (b"", True, "has turned on stream ids: the request needs a `sid`"),
        (b'{"uid":"7"}', True, "needs a `sid`"),
        (b'{"sid":1}', False, "`sid` is for a connection that has turned on stream ids"),
    ):
        with pytest.raises(RemoteProtocolError, match=words) as caught:
            parse_filter(value, has_stream_ids=turned_on)
        assert caught.value.status == Status.DCP_STREAM_ID_INVALID


def test_keys_unknown_to_an_older_server_are_ignored() -> None:
    older = KEYS - {"purge_seqno"}
    assert parse_filter(b'{"uid":"7","purge_seqno":5}', has_stream_ids=False, known=older) == FilterRequest()
    with pytest.raises(RemoteProtocolError, match="no known key"):
        parse_filter(b'{"purge_seqno":"5"}', has_stream_ids=False, known=older)


@given(st.dictionaries(st.sampled_from(sorted(KEYS)), anything).map(lambda parsed: json.dumps(parsed).encode()))
def test_any_object_is_a_filter_or_a_remote_error(value: bytes) -> None:
    for has_stream_ids in (False, True):
        try:
            parsed = parse_filter(value, has_stream_ids=has_stream_ids)
        except RemoteProtocolError:
            continue
        assert (parsed.stream_id is not None) == has_stream_ids
        assert parsed.scope_id is None or parsed.collections is None
