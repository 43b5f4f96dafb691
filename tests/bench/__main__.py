"""Run a bench: its flags are the keyword arguments of its `measure`, its rows become one table with their medians."""

from __future__ import annotations

import argparse
import inspect
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

Row = dict[str, float | str]
"""Texts say what was measured, numbers what was found."""
BENCHES = ("ingest", "lag", "get", "kv", "restart", "spark", "sql")


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield the table, a line as soon as its row is there, then the median of all rows that have the same texts."""
    found: dict[tuple[str, ...], list[Row]] = {}
    widths: dict[str, int] = {}
    for row in rows:
        if not widths:
            widths = {name: max(len(name), 10) for name in row}
            yield "  ".join(name.rjust(width) for name, width in widths.items())
        yield _line(row, widths)
        found.setdefault(tuple(each for each in row.values() if isinstance(each, str)), []).append(row)
    if any(len(alike) > 1 for alike in found.values()):
        yield "medians:"
        for alike in found.values():
            yield _line({name: _median([row[name] for row in alike]) for name in widths}, widths)


def _median(values: Sequence[float | str]) -> float | str:
    numbers = [each for each in values if not isinstance(each, str)]
    return statistics.median(numbers) if numbers else values[0]


def _line(row: Row, widths: dict[str, int]) -> str:
    return "  ".join(_shown(row[name]).rjust(width) for name, width in widths.items())


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def main(arguments: Sequence[str]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes and files go, as with Ctrl-C
    name = arguments[0] if arguments and arguments[0] in BENCHES else None
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if name is None:
        parser.add_argument("name", choices=BENCHES, help="what to measure; NAME --help lists its flags")
        parser.parse_args(arguments)
        return
    module = import_module(f"tests.bench.{name}")
    measure: Callable[..., Iterator[Row]] = module.measure
    parser.prog += f" {name}"
    parser.description = module.__doc__
    for each in inspect.signature(measure).parameters.values():
        if each.kind is each.KEYWORD_ONLY:
            flag = "--" + each.name.replace("_", "-")
            parser.add_argument(flag, type=type(each.default), default=each.default, help=" ")
    parser.add_argument("--folder", help="a directory on the disk to measure; what is made in it is removed again")
    flags = vars(parser.parse_args(arguments[1:]))
    with tempfile.TemporaryDirectory(prefix="dcp-mirror-bench-", dir=flags.pop("folder")) as folder:
        for line in lines(measure(Path(folder), **flags)):
            print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
