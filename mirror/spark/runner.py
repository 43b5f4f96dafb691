"""Call a function for each task of a list, on this machine's cores or on a Spark cluster, and return the results.

Each task has one result, even if Spark runs it twice because an executor was lost. The first error that no retry fixes
is raised as the task raised it, without Spark's traceback. On Spark this happens after the last task.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from mirror.errors import ConfigError, MirrorError
from storage.errors import StorageError

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int, int], None]

POLL_INTERVAL_S = 0.5

_MARK = "dcp-mirror-error:"
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(mirror|storage|pyarrow|lmdb|deltalake)\b")
"""Finds the error of an executor that lacks this package or one of its dependencies."""


class Runner(Protocol):
    @property
    def parallelism(self) -> int: ...

    def run(self, function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None = None) -> list[R]:
        """Call `function`, a function of a module, with each task. Raises a task's error."""
        ...


class LocalRunner:
    """Runs tasks in processes of this machine, by default one for each core, which stay for the next run. A new process
    first calls `prepare`.
    """

    def __init__(self, processes: int | None = None, prepare: Callable[[], None] | None = None) -> None:
        self.parallelism = processes or len(os.sched_getaffinity(0))
        self._prepare = prepare
        self._others = set(multiprocessing.active_children())
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None = None) -> list[R]:
        """Run all tasks in this process if `parallelism` is 1, or a single one that comes first. Other processes are
        spawned, because this process may have threads.
        """
        if self.parallelism == 1 or (len(tasks) <= 1 and self._pool is None):
            return self._run_here(function, tasks, progress)
        results: list[Any] = [None] * len(tasks)
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.parallelism, spawn, _begin, (os.getpid(), self._prepare))
        try:
            with _no_interrupt():
                futures = {self._pool.submit(function, task): number for number, task in enumerate(tasks)}
            for done, future in enumerate(as_completed(futures), 1):
                results[futures[future]] = future.result()
                if progress is not None:
                    progress(done, len(tasks))
        except BaseException as error:
            for process in set(multiprocessing.active_children()) - self._others:
                process.kill()  # the run has failed: no result is needed
            self.close()
            if isinstance(error, BrokenProcessPool):
                raise MirrorError(
                    "a process of this job died", hint="look for a kill or short memory; no data was committed"
                ) from error
            raise
        return results

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    @staticmethod
    def _run_here(function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None) -> list[R]:
        results = []
        for done, task in enumerate(tasks, 1):
            results.append(function(task))
            if progress is not None:
                progress(done, len(tasks))
        return results


def _begin(parent: int, prepare: Callable[[], None] | None) -> None:
    """Prepare a new process. End it if its parent has died: it would wait for tasks for ever."""
    if prepare is not None:
        prepare()
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Make processes that start in this block ignore Ctrl-C. Their parent ends them."""
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


class SparkRunner:
    """Runs tasks on the executors of a classic session. Spark Connect cannot run Python functions as jobs."""

    def __init__(self, spark: Any) -> None:
        self._spark = spark

    @property
    def _context(self) -> Any:
        return self._spark.sparkContext

    @property
    def parallelism(self) -> int:
        return int(self._context.defaultParallelism)

    def run(self, function: Callable[[T], R], tasks: Sequence[T], progress: Progress | None = None) -> list[R]:
        if not tasks:
            return []
        guarded = _Guarded(function)
        try:
            with self._watched(function.__name__, len(tasks), progress or (lambda *_: None)):
                found = self._context.parallelize(tasks, len(tasks)).map(guarded).collect()
        except Exception as error:
            raise error_of(error) from None
        for _, failed in found:
            if failed is not None:
                raise failed
        return [result for result, _ in found]

    @contextmanager
    def _watched(self, name: str, count: int, progress: Progress) -> Iterator[None]:
        over = threading.Event()
        group = f"dcp-mirror-{id(over)}"
        self._context.setJobGroup(group, f"dcp-mirror: {name}", interruptOnCancel=True)
        watch = threading.Thread(target=self._watch, args=(group, count, progress, over), daemon=True)
        watch.start()
        try:
            yield
        except BaseException:
            self._context.cancelJobGroup(group)
            raise
        finally:
            over.set()
            watch.join()
            progress(count, count)

    def _watch(self, group: str, count: int, progress: Progress, over: threading.Event) -> None:
        tracker = self._context.statusTracker()
        while not over.wait(POLL_INTERVAL_S):
            done = 0
            for job in tracker.getJobIdsForGroup(group):
                stages = (tracker.getStageInfo(stage) for stage in tracker.getJobInfo(job).stageIds)
                done += sum(stage.numCompletedTasks for stage in stages if stage is not None)
            progress(min(done, count), count)


class _Guarded:
    """A task function whose own errors pass through Spark unchanged.

    It returns an error that no retry fixes: if it raised the error, Spark would try four times and print four
    tracebacks. It raises an error that a retry may fix, as text from which `error_of` restores it.
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


def as_text(error: BaseException) -> str:
    """Return our error as text, from which `error_of` restores it, even inside other text."""
    return f"{_MARK}{pickle.dumps(error).hex()};"


def error_of(error: BaseException) -> BaseException:
    """Return the task's error that Spark's error contains, or else an error with the first line of Spark's text."""
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
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return MirrorError(f"Spark: {first}", hint="DCP_MIRROR_LOG_LEVEL=debug shows all of it")
