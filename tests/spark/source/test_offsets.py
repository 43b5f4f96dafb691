"""Offsets as JSON, and how far a batch goes: by hand, and against every way that boundaries can lie."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirror.errors import ConfigError
from mirror.spark.source.offsets import BEGINNING, At, Lag, Offset, admit, decode


def test_an_offset_is_the_same_after_a_checkpoint() -> None:
    offset = Offset("path", "b1", {0: At(1, 5, 77), 3: At(2, 9, 2**63 + 1, 1, 4)}, {8: "shop.orders"})
    encoded = json.loads(json.dumps(offset.encode()))
    assert decode(encoded, "path", "b1") == offset
    assert encoded["vbuckets"]["0"] == [1, 5, 77]
    assert offset.of(7) == BEGINNING


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 1}, "of format 1.*new checkpoint"),
        ({"format": 3}, "of format 3"),
        ({"origin": "connection"}, "made with option connection, not path"),
        ({"bucket_uuid": "b2"}, "bucket with uuid b2, this is b1"),
        ({"vbuckets": {"x": [1]}}, "cannot be read"),
        ({"vbuckets": None}, "cannot be read"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decode(Offset("path", "b1").encode() | change, "path", "b1")


def test_a_checkpoint_is_good_for_the_selection_that_it_was_made_with() -> None:
    """It knows nothing of the filtered documents, so a wider selection would never get them."""
    selections = ("", "collection=s.a", "collection=s.a,s.b", "vbuckets=0-3")
    for made_with in selections:
        encoded = json.loads(json.dumps(Offset("path", "b1", {0: At(1, 5, 77)}, selection=made_with).encode()))
        for now in selections:
            if now == made_with:
                assert decode(encoded, "path", "b1", now).selection == now
            else:
                with pytest.raises(ConfigError, match="make the same choice as before, or begin with a new"):
                    decode(encoded, "path", "b1", now)


class Vbuckets:
    """Vbuckets by their boundaries."""

    def __init__(self, boundaries: dict[int, list[int]]) -> None:
        self.boundaries = boundaries

    def newest(self, vbid: int, seqno: int) -> At | None:
        found = [each for each in self.boundaries[vbid] if each <= seqno]
        return At(1, found[-1], 7) if found else None

    def following(self, vbid: int, seqno: int) -> At | None:
        found = [each for each in self.boundaries[vbid] if each > seqno]
        return At(1, found[0], 7) if found else None

    def lags(self, at: dict[int, int], rows_max: int) -> dict[int, Lag]:
        return {
            vbid: Lag(at[vbid], At(1, ends[-1], 7), False, 1 / rows_max)
            for vbid, ends in self.boundaries.items()
            if ends[-1] > at[vbid]
        }


def test_a_batch_takes_the_vbuckets_that_fit_and_begins_next_with_the_others() -> None:
    vbuckets = Vbuckets({0: [10, 20], 1: [5], 2: [50]})
    ends, turn = admit(vbuckets.lags({0: 0, 1: 0, 2: 0}, 26), 0, vbuckets.newest, vbuckets.following)
    assert ({vbid: at.seqno for vbid, at in ends.items()}, turn) == ({0: 20, 1: 5}, 2)
    ends, turn = admit(vbuckets.lags({0: 20, 1: 5, 2: 0}, 26), turn, vbuckets.newest, vbuckets.following)
    assert {vbid: at.seqno for vbid, at in ends.items()} == {2: 50}  # larger than the limit, and whole


def test_a_rollback_is_taken_even_if_nothing_follows_it() -> None:
    back = At(2, 10, 8)
    ends, _ = admit({4: Lag(10, back, True, 1.0)}, 0, lambda *_: back, lambda *_: None)
    assert ends == {4: back}


@given(
    st.dictionaries(
        st.integers(0, 20), st.lists(st.integers(1, 60), min_size=1, unique=True).map(sorted), min_size=1, max_size=6
    ),
    st.integers(1, 80),
)
def test_every_vbucket_arrives_and_every_batch_keeps_its_limit(boundaries: dict[int, list[int]], rows_max: int) -> None:
    vbuckets = Vbuckets(boundaries)
    at = dict.fromkeys(boundaries, 0)
    turn = 0
    for _ in range(sum(map(len, boundaries.values())) + 1):
        lags = vbuckets.lags(at, rows_max)
        if not lags:
            break
        ends, turn = admit(lags, turn, vbuckets.newest, vbuckets.following)
        assert ends
        sizes = [end.seqno - at[vbid] for vbid, end in ends.items()]
        assert all(end.seqno in boundaries[vbid] and end.seqno > at[vbid] for vbid, end in ends.items())
        assert sum(sizes) <= rows_max or len(sizes) == 1
        at |= {vbid: end.seqno for vbid, end in ends.items()}
    assert at == {vbid: ends[-1] for vbid, ends in boundaries.items()}
