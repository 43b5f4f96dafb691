"""Report a user's mistake in one line, instead of a worker process's traceback.

An executor without this package fails when it unpickles its task, before it can run code of the package. So cloudpickle
sends the functions of this module as code, and `restore` needs only Python.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pyspark import cloudpickle

from mirror.errors import MirrorError
from storage.errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")


HIDE = "SPARK_HIDE_TRACEBACK"
"""If this environment variable is set, PySpark reports no traceback (`pyspark.util.handle_worker_exception`)."""


class MirrorSourceError(Exception): ...


MirrorSourceError.__module__ = "builtins"  # so that Python prints its text without the module


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn our errors into a MirrorSourceError of one line. `HIDE` stays set: the process ends after the error."""
    try:
        yield
    except (MirrorError, StorageError) as error:
        os.environ[HIDE] = "1"
        raise MirrorSourceError(" ".join(str(error).split())) from None


def with_clear_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function in `clear_errors`. Not for generators."""

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with clear_errors():
            return function(*args, **kwargs)

    return wrapper


class Carried:
    """Base of objects that Spark sends to executors. If an executor lacks a package, the error has one line."""

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (cloudpickle.dumps((type(self), self.__dict__)),)  # type: ignore[no-untyped-call]


def restore(payload: bytes) -> Any:
    import os
    import pickle
    import socket
    import sys

    try:
        kind, attributes = pickle.loads(payload)
    except ModuleNotFoundError as error:
        os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        missing = (error.name or str(error)).partition(".")[0]
        raise type("MirrorSourceError", (Exception,), {"__module__": "builtins"})(
            f"the Python of an executor ({sys.executable} on {socket.gethostname()}) has no package {missing} "
            "(pip install 'dcp-mirror[spark]' on every executor, and set spark.pyspark.python to that Python)"
        ) from None
    found = object.__new__(kind)
    found.__dict__.update(attributes)
    return found


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
