"""`verify`: compares the mirror with its source. With `--repair` the service fetches the differing vbuckets again.

Exit code: 0 if every vbucket is equal (after the repair), 3 if one differs, 1 if one could not be compared. Works with
and without a running service, except for a repair.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from cli import options, output, tasks
from cli.exits import CommandEnded
from mirror import client
from mirror.config import Settings, required_source
from mirror.errors import ConfigError, ExitCode
from mirror.feed.read.reader import SourceReader
from mirror.ingest.selection import Selection
from mirror.inspection.comparison import Difference, VbucketResult, not_said
from mirror.inspection.repair import resync
from mirror.inspection.verify import WAIT_S, VerifyTask, verify_task
from mirror.messages import Ping, Reply
from mirror.serve.objects import key_fields
from mirror.spark.runner import Runner
from storage.env import directory
from storage.format import keys
from storage.format.digest import Fingerprint
from storage.read.view import View, open_view

COUNTED = (
    "documents",
    "tombstones",
    "source_documents",
    "source_tombstones",
    "missing_here",
    "missing_there",
    "different",
    "rev_only",
    "purged_here",
    "purged_there",
    "never_sent",
    "moved",
    "not_compared",
    "behind_seqnos",
)
TASKS_PER_CORE = 4
FEW_ROWS = 100_000
"""Fewer rows are compared in this process: starting others would take longer."""
REPAIRED = ("different", "unreadable")
"""States that a repair fixes. `rollback` and `unsure` end by themselves while the service streams."""


def verify(
    data: options.DataOption = None,
    source: options.SourceOption = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Have the service fetch different vbuckets again, next to their old copies."),
    ] = False,
    vbid: options.VbidsOption = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Differing keys to print.")] = 20,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", min=0, help="Seconds to wait in all for a running mirror to publish the compared seqnos."
        ),
    ] = WAIT_S,
    config: options.ConfigOption = None,
    pairs: options.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Compare every version of every key with the source, by all cores, or on Spark's executors under spark-submit.

    Exit code 3 if something differs, 1 if unsure.
    """
    path = options.data_directory(data, config)
    settings = options.with_source(options.settings_from({"data": data, "source": source}, config=config, pairs=pairs))
    url = required_source(settings)
    options.quiet_logs(settings)
    service = client.ask(path, Ping()) is not None
    started = time.monotonic()
    task = VerifyTask(str(path), url, settings, selected(path, url, settings), [], wait)
    with open_view(str(path), stale_reads=True, partial=True) as view:
        chosen = selected_vbuckets(view, vbid)
        few = sum(view.history(each).versions for each in chosen) < FEW_ROWS

    with tasks.running("verify", quiet=as_json) as (runner, progress):
        count_max = 1 if few else runner.parallelism * TASKS_PER_CORE
        results = compared(task, chosen, count_max, runner, progress)
        broken = [result.vbid for result in results if result.state in REPAIRED] if repair else []
        if broken:
            resync(str(path), broken, progress=progress)
            again = {each.vbid: each for each in compared(task, broken, count_max, runner, progress)}
            results = [again.get(result.vbid, result) for result in results]
    facts = {
        "data": str(path),
        "source": url,
        "service": "up" if service else "down",
        "ok": all(result.equal for result in results),
        "repaired": broken,
        "elapsed_s": round(time.monotonic() - started, 3),
        "totals": totals(results),
    }
    if as_json:
        output.print_json(facts | {"vbuckets": [vbucket_object(result) for result in results]})
    else:
        say(facts, results, limit)
    if not facts["ok"]:
        raise CommandEnded(ExitCode.DATA if any(result.wrong for result in results) else ExitCode.FAILED)


def compared(
    task: VerifyTask, vbids: list[int], count_max: int, runner: Runner, progress: Callable[[int, int], None]
) -> list[VbucketResult]:
    count = min(len(vbids), count_max)
    shares = [task._replace(vbids=vbids[at::count]) for at in range(count)]
    found = [each for results in runner.run(verify_task, shares, progress) for each in results]
    return sorted(found, key=lambda each: each.vbid)


