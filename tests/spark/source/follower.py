"""A reader of changes as an upsert is: it compares (at_branch, at_seqno) of a key and nothing else."""

from __future__ import annotations

import json
from typing import Any

from mirror.spark.source import changes, remote
from mirror.spark.source.changes import ChangesTask
from mirror.spark.source.columns import CHANGES
from mirror.spark.source.offsets import Offset
from mirror.spark.source.options import Options
from mirror.spark.source.origin import driver_of

Row = dict[str, Any]


class Follower:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.driver = driver_of(options)
        self.start = self.driver.beginning()
        self.batches: list[tuple[Offset, Offset, list[Row]]] = []
        self.table: dict[str, Row] = {}
        self.log: list[Row] = []

    def rows(self, works: list[ChangesTask]) -> list[Row]:
        path = self.options.path
        found = (changes.read(path, work) if path else remote.read_changes(self.options, work) for work in works)
        return [dict(zip(CHANGES.names, row, strict=True)) for rows in found for row in rows]

    def next_rows(self, start: Offset | None = None) -> tuple[Offset, list[Row]]:
        """The end of the next batch, and its rows; they change nothing here."""
        start = start or self.start
        end = self.driver.decode(json.loads(json.dumps(self.driver.latest(start, True).encode())))
        return end, self.rows(self.driver.plan(start, end))

    def step(self) -> bool:
        """One batch; False: there was nothing."""
        end, found = self.next_rows()
        if end == self.start:
            return False
        self._take(end, found)
        return True

    def replay(self, end: Offset) -> None:
        """The batch that was planned up to `end` before a restart."""
        self._take(end, self.rows(self.driver.plan(self.start, end)))

    def _take(self, end: Offset, found: list[Row]) -> None:
        self.batches.append((self.start, end, found))
        self.start = end
        for row in found:
            self.apply(row)

    def apply(self, row: Row) -> None:
        self.log.append(row)
        if row["kind"] == "resync":
            self.table = {key: held for key, held in self.table.items() if held["vbid"] != row["vbid"]}
        elif row["key"] is not None:
            key, at = row["key"].decode(), (row["at_branch"], row["at_seqno"])
            held = self.table.get(key)
            rises = held is None or at > (held["at_branch"], held["at_seqno"])
            assert rises or self.options.path is None, "so an upsert is right, be it strict or by the last"
            if rises:
                self.table[key] = row

    def run(self) -> None:
        while self.step():
            pass

    def restart(self, options: Options | None = None) -> None:
        """Another driver, from the checkpoint."""
        self.driver.close()
        self.options = options or self.options
        self.driver = driver_of(self.options)

    @property
    def state(self) -> dict[str, tuple[int, bytes]]:
        return {
            key: (row["seqno"], row["value"])
            for key, row in self.table.items()
            if row["kind"] in ("mutation", "restoration")
        }
