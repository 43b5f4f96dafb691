"""A compacted copy of an LMDB file as of one transaction, made page by page.

LMDB's own compacting copy is not used, because it follows damaged page numbers. In py-lmdb 3.0.0, with the patch
`validate-md-pad`, LMDB's copy also crashes if a key has some hundred values. So this module reads pages of LMDB 0.9
(mdb.c: MDB_page, MDB_node, MDB_db, MDB_meta) from the file, never from LMDB's memory map, and checks page numbers,
nodes and lengths against their bounds before use. The copy holds the live pages (all that the transaction can reach) in
their old order, with renumbered references, and no free pages.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from itertools import accumulate

import lmdb

from storage.env.environment import DATA_FILE, Environment
from storage.errors import SET_ASIDE, CorruptedError, StorageError

_PAGE = struct.Struct("=QHHHH")
"""Page number, pad, flags, lower, upper; in a large value's first page the last two are the value's number of pages."""
_EXTENT = struct.Struct("=12xI")
_NODE = struct.Struct("=HHHH")
"""Size of the data (low, high half), flags, key size. In a branch page the first three fields are a page number."""
_META = struct.Struct("=IIQQ48s48sQQ")
"""Magic, data version, address, map size, tree of free pages, main tree, last page, transaction."""
_TREE = struct.Struct("=IHHQQQQQ")
"""Pad (of the tree of free pages: the page size), flags, depth, three counts of pages, entries, root."""
_NUMBER = struct.Struct("=Q")
_MAGIC, _DATA_VERSION, _INTEGER_KEY = 0xBEEFC0DE, 1, 0x08
_ROOT_AT = _TREE.size - _NUMBER.size
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE, _FIXED_LEAF = 0x01, 0x02, 0x04, 0x08, 0x22
_BIG, _SUBTREE = 0x01, 0x02
_NO_ROOT = 2**64 - 1
_VERBATIM, _BRANCHES, _REFERS, _CONTINUES = 1, 2, 3, 4
"""Kinds of live pages. `_CONTINUES`: a later page of a large value, without a header."""


class Compaction:
    """The live pages of one transaction. The transaction must stay open while `pages` copies them."""

    def __init__(self, environment: Environment, txn: lmdb.Transaction) -> None:
        """Find the live pages. Call this soon after the begin of `txn`.

        LMDB keeps the meta pages (roots) of only the newest two commits. Raises CorruptedError, StorageError.
        """
        self._path = environment.path
        self.page_bytes = int(environment.env.stat()["psize"])
        self._file = os.open(os.path.join(environment.path, DATA_FILE), os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._meta = self._meta_of(txn.id())
            self._kinds = bytearray(self._meta[6] + 1)
            self._walk(_TREE.unpack(self._meta[5])[-1])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._file)

    def _meta_of(self, number: int) -> tuple[int, int, int, int, bytes, bytes, int, int]:
        for page in range(2):
            meta = _META.unpack_from(os.pread(self._file, _PAGE.size + _META.size, page * self.page_bytes), _PAGE.size)
            if meta[-1] == number and meta[:2] == (_MAGIC, _DATA_VERSION):
                return meta
        raise StorageError("commits overtook the begin of the copy", path=self._path, hint="try again")

    def _damaged(self, number: int, what: str) -> CorruptedError:
        return CorruptedError(f"the LMDB file is damaged: page {number} {what}", path=self._path, hint=SET_ASIDE)

    def _read(self, number: int, kind: int) -> bytes:
        """Read a page and note its kind. A second reference to a page is damage."""
        if not 2 <= number < len(self._kinds) or self._kinds[number]:
            raise self._damaged(number, "is referred to twice, or is none")
        self._kinds[number] = kind
        page = os.pread(self._file, self.page_bytes, number * self.page_bytes)
        if len(page) != self.page_bytes or _NUMBER.unpack_from(page)[0] != number:
            raise self._damaged(number, "is not there")
        return page

    def _nodes(self, number: int, page: bytes | bytearray) -> list[int]:
        _, _, _, lower, upper = _PAGE.unpack_from(page)
        if not _PAGE.size <= lower <= upper <= self.page_bytes or lower % 2:
            raise self._damaged(number, "has bounds that contradict each other")
        nodes = list(struct.unpack_from(f"={(lower - _PAGE.size) // 2}H", page, _PAGE.size))
        if nodes and not upper <= min(nodes) <= max(nodes) <= self.page_bytes - _NODE.size:
            raise self._damaged(number, "has a node outside of it")
        return nodes

    def _walk(self, root: int) -> None:
        following = [root] if root != _NO_ROOT else []
        while following:
            number = following.pop()
            page = self._read(number, _VERBATIM)
            flags = _PAGE.unpack_from(page)[2]
            if flags == _BRANCH:
                self._kinds[number] = _BRANCHES
                following += [_child(page, at) for at in self._nodes(number, page)]
            elif flags == _LEAF:
                for at in self._nodes(number, page):
                    if page[at + 4] & (_BIG | _SUBTREE):
                        self._kinds[number] = _REFERS
                        low, high, node_flags, key_size = _NODE.unpack_from(page, at)
                        data_at = at + _NODE.size + key_size
                        size = _NUMBER.size if node_flags & _BIG else _TREE.size
                        if data_at + size > self.page_bytes:
                            raise self._damaged(number, "has a node that is cut short")
                        if node_flags & _BIG:
                            self._keep_extent(_NUMBER.unpack_from(page, data_at)[0], low | high << 16)
                        elif (child := _NUMBER.unpack_from(page, data_at + _ROOT_AT)[0]) != _NO_ROOT:
                            following.append(child)
            elif flags != _FIXED_LEAF:
                raise self._damaged(number, f"is of no known kind ({flags:#x})")

    def _keep_extent(self, number: int, size: int) -> None:
        """Mark the pages of a large value as live. A value that replaced a larger one may have spare pages."""
        page = self._read(number, _VERBATIM)
        count = _EXTENT.unpack_from(page)[0]
        if _PAGE.unpack_from(page)[2] != _OVERFLOW or count * self.page_bytes < _PAGE.size + size:
            raise self._damaged(number, "does not hold the large value that refers to it")
        following = range(number + 1, number + count)
        if following.stop > len(self._kinds) or any(self._kinds[following.start : following.stop]):
            raise self._damaged(number, "holds a value whose pages are referred to twice, or are none")
        self._kinds[following.start : following.stop] = bytes([_CONTINUES]) * len(following)

    def pages(self) -> Iterator[bytes]:
        kinds = self._kinds
        numbers = array("Q", accumulate((kind > 0 for kind in kinds), initial=2))
        """The new number of each page."""
        yield from self._meta_pages(numbers)
        for number, kind in enumerate(kinds):
            if not kind:
                continue
            page = bytearray(os.pread(self._file, self.page_bytes, number * self.page_bytes))
            if len(page) != self.page_bytes:
                raise self._damaged(number, "is not there")
            if kind != _CONTINUES:
                _NUMBER.pack_into(page, 0, numbers[number])
            if kind in (_BRANCHES, _REFERS):
                for at in self._nodes(number, page):
                    _, _, flags, key_size = _NODE.unpack_from(page, at)
                    if kind == _BRANCHES:
                        child = numbers[_child(page, at)]
                        _NODE.pack_into(page, at, child & 0xFFFF, child >> 16 & 0xFFFF, child >> 32, key_size)
                    elif flags & (_BIG | _SUBTREE):
                        reference_at = at + _NODE.size + key_size + (0 if flags & _BIG else _ROOT_AT)
                        target = _NUMBER.unpack_from(page, reference_at)[0]
                        if target != _NO_ROOT:
                            _NUMBER.pack_into(page, reference_at, numbers[target])
            yield bytes(page)

    def _meta_pages(self, numbers: array[int]) -> Iterator[bytes]:
        """Yield the two meta pages: of transaction 0 (an empty file) and of transaction 1 (all pages)."""
        _, _, _, map_size, _, main, _, _ = self._meta
        no_tree = (0, 0, 0, 0, 0, _NO_ROOT)
        free = _TREE.pack(self.page_bytes, _INTEGER_KEY, *no_tree)
        *fields, root = _TREE.unpack(main)
        copied = _TREE.pack(*fields, _NO_ROOT if root == _NO_ROOT else numbers[root])
        for number, (tree, last) in enumerate([(_TREE.pack(0, fields[1], *no_tree), 1), (copied, numbers[-1] - 1)]):
            meta = _META.pack(_MAGIC, _DATA_VERSION, 0, map_size, free, tree, last, number)
            yield (_PAGE.pack(number, 0, _META_PAGE, 0, 0) + meta).ljust(self.page_bytes, b"\0")


def _child(page: bytes | bytearray, at: int) -> int:
    low, high, flags, _ = _NODE.unpack_from(page, at)
    return int(low | high << 16 | flags << 32)
