"""`demo`: starts a source and a mirror, kills a worker, fails a node over, and compares.

Every printed claim was measured in this run; if a claim is false, the exit code is 1.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import options, output, render
from cli.exits import CommandEnded
from cli.stage import Stage
from cli.status import count_documents
from mirror.errors import ConfigError, ExitCode, SupervisionError
from mirror.messages import Reply, Status
from storage.admin import check as storage_check
from storage.env import directory
from storage.read.view import open_view

LOOK_INTERVAL_S = 0.5
STEP_TIMEOUT_S = 90.0
"""Longest wait for a condition. A longer wait makes the demo fail."""
DEFAULT_LENGTH_S = 30.0
"""The `length_s` of a story without --seconds, after which the mirror runs on until Ctrl-C."""
QUESTION = "SELECT customer.city, count(*) AS orders, sum(total) AS total FROM documents GROUP BY ALL ORDER BY total"
LOST_CHANGES = 20
"""Changes that each vbucket of the failed node loses; fewer if a vbucket keeps less history."""


class Story:
    """The steps of the demo, as a generator: each new status continues it."""

    def __init__(self, stage: Stage, length_s: float, *, to_stderr: bool = False) -> None:
        """After a third of `length_s` a worker is killed, after two thirds a node fails over."""
        self._to_stderr = to_stderr
        self.facts: Reply = {}
        self.finished = False
        self._stage = stage
        self._began_s = time.monotonic()
        self._length_s = length_s
        self._status: Status = {}
        self._steps = self._story_steps()
        next(self._steps)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def say(self, line: str) -> None:
        output.echo(f"{self.elapsed_s:5.1f} s  {line}", err=self._to_stderr)
        sys.stdout.flush()

    def go_on(self, status: Status) -> None:
        self._status = status
        if not self.finished:
            try:
                next(self._steps)
            except StopIteration:
                self.finished = True

    def _wait(self, condition: Any, what: str) -> Iterator[None]:
        until_s = time.monotonic() + STEP_TIMEOUT_S
        while not condition():
            if time.monotonic() > until_s:
                raise SupervisionError(f"the demo waited {STEP_TIMEOUT_S:.0f} s in vain: {what}")
            yield

    def _until(self, moment_s: float) -> Iterator[None]:
        while self.elapsed_s < moment_s:
            yield

    def _story_steps(self) -> Iterator[None]:
        yield
        yield from self._fill()
        yield from self._until(self._length_s / 3)
        yield from self._kill()
        yield from self._until(self._length_s * 2 / 3)
        yield from self._fail_over()

    # the steps

    def _caught_up(self) -> bool:
        sums = self._status["totals"]
        every = self._status["vbucket_count"]
        return bool(
            every
            and sums["vbuckets"] == every
            and sums["states"].get("streaming", 0) == every
            and sums["source_high_seqnos"]
            and sums["lag_seqnos"] is not None
            and sums["lag_seqnos"] * 50 <= sums["source_high_seqnos"]
        )

    def _fill(self) -> Iterator[None]:
        yield from self._wait(lambda: self._status["listeners"].get("http"), "the status page")
        self.say(f"status page: {self._status['listeners']['http'][0]} (Ctrl-C ends the demo)")
        self.say(f"source: 2 nodes, live writes, at {self._stage.connection_string}")
        yield from self._wait(self._caught_up, "the first fill")
        self.facts["filled_s"] = round(self.elapsed_s, 1)
        self.facts["filled_seqnos"] = self._status["totals"]["published_seqnos"]
        self.say(f"mirrored {output.number(self.facts['filled_seqnos'])} seqnos; now following the live writes")

    def _kill(self) -> Iterator[None]:
        yield from self._wait(lambda: self._running(), "all workers")
        victim = self._status["workers"][0]
        groups = set(victim["groups"])
        vbids = [row["vbid"] for row in self._status["vbuckets"] if row["group"] in groups]
        published = {row["vbid"]: row["published_seqno"] for row in self._status["vbuckets"]}
        requests = {vbid: len(self._requests(vbid)) for vbid in vbids}
        self._stage.kill_worker(victim["pid"])
        killed_s = time.monotonic()
        self.say(f"SIGKILL to worker {victim['slot']} (process {victim['pid']}, {len(vbids)} vbuckets)")
        yield from self._wait(lambda: self._replaced(victim), "the worker's replacement")
        yield from self._wait(lambda: all(len(self._requests(vbid)) > requests[vbid] for vbid in vbids), "new streams")
        yield from self._wait(self._caught_up, "catching up after the kill")
        lag_s = time.monotonic() - killed_s
        again = sum(row["requested_again_bytes"] or 0 for row in self._status["vbuckets"] if row["vbid"] in vbids)
        lower = [vbid for vbid in vbids if self._requests(vbid)[-1] < published[vbid]]
        self.facts["kill"] = {
            "worker": victim["slot"],
            "vbuckets": len(vbids),
            "back_s": round(lag_s, 1),
            "requested_again_bytes": again,
            "vbuckets_requested_below_published": len(lower),
        }
        self.say(f"worker {victim['slot']} is back and caught up after {lag_s:.1f} s; requested again: {again} bytes")
        self.say(
            f"the source's account: {len(vbids) - len(lower)} of {len(vbids)} streams resumed where the mirror stood"
        )

    def _running(self) -> bool:
        workers = self._status["workers"]
        return bool(workers) and all(worker["phase"] == "running" for worker in workers)

    def _replaced(self, victim: Mapping[str, Any]) -> bool:
        worker: Mapping[str, Any] = self._status["workers"][victim["slot"]]
        return bool(worker["phase"] == "running" and worker["pid"] != victim["pid"])

    def _requests(self, vbid: int) -> list[int]:
        requests: list[int] = self._stage.ask_source("vbucket", vbid=vbid)["stream_requests"]
        return requests

    def _fail_over(self) -> Iterator[None]:
        yield from self._wait(self._caught_up, "catching up before the failover")
        before = self._status["totals"]["rollback_count"] or 0
        vbids = [row["vbid"] for row in self._status["vbuckets"] if self._node_of(row["vbid"]) == 1]
        with open_view(str(self._stage.data)) as view:
            kept = min(int(state.published_seqno - state.history_floor_seqno) for state in map(view.state, vbids))
        lost = max(1, min(LOST_CHANGES, kept))
        self._stage.ask_source("failover-node", node=1, lose=lost)
        self.say(f"node 1 fails over: {len(vbids)} vbuckets lose their newest {lost} change{'s' * (lost > 1)} each")
        yield from self._wait(lambda: (self._status["totals"]["rollback_count"] or 0) > before, "a rollback")
        yield from self._wait(self._caught_up, "catching up after the failover")
        with open_view(str(self._stage.data)) as view:
            rollbacks = [view.rollbacks(vbid)[-1] for vbid in vbids if view.rollbacks(vbid)]
            parted = [view.state(each.vbid).failover_log[0].seqno for each in rollbacks]
        retracted = sum(rollback.from_seqno - rollback.to_seqno for rollback in rollbacks)
        again = sum(max(0, seqno - each.to_seqno) for each, seqno in zip(rollbacks, parted, strict=True))
        self.facts["failover"] = {
            "vbuckets": len(vbids),
            "rolled_back": len(rollbacks),
            "retracted_seqnos": retracted,
            "sent_again_seqnos": again,
            "resynced": len(vbids) - len(rollbacks),
        }
        self.say(f"{len(rollbacks)} vbuckets rolled back to a kept boundary, at once for readers")
        self.say(f"{retracted} seqnos retracted: {retracted - again} lost, {again} above the boundary and sent again")
        if rollbacks:
            one = rollbacks[0]
            self.say(
                f"vbucket {one.vbid}: seqno {one.from_seqno} -> {one.to_seqno} on branch {one.to_branch}, "
                "streaming on from there"
            )

    def _node_of(self, vbid: int) -> int:
        node: int = self._stage.ask_source("vbucket", vbid=vbid)["node"]
        return node

    def reckon(self) -> bool:
        """Stop the writes, wait for the mirror, compare, stop the service and check its data."""
        self._stage.ask_source("rate", rate=0)
        until_s = time.monotonic() + STEP_TIMEOUT_S
        documents = sent = -1
        while time.monotonic() < until_s:
            status = self._stage.status()
            sent = self._stage.ask_source("status")["documents"]
            if status is not None and status["totals"]["lag_seqnos"] == 0:
                count_documents(self._stage.data, status)
                documents = status["totals"]["documents"]
                if documents == sent:
                    break
            time.sleep(LOOK_INTERVAL_S)
        code = self._stage.end_service()
        problems = storage_check.check(str(self._stage.data)).problems
        self.facts["documents"] = {"source": sent, "mirror": documents}
        self.facts["check_problems"] = problems
        self.say(
            f"writes stop. documents in the source: {output.number(sent)}, in the mirror: {output.number(documents)}"
        )
        self.say(f"the stored data is {'sound' if not problems else f'NOT sound: {problems[0]}'} (dcp-mirror check)")
        kill = self.facts.get("kill") or {}
        held = kill.get("requested_again_bytes", 0) == 0 and kill.get("vbuckets_requested_below_published", 0) == 0
        return documents == sent and not problems and code == 0 and held


def demo(
    data: options.DataOption = None,
    seconds: Annotated[
        float | None, options.optional("--seconds", min=1, help="End after this time, with a summary.")
    ] = None,
    documents: Annotated[int, typer.Option("--documents", min=1, help="Documents at the start.")] = 50_000,
    rate: Annotated[float, typer.Option("--rate", min=0, help="Writes per second.")] = 1_000.0,
    workers: Annotated[int, typer.Option("--workers", min=1, max=8, help="Worker processes.")] = 2,
    http: Annotated[
        str, typer.Option("--http", metavar="ADDR", help="Serve the status page here; 0: a free port of localhost.")
    ] = "0",
    as_json: options.JsonOption = False,
) -> None:
    """Show a mirror at work: live writes, a killed worker, a failover with rollback."""
    if data is not None and directory.exists(str(data)):
        raise ConfigError(f"{data} holds a mirror already", hint="the demo makes a new one: give it an empty directory")
    # SIGTERM ends this command as Ctrl-C does, also in the background of a script, where Ctrl-C is ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-mirror-demo-")))
        place = data if data is not None else folder / "data"
        stage = Stage(place, folder, nodes=2, vbuckets=64, documents=documents, rate=rate, workers=workers, http=http)
        stack.enter_context(stage)
        story = Story(stage, seconds or DEFAULT_LENGTH_S, to_stderr=as_json)
        with contextlib.suppress(KeyboardInterrupt):
            run_story(stage, story, seconds)
        ok = story.reckon()
        finish(story, ok, data, as_json=as_json)
    if not ok:
        raise CommandEnded(ExitCode.FAILED)


def run_story(stage: Stage, story: Story, seconds: float | None) -> None:
    while seconds is None or story.elapsed_s < seconds or not story.finished:
        status = stage.status()
        if status is not None:
            story.go_on(status)
        time.sleep(LOOK_INTERVAL_S)


def finish(story: Story, ok: bool, data: Path | None, *, as_json: bool) -> None:
    if as_json:
        output.print_json({"ok": ok, "elapsed_s": round(story.elapsed_s, 1), **story.facts})
        return
    output.echo("the demo ended well: every claim above was measured" if ok else "the demo did NOT end well: see above")
    command = render.command_name()
    if data is None:
        output.echo(f"keep the next one, and ask it questions: {command} demo --data DIR")
    else:
        output.echo(f"the mirror stays in {data}; ask it: {command} sql --data {shlex.quote(str(data))} '{QUESTION}'")
