"""Queries that several processes read for: the same answers, one boundary, and no process left however a query ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings

from mirror import View, open_view
from mirror.errors import QueryCancelled, QueryFailed
from mirror.sql import Session, readers
from mirror.sql.readers import ReaderDied, Readers
from mirror.typed import rows as typed_rows
from storage.errors import CorruptedError, ViewInvalidated
from storage.format import keys
from storage.read import bulk
from tests.fuzz.documents import NAMES, ODD_NAMES, Documents
from tests.fuzz.readers import METADATA, Mirror, folded
from tests.processes import ProcessGroup
from tests.seeds import seed_from
from tests.spark.mirrors import GROUPS, SmallMirror, orders
from tests.sql.rig import put
from tests.sql.test_random import BODIES, QUERIES
from tests.sql.test_read import Held
from tests.storage.test_writer import LIMITS

SUMS = "SELECT count(*) AS n, sum(id) AS ids, sum(_seqno) AS seqnos, count(value) AS bodies FROM documents"
HELPERS = 2


class Joined:
    """Reads that helpers were asked to join. `before` and `after` run around the first one."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], object] = lambda: None


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Joined:
    """Make small batches, and let two helpers read all vbuckets that are left after the first rows of a read."""
    found = Joined()
    join, taken = Readers._joining, readers._taken

    def spied(self: Readers, *given: Any) -> Any:
        before, found.before = found.before, lambda: None
        after, found.after = found.after, lambda: None
        before()
        helping = join(self, *given)
        found.count += len(helping)
        after()
        return helping

    def left_to_helpers(pipe: int, ended: Callable[[], object], kept: Sequence[int] = ()) -> Iterator[int]:
        joined_before = found.count
        for vbid in taken(pipe, ended):
            yield vbid
            if found.count > joined_before:
                break
        for vbid in kept:
            yield vbid
            ended()

    monkeypatch.setattr(typed_rows, "BATCH_ROWS", 2)
    monkeypatch.setattr(bulk, "GET_ROWS", 2)
    monkeypatch.setattr(bulk, "ROWS_MAX", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(HELPERS + 1)))
    monkeypatch.setattr(readers, "HELPED_S", 0.0)
    monkeypatch.setattr(Readers, "_joining", spied)
    monkeypatch.setattr(readers, "_taken", left_to_helpers)
    return found


def helpers() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it may end meanwhile
            if "help_with" in " ".join(each.cmdline()):
                found.append(each)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    assert helpers() == []


