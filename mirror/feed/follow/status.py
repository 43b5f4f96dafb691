"""The report of a consumer: vbuckets, nodes, groups, counters, and warnings for people. Only reads the consumer."""

from __future__ import annotations

from typing import Any

from mirror.feed.cluster.connections import NodeKeeper
from mirror.feed.follow.consumer import Consumer
from mirror.feed.follow.group_commits import Group
from mirror.feed.follow.mirrored_vbucket import MirroredVbucket
from mirror.ingest.instructions import VbucketStatus
from mirror.log import get_logger
from mirror.messages import ProcessReport
from mirror.wire.constants import ControlKey
from storage.errors import Full, StorageError
from storage.history.extent import History
from storage.model import VbucketState

log = get_logger("feed")


class ConsumerStatus:
    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._clock_step_count = 0

    def standing(self) -> tuple[bool, bool]:
        """Return two flags: all vbuckets stream; all vbuckets have caught up."""
        vbuckets, now = self._consumer.vbuckets.values(), self._consumer.clock.monotonic()
        streaming = all(vbucket.host.streaming and _in_contact(vbucket) for vbucket in vbuckets)
        return streaming, streaming and all(_lag(vbucket, now) == 0 for vbucket in vbuckets)

    def report(self) -> ProcessReport:
        consumer = self._consumer
        histories = self._histories()
        now = consumer.clock.monotonic()
        rows = [_vbucket_row(vbucket, histories.get(vbid), now) for vbid, vbucket in consumer.vbuckets.items()]
        followed = consumer.map_follower.current
        collections = consumer.collections
        return {
            "vbuckets": rows,
            "nodes": [_node_row(keeper) for keeper in consumer.connections.keepers.values()],
            "groups": [_figures(group) for group in consumer.commits.groups],
            "counters": {
                "received_documents": sum(row["received_documents"] for row in rows),
                "received_bytes": sum(row["received_bytes"] for row in rows),
                "requested_again_bytes": sum(row["requested_again_bytes"] for row in rows),
                "commits": sum(group.count for group in consumer.commits.groups),
                "stalls": sum(row["stalls"] for row in rows),
                "retries": sum(vbucket.host.retries for vbucket in consumer.vbuckets.values()),
            },
            "map": {"rev_epoch": None, "rev": None, "nodes": None}
            if followed is None
            else {"rev_epoch": followed.rev_epoch, "rev": followed.rev, "nodes": len(followed.nodes)},
            "error": consumer.map_follower.error,
            "selection": str(collections.selection),
            "warnings": collections.warnings + self._refused_controls() + self._clock_warnings(),
        }

    def _refused_controls(self) -> list[str]:
        if not self._consumer.settings.change_streams:
            return []
        name = ControlKey.CHANGE_STREAMS.decode()
        return [
            f"{session.address} does not offer {name}, which the settings ask for; going on without"
            for session in self._consumer.connections.ready_sessions()
            if not session.controls.get(name, False)
        ]

    def _clock_warnings(self) -> list[str]:
        """Return a warning if the wall clock was set. Log it when it is new."""
        clocks = [group.writer.owner.clock for group in self._consumer.commits.groups]
        steps = [(clock.step_count, clock.last_step_ms) for clock in clocks]
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
        found: dict[int, History] = {}
        for group in self._consumer.commits.groups:
            if group.error is None:
                try:
                    found |= group.writer.histories()
                except StorageError as error:
                    log.warning("history-unreadable", group=group.writer.group, error=str(error))
        return found


def _vbucket_row(vbucket: MirroredVbucket, history: History | None, now: float) -> dict[str, Any]:
    state, progress, machine = vbucket.sink.state(), vbucket.progress, vbucket.host.machine
    failing = machine.shown.failing_text if machine is not None else None
    contact, status, text = _contact(vbucket, now), progress.status, progress.text
    gate, held_s = vbucket.gate, None
    if gate is not None and gate.waiting and gate.held_by:
        held_s = round(now - gate.held_at, 1)
    if vbucket.host.streaming and not _in_contact(vbucket):
        status, text = VbucketStatus.WAITING, str(contact["last_error"])
    elif gate is not None and held_s is not None:
        text = gate.held_by
    return (
        state_fields(state, history)
        | contact
        | {
            "state": "stalled" if progress.stalled_streams else "failing" if failing else str(status),
            "text": progress.stall_text if progress.stalled_streams else failing or text,
            "source_high_seqno": vbucket.source_high_seqno,
            "lag_seqnos": _lag(vbucket, now),
            "received_documents": progress.documents,
            "received_bytes": progress.bytes,
            "requested_again_bytes": vbucket.sink.requested_again_bytes,
            "stalls": progress.stalls,
            "last_rollback": vbucket.sink.last_rollback,
            "resyncs_begun": vbucket.sink.resyncs_begun,
            "resync_why": vbucket.sink.resync_why,
            "persisted_seqno": gate.persisted_seqno if gate is not None else None,
            "held_snapshots": gate.waiting if gate is not None else 0,
            "held_s": held_s,
        }
    )


