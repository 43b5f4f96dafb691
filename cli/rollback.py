"""`rollback`: rolls a vbucket back to a kept boundary, through the running service or without a service.

Retractions are read from the store after the rollback, not predicted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output
from cli.state import boundary_object
from mirror import client
from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.messages import Reply, RollBack
from mirror.serve.objects import document_json, dumps
from storage.env import directory
from storage.errors import ViewInvalidated
from storage.format.tokens import Token
from storage.model import Document
from storage.read.view import View, open_view
from storage.write.writer import GroupWriter, WriterOptions


def roll_back_offline(settings: Settings, path: Path, vbid: int, to_seqno: int) -> Reply:
    """Roll back without a service. Raises StorageError, such as Locked or NoSuchBoundary."""
    identity = directory.load(str(path))
    group = vbid % identity.group_count
    writer = GroupWriter(
        directory.group_path(str(path), group),
        WriterOptions(
            group=group,
            identity=identity,
            sync="full",
            clock_ms=SystemClock().wall_ms,
            resync_reads=settings.resync_reads,
        ),
    )
    try:
        writer.vbuckets[vbid].check_rollback(to_seqno)
        result = writer.vbuckets[vbid].rollback(to_seqno)
    finally:
        writer.close()
    return asdict(result)


def undone(view: View, vbid: int, result: Reply) -> Iterator[tuple[str, Document]]:
    """Yield the retractions and restorations of a finished rollback."""
    for change in view.changes(vbid, since=view.token(vbid, result["from_branch"], result["from_seqno"])):
        if change.kind not in ("rollback", "retraction", "restoration"):
            return  # a running service has streamed it since
        if change.document is not None:
            yield change.kind, change.document


def rollback(
    vbid: Annotated[int, options.optional("--vbid", min=0, max=65535, help="The vbucket.")],
    to_seqno: Annotated[
        int, options.optional("--to", metavar="SEQNO", min=0, help="Go to the newest kept boundary not above it.")
    ],
    data: options.DataOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would do.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Documents to print; all are counted.")] = 100,
    config: options.ConfigOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Roll one vbucket back to a kept boundary. A running service then streams on from there."""
    path = options.data_directory(data, config)
    with open_view(str(path), stale_reads=True) as view:
        if vbid >= view.identity.vbucket_count:
            raise ConfigError(f"there is no vbucket {vbid}", hint=f"the bucket has {view.identity.vbucket_count}")
        boundary, predicted = view.retracted_by(vbid, to_seqno)
        before = view.state(vbid)
        at = view.token(vbid)
        done = not dry_run and boundary.seqno < before.published_seqno
        if not done:
            shown, counts = take(predicted, limit)
    since: Token | None = at
    result = {
        "boundary_seqno": int(boundary.seqno),
        "from_branch": int(at.branch),
        "from_seqno": int(before.published_seqno),
        "branch": int(before.branch),
    }
    answer = client.ask(path, RollBack(vbid, to_seqno)) if done else None
    if done:
        settings = options.settings_from({"data": data}, config=config).settings
        result = answer["result"] if answer is not None else roll_back_offline(settings, path, vbid, to_seqno)
        with open_view(str(path), stale_reads=True) as view:
            kept = (each for each in view.boundaries(vbid) if each.seqno <= result["boundary_seqno"])
            boundary = next(kept, boundary)
            try:
                since = view.token(vbid, result["from_branch"], result["from_seqno"])
                shown, counts = take(undone(view, vbid, result), limit)
            except ViewInvalidated:  # the service has purged or copied again since
                shown, counts, since = [], Counter(), None
    facts = {
        "vbid": vbid,
        "dry_run": dry_run,
        "done": done,
        "service": ("down" if answer is None else "up") if done else None,
        "from_branch": result["from_branch"],
        "from_seqno": result["from_seqno"],
        "branch": result["branch"],
        "boundary": boundary_object(boundary),
        "retracted": None if since is None else counts["retraction"],
        "restored": None if since is None else counts["restoration"],
        "since": None if since is None else str(since),
    }
    if as_json:
        documents = (b'{"kind":"%b","document":%b}' % (kind.encode(), document_json(each)) for kind, each in shown)
        output.print_parts([dumps(facts)[:-1], b',"documents":[', b",".join(documents), b"]}"])
    else:
        say(facts, shown, boundary.time_ms)


def take(events: Iterable[tuple[str, Document]], limit: int) -> tuple[list[tuple[str, Document]], Counter[str]]:
    left = iter(events)
    shown = list(itertools.islice(left, limit))
    counts = Counter(kind for kind, _ in shown)
    counts.update(kind for kind, _ in left)
    return shown, counts


def say(facts: Reply, shown: list[tuple[str, Document]], time_ms: int) -> None:
    seqno = facts["boundary"]["seqno"]
    if seqno == facts["from_seqno"]:
        output.echo(f"vbucket {facts['vbid']} stands at seqno {seqno}: nothing to take back")
        return
    verb = "went" if facts["done"] else "would go"
    counts = "the retracted documents are gone from history"
    if facts["since"] is not None:
        counts = f"{facts['retracted']:,} retracted, {facts['restored']:,} restored"
    output.echo(
        f"vbucket {facts['vbid']} {verb} from seqno {facts['from_seqno']} to the boundary at seqno {seqno}, "
        f"published {output.moment(time_ms)}: {counts}"
    )
    for kind, document in shown:
        what = "deleted" if document.deleted else output.for_people(document.value, 60)
        output.echo(f"{kind}\t{document.seqno}\t{output.for_people(document.key)}\t{what}")
    if facts["since"] is not None and facts["done"] and len(shown) < facts["retracted"] + facts["restored"]:
        output.echo(f"all of them: dcp-mirror changes --vbid {facts['vbid']} --since {facts['since']}", err=True)
