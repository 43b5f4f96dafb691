"""`bench`: how fast the program is against the limits of what it stands on, in one run on this machine.

Knows how to ask for measurements and print them; what is measured, and against what, lives with the measured code.
Trust the ratios: both sides of one are taken in turn within seconds, while the machine may drift from run to run.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli import options, output
from cli.exits import CommandEnded, complain, end_by_sigterm
from cli.pipeline import need, spark_session
from mirror.bench import dcp as dcp_bench
from mirror.bench import get as get_bench
from mirror.bench import growth as growth_bench
from mirror.bench import http as http_bench
from mirror.bench import kv as kv_bench
from mirror.bench import lag as lag_bench
from mirror.bench import limits, stores
from mirror.bench import restart as restart_bench
from mirror.bench import rollback as rollback_bench
from mirror.bench import start as start_bench
from mirror.bench.ingest import ORDERS, ingest_rounds
from mirror.errors import ExitCode
from mirror.sandbox.workload import Orders, order_key

if TYPE_CHECKING:
    from mirror.bench.spark import Ratio

app = typer.Typer(
    name="bench",
    help="Speed against the limits of LMDB, measured here and now.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def prepare() -> None:
    """Before each measurement."""
    end_by_sigterm()


RoundsOption = Annotated[int, typer.Option("--rounds", min=1, max=100, help="Times each side is measured, in turn.")]
FolderOption = Annotated[
    Path | None, typer.Option("--folder", help="Where to put the files; on the disk that the mirror will use.")
]


@app.command()
def ingest(
    documents: Annotated[int, typer.Option(min=1000, max=20_000_000, help="Documents to mirror.")] = 500_000,
    vbuckets: Annotated[int, typer.Option(min=1, max=1024, help="Vbuckets they are in.")] = 64,
    value_bytes: Annotated[int, typer.Option("--value-size", min=48, max=65_536, help="Bytes of a value.")] = 256,
    sync: Annotated[str, typer.Option(help="What a commit forces to the disk: safe, full or unsafe.")] = "safe",
    order: Annotated[
        str,
        typer.Option(help="How the source sends: the streams in turn (turn), one by one (stream), or both in turn."),
    ] = "turn",
    workers: Annotated[int, typer.Option(min=1, max=8, help="Worker processes that share the vbuckets.")] = 1,
    rounds: RoundsOption = 3,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """First backfill of a bucket, over a socket, against the same rows put into bare LMDB by one process.

    And against the same bytes received and discarded by one process.
    """
    check_sync(sync)
    if order not in (*ORDERS, "both"):
        complain(f"--order {order!r}: must be turn, stream or both")
        raise CommandEnded(ExitCode.USAGE)
    orders = ORDERS if order == "both" else (order,)
    found = []
    with _folder(folder) as path:
        for figures in ingest_rounds(
            documents, vbuckets, value_bytes, rounds, path, sync, orders=orders, workers=workers
        ):
            found.append(
                {
                    "order": figures.order,
                    "documents_per_s": round(figures.ingest.per_second),
                    "limit_documents_per_s": round(figures.limit.per_second),
                    "ratio": round(figures.ratio, 3),
                    "discarded_documents_per_s": round(figures.discarded.per_second),
                    "discard_ratio": round(figures.discard_ratio, 3),
                    "cpu_s": round(figures.ingest.cpu_s, 3),
                    "limit_cpu_s": round(figures.limit.cpu_s, 3),
                    "peak_private_mib": round(figures.peak_private_bytes / 2**20, 1),
                }
            )
            _say_round(found[-1], as_json)
    setting = {"documents": documents, "vbuckets": vbuckets, "sync": sync, "order": order, "workers": workers}
    if as_json:
        _finish("ingest", setting, found, as_json, [each for each in found if each["order"] == orders[0]])
        return
    for one in orders:
        _finish(f"ingest, {one}", setting, [each for each in found if each["order"] == one], as_json)


@app.command()
def lag(
    rates: Annotated[
        str, typer.Option(help="Writes a second, separated by commas, each for some seconds.")
    ] = "500,5000",
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="How long each rate is measured.")] = 5.0,
    sync: Annotated[str, typer.Option(help="What a commit forces to the disk: safe, full or unsafe.")] = "safe",
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """From a write at the source until readers see it, against a bare loop that commits what it receives to LMDB."""
    check_sync(sync)
    each_rate = _numbers("--rates", rates, 100_000)
    found = []
    with _folder(folder) as path:
        for figures in lag_bench.lags(each_rate, seconds, path, sync):
            values = {"": figures.lags_ms, "limit_": figures.limit_ms}
            shares = {"p50": 0.5, "p99": 0.99}
            found.append(
                {"writes_per_s": figures.rate}
                | {
                    f"{prefix}{name}_ms": round(lag_bench.quantile(each, share), 2)
                    for prefix, each in values.items()
                    for name, share in shares.items()
                }
            )
            _say_round(found[-1], as_json)
    if as_json:
        output.print_json({"bench": "lag", "seconds": seconds, "sync": sync, "rounds": found})


def check_sync(sync: str) -> None:
    """Refuse another word."""
    if sync not in ("safe", "full", "unsafe"):
        complain(f"--sync {sync!r}: must be safe, full or unsafe")
        raise CommandEnded(ExitCode.USAGE)


@app.command()
def start(
    vbuckets: Annotated[int, typer.Option(min=1, max=1024, help="Vbuckets of the source.")] = 1024,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Nodes of the source.")] = 4,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Worker processes of the service.")] = 4,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Starts; the first makes the mirror.")] = 3,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """From the service's start until the source has a stream open for every vbucket, and each worker's memory then."""
    found = []
    with _folder(folder) as path:
        for figures in start_bench.starts(vbuckets, nodes, workers, rounds - 1, path):
            found.append(
                {
                    "made": figures.made,
                    "seconds": round(figures.seconds, 2),
                    "worker_private_mib": [round(each / 2**20, 1) for each in figures.worker_private_bytes],
                }
            )
            memory = ", ".join(f"{each / 2**20:.1f}" for each in figures.worker_private_bytes)
            made = "a new mirror" if figures.made else "again"
            if not as_json:
                typer.echo(f"{made}: {figures.seconds:.2f} s, private MiB of the workers: {memory}")
    if as_json:
        shape = {"bench": "start", "vbuckets": vbuckets, "nodes": nodes, "workers": workers, "rounds": found}
        output.print_json(shape)


@app.command()
def restart(
    documents: Annotated[int, typer.Option(min=1000, max=20_000_000, help="Documents in the mirror.")] = 1_000_000,
    vbuckets: Annotated[int, typer.Option(min=8, max=1024, help="Vbuckets they are in.")] = 1024,
    missed: Annotated[int, typer.Option(min=0, max=1_000_000, help="Documents written while it is down.")] = 1000,
    workers: Annotated[int, typer.Option(min=1, max=8, help="Worker processes of the service.")] = 2,
    rounds: RoundsOption = 3,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """From the start of a service that was killed to its first read, and until it has caught up.

    Against a new interpreter that reads one document from bare LMDB.
    """
    found = []
    with _folder(folder) as path:
        for figures in restart_bench.restarts(documents, vbuckets, missed, workers, rounds, path):
            found.append(
                {
                    "first_read_s": round(figures.first_read_s, 3),
                    "limit_first_read_s": round(figures.limit_read_s, 3),
                    "caught_up_s": round(figures.caught_up_s, 3),
                    "ratio": round(figures.limit_read_s / figures.first_read_s, 3),
                }
            )
            _say_round(found[-1], as_json)
    setting = {"documents": documents, "vbuckets": vbuckets, "missed": missed, "workers": workers}
    _finish("restart", setting, found, as_json)


@app.command()
def get(
    documents: Annotated[int, typer.Option(min=1000, max=20_000_000, help="Documents in the mirror.")] = 200_000,
    reads: Annotated[int, typer.Option(min=1000, max=10_000_000, help="Reads of random keys.")] = 200_000,
    vbuckets: Annotated[int, typer.Option(min=1, max=1024, help="Vbuckets they are in.")] = 64,
    rounds: RoundsOption = 5,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Reads in this process through `open_view`, against bare LMDB reads of key and row.

    And 100 documents by one call, against 100 reads in a loop.
    """
    found = []
    with _folder(folder) as path:
        mirror = str(Path(path) / "mirror")
        stores.store_rows(mirror, stores.own_keys(vbuckets, documents), snapshot_rows=documents)
        sample = stores.sample_keys(reads, documents)
        for _ in range(rounds):
            limit = limits.get_limit(mirror, sample, vbuckets)
            view = get_bench.get_view(mirror, sample)
            many = get_bench.get_many_view(mirror, sample)
            found.append(
                {
                    "reads_per_s": round(view.per_second),
                    "limit_reads_per_s": round(limit.per_second),
                    "ratio": round(view.per_second / limit.per_second, 3),
                    "many_reads_per_s": round(many.per_second),
                    "many_ratio": round(many.per_second / view.per_second, 3),
                }
            )
            _say_round(found[-1], as_json)
    _finish("get", {"documents": documents, "reads": reads, "vbuckets": vbuckets}, found, as_json)
    if not as_json:
        median = statistics.median(each["many_ratio"] for each in found)
        typer.echo(f"get_many of 100: {median:.2f} of 100 gets in a loop (median of {rounds})")


