"""Objects on their way to executors, where this package may be missing.

An executor that cannot import the package fails while it unpickles what it is to run, before any code of ours. So
what unpickles is carried along: cloudpickle, which Spark uses, sends this module's functions as code. Invariant: they
need nothing but Python itself.
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark import cloudpickle


class Carried:
    """Base of what is sent to executors: a missing package is an error in one line there."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Class and attributes, wrapped; `restore` opens them."""
        return restore, (cloudpickle.dumps((type(self), self.__dict__)),)  # type: ignore[no-untyped-call]


def restore(payload: bytes) -> Any:
    """What was pickled. Raises MirrorSourceError where a package that it needs is missing."""
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
