"""The view that `mirror.open_view` returns: the store's view with SQL and Arrow."""

from __future__ import annotations

import os
from typing import Any

from mirror.errors import ConfigError
from storage.read import view as read_view
from storage.read.view import AsOf, View

INSTALL = "pip install 'dcp-mirror[sql]'"


def _sql() -> Any:
    try:
        from mirror import sql
    except ImportError as error:
        raise ConfigError(f"SQL and Arrow need the package {error.name}", hint=INSTALL) from error
    return sql


class QueryView(View):
    __doc__ = View.__doc__

    def sql(self, query: str, *, as_of: AsOf = None, memory_bytes: int | None = None) -> Any:
        """Return the answer to a SELECT as a pyarrow.Table. Each collection is a table; `documents` is the default
        collection.

        Use `mirror.sql.Session` for several queries, or for batches. Raises QueryFailed, DocumentDoesNotFit,
        ConfigError, SupervisionError, and the errors of `scan`.
        """
        with _sql().Session(self, as_of=as_of, memory_bytes=memory_bytes) as session:
            return session.run(query).reader.read_all()

    def arrow(self, collection: str | None = None, **options: Any) -> Any:
        """Return a pyarrow.RecordBatchReader of documents; `mirror.sql.arrow` has the options."""
        return _sql().arrow(self, collection, **options)

    def to_pandas(self, collection: str | None = None, **options: Any) -> Any:
        """Return the documents of `arrow` as a pandas.DataFrame with exact integers (`mirror.sql.to_pandas`)."""
        return _sql().to_pandas(self.arrow(collection, **options))

    def to_polars(self, collection: str | None = None, **options: Any) -> Any:
        """Return the documents of `arrow` as a polars.DataFrame."""
        import polars

        return polars.from_arrow(self.arrow(collection, **options).read_all())


def open_view(
    path: str | os.PathLike[str],
    *,
    stale_reads: bool = False,
    verify_reads: bool = True,
    partial: bool = False,
) -> QueryView:
    return QueryView(os.fspath(path), stale_reads=stale_reads, verify_reads=verify_reads, partial=partial)


open_view.__doc__ = read_view.open_view.__doc__
