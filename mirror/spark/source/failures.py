"""One line for a user's mistake, instead of the traceback of some worker process.

Knows how PySpark's worker processes pass an exception on; must never hide a programmer's error, whose traceback is what
one wants to see. Invariant: what leaves `clear_errors` for a foreseen reason is a MirrorSourceError of one line.
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


HIDE = "SPARK_HIDE_TRACEBACK"
"""A variable of PySpark's (`pyspark.util.handle_worker_exception`)."""


class MirrorSourceError(Exception):
    """What went wrong and how to fix it, in one line."""


MirrorSourceError.__module__ = "builtins"  # so that it is not spelled out with its module in front of its text


def hide_tracebacks() -> None:
    """An error that this process ends with is reported without its traceback."""
    os.environ[HIDE] = "1"


def show_tracebacks() -> None:
    """And with it."""
    os.environ.pop(HIDE, None)


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn errors that were foreseen into one line.

    PySpark's processes end after they reported an exception.
    """
    try:
        yield
    except (MirrorError, StorageError) as error:
        hide_tracebacks()
        raise MirrorSourceError(" ".join(str(error).split())) from None


def with_clear_errors(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, within `clear_errors`. Not for generators."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with clear_errors():
            return function(*args, **kwargs)

    return wrapper
