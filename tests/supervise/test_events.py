"""The types of events: names, levels and sentences, and that the documents have a row for each."""

from __future__ import annotations

import json
import re
from pathlib import Path

from mirror.supervise.events.kinds import (
    EVENTS,
    DiskFull,
    Event,
    MapChanged,
    SourceLost,
    SourceReached,
    SourceUnreachable,
    VbucketsRolledBack,
    WorkerEnded,
    to_json,
)

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


def test_one_vbucket_is_said_with_its_seqnos_and_many_with_their_number() -> None:
    one = VbucketsRolledBack(vbuckets=1, vbids=(3,), seqnos=168, from_seqno=568, to_seqno=400)
    assert one.text == "1 vbucket rolled back from seqno 568 to 400, 168 seqnos retracted"
    many = VbucketsRolledBack(vbuckets=33, vbids=(0, 2), seqnos=640, from_seqno=None, to_seqno=None)
    assert many.text == "33 vbuckets rolled back, 640 seqnos retracted"
    alone = MapChanged(rev_epoch=1, rev=3, nodes=1)
    assert alone.text == "new cluster map: revision 1.3, 1 node"


def test_a_source_that_was_never_reached_is_not_said_to_be_lost() -> None:
    never = SourceUnreachable(why="nobody there")
    assert never.text == "the source has not been reached since the service started: nobody there"
    assert SourceReached(after_s=2.5).text == "the source has answered after 2.5 s"
    lost = SourceLost(vbuckets=3, vbids=(0, 1, 2), nodes=("db1:11210",), why="")
    assert lost.text == "3 vbuckets lost contact with the source"


def test_an_event_is_one_json_object_with_its_fields() -> None:
    event: Event = DiskFull(groups=(1, 2), why="no space")
    shown = to_json(event, 7, 1000)
    assert json.loads(json.dumps(shown)) == {
        "number": 7, "time_ms": 1000, "event": "disk-full", "level": "error",
        "text": "the disk is full for 2 groups: no space", "groups": [1, 2], "why": "no space",
    }  # fmt: skip
    ended = WorkerEnded(process="worker 0", pid=5, exit="SIGKILL", why=None, pause_ms=200)
    assert ended.text == "worker 0 (process 5) died: SIGKILL"


def test_every_event_has_its_row_in_the_documents() -> None:
    section = OPERATIONS.read_text().split("## Events\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (\w+) \|", section, re.M)
    assert dict(rows) == {kind.name: kind.level for kind in EVENTS}
    assert len(rows) == len(EVENTS)
