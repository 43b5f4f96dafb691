"""Broken bytes end in the reader's own error: never in another exception, a hang, or much memory.

    pytest tests/fuzz                                                    some thousand executions of each target
    DCP_MIRROR_FUZZ=10000000 pytest -m long -n auto tests/fuzz           ten million of each
    DCP_MIRROR_FUZZ_SEED=4711 DCP_MIRROR_FUZZ=... pytest -m long ...     the same once more

A finding is added to `tests/fuzz/corpus/<target>/` (as text, in hex) with its fix, and is then tried at every run.
"""

from __future__ import annotations

import os
import tracemalloc
from random import Random
from time import process_time

import pytest

from tests.fuzz import corpus
from tests.fuzz.mutator import mutate
from tests.fuzz.targets import TARGETS
from tests.seeds import seed_from

SEED = "DCP_MIRROR_FUZZ_SEED"
EXECUTIONS = 2_000
EXECUTIONS_LONG = 1_000_000
SECONDS_MAX = 5.0
"""Of processor time for one input: they take some 20 microseconds."""
BYTES_MAX = 64 << 20
"""For one input of 4 KiB at most."""
MEASURED_EVERY = 50
"""Executions of which the memory is measured; it slows them down tenfold."""


def run(name: str, executions: int, seed: int) -> None:
    target, samples, rng = TARGETS[name], corpus.of(name), Random(f"{seed} {name}")
    for number in range(executions):
        data = samples[number] if number < len(samples) else mutate(rng, samples)
        measured = number % MEASURED_EVERY == 0
        if measured:
            tracemalloc.start()
        started = process_time()
        try:
            target(data)
        except Exception as error:
            pytest.fail(f"{name} raised {type(error).__name__}: {error} for {data.hex()} (seed {seed})")
        took = process_time() - started
        assert took < SECONDS_MAX, f"{name} took {took:.1f} s for {data.hex()} (seed {seed})"
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < BYTES_MAX, f"{name} took {peak} bytes for {data.hex()} (seed {seed})"


def test_every_target_has_samples() -> None:
    assert corpus.SAMPLES.keys() == TARGETS.keys()


@pytest.mark.parametrize("name", TARGETS)
def test_samples_and_past_findings_are_read_or_refused(name: str) -> None:
    run(name, len(corpus.of(name)), 0)


@pytest.mark.parametrize("name", TARGETS)
def test_broken_bytes_are_refused(name: str) -> None:
    run(name, EXECUTIONS, seed_from(SEED))


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("name", TARGETS)
def test_broken_bytes_are_refused_for_a_long_time(name: str) -> None:
    run(name, int(os.environ.get("DCP_MIRROR_FUZZ", EXECUTIONS_LONG)), seed_from(SEED))
