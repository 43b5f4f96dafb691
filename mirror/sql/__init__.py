"""SQL and Arrow over a view of a mirror.

`arrow` reads documents as record batches, `sample` infers the columns of a collection, and a `Session` answers SQL.
`to_pandas` makes a DataFrame of an answer.
"""

from mirror.sql.answers import to_pandas
from mirror.sql.read import arrow
from mirror.sql.schema import Column, sample
from mirror.sql.sql_session import Result
from mirror.sql.sql_session import SqlSession as Session

__all__ = ["Column", "Result", "Session", "arrow", "sample", "to_pandas"]
