"""Changes of a mirror's directory (`path`) or over the network (`connection`): choose the reader for the options.

`remote` is imported only if it is needed, because Spark imports this module in a new process for each step of planning.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mirror.spark.source import changes
from mirror.spark.source.changes import ChangesTask, LocalChanges
from mirror.spark.source.columns import change_batches
from mirror.spark.source.options import Options

if TYPE_CHECKING:
    from mirror.spark.source.remote import RemoteChanges


def driver_of(options: Options) -> LocalChanges | RemoteChanges:
    if options.path is not None:
        return LocalChanges(options)
    from mirror.spark.source.remote import RemoteChanges

    return RemoteChanges(options)


def batches_of(options: Options, work: ChangesTask) -> Iterator[Any]:
    collections = options.collections
    if options.path is not None:
        rows = changes.read(options.path, work)
    else:
        from mirror.spark.source import remote

        rows = remote.read_changes(options, work)
    if collections is not None:
        rows = (row for row in rows if row[1] is None or row[1] in collections)
    yield from change_batches(rows, options.names)
