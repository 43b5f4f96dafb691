"""One line for a user's mistake, instead of the traceback of some worker process.

Knows how PySpark's worker processes pass an exception on; must never hide a programmer's error, whose traceback is what
one wants to see. Invariant: what leaves `clearly` for a foreseen reason is a MirrorSourceError of one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from mirror.errors import MirrorError
from storage.errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")


class MirrorSourceError(Exception):
    """What went wrong and how to mend it, in one line."""


MirrorSourceError.__module__ = "builtins"  # so that it is not spelled out with its module in front of its text


@contextmanager
def clearly() -> Iterator[None]:
    """Turn errors that were foreseen into one line.

    PySpark's processes end after they told of an exception; that the traceback is not told along is decided by a
    variable of theirs (`pyspark.util.handle_worker_exception`).
    """
    try:
        yield
    except (MirrorError, StorageError) as error:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise MirrorSourceError(" ".join(str(error).split())) from None


def told_clearly(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, its foreseen errors told by `clearly`. Not for generators."""

    @wraps(function)
    def telling(*args: P.args, **kwargs: P.kwargs) -> T:
        with clearly():
            return function(*args, **kwargs)

    return telling
