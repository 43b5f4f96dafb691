"""Filters on key, collection and vbucket that a read of documents applies instead of Spark.

Spark does not apply accepted filters again, so only filters that the read applies exactly are accepted. Comparisons of
keys are exact: Spark compares strings by their bytes, as the store does. IsNotNull is always true, because the three
columns are never null.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from mirror.spark.source.local import Restriction

NEXT = b"\0"

_COMPARISONS: dict[type[Filter], Callable[[int, int], bool]] = {
    EqualTo: operator.eq,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
}


def accept(filters: Iterable[Filter], mark: str, restriction: Restriction) -> Iterator[Filter]:
    """Add the accepted filters to `restriction`, and yield the others. Metadata columns begin with `mark`."""
    for each in filters:
        column = getattr(each, "attribute", ("",))
        name = column[0].removeprefix(mark) if len(column) == 1 and column[0].startswith(mark) else ""
        taker = _TAKERS.get(name)
        if taker is None or not (isinstance(each, IsNotNull) or taker(each, restriction)):
            yield each


def _take_vbid(each: Filter, restriction: Restriction) -> bool:
    value = getattr(each, "value", None)
    if isinstance(each, In) and all(type(one) is int for one in each.value):
        values = frozenset(each.value)
        restriction.vbid_tests.append(lambda vbid: vbid in values)
        return True
    compare = _COMPARISONS.get(type(each))
    if compare is None or type(value) is not int:
        return False
    restriction.vbid_tests.append(lambda vbid: compare(vbid, value))
    return True


def _take_collection(each: Filter, restriction: Restriction) -> bool:
    values: Any = each.value if isinstance(each, In) else (getattr(each, "value", None),)
    if not isinstance(each, In | EqualTo) or not all(isinstance(one, str) for one in values):
        return False
    names = frozenset(values)
    restriction.collections = names if restriction.collections is None else restriction.collections & names
    return True


def _take_key(each: Filter, restriction: Restriction) -> bool:
    text = getattr(each, "value", None)
    if not isinstance(text, str):
        return False
    key = text.encode()
    if isinstance(each, EqualTo):
        restriction.key = key
        restriction.narrow(key, key + NEXT)
    elif isinstance(each, GreaterThan):
        restriction.narrow(key + NEXT)
    elif isinstance(each, GreaterThanOrEqual):
        restriction.narrow(key)
    elif isinstance(each, LessThan):
        restriction.narrow(end=key)
    elif isinstance(each, LessThanOrEqual):
        restriction.narrow(end=key + NEXT)
    elif isinstance(each, StringStartsWith) and key.startswith(restriction.prefix):
        restriction.prefix = key
    else:
        return False
    return True


_TAKERS = {"key": _take_key, "collection": _take_collection, "vbid": _take_vbid}