@app.command()
def growth(
    documents: Annotated[
        str, typer.Option(help="Sizes to measure at, separated by commas: multiples of the first, rising.")
    ] = "1000000,5000000,20000000",
    vbuckets: Annotated[int, typer.Option(min=1, max=1024, help="Vbuckets they are in.")] = 1024,
    value_bytes: Annotated[int, typer.Option("--value-size", min=48, max=65_536, help="Bytes of a value.")] = 100,
    reads: Annotated[int, typer.Option(min=100, max=10_000_000, help="Reads of random keys at each size.")] = 50_000,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Processor time of a document as the mirror grows: stored by a worker's writer, and read; next to bare LMDB.

    Documents of random keys come in waves; the last one before each size is measured, and as large as the first size.
    """
    sizes = _numbers("--documents", documents, 20_000_000)
    if sizes != sorted(set(sizes)) or any(each % sizes[0] for each in sizes):
        complain(f"--documents {documents!r}: must be multiples of the first, rising")
        raise CommandEnded(ExitCode.USAGE)
    found = []
    with _folder(folder) as path:
        for figures in growth_bench.growth(sizes, vbuckets, value_bytes, reads, path):
            found.append(
                {
                    "documents": figures.documents,
                    "documents_per_s": round(figures.stored.per_second),
                    "limit_documents_per_s": round(figures.limit.per_second),
                    "cpu_us": round(figures.stored.cpu_us, 3),
                    "limit_cpu_us": round(figures.limit.cpu_us, 3),
                    "get_us": round(figures.got.cpu_us, 2),
                    "limit_get_us": round(figures.limit_got.cpu_us, 2),
                }
            )
            _say_round(found[-1], as_json)
    costs = {f"{name}_growth": round(found[-1][name] / found[0][name], 3) for name in list(found[0])[3:]}
    if as_json:
        shape = {"bench": "growth", "vbuckets": vbuckets, "value_bytes": value_bytes, "rounds": found}
        output.print_json(shape | costs)
    else:
        said = "  ".join(f"{name.removesuffix('_growth')} {value:.2f}" for name, value in costs.items())
        typer.echo(f"growth, {sizes[-1]:,} documents to {sizes[0]:,}: {said}")


@app.command()
def rollback(
    rows: Annotated[int, typer.Option("--rows", min=1000, max=20_000_000, help="Rows to retract.")] = 1_000_000,
    value_bytes: Annotated[int, typer.Option("--value-size", min=48, max=65_536, help="Bytes of a value.")] = 256,
    rounds: RoundsOption = 1,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """A rollback's own time, and the steps that remove what it leaves behind, next to writes and reads."""
    found = []
    for number in range(rounds):
        with _folder(folder) as path:
            figures = rollback_bench.rollback_round(
                str(Path(path) / "mirror"), rows, value_bytes=value_bytes, seed=number
            )
        found.append({name: round(value, 2) for name, value in figures._asdict().items()})
        _say_round(found[-1], as_json)
    if as_json:
        output.print_json({"bench": "rollback", "rows": rows, "rounds": found})


@app.command()
def http(
    documents: Annotated[int, typer.Option(min=1000, max=20_000_000, help="Documents in the mirror.")] = 100_000,
    requests: Annotated[int, typer.Option(min=100, max=10_000_000, help="Requests for random keys.")] = 20_000,
    connections: Annotated[int, typer.Option(min=1, max=1000, help="Connections that are kept busy.")] = 16,
    rounds: RoundsOption = 3,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Documents over HTTP from one process, against the same HTTP server answering as many bytes from memory.

    memcached and Redis speak no HTTP; `bench kv` compares them with the mirror, with one client for all three.
    """
    found = []
    with _folder(folder) as path:
        mirror = str(Path(path) / "mirror")
        stores.store_rows(mirror, stores.own_keys(64, documents), snapshot_rows=documents)
        sample = stores.sample_keys(requests, documents)
        with http_bench.serving(None) as bare, http_bench.serving(mirror) as served:
            for _ in range(rounds):
                limit = http_bench.measure(bare, sample, connections)
                ours = http_bench.measure(served, sample, connections)
                found.append(
                    {
                        "requests_per_s": round(ours.per_second),
                        "limit_requests_per_s": round(limit.per_second),
                        "ratio": round(ours.per_second / limit.per_second, 3),
                        "p50_ms": round(ours.quantile_ms(0.5), 2),
                        "p99_ms": round(ours.quantile_ms(0.99), 2),
                    }
                )
                _say_round(found[-1], as_json)
    _finish("http", {"documents": documents, "requests": requests, "connections": connections}, found, as_json)


@app.command()
def kv(
    documents: Annotated[int, typer.Option(min=1000, max=20_000_000, help="Documents in the mirror.")] = 100_000,
    reads: Annotated[int, typer.Option(min=1000, max=10_000_000, help="Reads of random keys.")] = 20_000,
    vbuckets: Annotated[int, typer.Option(min=1, max=1024, help="Vbuckets they are in.")] = 64,
    rounds: RoundsOption = 3,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Reads over the KV port from one plain client, compared with memcached and Redis where they are installed."""
    found = []
    with _folder(folder) as path, contextlib.ExitStack() as stack:
        mirror = str(Path(path) / "mirror")
        rows = stores.own_keys(vbuckets, documents)
        stores.store_rows(mirror, rows, snapshot_rows=documents)
        sample = stores.sample_keys(reads, documents)
        servers: list[tuple[str, int, kv_bench.Protocol]] = [
            ("mirror", stack.enter_context(kv_bench.mirror_server(mirror)), kv_bench.Memcached)
        ]
        for name in kv_bench.peers():
            held = [(b"document::%010d" % number, b"%0256d" % number) for number in range(documents)]
            servers.append((name, *stack.enter_context(kv_bench.peer_server(name, held))))
        for _ in range(rounds):
            for name, port, protocol in servers:
                figures = kv_bench.measure(port, protocol, sample)
                found.append({"server": name} | {key: round(value) for key, value in asdict(figures).items()})
                _say_round(found[-1], as_json)
    share = _share_of_memcached(found)
    if as_json:
        shape = {"bench": "kv", "documents": documents, "reads": reads, "rounds": found}
        output.print_json(shape | {"pipelined_ratio_median": share})
    elif share is not None:
        typer.echo(f"kv, pipelined: {share:.2f} of memcached (median of {rounds})")


def _share_of_memcached(found: Sequence[dict[str, Any]]) -> float | None:
    """The median rate of the mirror's pipelined reads over memcached's; None: that is not installed."""
    ours, theirs = (
        [float(each["pipelined_per_s"]) for each in found if each["server"] == name] for name in ("mirror", "memcached")
    )
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3) if theirs else None


@app.command()
def dcp(
    documents: Annotated[int, typer.Option(min=1000, max=20_000_000, help="Documents in the mirror.")] = 100_000,
    vbuckets: Annotated[int, typer.Option(min=1, max=1024, help="Vbuckets they are in.")] = 64,
    clients: Annotated[
        str, typer.Option(help="How many clients read all documents at once, separated by commas.")
    ] = "1,64",
    rounds: RoundsOption = 3,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """The DCP port of one process read by clients that store nothing, against the same bytes sent from memory."""
    numbers = _numbers("--clients", clients, 1000)
    found = []
    with _folder(folder) as path:
        mirror = str(Path(path) / "mirror")
        stores.store_rows(mirror, stores.own_keys(vbuckets, documents), snapshot_rows=documents)
        for figures in dcp_bench.dcp_rounds(mirror, "bench", numbers, rounds):
            found.append(
                {
                    "clients": figures.clients,
                    "documents_per_s": round(figures.streamed.per_second),
                    "limit_documents_per_s": round(figures.limit.per_second),
                    "ratio": round(figures.streamed.per_second / figures.limit.per_second, 3),
                }
            )
            _say_round(found[-1], as_json)
    if as_json:
        output.print_json({"bench": "dcp", "documents": documents, "vbuckets": vbuckets, "rounds": found})
        return
    for number in numbers:
        each = [figures for figures in found if figures["clients"] == number]
        _finish(f"dcp, {number} client{'s' if number > 1 else ''}", {}, each, as_json)


def _numbers(option: str, text: str, most: int) -> list[int]:
    """The numbers that an option lists."""
    numbers = [int(each) for each in text.split(",") if each.strip().isdecimal() and 0 < int(each) <= most]
    if len(numbers) != text.count(",") + 1:
        complain(f"{option} {text!r}: must be numbers from 1 to {most}, separated by commas")
        raise CommandEnded(ExitCode.USAGE)
    return numbers


@app.command()
def spark(
    documents: Annotated[int, typer.Option(min=1000, max=20_000_000, help="Documents in the mirror.")] = 100_000,
    value_bytes: Annotated[
        int, typer.Option("--value-size", min=48, max=65_536, help="Bytes of a value, about.")
    ] = 300,
    rounds: RoundsOption = 5,
    folder: FolderOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """A mirror read by Spark, compared with Parquet of the same orders, from_json on the same rows, and plain Arrow."""
    need("pyspark", "pyarrow", "deltalake")
    from mirror.bench import spark as spark_bench

    def orders() -> Iterator[tuple[bytes, bytes]]:
        template = Orders(Random(1), value_bytes)
        return ((order_key(number), template.order(number)) for number in range(documents))

    found: list[dict[str, float]] = []
    with _folder(folder) as path:
        few, many = str(Path(path) / "few"), str(Path(path) / "many")
        size = spark_bench.store(few, orders(), spark_bench.FEW)
        spark_bench.store(many, orders(), spark_bench.MANY)
        with spark_session("bench", None) as session:
            for each in spark_bench.rounds(spark_bench.Jobs(session, Path(path), few, many), rounds):
                found.append(each)
                _say_round({name: f"{name} {seconds:.2f} s" for name, seconds in each.items()}, as_json)
    ratios = spark_bench.ratios(found)
    if as_json:
        setting = {"documents": documents, "document_bytes": size}
        seconds = [{f"{name}_s": round(value, 3) for name, value in each.items()} for each in found]
        bars = [
            {
                "name": each.bar.name,
                "ratio_median": round(each.median, 3),
                "ratio_min": round(each.least, 3),
                "ratio_max": round(each.most, 3),
                "at_most": each.bar.at_most,
                "met": each.met,
            }
            for each in ratios
        ]
        output.print_json({"bench": "spark", **setting, "rounds": seconds, "bars": bars})
        return
    for name in found[0]:
        typer.echo(f"{name}: {documents / statistics.median(each[name] for each in found):,.0f} documents/s (median)")
    for line in bar_lines(ratios):
        typer.echo(line)


def bar_lines(ratios: Sequence[Ratio]) -> list[str]:
    """What was found of each bar, in a line."""
    lines = []
    for bar, median, least, most in ratios:
        limit = "" if bar.at_most is None else f"at most {bar.at_most:g} required; "
        missed = "" if bar.at_most is None or median <= bar.at_most else "MISSED "
        lines.append(f"{missed}{bar.name}: {median:.2f} of its time ({limit}{least:.2f} to {most:.2f})")
    return lines


@contextlib.contextmanager
def _folder(folder: Path | None) -> Iterator[str]:
    """A folder for one bench, which ends in a line where one of its processes fails."""
    if folder is not None and not folder.is_dir():
        complain(f"--folder {folder}: no such directory")
        raise CommandEnded(ExitCode.USAGE)
    with tempfile.TemporaryDirectory(prefix="dcp-mirror-bench-", dir=folder) as path:
        try:
            yield path
        except BrokenPipeError:  # anyone who read what is printed is gone: no process of the bench failed
            raise
        except (RuntimeError, OSError) as error:
            complain(str(error))
            raise CommandEnded(ExitCode.FAILED) from None


def _say_round(figures: dict[str, Any], as_json: bool) -> None:
    if not as_json:
        typer.echo(
            "  ".join(f"{name} {value:,}" if not isinstance(value, str) else value for name, value in figures.items())
        )


def _finish(
    name: str,
    setting: dict[str, Any],
    rounds: list[dict[str, Any]],
    as_json: bool,
    judged: list[dict[str, Any]] | None = None,
) -> None:
    """Print the median ratio of the rounds (`judged`: of those among them), and in JSON all that was measured."""
    ratios = [each["ratio"] for each in judged or rounds]
    median = statistics.median(ratios)
    if as_json:
        output.print_json({"bench": name, **setting, "rounds": rounds, "ratio_median": median})
    else:
        typer.echo(
            f"{name}: {median:.2f} of the limit (median of {len(ratios)}; {min(ratios):.2f} to {max(ratios):.2f})"
        )