def selected(path: Path, url: str, settings: Settings) -> list[str] | None:
    """Return the selected parts that the source still has, or None (the whole bucket) if there are none. Raises
    MirrorError, StorageError.
    """
    selection = Selection.parse(directory.load(str(path)).selection)
    if selection.scope is None and not selection.collections:
        return None
    with SourceReader(url, settings=settings) as reader:
        known = set(reader.collection_names().values())
    if selection.scope is not None:
        return [selection.scope] if any(name.startswith(f"{selection.scope}.") for name in known) else None
    return sorted(known & set(selection.collections)) or None


def selected_vbuckets(view: View, requested: list[int] | None) -> list[int]:
    held = [int(vbid) for vbid in view.vbids]
    for vbid in requested or ():
        if vbid not in held:
            raise ConfigError(f"this mirror holds no vbucket {vbid}", hint=f"it holds {held[0]} to {held[-1]}")
    return sorted(set(requested)) if requested else held


def totals(results: list[VbucketResult]) -> Reply:
    sums: Reply = {"vbuckets": len(results), "states": dict(Counter(result.state for result in results))}
    return sums | {name: sum(getattr(result, name) for result in results) for name in COUNTED}


def vbucket_object(result: VbucketResult) -> dict[str, object]:
    row = {field.name: getattr(result, field.name) for field in fields(result)}
    return row | {"differences": [difference_object(each) for each in result.differences]}


def difference_object(difference: Difference) -> dict[str, object]:
    collection_id, key = keys.split_key(difference.key)
    return {
        "kind": difference.verdict.value,
        "collection_id": collection_id,
        **key_fields(key),
        "fields": difference.fields,
        "here": version_object(difference.here),
        "there": version_object(difference.there),
    }


def version_object(version: Fingerprint | None) -> dict[str, object] | None:
    if version is None:
        return None
    fields = {name: getattr(version, name) for name in ("seqno", "rev_seqno", "cas", "deleted")}
    return fields | {"digest": version.digest.hex()}


def say(facts: Reply, results: list[VbucketResult], limit: int) -> None:
    left = limit
    for detail, number in Counter(result.detail for result in results if result.state == "unsure").items():
        output.echo(f"{number} vbuckets: unsure; {detail}")
    for result in results:
        if result.wrong:
            counts = ", ".join(
                f"{getattr(result, name):,} {words}"
                for name, words in (
                    ("different", "different"),
                    ("missing_here", "missing here"),
                    ("missing_there", "missing at the source"),
                )
                if getattr(result, name)
            )
            output.echo(f"vbucket {result.vbid}: {'; '.join(filter(None, (result.state, counts, result.detail)))}")
        for difference in result.differences[: max(0, left)]:
            left -= 1
            key = output.for_people(keys.split_key(difference.key)[1])
            sides = f"here {seqno_of(difference.here)}, source {seqno_of(difference.there)}"
            if difference.fields:
                sides += f": {', '.join(difference.fields)}"
            output.echo(f"  {difference.verdict.value.replace('_', ' ')}\t{key}\t{sides}")
    sums = facts["totals"]
    count = sums["different"] + sums["missing_here"] + sums["missing_there"]
    if count > limit:
        output.echo(f"  ... {count - limit:,} more keys: --json names up to 100 of each vbucket")
    if facts["repaired"]:
        output.echo(f"fetched again: {len(facts['repaired'])} vbuckets")
    states = sums["states"]
    unsure, wrong = states.get("unsure", 0), sums["vbuckets"] - states.get("unsure", 0) - states.get("equal", 0)
    found = (f"NOT equal: {wrong} vbuckets" if wrong else "", f"unsure: {unsure} vbuckets" if unsure else "")
    verdict = ", ".join(filter(None, found)) or "equal"
    more = f", {unsaid}" if (unsaid := not_said(results)) else ""
    output.echo(
        f"{facts['data']}: {verdict} ({sums['vbuckets']} vbuckets, {sums['documents']:,} documents and "
        f"{sums['tombstones']:,} tombstones compared in {output.duration(facts['elapsed_s'])}{more})"
    )


def seqno_of(version: Fingerprint | None) -> str:
    if version is None:
        return "nothing"
    return f"{'tombstone' if version.deleted else 'version'} at seqno {version.seqno}"
