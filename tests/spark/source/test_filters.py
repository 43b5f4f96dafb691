"""Filters: what is accepted is exact, whatever they are and however they are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from mirror.spark.source.filters import accept
from mirror.spark.source.local import Restriction

KEYS = ["", "a", "ab", "abc", "b", "ba", "é", "\U0001f600"]
COLLECTIONS = ["_default._default", "shop.orders"]
COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda row, value: row == value,
    LessThan: lambda row, value: row < value,
    LessThanOrEqual: lambda row, value: row <= value,
    GreaterThan: lambda row, value: row > value,
    GreaterThanOrEqual: lambda row, value: row >= value,
    In: lambda row, value: row in value,
    StringStartsWith: lambda row, value: row[: len(value)] == value,
}
ON_KEYS = st.builds(
    lambda kind, value: kind(("key",), value),
    st.sampled_from([kind for kind in COMPARISONS if kind is not In]),
    st.sampled_from(KEYS),
)
ON_VBIDS = st.one_of(
    st.builds(
        lambda kind, value: kind(("vbid",), value),
        st.sampled_from([EqualTo, LessThan, LessThanOrEqual, GreaterThan, GreaterThanOrEqual]),
        st.integers(0, 3),
    ),
    st.builds(lambda values: In(("vbid",), tuple(values)), st.lists(st.integers(0, 3), max_size=3)),
)
ON_COLLECTIONS = st.one_of(
    st.sampled_from(COLLECTIONS).map(lambda name: EqualTo(("collection",), name)),
    st.lists(st.sampled_from(COLLECTIONS)).map(lambda names: In(("collection",), tuple(names))),
)


def passes(each: Any, row: dict[str, Any]) -> bool:
    value, found = each.value, row[each.attribute[0]]
    if isinstance(found, str):  # as Spark compares: by bytes
        found = found.encode()
        value = tuple(one.encode() for one in value) if isinstance(value, tuple) else value.encode()
    return bool(COMPARISONS[type(each)](found, value))


def left(restriction: Restriction, row: dict[str, Any]) -> bool:
    start, prefix, end = restriction.keys
    key = row["key"].encode()
    return (
        key >= start
        and key.startswith(prefix)
        and (end is None or key < end)
        and restriction.takes(row["vbid"])
        and (restriction.collections is None or row["collection"] in restriction.collections)
    )


@given(st.lists(st.one_of(ON_KEYS, ON_VBIDS, ON_COLLECTIONS), max_size=5))
def test_a_row_is_selected_exactly_if_it_passes_the_accepted_filters(filters: list[Filter]) -> None:
    restriction = Restriction()
    refused = list(accept(filters, "", restriction))
    accepted = [each for each in filters if not any(each is other for other in refused)]
    for key in KEYS:
        for vbid in range(4):
            for collection in COLLECTIONS:
                row = {"key": key, "vbid": vbid, "collection": collection}
                assert left(restriction, row) == all(passes(each, row) for each in accepted), (row, accepted)


def test_filters_that_cannot_be_exact_are_left_to_spark() -> None:
    filters: list[Filter] = [
        EqualTo(("seqno",), 5),
        EqualTo(("key",), None),
        EqualTo(("vbid",), None),
        In(("vbid",), (1, None)),
        In(("collection",), (None,)),
        Not(EqualTo(("vbid",), 1)),
        StringContains(("key",), "x"),
        IsNull(("key",)),
        EqualTo(("body", "key"), "x"),
        EqualTo(("value",), b"x"),
    ]
    restriction = Restriction()
    assert list(accept(filters, "", restriction)) == filters
    assert restriction == Restriction()


def test_a_null_check_of_a_key_column_is_accepted_without_a_restriction() -> None:
    assert list(accept([IsNotNull(("key",)), IsNotNull(("seqno",))], "", Restriction())) == [IsNotNull(("seqno",))]


def test_a_custom_schema_pushes_down_only_columns_with_the_prefix() -> None:
    restriction = Restriction()
    assert list(accept([EqualTo(("key",), "x"), EqualTo(("_key",), "y")], "_", restriction)) == [EqualTo(("key",), "x")]
    assert restriction.key == b"y"