def answer(session: Session, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = session.run(query).reader.read_all().to_pylist()
    return found


@pytest.mark.parametrize("round_", [0, *(pytest.param(each, marks=pytest.mark.long) for each in range(1, 100))])
def test_helpers_type_odd_documents_as_plain_python_does(round_: int, tmp_path: Path, joined: Joined) -> None:
    rng = Random(seed_from("DCP_MIRROR_FUZZ_SEED") + round_)
    documents = Documents(rng)
    mirror = Mirror(tmp_path, Counter(), rng)
    fields = {name: documents.kind() for name in rng.sample(NAMES + ODD_NAMES, 20)}
    mirror.put({f"k{at}": documents.document(fields) for at in range(100)})
    with open_view(mirror.made.path) as view, Session(view) as session:
        found = session.columns("_default._default")
        typed = [each.field.with_type(pa.json_()) if each.mixed else each.field for each in found]
        kept = [each for each in typed if folded(each.name) not in METADATA and not mirror.wants(each)[1]]
        mirror.sql(session, kept)
        mirror.aggregates(session, kept)
        for of in typed:
            if folded(of.name) not in METADATA and of not in kept:
                mirror.refused(session, of.name, mirror.wants(of)[1])
    assert joined.count >= 4
    mirror.made.close()


@pytest.mark.parametrize("examples", [60, pytest.param(300, marks=pytest.mark.ci)])
def test_conditions_in_helpers_choose_the_rows_that_they_choose_here(
    examples: int, mirror: SmallMirror, view: View, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.put({f"k{number}": (BODIES[number % len(BODIES)] % number).encode() for number in range(60)})
    with Session(view, threads=1) as session:
        session.tables()

        def rows(query: str) -> object:
            try:
                return sorted(map(repr, answer(session, query)))
            except QueryFailed as error:
                return "Conversion" in str(error)

        @settings(LIMITS, max_examples=examples)
        @given(QUERIES)
        def check(query: str) -> None:
            with monkeypatch.context() as alone:
                alone.setattr(readers, "HELPED_S", float("inf"))
                expected = rows(query)
            assert rows(query) == expected

        check()
    assert joined.count > examples


@pytest.mark.parametrize("event", ["write", "rollback", "purge", "damage"])
def test_helpers_read_at_the_boundaries_of_the_query(
    mirror: SmallMirror, view: View, joined: Joined, event: str
) -> None:
    mirror.put(orders(0, 60))
    mirror.put(orders(0, 60))

    def happen() -> None:
        if event == "damage":
            return spoil(mirror, 7)
        if event == "rollback":
            for vbid, seqno in list(mirror.seqnos.items()):
                mirror.roll_back(vbid, seqno // 2)
        mirror.put(dict.fromkeys(orders(0, 30)))
        mirror.put(orders(60, 60))
        if event == "purge":
            mirror.put(dict.fromkeys(orders(0, 60)))
            mirror.purge(boundaries=1, time_ms=0)
        return None

    with Session(view, threads=1) as session:
        expected = answer(session, SUMS)
        assert joined.count == HELPERS
        joined.before = happen
        if event in ("purge", "damage"):
            with pytest.raises(ViewInvalidated if event == "purge" else CorruptedError) as caught:
                answer(session, SUMS)
            assert caught.value.vbid is not None
            assert caught.value.hint
        else:
            assert answer(session, SUMS) == expected
            assert answer(session, SUMS) != expected


def spoil(mirror: SmallMirror, vbid: int) -> None:
    """Change a byte of the newest row."""
    environment = mirror.writers[vbid % GROUPS].environment
    with environment.begin(write=True) as txn:
        tree = environment.db(keys.rows_db(vbid))
        row_key = keys.ROW.pack(1, mirror.seqnos[vbid])
        stored = bytearray(txn.get(row_key, db=tree))
        stored[-5] ^= 1
        txn.put(row_key, bytes(stored), db=tree)


def test_the_lease_of_the_query_holds_until_the_last_row_of_a_helper(
    mirror: SmallMirror, view: View, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, seen = Held(), []
    monkeypatch.setattr("mirror.lease.Lease", held)
    receive = readers._received

    def watched(*given: Any) -> Iterator[Any]:
        for batch in receive(*given):
            seen.append(len(held.now))
            yield batch

    monkeypatch.setattr(readers, "_received", watched)
    mirror.put(orders(0, 60))
    with Session(view, threads=1) as session:
        answer(session, SUMS)
    assert seen
    assert set(seen) == {1}
    assert (held.now, held.count) == ([], 1)


def test_a_killed_helper_is_one_error_and_the_next_query_is_answered(
    mirror: SmallMirror, view: View, joined: Joined
) -> None:
    mirror.put(orders(0, 60))
    with Session(view) as session:
        expected = answer(session, SUMS)
        joined.before = lambda: [each.suspend() for each in helpers()]  # type: ignore[func-returns-value]
        joined.after = lambda: [each.kill() for each in helpers()]  # type: ignore[func-returns-value]
        with pytest.raises(ReaderDied, match=r"a process that read for this query died \(look for a kill"):
            answer(session, SUMS)
        assert helpers() == []
        assert answer(session, SUMS) == expected
        for each in helpers():
            os.kill(each.pid, signal.SIGKILL)
            each.wait(10)
        count = joined.count
        assert answer(session, SUMS) == expected
        assert (joined.count, helpers()) == (count, [])
        assert answer(session, SUMS) == expected
        assert joined.count == count + HELPERS


def interrupted(session: Session) -> None:
    with pytest.raises(QueryCancelled):
        answer(session, SUMS)


def failed(session: Session) -> None:
    with pytest.raises(QueryFailed, match="too much"):
        answer(session, "SELECT CASE WHEN _vbid >= 0 THEN error('too much') END FROM documents")


def broken_off(session: Session) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(session, SUMS)


ENDS: dict[str, Callable[[Session], object]] = {
    "limit": lambda session: answer(session, "SELECT * FROM documents LIMIT 3"),
    "error": failed,
    "interrupt": interrupted,
    "Ctrl-C": broken_off,
    "another query": lambda session: (session.run("SELECT * FROM documents"), answer(session, "SELECT 1")),
    "closed": lambda session: session.run("SELECT * FROM documents").close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_query_that_ends_early_leaves_no_process(
    mirror: SmallMirror, view: View, joined: Joined, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(readers, "HELPED_S", -1.0)
    mirror.put(orders(0, 600))
    with Session(view, threads=1) as session:
        session.tables()
        descriptors = len(os.listdir("/proc/self/fd"))
        joined.after = {"interrupt": session.interrupt, "Ctrl-C": ctrl_c}.get(end, lambda: None)
        ENDS[end](session)
        assert len(session.readers._free) == len(helpers())
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors + len(helpers())
        monkeypatch.setattr(readers, "HELPED_S", 0.0)
        assert answer(session, SUMS)[0]["n"] == 600


def test_vbuckets_that_do_not_fit_into_the_pipe_are_read_too(
    mirror: SmallMirror, view: View, joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 32,768 vbuckets, and fewer for a user with many pipes; the others were left out of the answer."""
    mirror.put(orders(0, 400))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:4]))
    with Session(view) as session:
        assert answer(session, "SELECT count(*) AS n FROM documents") == [{"n": 400}]


def test_two_tables_of_a_query_share_no_helper(mirror: SmallMirror, view: View, joined: Joined) -> None:
    put(mirror, {f"k{at}": {"n": at} for at in range(60)})
    query = (
        "SELECT count(*) AS n, sum(a.n * b.n) AS s FROM documents a JOIN documents b USING (_key) WHERE a.n < b.n + 1"
    )
    with Session(view) as session:
        assert answer(session, query) == [{"n": 60, "s": sum(at * at for at in range(60))}]
        assert len(helpers()) == HELPERS


def test_an_abandoned_session_leaves_no_process(mirror: SmallMirror, view: View, joined: Joined) -> None:
    mirror.put(orders(0, 60))
    session = Session(view, threads=1)
    answer(session, SUMS)
    running = helpers()
    assert len(running) == HELPERS
    del session
    gc.collect()
    assert psutil.wait_procs(running, 10)[1] == []


PROGRAM = """
import os, sys, threading
import mirror
from mirror.sql import readers

os.sched_getaffinity = lambda _: {0, 1, 2}
readers.HELPED_S = -1.0
print("once", flush=True)

def ask():
    with mirror.open_view(sys.argv[1]) as view, mirror.sql.Session(view) as session:
        found = session.run("SELECT count(*) AS n, max(id) AS high FROM documents").reader.read_all().to_pylist()
        print(found, len(session.readers._free), flush=True)
        if sys.argv[2] == "wait":
            print(*(each.process.pid for each in session.readers._started), flush=True)
            sys.stdin.read()

if sys.argv[2] == "fork":
    with mirror.open_view(sys.argv[1]) as view, mirror.sql.Session(view) as session:
        asked = []
        for _ in range(2):
            session.run("SELECT max(id) FROM documents").reader.read_all()
            asked.append([each.process.pid for each in session.readers._free])
            if len(asked) == 1 and os.fork() == 0:
                ask()
                session.readers.close()
                os._exit(0)
            if len(asked) == 1:
                assert os.wait()[1] == 0
        assert asked[0] == asked[1], asked
elif sys.argv[2] == "thread":
    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
else:
    ask()
"""


@pytest.mark.parametrize("way", ["file", "stdin", "fork", "thread"])
def test_a_program_without_a_guard_asks_once(mirror: SmallMirror, tmp_path: Path, way: str) -> None:
    """Neither a module that multiprocessing imports again, nor a file at all, is needed; a preforked child may ask."""
    mirror.put(orders(0, 60))
    script = tmp_path / "report.py"
    script.write_text(PROGRAM)
    words = [sys.executable, "-" if way == "stdin" else str(script), str(mirror.path), way]
    done = subprocess.run(
        words, input=PROGRAM if way == "stdin" else "", capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["once", f"[{{'n': 60, 'high': 59}}] {HELPERS}"]
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_helpers_end_with_their_program(mirror: SmallMirror, tmp_path: Path, number: int) -> None:
    mirror.put(orders(0, 60))
    script = tmp_path / "report.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(mirror.path), "wait"]
    with ProcessGroup(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as program:
        assert program.stdout is not None
        *_, pids = (program.stdout.readline() for _ in range(3))
        running = [psutil.Process(int(pid)) for pid in pids.split()]
        assert len(running) == HELPERS
        program.send_signal(number)
        assert psutil.wait_procs(running, 20)[1] == []
