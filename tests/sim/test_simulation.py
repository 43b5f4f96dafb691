"""Source, network, mirror and a bounded reader from one seed: what is published is what the source held there.

    pytest tests/sim                                         10,000 steps
    pytest tests/sim -m ci                                   60,000 steps
    pytest tests/sim -m long                                 1,000,000 steps
    DCP_MIRROR_SIM_STEPS_TOTAL=5000000 pytest tests/sim -m long
    DCP_MIRROR_SIM_SEED=<seed of a failure> pytest tests/sim   that world alone, step by step as it was

A run is many worlds of some hundred steps, each from a seed of its own; `checkers` says what holds and what is not
looked at. At the end everything that a mirror can suffer must have happened, or the run proves nothing; in the short
run of the default suite, everything that is frequent.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from tests.seeds import seed_from
from tests.sim.simulate import live_through

STEPS_DEFAULT = 10_000
STEPS_CI = 60_000
STEPS_LONG = 1_000_000
STEPS_OF_A_WORLD = 500
MUST_HAPPEN_IN_SHORT_RUNS = (
    "advances inside a backfill", "as-of reads", "bounded reads of a vbucket", "changes lost", "deletes", "expiries",
    "failovers that lost changes", "floors raised", "followers brought up to date", "key rows made in steps",
    "publishes", "reads below the floor", "streams proven to be on our history", "versions purged",
)  # fmt: skip
"""Events of a third of the worlds and more; a run of some twenty worlds might miss rarer ones."""
MUST_HAPPEN = (
    "abandoned rows purged", "acknowledgements held for a reader", "advances inside a backfill", "as-of reads",
    "backfills cut in memory's reach", "boundaries under a lease", "bounded reads of a vbucket",
    "bulk that stayed open finished", "changes between that stayed open ended by ViewInvalidated",
    "changes between that stayed open finished", "changes lost",
    "changes since that stayed open ended by ViewInvalidated", "changes since that stayed open finished",
    "changes that stayed open ended by ViewInvalidated", "changes that stayed open finished", "clocks set",
    "collections dropped", "collections flushed", "commits undone by a power cut", "connections cut inside a frame",
    "connections of a reader cut", "cursors dropped", "deferred rollbacks", "deletes", "died at a commit",
    "died between commits", "disk errors", "double markers", "ends before that of a resumed snapshot", "expiries",
    "failovers that lost changes", "filtered streams accepted", "filters that changed", "floors held by a lease",
    "floors raised", "followers brought up to date", "followers refused after a resync",
    "followers refused after tombstones were purged", "followers stopped in the middle",
    "followers with a lease brought up to date", "groups taken over", "integrity walks", "key rows made in steps",
    "leases ended by time", "leases granted", "leases refused", "leases released", "leases resumed after a restart",
    "maps grown", "mid-snapshot resumes of a reader", "mid-snapshot resumes", "open snapshots written down",
    "pages within that stayed open finished", "pages that stayed open ended by ViewInvalidated",
    "pages that stayed open finished", "power cuts between commits", "power cuts in a commit", "protocol broken",
    "published once persisted", "publishes", "reads below the floor", "reads that were rolled back",
    "refused on purpose", "replicas promoted with part of a snapshot", "restorations followed", "resyncs published",
    "retracted rows purged", "retractions followed", "rollbacks by command", "rollbacks followed", "rollbacks",
    "scan that stayed open finished", "selections compared with the source", "seqnos that stayed open finished",
    "snapshots handed out to a reader", "source purges", "staged rows abandoned on disk", "stopped and started",
    "streams proven to be on our history", "syncs of a commit failed", "syncs of an idle group failed",
    "vbuckets deleted and recreated", "vbuckets moved", "versions purged",
)  # fmt: skip
MUST_HAPPEN_IN_LONG_RUNS = (
    "followers refused after retracted rows were purged",
    "links merged",
    "mid-snapshot resumes below the purge seqno",
)

Remember = Callable[[str, object], None]


def simulate(first_seed: int, steps_min: int) -> tuple[int, int, Counter[str]]:
    """Run worlds until there were so many steps."""
    counts: Counter[str] = Counter()
    seeds = Random(first_seed)
    steps = worlds = 0
    while steps < steps_min:
        steps += live_through(seeds.randrange(2**31), STEPS_OF_A_WORLD, counts)
        worlds += 1
    return steps, worlds, counts


def run(steps_min: int, must_happen: tuple[str, ...], record_property: Remember) -> None:
    replayed = os.environ.get("DCP_MIRROR_SIM_SEED")
    if replayed:
        steps = int(os.environ.get("DCP_MIRROR_SIM_STEPS", STEPS_OF_A_WORLD))
        live_through(int(replayed), steps, Counter())
        return
    first_seed = seed_from("DCP_MIRROR_SIM_RUN")
    print(f"DCP_MIRROR_SIM_RUN={first_seed}")  # noqa: T201 - shown with a failure
    steps, worlds, counts = simulate(first_seed, steps_min)
    reported = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    record_property("simulated", f"{steps} steps in {worlds} worlds, DCP_MIRROR_SIM_RUN={first_seed}: {reported}")
    missing = [what for what in must_happen if not counts[what]]
    assert not missing, f"in {steps} steps this never happened: {missing}"


@pytest.mark.small
def test_published_data_equals_the_source_after_any_faults(record_property: Remember) -> None:
    run(STEPS_DEFAULT, MUST_HAPPEN_IN_SHORT_RUNS, record_property)


@pytest.mark.ci
@pytest.mark.timeout(1200)
def test_published_data_equals_the_source_after_every_kind_of_fault(record_property: Remember) -> None:
    run(STEPS_CI, MUST_HAPPEN, record_property)


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_published_data_equals_the_source_after_faults_for_a_long_time(record_property: Remember) -> None:
    total = int(os.environ.get("DCP_MIRROR_SIM_STEPS_TOTAL", STEPS_LONG))
    run(total, MUST_HAPPEN + MUST_HAPPEN_IN_LONG_RUNS, record_property)


def test_the_same_seed_gives_the_same_run() -> None:
    """The same seed gives the same steps, commits and counts: else no failure could be seen again."""
    stories = []
    for _ in range(2):
        counts: Counter[str] = Counter()
        steps = live_through(20_240_229, 300, counts)
        stories.append((steps, counts))
    assert stories[0] == stories[1]
    assert stories[0][1]["publishes"] > 0
