"""The same tasks on this machine's cores or on a Spark cluster: a function, a list of what to call it with, results.

Knows processes and Spark's job API; must never know what a task does. A task gets what it needs by its argument and
works where it runs: it opens its own files and connections, and what it returns is small. Invariants: each task's
result is counted once, also where Spark ran it again after an executor was lost; results come in the order of the
tasks; the first failure that trying again does not fix ends the run, as the task's own error and not as a trace of
the machinery between.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from mirror.errors import ConfigError, MirrorError
from mirror.log import structlog
from storage.errors import StorageError

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int, int], None]
"""Tasks done, and of how many."""

POLL_INTERVAL_S = 0.5

_MARK = "dcp-mirror-error:"
_REPORTED = re.compile(r"MirrorSourceError: (.+?)(?: SQLSTATE: \w+)?$", re.MULTILINE)
"""How the data source tells of an error that was foreseen (failures.py), among Spark's own words."""

_MISSING = re.compile(r"ModuleNotFoundError: No module named '(mirror|storage|pyarrow|lmdb|deltalake)\b")
"""What an executor without this package says; workers that do not start say it, too."""


class Runner(Protocol):
    """Whatever can run tasks."""

    parallelism: int
    """How many tasks run at once."""

    def run(self, function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None = None) -> list[R]:
        """Call `function`, a module's own, with each task. Raises what a task raised."""
        ...


class LocalRunner:
    """Several processes of this machine."""

    def __init__(self, processes: int | None = None, prepare: Callable[[], None] | None = None) -> None:
        """As many processes as cores by default; `prepare`, a module's own function, is called in each of them."""
        self.parallelism = processes or len(os.sched_getaffinity(0))
        self._prepare = prepare

    def run(self, function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None = None) -> list[R]:
        """Spawned, never forked: LMDB's environments must not cross a fork."""
        if self.parallelism == 1 or len(tasks) <= 1:
            return self._run_here(function, tasks, progress)
        results: list[Any] = [None] * len(tasks)
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(
            min(self.parallelism, len(tasks)),
            multiprocessing.get_context("spawn"),
            _begin,
            (os.getpid(), self._prepare),
        )
        try:
            with _no_interrupt():
                futures = {pool.submit(function, task): number for number, task in enumerate(tasks)}
            for done, future in enumerate(as_completed(futures), 1):
                results[futures[future]] = future.result()
                if progress is not None:
                    progress(done, len(tasks))
        except BaseException as error:
            for process in set(multiprocessing.active_children()) - before:
                process.kill()  # what the others would still do is not needed
            if isinstance(error, BrokenProcessPool):
                raise MirrorError(
                    "a process of this job died", hint="was it killed, or is memory short? Nothing was committed"
                ) from error
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return results

    @staticmethod
    def _run_here(function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None) -> list[R]:
        results = []
        for done, task in enumerate(tasks, 1):
            results.append(function(task))
            if progress is not None:
                progress(done, len(tasks))
        return results


def _begin(parent: int, prepare: Callable[[], None] | None) -> None:
    """The first steps of a process. One whose parent has died already would wait for tasks for ever."""
    if prepare is not None:
        prepare()
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """A terminal's Ctrl-C is not for processes that are started here: they are ended by anyone who started them."""
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


class SparkRunner:
    """A Spark session's executors."""

    def __init__(self, spark: Any) -> None:
        """`spark` is a classic session: jobs of Python functions are not to be had through Spark Connect."""
        self._context = spark.sparkContext
        self.parallelism = int(self._context.defaultParallelism)

    def run(self, function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None = None) -> list[R]:
        """A Spark task for each; Spark runs those again whose executor was lost."""
        if not tasks:
            return []
        guarded = _Guarded(function)
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(len(tasks), progress, over), daemon=True)
        group = f"dcp-mirror-{id(guarded)}"
        self._context.setJobGroup(group, f"dcp-mirror: {function.__name__}", interruptOnCancel=True)
        self._group = group
        if progress is not None:
            watch.start()
        try:
            found = self._context.parallelize(tasks, len(tasks)).map(guarded).collect()
        except Exception as error:
            raise error_of(error) from None
        except BaseException:
            self._context.cancelJobGroup(group)
            raise
        finally:
            over.set()
            if progress is not None:
                watch.join()
                progress(len(tasks), len(tasks))
        for _, failed in found:
            if failed is not None:
                raise failed
        return [result for result, _ in found]

    def _watch(self, count: int, progress: Progress, over: threading.Event) -> None:
        tracker = self._context.statusTracker()
        while not over.wait(POLL_INTERVAL_S):
            done = 0
            for job in tracker.getJobIdsForGroup(self._group):
                stages = (tracker.getStageInfo(stage) for stage in tracker.getJobInfo(job).stageIds)
                done += sum(stage.numCompletedTasks for stage in stages if stage is not None)
            progress(min(done, count), count)


class _Guarded:
    """A task function whose own errors come back as what they are.

    What trying again cannot fix is returned, or Spark would try it four times and print four traces; what may be
    fixed is raised, as text that `error_of` finds again.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, task: Any) -> tuple[Any, Exception | None]:
        try:
            return self._function(task), None
        except (MirrorError, StorageError) as error:
            if error.retryable:
                raise RuntimeError(as_text(error)) from error
            return None, error


def quiet_logs() -> None:
    """Errors alone, on stderr: what a task has to say it returns or raises, and stdout may belong to data."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def as_text(error: BaseException) -> str:
    """An error of ours as text that survives any number of wrappings."""
    return f"{_MARK}{pickle.dumps(error).hex()};"


def error_of(error: BaseException) -> BaseException:
    """What a task raised, out of whatever Spark made of it; an error of Spark's own in its first line."""
    text = str(error)
    start = text.find(_MARK)
    if start >= 0:
        found = pickle.loads(bytes.fromhex(text[start + len(_MARK) : text.index(";", start)]))
        if isinstance(found, MirrorError | StorageError):
            return found
    missing = _MISSING.search(text)
    if missing is not None:
        return ConfigError(
            f"the Python of an executor has no package {missing[1]}",
            hint="pip install 'dcp-mirror[spark]' on every executor, and set spark.pyspark.python to that Python",
        )
    reported = _REPORTED.search(text)
    if reported is not None:
        return MirrorError(reported[1].strip())
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return MirrorError(f"Spark: {first}", hint="DCP_MIRROR_LOG_LEVEL=debug shows all of it")
