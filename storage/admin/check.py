"""The integrity walk: checks the invariants of FORMAT.md on every row of every vbucket.

The walk reads each vbucket in a transaction of its own, because a long transaction makes the file of a running service
grow. The walk finds contradictions within the stored data; `verify` compares the data with the source.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import lmdb

from storage.env import directory
from storage.env.environment import DATA_FILE, READER_TRIES, SHARED
from storage.env.transaction import Transaction
from storage.errors import RUN_CHECK, SET_ASIDE, CorruptedError, StorageError
from storage.format import keys, records, seal
from storage.history import branches, chain
from storage.model import SEQNO_MAX, Identity, Kind

PROBLEMS_MAX = 1000
GAP_ROWS = 5_000_000
"""Maximum number of hashes of a vbucket's key rows in memory. For further rows, the walk looks up each key row."""


@dataclass(slots=True)
class CheckReport:
    problems: list[str] = field(default_factory=list)
    vbuckets: int = 0
    rows: int = 0
    key_rows: int = 0
    boundaries: int = 0

    def add(self, where: str, what: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(f"{where}: {what}")


Progress = Callable[[int, int], None]


def check(path: str, *, progress: Progress | None = None) -> CheckReport:
    """Check the mirror at `path`, group by group: first LMDB's pages, by py-lmdb's verifier, then the rows.

    Problems of a group are reported, not raised. Raises NotAMirror, ReadOnly, UnknownFormat or CorruptedError for
    `mirror.json`. `progress` gets the number of checked vbuckets and of all vbuckets.
    """
    identity = directory.load(path)
    report = CheckReport()
    for group in range(identity.group_count):
        check_group(path, group, identity, report, progress)
    return report


def check_group(
    path: str, group: int, identity: Identity, report: CheckReport, progress: Progress | None = None
) -> None:
    try:
        _check_group(directory.group_path(path, group), group, identity, report, progress)
    except (StorageError, lmdb.Error, struct.error, OSError) as error:
        report.add(f"group {group}", _problem(error))


def _problem(error: Exception) -> str:
    """Return the error's text, with the remedy instead of the hint to run this check."""
    if isinstance(error, StorageError) and error.hint == RUN_CHECK:
        return f"{error.what} ({SET_ASIDE})"
    return str(error)


def _check_group(folder: str, group: int, identity: Identity, report: CheckReport, progress: Progress | None) -> None:
    vbids = identity.group_vbids(group)
    environment = SHARED.acquire(folder, vbids)
    try:
        with environment.read():  # keeps the writer from reusing LMDB pages
            if not _check_pages(folder, group, report):
                return  # reading damaged LMDB pages can crash
        environment.open_all()
        with environment.read() as txn:
            stored = txn.get(keys.DB_META, b"identity")
            directory.check_identity(stored, identity, group, folder)
            if len(txn.get(keys.DB_META, b"fence") or b"") != keys.SEQNO.size:
                report.add(f"group {group}", "its fence is not a number of 8 bytes")
            _check_strays(txn, set(vbids), group, report)
        for vbid in vbids:
            try:
                with environment.read() as txn:
                    _VbucketCheck(txn, vbid, report).run()
            except (StorageError, struct.error, ValueError, IndexError) as error:
                report.add(f"vbucket {vbid}", _problem(error))
            report.vbuckets += 1
            if progress is not None:
                progress(report.vbuckets, len(identity.vbids))
    finally:
        SHARED.release(environment)


def _check_pages(folder: str, group: int, report: CheckReport) -> bool:
    """Run py-lmdb's verifier on the file. Return True if it found nothing."""
    from lmdb import verify

    problems: list[str] = []
    for _ in range(READER_TRIES):  # a commit during a run can look like damage
        try:
            problems = verify.verify(os.path.join(folder, DATA_FILE))  # type: ignore[no-untyped-call]
        except Exception as error:  # the verifier can raise anything on damage
            problems = [f"{type(error).__name__}: {error}"]
        if not problems:
            break
    for problem in problems:
        report.add(f"group {group}", f"page verification: {problem}")
    return not problems


def _check_strays(txn: Transaction, vbids: set[int], group: int, report: CheckReport) -> None:
    for name in keys.SHARED_DBS:
        if name == keys.DB_META:
            continue
        for key, _ in txn.cursor(name).iternext():
            vbid = int.from_bytes(key[:2], "big")
            if vbid not in vbids:
                report.add(f"group {group}", f"tree {name.decode()} has a row of vbucket {vbid}")


class _VbucketCheck:
    def __init__(self, txn: Transaction, vbid: int, report: CheckReport) -> None:
        self.txn = txn
        self.vbid = vbid
        self.report = report

    def _add(self, what: str) -> None:
        self.report.add(f"vbucket {self.vbid}", what)

    def run(self) -> None:
        self.state, _ = branches.load(self.txn, self.vbid)
        self.indexed = self.txn.state_row(self.vbid).indexed_seqno
        self._check_state()
        self._check_branches()
        self.served = chain.load(self.txn, self.vbid, self.state.branch, self.state.published_seqno)
        self._check_boundaries()
        references = self._check_rows()
        self._check_keys(references)
        self._check_manifests()

    def _check_state(self) -> None:
        state = self.state
        if state.history_floor_seqno > state.published_seqno:
            self._add(f"history floor {state.history_floor_seqno} above published seqno {state.published_seqno}")
        if self.indexed > state.staged_seqno or self.indexed < state.staging_published_seqno:
            self._add(f"key rows said to reach {self.indexed}, published {state.staging_published_seqno}")
        if state.staging_branch < state.branch:
            self._add(f"staging branch {state.staging_branch} older than the served {state.branch}")
        snapshot = state.open_snapshot
        if snapshot is not None and snapshot.end_seqno < state.staged_seqno:
            self._add(f"staged seqno {state.staged_seqno} beyond the open snapshot's end {snapshot.end_seqno}")
        if (
            snapshot is None
            and state.staged_seqno != state.staging_published_seqno
            and self.indexed == state.staged_seqno
        ):
            self._add("a complete snapshot with all its key rows is not published")
        seqnos = [entry.seqno for entry in state.failover_log]
        if seqnos != sorted(seqnos, reverse=True):
            self._add("failover log is not newest first")

    def _check_branches(self) -> None:
        self.bases: dict[int, int] = {}
        for branch, row in branches.all_branches(self.txn, self.vbid).items():
            limits = [above for _, above in row.history_ids]
            if not limits or limits != sorted(limits):
                self._add(f"the history ids of branch {branch} are missing or fall")
            if row.parent is None and row.base_seqno:
                self._add(f"branch {branch} has no parent but base seqno {row.base_seqno}")
            if row.parent is not None and row.parent not in self.bases:
                self._add(f"branch {branch} has the unknown parent {row.parent}")
            elif row.parent is not None and row.base_seqno <= self.bases[row.parent]:
                self._add(
                    f"branch {branch} begins at {row.base_seqno}, not above its parent's {self.bases[row.parent]}"
                )
            self.bases[branch] = row.base_seqno
        for name, branch in (("served", self.state.branch), ("staging", self.state.staging_branch)):
            if branch not in self.bases:
                raise CorruptedError(f"the {name} branch {branch} is unknown")

    def _check_boundaries(self) -> None:
        state = self.state
        last = None
        found = []
        for boundary in chain.boundaries(self.txn, self.vbid, self.served):
            if last is not None and boundary.seqno >= last:
                self._add(f"boundaries do not fall: {boundary.seqno} below {last}")
            if boundary.snap_start_seqno > boundary.seqno:
                self._add(f"boundary {boundary.seqno} starts at {boundary.snap_start_seqno}")
            last = boundary.seqno
            found.append(last)
        if state.published_seqno and (not found or found[0] != state.published_seqno):
            self._add(f"published seqno {state.published_seqno} is not a kept boundary")
        if state.history_floor_seqno and state.history_floor_seqno not in found:
            self._add(f"history floor {state.history_floor_seqno} is not a kept boundary")
        self.report.boundaries += len(found)
        self._check_counters()
        self._check_spans()

    def _check_counters(self) -> None:
        """Check each boundary above the floor: its counters are those of the boundary before, plus the rows between."""
        expected = None
        row_bytes, floor = 0, self.state.history_floor_seqno
        for key, value in chain.rows_after(self.txn, self.vbid, self.served, floor - 1, boundaries=True):
            if len(key) == keys.ROW_KEY_SIZE:
                row_bytes += len(value)
                continue
            boundary = chain.boundary_of(key, value, self.vbid)
            if expected is not None and (boundary.ordinal, boundary.row_bytes - row_bytes) != expected:
                self._add(
                    f"boundary {boundary.seqno} counts {boundary.ordinal} boundaries, {boundary.row_bytes} bytes, "
                    f"expected {expected[0]} and {expected[1] + row_bytes}"
                )
            expected, row_bytes = (boundary.ordinal + 1, boundary.row_bytes), 0

    def _check_spans(self) -> None:
        rows = self.txn.cursor(keys.rows_db(self.vbid))
        for key, value in self.txn.of_vbucket(keys.DB_SPAN, self.vbid):
            _, branch, end_seqno = keys.SPAN_KEY.unpack(key)
            (before_seqno,) = keys.SEQNO.unpack(value)
            if not rows.set_range(keys.ROW.pack(branch, before_seqno) + b"\x02"):
                continue
            last = keys.ROW.pack(branch, end_seqno)
            for row_key in rows.iternext(values=False):
                if row_key >= last:
                    break
                if len(row_key) == keys.BOUNDARY_KEY_SIZE:
                    where = _show(row_key[records.ROW_KEY])
                    self._add(f"a boundary at {where}, inside a span from {before_seqno} to {end_seqno}")

    def _check_rows(self) -> dict[bytes, int]:
        """Check that every row decodes, has the seqno of its row key and lies above the base of its branch. Return, by
        row key, a hash of each key row that must be stored. After `GAP_ROWS` hashes, look up the key rows instead.
        """
        state = self.state
        references: dict[bytes, int] = {}
        key_rows = self.txn.cursor(keys.keys_db(self.vbid))
        for key, value in self.txn.cursor(keys.rows_db(self.vbid)).iternext():
            if len(key) == keys.BOUNDARY_KEY_SIZE and key[-1:] == keys.BOUNDARY_SUFFIX:
                chain.boundary_of(key, value, self.vbid)
                continue
            if len(key) != keys.ROW_KEY_SIZE:
                self._add(f"row key {key.hex()} has {len(key)} bytes")
                continue
            self.report.rows += 1
            branch, seqno = keys.ROW.unpack(key)
            where = f"row {branch}:{seqno}"
            if branch not in self.bases:
                self._add(f"{where} is of an unknown branch")
                continue
            if seqno <= self.bases[branch]:
                self._add(f"{where} is not above its branch's base {self.bases[branch]}")
            try:
                frame = seal.frame_of(value, key, self.vbid, self.txn.path)
                document = records.decode_row(self.vbid, branch, frame)
            except CorruptedError as error:
                self._add(f"{where}: {error.message}")
                continue
            if document.seqno != seqno:
                self._add(f"{where} holds the event of seqno {document.seqno}")
            if branch == state.staging_branch and seqno > state.staged_seqno:
                self._add(f"{where} lies above the staged seqno {state.staged_seqno}")
                continue
            if document.kind is Kind.SYSTEM_EVENT:
                continue
            if self._must_have_key_row(branch, seqno):
                (key_row,) = records.key_rows([(key, value)])
                if len(references) < GAP_ROWS:
                    references[key] = hash(key_row)
                elif not key_rows.set_key_dup(*key_row):
                    self._add(f"{where} has no key row")
        return references

    def _must_have_key_row(self, branch: int, seqno: int) -> bool:
        """Return True for visible rows, and for rows of the staging branch up to the indexed seqno."""
        if branch == self.state.staging_branch:
            return seqno <= self.indexed
        return any(link.branch == branch and seqno <= link.cut for link in self.served)

    def _check_keys(self, references: dict[bytes, int]) -> None:
        """Check that every key row points to a row of its key and kind, and that each of `references` has a key row."""
        rows_db = keys.rows_db(self.vbid)
        pointed = 0
        previous = b""
        for wire_key, dup in self.txn.cursor(keys.keys_db(self.vbid)).iternext():
            self.report.key_rows += 1
            if len(dup) != keys.DUP_SIZE:
                self._add(f"key {wire_key!r} has a reference of {len(dup)} bytes")
                continue
            if wire_key != previous:
                previous = wire_key
                try:
                    keys.split_key(wire_key)
                except ValueError as error:
                    self._add(_problem(error))
            position = dup[records.ROW_KEY]
            if position in references:
                if references[position] != hash((wire_key, dup)):
                    self._add(f"key {wire_key!r} points to row {_show(position)}, which is another document's")
                pointed += 1
                continue
            frame = self.txn.get(rows_db, position)
            if frame is None:
                self._add(f"key {wire_key!r} points to row {_show(position)}, which is missing")
            elif records.key_rows([(position, frame)]) != [(wire_key, dup)]:
                self._add(f"key {wire_key!r} points to row {_show(position)}, which is another document's")
        if pointed != len(references):
            for _, dup in self.txn.cursor(keys.keys_db(self.vbid)).iternext():
                references.pop(dup[records.ROW_KEY], None)
            for position in references:
                self._add(f"row {_show(position)} has no key row")

    def _check_manifests(self) -> None:
        for key, value in self.txn.of_vbucket(keys.DB_MANIFEST, self.vbid):
            _, branch, seqno = keys.MANIFEST_KEY.unpack(key)
            if branch not in self.bases:
                self._add(f"manifest at {branch}:{seqno} is of an unknown branch")
            for entry in records.decode_manifest(value).collections.values():
                # No check of the scope: a stream filtered to a collection brings no events of scopes.
                if entry is not None and not 0 <= entry.begin_seqno <= SEQNO_MAX:
                    self._add(f"manifest at {branch}:{seqno} contradicts itself in collection {entry.name!r}")


def _show(position: bytes) -> str:
    branch, seqno = keys.ROW.unpack(position)
    return f"{branch}:{seqno}"
