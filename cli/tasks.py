"""Tasks of `export`, `sync` and `verify`, on this machine's cores or on Spark, and options that commands share.

Under `spark-submit cli/main.py COMMAND ...` tasks run on Spark's executors, otherwise in processes of this machine.
Packages of the extra `spark` are imported only when a command needs them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options, render
from mirror.spark.runner import LocalRunner, Runner, SparkRunner
from mirror.supervise.processes.life import die_with_parent
from storage.model import collection_named

if TYPE_CHECKING:
    from mirror.typed.bodies import Reading

ModeOption = Annotated[
    str | None,
    options.optional(
        "--mode",
        metavar="failfast|permissive|dropmalformed",
        help="A document that does not fit --schema gives an error (default), nulls, or no row.",
    ),
]
TimeZoneOption = Annotated[
    str | None,
    options.optional("--time-zone", metavar="ZONE", help="Zone of times in documents that name none; default: UTC."),
]
EpochOption = Annotated[
    str | None,
    options.optional(
        "--epoch",
        metavar="seconds|millis|micros",
        help="Unit of numeric times in documents since 1970. Default: text, or seconds.",
    ),
]
MisfitsOption = Annotated[
    float,
    typer.Option(
        "--max-misfits",
        min=0,
        max=1,
        help="Largest share of documents that do not fit --schema (sync: in the first merge). Above it: exit code 3.",
    ),
]
OverwriteSchemaOption = Annotated[
    bool, typer.Option("--overwrite-schema", help="Allow columns of a table to go or to change their types.")
]
CollectionsOption = Annotated[
    str | None,
    options.optional("--collection", "-c", metavar="SCOPE.NAME,...", help="Only these collections; default: all."),
]

need = partial(options.need, "tables need", "spark")


def path_from(text: str | Path) -> Path:
    need("pyarrow", "deltalake")
    from mirror.spark.places import local_path

    return local_path(text)


def check_destination(text: str) -> None:
    """Raise ConfigError if this is no destination; call this before any work."""
    need("pyarrow", "deltalake")
    from mirror.spark.places import folder_at

    folder_at(text)


def reading_from(mode: str | None, time_zone: str | None, epoch: str | None) -> Reading:
    from mirror.spark.source.options import reading_of

    given = {"mode": mode, "timeZone": time_zone, "epoch": epoch}
    return reading_of({name: text for name, text in given.items() if text is not None})


def collections_from(text: str | None) -> tuple[str | int, ...] | None:
    return None if text is None else tuple(map(collection_named, text.replace(" ", "").split(",")))


def spark_session(name: str) -> AbstractContextManager[Any]:
    need("pyspark", "pyarrow", "deltalake")
    from mirror.spark.spark_session import lasting

    return lasting(f"dcp-mirror {name}")


def submitted() -> bool:
    """True if spark-submit has started this process."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


@contextmanager
def runner(name: str) -> Iterator[Runner]:
    if not submitted():
        with contextlib.closing(LocalRunner(prepare=die_with_parent)) as local:
            yield local
        return
    with spark_session(name) as session:
        yield SparkRunner(session)


@contextmanager
def running(name: str, *, quiet: bool = False) -> Iterator[tuple[Runner, Callable[[int, int], None]]]:
    """Yield the runner of a command's tasks, and a function that shows the number of finished tasks on stderr.

    `quiet`: spark-submit joins stderr and stdout, so show nothing there.
    """
    with render.ProgressLine() as screen, runner(name) as found:

        def progress(done: int, of: int) -> None:
            if not (quiet and submitted()):
                screen.show(f"{name}: {done} of {of} tasks")

        yield found, progress
