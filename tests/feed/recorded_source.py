"""Recordings of real engines, served as sources to the feed: what the program's own replay makes of them, under the
tests' names, and documents that a recorded server held although no recorded stream brought them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mirror.inspection.recording import Recording
from mirror.sandbox import replay
from mirror.sandbox.replay import Exchange, ReplayedSource, Script
from mirror.wire import events as ev
from mirror.wire.codec_dcp import encode_failover_log, to_frame
from mirror.wire.constants import Datatype, Status
from tests.recordings import unpack

USER, PASSWORD, BUCKET, BUCKET_UUID, CLUSTER_UUID = "demo", "secret", "default", "b0", "c0"
VBUCKETS = replay.VBUCKETS_MIN


def read_script(name: str) -> Script:
    """A recording as a script."""
    with TemporaryDirectory() as folder:
        return replay.read_script(Recording(unpack(name, Path(folder))))


def fresh_exchange(vbid: int, failover_log: list[tuple[int, int]], events: list[ev.Event]) -> Exchange:
    """A stream from 0 that brings these events."""
    stream_request = ev.StreamRequest(vbid, 0, 0, 2**64 - 1, 0, 0, 0)
    return Exchange(
        stream_request, Status.SUCCESS, encode_failover_log(failover_log), [to_frame(event) for event in events]
    )


def stored_events(state: dict[str, Any], vbid: int, last_seqno: int) -> list[ev.Event]:
    """The documents that the server held at or below a seqno, as it would send them: from the recorded state."""
    events: list[tuple[int, ev.Event]] = []
    for name, held in state["keys"].items():
        if held is None or "disk" not in held or held["disk"]["seq"] > last_seqno:
            continue
        seqno, key = held["disk"]["seq"], name.encode()
        if held["deleted"]:
            events.append((seqno, ev.Deletion(vbid, key, seqno, held["rev"], held["cas"])))
        else:
            value, datatype = held["value"].encode(), held["get_datatype"] & Datatype.JSON
            events.append(
                (
                    seqno,
                    ev.Mutation(
                        vbid, key, seqno, held["rev"], held["cas"], held["flags"], held["expiry"], 0, datatype, value
                    ),
                )
            )
    return [event for _, event in sorted(events, key=lambda pair: pair[0])]


class RecordedSource(ReplayedSource):
    """A server on a free port of the loopback that plays a script."""

    def __init__(self, script: Script, *, seed: int = 0) -> None:
        super().__init__(script, user=USER, password=PASSWORD, seed=seed)


__all__ = [
    "BUCKET", "BUCKET_UUID", "CLUSTER_UUID", "PASSWORD", "USER", "VBUCKETS", "Exchange", "RecordedSource", "Script",
    "fresh_exchange", "read_script", "stored_events",
]  # fmt: skip
