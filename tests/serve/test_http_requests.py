"""Requests made into values, each of which comes out as it went in, and errors made into problem details."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from mirror.serve.http import problems as http_problems
from mirror.serve.http import requests
from mirror.serve.http.problems import Problem
from storage import errors
from storage.model import SEQNO_MAX, Branch, Seqno
from storage.read.view import Pin, Time, Token

KEYS = st.binary(max_size=250)
SEQNOS = st.integers(0, SEQNO_MAX)
MOMENTS = st.integers(0, 2**53)


def parameters(query: str, *known: str) -> requests.Parameters:
    scope: dict[str, Any] = {"type": "http", "query_string": query.encode(), "headers": []}
    return requests.Parameters(Request(scope), known)


@given(
    st.builds(
        requests.Page,
        st.builds(Pin, st.integers(0, 63), st.integers(0, 2**32 - 1).map(Branch), SEQNOS.map(Seqno), SEQNOS, MOMENTS),
        KEYS,
        st.integers(0, 2**32 - 1) | st.text(max_size=60),
        KEYS,
        KEYS,
        st.none() | KEYS,
        st.booleans(),
        st.booleans(),
        st.none() | SEQNOS | MOMENTS.map(Time),
    )
)
def test_a_page_token_is_read_as_it_was_written(page: requests.Page) -> None:
    assert requests.Page.parse(page.text(), 64, page.collection) == page


@pytest.mark.parametrize("at", range(13))
def test_a_page_token_with_an_odd_field_is_a_bad_request(at: int) -> None:
    page = requests.Page(Pin(0, Branch(1), Seqno(1), 5, 0), b"", 0, b"", b"", None, True, False, None)
    fields = json.loads(requests.from_base64url(page.text()))
    values: tuple[Any, ...] = (-1, 2**64, 1.5, [], {}, ["t", 1.5], ["x", 1], "!")
    for value in values:
        odd = requests.to_base64url(json.dumps([*fields[:at], value, *fields[at + 1 :]]).encode())
        with pytest.raises(Problem, match="invalid page token"):
            requests.Page.parse(odd, 64, 0)


TOKENS = st.builds(Token, st.integers(0, 1023), st.integers(0, 2**32 - 1).map(Branch), SEQNOS.map(Seqno), SEQNOS)


@given(st.lists(TOKENS, min_size=1, max_size=50, unique_by=lambda token: token.vbid))
def test_a_position_is_read_as_it_was_written(tokens: list[Token]) -> None:
    position = {int(token.vbid): token for token in tokens}
    assert requests.parse_position(requests.position_text(position), 1024) == position


def test_the_position_of_a_whole_bucket_fits_into_a_header() -> None:
    position = {
        vbid: Token(vbid, Branch(vbid % 7), Seqno(vbid * 7919 + 10**9), 2**64 // (1 + vbid % 8) - 1)
        for vbid in range(1024)
    }
    assert len(requests.position_text(position)) < 16_384


def test_a_packed_position_that_unpacks_to_too_much_is_refused() -> None:
    bomb = "z" + requests.to_base64url(zlib.compress(b"1:1:1," * 10_000_000))
    with pytest.raises(Problem, match="too long"):
        requests.parse_position(bomb, 1024)


def test_a_position_with_more_tokens_than_vbuckets_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 8 KiB once had 699,050 tokens parsed, on the event loop."""
    parsed: list[str] = []
    monkeypatch.setattr(requests, "Token", type("Counting", (Token,), {"parse": parsed.append}))
    bomb = b"0:0:0," * 699_050
    for text in (bomb.decode(), "z" + requests.to_base64url(zlib.compress(bomb))):
        with pytest.raises(Problem, match="invalid position"):
            requests.parse_position(text, 1024)
    assert not parsed


def test_input_is_bounded_before_it_is_parsed() -> None:
    with pytest.raises(Problem, match="2048 parameters at most"):
        parameters("&".join(["vbid=1"] * (requests.PARAMETERS_MAX + 1)), "vbid")
    assert len(parameters("&".join(["vbid=1"] * requests.PARAMETERS_MAX), "vbid").all("vbid")) == 2048
    with pytest.raises(Problem, match="too long"):
        requests.Page.parse("A" * (requests.PAGE_LENGTH_MAX + 1), 64, 0)


def test_too_many_keys_are_refused_undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(requests, "key_bytes", lambda text, _encoding, **_: seen.append(text))
    for body in ({"keys": ["a"] * 200_000}, {"keys": ["a"] * 600, "keys_b64": ["_w"] * 600}):
        seen.clear()
        with pytest.raises(Problem, match="1000 at most"):
            requests.requested_keys(body)
        assert len(seen) <= 600


