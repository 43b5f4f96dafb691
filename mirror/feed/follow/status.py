"""What a consumer reports of itself: vbuckets, nodes, groups, counters, and warnings for people.

Knows where each figure is found, and changes nothing. Invariants: counters only rise; a group whose store cannot be
read is reported without its figures, never as an error of the report.
"""

from __future__ import annotations

from typing import Any, Protocol

from mirror.config import Settings
from mirror.feed.cluster.collection_watch import CollectionWatch
from mirror.feed.cluster.connections import Connections
from mirror.feed.cluster.map_follower import MapFollower
from mirror.feed.cluster.nodes import NodeKeeper
from mirror.feed.follow.group_commits import Group, GroupCommits
from mirror.feed.follow.vbucket import MirroredVbucket
from mirror.log import get_logger
from mirror.messages import ProcessReport
from mirror.wire.constants import ControlKey
from storage.errors import Full, StorageError
from storage.history.extent import History

log = get_logger("feed")


class Reporting(Protocol):
    """The parts of a consumer that are reported of."""

    settings: Settings
    commits: GroupCommits
    connections: Connections
    map_follower: MapFollower
    vbuckets: dict[int, MirroredVbucket]

    @property
    def collections(self) -> CollectionWatch:
        """Which collections are mirrored."""
        ...


class ConsumerStatus:
    """Makes the reports of one consumer."""

    def __init__(self, consumer: Reporting) -> None:
        """Nothing was reported yet."""
        self._consumer = consumer
        self._clock_step_count = 0

    def standing(self) -> tuple[bool, bool]:
        """True if every vbucket streams, and true if every one has caught up."""
        vbuckets = self._consumer.vbuckets.values()
        streaming = all(vbucket.streaming and vbucket.in_contact for vbucket in vbuckets)
        return streaming, streaming and all(vbucket.caught_up for vbucket in vbuckets)

    def report(self) -> ProcessReport:
        """`vbuckets` (a row each), `nodes`, `groups`, `counters` (they only rise), `map`, `error`."""
        consumer = self._consumer
        histories = self._histories()
        rows = [vbucket.row(histories.get(vbid)) for vbid, vbucket in consumer.vbuckets.items()]
        followed = consumer.map_follower.current
        collections = consumer.collections
        return {
            "vbuckets": rows,
            "nodes": [_node_row(keeper) for keeper in consumer.connections.keepers.values()],
            "groups": [_group_row(group) for group in consumer.commits.groups],
            "counters": {
                "received_documents": sum(row["received_documents"] for row in rows),
                "received_bytes": sum(row["received_bytes"] for row in rows),
                "requested_again_bytes": sum(row["requested_again_bytes"] for row in rows),
                "commits": sum(group.commits for group in consumer.commits.groups),
                "stalls": sum(row["stalls"] for row in rows),
                "retries": sum(vbucket.retries for vbucket in consumer.vbuckets.values()),
            },
            "map": {"rev_epoch": None, "rev": None, "nodes": None}
            if followed is None
            else {"rev_epoch": followed.rev_epoch, "rev": followed.rev, "nodes": len(followed.nodes)},
            "error": consumer.map_follower.error,
            "selection": str(collections.selection),
            "warnings": collections.warnings + self._refused_controls() + self._clock_warnings(),
        }

    def _refused_controls(self) -> list[str]:
        """What a node does not offer that the settings ask for."""
        if not self._consumer.settings.change_streams:
            return []
        name = ControlKey.CHANGE_STREAMS.decode()
        return [
            f"{session.address} does not offer {name}, which the settings ask for; going on without"
            for session in self._consumer.connections.ready_sessions()
            if not session.controls.get(name, False)
        ]

    def _clock_warnings(self) -> list[str]:
        """That the wall clock was set, which times of publication then show; each step is also logged, once."""
        steps = [group.writer.clock_steps() for group in self._consumer.commits.groups]
        count, step_ms = max(steps, default=(0, 0))
        if count > self._clock_step_count:
            self._clock_step_count = count
            log.warning("clock-set", step_s=step_ms / 1000, step_count=count)
        if not count:
            return []
        return [
            f"the wall clock was set {count} times since this worker began, the last time by {step_ms / 1000:+,.0f} s; "
            "times of publication are wrong where it was"
        ]

    def _histories(self) -> dict[int, History]:
        """Of the groups that can be read."""
        found: dict[int, History] = {}
        for group in self._consumer.commits.groups:
            if group.error is None:
                try:
                    found |= group.writer.histories()
                except StorageError as error:
                    log.warning("history-unreadable", group=group.writer.group, error=str(error))
        return found


def _node_row(keeper: NodeKeeper) -> dict[str, Any]:
    session = keeper.session
    return {
        "address": str(keeper.address),
        "ready": keeper.ready,
        "error": str(keeper.error) if keeper.error is not None else None,
        "reconnects": keeper.reconnects,
        "streams": session.stream_count if session is not None else 0,
        "unacked_bytes": session.ledger.outstanding if session is not None else 0,
        "received_bytes": session.ledger.received_total if session is not None else 0,
        "acked_bytes": session.ledger.acked_total if session is not None else 0,
        "dropped_bytes": session.figures.dropped_bytes if session is not None else 0,
        "controls": dict(session.controls) if session is not None else {},
    }


def _group_row(group: Group) -> dict[str, Any]:
    return {
        "group": group.writer.group,
        "error": str(group.error) if group.error is not None else None,
        "full": isinstance(group.error, Full),
        **(group.writer.figures() if group.error is None else {}),
    }
