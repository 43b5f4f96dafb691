"""Made-up changes for tests: a source with histories that roll back, reported as a mirror reports them.

Knows the columns of `changes` and the rules by which rows of them come about (columns.py); it is the model that tables
are held against. `History` is one vbucket: `write`, `delete`, `drop`, `roll_back`, `resync` each append events;
`state` is what is current after all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from mirror.spark.source.columns import CHANGES

Event = dict[str, Any]
Name = tuple[str, str]
"""Collection and key."""


def event(
    kind: str, key: str | None, at: tuple[int, int], *, seqno: int | None = None, vbid: int = 0, **more: Any
) -> Event:
    return {
        "key": key,
        "collection": "_default._default",
        "vbid": vbid,
        "seqno": at[1] if seqno is None else seqno,
        "rev_seqno": 1,
        "cas": 1,
        "flags": 0,
        "expiry": 0,
        "datatype": 1,
        "value": None,
        "kind": kind,
        "branch": at[0],
        "vbuuid": 100 + at[0],
        "snapshot_end_seqno": at[1],
        "at_branch": at[0],
        "at_seqno": at[1],
        "event_time": None,
    } | more


def table_of(events: list[Event]) -> pa.Table:
    return pa.Table.from_pylist(events, CHANGES)


def applied(events: list[Event]) -> dict[tuple[Any, ...], Event]:
    """The documents that are there after all events of a vbucket, in the order in which they came."""
    state: dict[tuple[Any, ...], Event] = {}
    for each in events:
        if each["key"] is None:
            ended = each["kind"] != "resync" and each["collection"]
            state = {name: held for name, held in state.items() if ended and name[0] != ended}
            continue
        state.pop((each["collection"], each["key"]), None)
        if each["kind"] in ("mutation", "restoration"):
            state[each["collection"], each["key"]] = each
    return state


@dataclass
class History:
    """A vbucket's history."""

    vbid: int = 0
    branch: int = 1
    seqno: int = 0
    log: list[Event] = field(default_factory=list)
    """Everything that was reported, in order."""
    states: dict[int, dict[Name, Event]] = field(default_factory=lambda: {0: {}})
    """What was current at each seqno of the history that is valid now."""
    begin: int = 0
    """The place in the log of the last resync."""

    @property
    def state(self) -> dict[Name, Event]:
        return self.states[self.seqno]

    def _advance(self, added: Event, state: dict[Name, Event]) -> None:
        self.log.append(added)
        self.states[self.seqno] = state

    def write(self, key: str, value: bytes, collection: str = "_default._default") -> None:
        self.seqno += 1
        added = event("mutation", key, (self.branch, self.seqno), vbid=self.vbid, value=value, collection=collection)
        self._advance(added, self.states[self.seqno - 1] | {(collection, key): added})

    def delete(self, key: str, collection: str = "_default._default", kind: str = "deletion") -> None:
        self.seqno += 1
        added = event(kind, key, (self.branch, self.seqno), vbid=self.vbid, collection=collection)
        left = {name: each for name, each in self.states[self.seqno - 1].items() if name != (collection, key)}
        self._advance(added, left)

    def drop(self, collection: str, kind: str = "collection_dropped") -> None:
        self.seqno += 1
        added = event(kind, None, (self.branch, self.seqno), vbid=self.vbid, collection=collection)
        left = {name: each for name, each in self.states[self.seqno - 1].items() if name[0] != collection}
        self._advance(added, left)

    def roll_back(self, to_seqno: int) -> None:
        """Retractions and restorations, as a mirror reports them to a reader who had seen everything."""
        before, after = self.state, self.states[to_seqno]
        void = [each for each in self.log_since(to_seqno) if each["key"] is not None]
        names = {(each["collection"], each["key"]): each for each in void}
        self.branch += 1
        at = (self.branch, to_seqno)
        for name, lost in names.items():
            self.log.append(lost | {"kind": "retraction", "at_branch": at[0], "at_seqno": 0})
            if name in after:
                self.log.append(after[name] | {"kind": "restoration", "at_branch": at[0], "at_seqno": at[1]})
        for name in after.keys() - before.keys() - names.keys():  # back with their collection
            self.log.append(after[name] | {"kind": "restoration", "at_branch": at[0], "at_seqno": at[1]})
        self.seqno = to_seqno
        restored = {name for name in after if name in names or name not in before}
        moved = {
            name: each | ({"at_branch": at[0], "at_seqno": at[1]} if name in restored else {})
            for name, each in after.items()
        }
        self.states = {seqno: state for seqno, state in self.states.items() if seqno < to_seqno} | {to_seqno: moved}

    def log_since(self, seqno: int) -> list[Event]:
        """Published events of the history that is valid now, above a seqno; each key's newest."""
        newest: dict[tuple[str, str | None], Event] = {}
        for each in self.log[self.begin :]:
            published = each["kind"] not in ("retraction", "restoration", "resync")
            if published and each["branch"] == self.branch_at(each["seqno"]) and seqno < each["seqno"] <= self.seqno:
                newest[each["collection"], each["key"]] = each
        return list(newest.values())

    def branch_at(self, seqno: int) -> int:
        """The branch whose event the valid history has at a seqno: the newest that reported one."""
        branches: list[int] = [
            each["branch"]
            for each in self.log[self.begin :]
            if each["seqno"] == seqno and each["kind"] not in ("retraction", "restoration", "resync")
        ]
        return max(branches)

    def resync(self, branch: int | None = None, lost: Callable[[], bool] = lambda: False) -> None:
        """Everything again, as after a history that could not be followed, in which documents were `lost`. The branch
        may be lower: the mirror was made again.
        """
        self.branch = branch or self.branch + 1
        self.begin = len(self.log)
        current = {name: each for name, each in self.state.items() if not lost()}
        self.log.append(event("resync", None, (self.branch, 0), vbid=self.vbid, collection=None))
        added = {
            name: each
            | {"kind": "mutation", "branch": self.branch, "at_branch": self.branch, "at_seqno": each["seqno"]}
            for name, each in sorted(current.items(), key=lambda item: item[1]["seqno"])
        }
        self.log.extend(added.values())
        self.states = {0: {}, self.seqno: added}


def act(history: History, chance: random.Random) -> None:
    """Something happens at the source. Keys are the vbucket's own, as a key lies in one."""
    key = f"v{history.vbid}-{chance.randrange(6)}"
    collection = chance.choice(["_default._default", "s.it's"])
    choice = chance.random()
    if choice < 0.55:
        history.write(key, chance.randbytes(3), collection)
    elif choice < 0.75:
        history.delete(key, collection, chance.choice(["deletion", "expiration"]))
    elif choice < 0.8:
        history.drop("s.it's", chance.choice(["collection_dropped", "collection_flushed"]))
    elif choice < 0.95:
        history.roll_back(chance.choice(sorted(history.states)))
    else:
        history.resync(chance.choice([None, 1]), lambda: chance.random() < 0.3)