def test_parameters_are_known_single_and_within_bounds() -> None:
    assert parameters("a=1&b=2&b=3", "a", "b").all("b") == ["2", "3"]
    assert parameters("a=7", "a").integer("a", 1, 0, 9) == 7
    assert parameters("", "a").integer("a", 1, 0, 9) == 1
    assert parameters("f=true", "f").flag("f")
    assert parameters("as_of=7", "as_of").as_of() == 7
    assert parameters("as_of=1970-01-01T00:00:01Z", "as_of").as_of() == Time(1000)
    questions: tuple[tuple[str, Callable[[requests.Parameters], object]], ...] = (
        ("c=1", lambda found: found),
        ("a=1&a=2", lambda found: found.text("a")),
        ("a=1&a=2", lambda found: found.integer("a", 1, 0, 9)),
        ("a=10", lambda found: found.integer("a", 1, 0, 9)),
        ("a=%C2%B2", lambda found: found.integer("a", 1, 0, 9)),
        ("a=-1", lambda found: found.integer("a", 1, 0, 9)),
        ("a=yes", lambda found: found.flag("a")),
        ("a=yes", lambda found: found.choice("a", "x", "y")),
        ("as_of=2024-01-01T00:00:00", lambda found: found.as_of()),
        ("as_of=0001-01-01T00:00:00%2B23:59", lambda found: found.as_of()),  # it once was an internal error
        ("as_of=9999-12-31T23:59:59-23:59", lambda found: found.as_of()),
        ("as_of=9999999999999999999999", lambda found: found.as_of()),
    )
    for query, ask in questions:
        with pytest.raises(Problem):
            ask(parameters(query, "a", "as_of"))


def test_the_keys_of_a_multi_get_are_text_or_base64() -> None:
    assert requests.requested_keys({"keys": ["b", "a", "b"], "keys_b64": ["_w"]}) == [b"b", b"a", b"\xff"]
    assert requests.requested_keys({}) == []
    bodies: tuple[object, ...] = (
        [], {"key": "a"}, {"keys": "a"}, {"keys": [1]}, {"keys": [""]}, {"keys_b64": ["!"]},
        {"keys": ["x" * 251]}, {"keys": [str(n) for n in range(1001)]}, {"keys": ["\ud800"]},
    )  # fmt: skip
    for wrong in bodies:
        with pytest.raises(Problem):
            requests.requested_keys(wrong)


def test_collections_and_vbuckets_are_parsed_or_refused() -> None:
    assert [requests.collection_name(text) for text in ("a", "s.a", "9")] == ["_default.a", "s.a", 9]
    for wrong in ("", "x" * 600, "4294967296"):
        with pytest.raises(Problem):
            requests.collection_name(wrong)
    assert requests.vbucket("7", 8) == 7
    with pytest.raises(Problem, match="there is no vbucket 8"):
        requests.vbucket("8", 8)


@pytest.mark.parametrize("name", http_problems.TITLES)
def test_every_problem_has_the_shape_of_the_standard(name: str) -> None:
    answer = Problem(name, "what", hint="how", vbid=3).response()
    status, title = http_problems.TITLES[name]
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["cache-control"] == "no-store"
    assert json.loads(bytes(answer.body)) == {
        "type": f"urn:dcp-mirror:{name}", "title": title, "status": status, "detail": "what", "hint": "how", "vbid": 3,
    }  # fmt: skip
    assert ("retry-after" in answer.headers) == (status == 503)
    assert ("www-authenticate" in answer.headers) == (status == 401)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.UnknownCollection("no"), 404), (errors.NoSuchBoundary("no"), 410), (errors.ViewInvalidated("no"), 410),
        (errors.AnswerTooLarge("no"), 413), (errors.WriteLost("no"), 409), (errors.NotPublished("no"), 504),
        (errors.CorruptedError("no"), 500), (errors.NotAMirror("/secret: no"), 503), (errors.Closed("no"), 503),
        (errors.Full("no"), 503),
    ],
)  # fmt: skip
def test_an_error_of_the_store_has_a_status_and_shows_no_path(error: errors.StorageError, status: int) -> None:
    error.path = "/secret/place"
    error.vbid = 5
    problem = http_problems.of_storage(error)
    assert problem.status == status
    assert "secret" not in json.dumps(problem.object())


def test_a_long_detail_is_cut() -> None:
    assert len(Problem("bad-request", "x" * 10_000).detail) == http_problems.DETAIL_LENGTH_MAX
