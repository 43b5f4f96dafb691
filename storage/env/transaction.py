"""A transaction: the argument of functions that read or write an environment.

A transaction sees the environment as of one commit. Hot loops use `raw` with handles that they looked up once
(`environment.db`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Protocol

from storage.errors import CorruptedError
from storage.format import keys, records


class Trees(Protocol):
    path: str
    history_id: int

    def db(self, name: bytes) -> Any: ...


def seek_before(cursor: Any, key: bytes) -> bool:
    """Move a cursor to the last key below `key`. Return False if no key is below."""
    found: bool = cursor.prev() if cursor.set_range(key) else cursor.last()
    return found


class Transaction:
    __slots__ = ("environment", "raw")

    def __init__(self, environment: Trees, raw: Any) -> None:
        """`raw` is an lmdb.Transaction; the caller ends it."""
        self.environment = environment
        self.raw = raw

    @property
    def path(self) -> str:
        return self.environment.path

    def get(self, tree: bytes, key: bytes) -> bytes | None:
        """Return the value of a key, or the first of several values; None if the key is missing."""
        value: bytes | None = self.raw.get(key, db=self.environment.db(tree))
        return value

    def put(self, tree: bytes, key: bytes, value: bytes) -> None:
        """Write a value. It replaces the key's old value; only in a tree of key rows, a key keeps all its values."""
        self.raw.put(key, value, db=self.environment.db(tree))

    def delete(self, tree: bytes, key: bytes, value: bytes = b"") -> bool:
        """Remove a key, or only `value` from its values. Return False if nothing was removed."""
        removed: bool = self.raw.delete(key, value, db=self.environment.db(tree))
        return removed

    def cursor(self, tree: bytes) -> Any:
        return self.raw.cursor(self.environment.db(tree))

    def of_vbucket(self, tree: bytes, vbid: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield the (key, value) rows of a vbucket in a tree that the vbuckets share, in key order."""
        prefix = keys.VBID_KEY.pack(vbid)
        cursor = self.cursor(tree)
        if cursor.set_range(prefix):
            yield from takewhile(lambda row: row[0].startswith(prefix), cursor.iternext())

    def stat(self, tree: bytes) -> dict[str, int]:
        stat: dict[str, int] = self.raw.stat(self.environment.db(tree))
        return stat

    def pub(self, vbid: int) -> records.Pub:
        try:
            return records.decode_pub(self.get(keys.DB_PUB, keys.VBID_KEY.pack(vbid)))
        except CorruptedError as error:
            raise CorruptedError(error.message, path=self.path, vbid=vbid) from None

    def put_pub(self, vbid: int, pub: records.Pub) -> None:
        self.put(keys.DB_PUB, keys.VBID_KEY.pack(vbid), records.encode_pub(pub))

    def state_row(self, vbid: int) -> records.StateRow:
        try:
            return records.decode_state(self.get(keys.DB_STATE, keys.VBID_KEY.pack(vbid)))
        except CorruptedError as error:
            raise CorruptedError(error.message, path=self.path, vbid=vbid, hint=error.hint) from error

    def put_state_row(self, vbid: int, row: records.StateRow) -> None:
        self.put(keys.DB_STATE, keys.VBID_KEY.pack(vbid), records.encode_state(row))

    def newest_branch(self, vbid: int) -> int:
        cursor = self.cursor(keys.DB_BRANCH)
        there = seek_before(cursor, keys.BRANCH_KEY.pack(vbid, 2**32 - 1))
        row_vbid, number = keys.BRANCH_KEY.unpack(cursor.key()) if there else (None, 0)
        return number if row_vbid == vbid else 0