def state_fields(state: VbucketState, history: History | None) -> dict[str, Any]:
    """Return the part of a vbucket's row that the store knows."""
    return {
        "vbid": int(state.vbid),
        "branch": int(state.branch),
        "vbuuid": int(state.failover_log.newest_vbuuid),
        "published_seqno": int(state.published_seqno),
        "staged_seqno": int(state.staged_seqno),
        "rollback_count": state.rollback_count,
        "last_rollback_ms": state.last_rollback_ms,
        "stale": not state.has_served_log and state.published_seqno > 0,
        "history_floor_seqno": int(state.history_floor_seqno),
        "history_floor_ms": history and history.floor_ms,
        "local_purge_seqno": int(state.local_purge_seqno),
        "resync_count": history and history.resync_count,
        "last_resync_ms": history and history.last_resync_ms,
        "boundaries": history and history.boundaries,
        "versions": history and history.versions,
        "row_bytes": history and history.row_bytes,
        "key_bytes": history and history.key_bytes,
    }


def _lag(vbucket: MirroredVbucket, now: float) -> int | None:
    """Return the number of seqnos that readers lack; None while the source's high seqno is unknown or too old.

    While a new branch is staged, the served branch's rows do not reduce the lag. Staged seqnos above the high seqno add
    to the lag, because the high seqno of a filtered mirror does not include the drop of a collection.
    """
    high_seqno = vbucket.source_high_seqno
    if high_seqno is None or _late_s(vbucket, now) is not None:
        return None
    state = vbucket.sink.state()
    return max(0, max(high_seqno, int(state.staged_seqno)) - int(state.staging_published_seqno))


def _late_s(vbucket: MirroredVbucket, now: float) -> float | None:
    """Return the age of `source_high_seqno` if a newer one is overdue: on a slow link it waits behind rows."""
    if vbucket.source_high_seqno is None or vbucket.polled is None:
        return None
    session, _ = vbucket.polled
    return now - session.seqnos_at if now > session.seqnos_until else None


def _in_contact(vbucket: MirroredVbucket) -> bool:
    return vbucket.host.session is not None and vbucket.host.session.answers


def _contact(vbucket: MirroredVbucket, now: float) -> dict[str, object]:
    session = vbucket.host.session
    silent_ms = round((now - vbucket.apart_at if session is None else session.silent_s) * 1000)
    if session is None or not session.ready:
        return {"node": None, "silent_ms": silent_ms, "last_error": vbucket.progress.last_error}
    if vbucket.source_silent_ms is not None:
        silent_ms += vbucket.source_silent_ms
        error = f"{session.address}, a mirror, has no contact with its source"
        return {"node": None, "silent_ms": silent_ms, "last_error": error}
    if session.answers:
        silent_ms = max(silent_ms, round((_late_s(vbucket, now) or 0) * 1000))
        return {"node": str(session.address), "silent_ms": silent_ms, "last_error": vbucket.progress.last_error}
    return {"node": None, "silent_ms": silent_ms, "last_error": f"{session.address} does not answer"}


def _node_row(keeper: NodeKeeper) -> dict[str, object]:
    session = keeper.session
    return {
        "address": str(keeper.address),
        "ready": keeper.ready,
        "error": str(keeper.error) if keeper.error is not None else None,
        "reconnects": keeper.reconnects,
        "streams": len(session.streams) if session is not None else 0,
        "unacked_bytes": session.ledger.unacked if session is not None else 0,
        "received_bytes": session.ledger.received_total if session is not None else 0,
        "acked_bytes": session.ledger.acked_total if session is not None else 0,
        "dropped_bytes": session.dropped_bytes if session is not None else 0,
        "controls": dict(session.controls) if session is not None else {},
    }


def _figures(group: Group) -> dict[str, object]:
    error, figures = group.error, {}
    if error is None:
        try:
            figures = group.writer.figures()
        except StorageError as unreadable:
            error = unreadable
    return group_row(group.writer.group, error) | figures


def group_row(group: int, error: StorageError | None) -> dict[str, object]:
    return {
        "group": group,
        "error": str(error) if error is not None else None,
        "full": isinstance(error, Full),
    }
