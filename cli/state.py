"""`state` and `check`: the stored state of each vbucket, and the integrity of the stored data.

Both read only the store, not the service: `state` shows the state that a crash now would leave.
"""

from __future__ import annotations

from cli import options, output, render
from cli.exits import CommandEnded
from mirror.errors import ExitCode
from mirror.messages import Reply
from storage.admin import check as storage_check
from storage.errors import StorageError
from storage.history.extent import History
from storage.model import Boundary, Identity, VbucketState
from storage.read.view import open_view


def boundary_object(boundary: Boundary) -> dict[str, object]:
    return {
        "branch": boundary.branch,
        "seqno": boundary.seqno,
        "snap_start_seqno": boundary.snap_start_seqno,
        "vbuuid": f"{boundary.vbuuid:012x}",
        "time_ms": boundary.time_ms,
    }


def state_object(state: VbucketState, boundaries: list[Boundary], history: History) -> Reply:
    snapshot = state.open_snapshot
    return {
        "vbid": state.vbid,
        "branch": state.branch,
        "staging_branch": state.staging_branch,
        "vbuuid": f"{state.failover_log[0].vbuuid:012x}" if state.failover_log else None,
        "failover_log": [{"vbuuid": f"{entry.vbuuid:012x}", "seqno": entry.seqno} for entry in state.failover_log],
        "published_seqno": state.published_seqno,
        "staged_seqno": state.staged_seqno,
        "snapshot": {"start_seqno": snapshot.start_seqno, "end_seqno": snapshot.end_seqno} if snapshot else None,
        "source_purge_seqno": state.source_purge_seqno,
        "local_purge_seqno": state.local_purge_seqno,
        "history_floor_seqno": state.history_floor_seqno,
        "history_floor_ms": history.floor_ms,
        "purged_seqno": history.purged_seqno,
        "versions": history.versions,
        "row_bytes": history.row_bytes,
        "key_bytes": history.key_bytes,
        "stale": not state.has_served_log and state.published_seqno > 0,
        "manifest_uid": f"{state.manifest.uid:x}",
        "rollback_count": state.rollback_count,
        "last_rollback_ms": state.last_rollback_ms,
        "boundaries": [boundary_object(boundary) for boundary in boundaries],
    }


def state(
    data: options.DataOption = None,
    vbid: options.VbidOption = None,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Show the stored state of each readable vbucket: histories, positions, boundaries. Exit code 3 if one is not."""
    path = str(options.data_directory(data, config))
    rows, unreadable = [], None
    with open_view(path) as view:
        for each in view.vbids if vbid is None else (vbid,):
            try:
                rows.append(state_object(view.state(each), view.boundaries(each), view.history(each)))
            except StorageError as error:
                unreadable = unreadable or error
        identity = view.identity
    if rows or not unreadable:
        _show(path, identity, rows, as_json=as_json)
    if unreadable:
        raise unreadable


def _show(path: str, identity: Identity, rows: list[Reply], *, as_json: bool) -> None:
    if as_json:
        output.print_json(
            {"data": path, "bucket": identity.bucket_name, "bucket_uuid": identity.bucket_uuid, "vbuckets": rows}
        )
        return
    headers = ["vbid", "branch", "vbuuid", "published", "staged", "open snapshot", "floor", "of", "boundaries"]
    headers += ["versions", "size"]
    render.show(
        render.plain_table(
            headers,
            [
                [
                    str(row["vbid"]),
                    str(row["branch"]),
                    row["vbuuid"] or output.DASH,
                    output.number(row["published_seqno"]),
                    output.number(row["staged_seqno"]),
                    f"{row['snapshot']['start_seqno']}..{row['snapshot']['end_seqno']}"
                    if row["snapshot"]
                    else output.DASH,
                    output.number(row["history_floor_seqno"]),
                    output.moment(row["history_floor_ms"]) if row["history_floor_ms"] else output.DASH,
                    str(len(row["boundaries"])),
                    output.number(row["versions"]),
                    output.size(row["row_bytes"] + row["key_bytes"]),
                ]
                for row in rows
            ],
            right=(0, 1, 3, 4, 6, 8, 9, 10),
        )
    )


def check(
    data: options.DataOption = None, config: options.ConfigOption = None, as_json: options.JsonOption = False
) -> None:
    """Check every invariant of the stored data. Exit code 3 if one is broken."""
    path = str(options.data_directory(data, config))
    with render.ProgressLine() as screen:
        report = storage_check.check(path, progress=lambda done, of: screen.show(f"checked {done} of {of} vbuckets"))
    found: list[str] = [str(problem) for problem in report.problems]
    if as_json:
        shape: dict[str, object] = {"data": path, "ok": not found, "problems": found}
        looked_at = {name: getattr(report, name) for name in ("vbuckets", "rows", "key_rows", "boundaries")}
        output.print_json(shape | looked_at)
    else:
        for problem in found:
            output.echo(problem)
        looked = f"{report.vbuckets} vbuckets, {report.rows:,} rows, {report.boundaries:,} boundaries"
        output.echo(f"{path}: {f'{len(found)} problems' if found else 'sound'} ({looked})")
    if found:
        raise CommandEnded(ExitCode.DATA)
