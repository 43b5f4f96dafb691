"""SQL against plain Python over `View.scan`: in the store's state machine, and under drops of collections."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from mirror import View, open_view
from mirror.errors import QueryFailed
from mirror.sql import Session, arrow
from mirror.typed import rows as typed_rows
from storage.errors import Closed, UnknownCollection, ViewInvalidated
from storage.format import records
from storage.model import Document
from storage.read import bulk
from storage.read.view import Time
from tests.spark.mirrors import VBUCKETS, SmallMirror
from tests.sql.rig import collections, put
from tests.storage.frames import encode_deletion
from tests.storage.model import span
from tests.storage.test_writer import KEYS, LIMITS, VBIDS, Store

pytestmark = pytest.mark.usefixtures("small_batches")
BODIES = ('{"n":%d,"g":"a"}', '{"n":%d,"g":"b","more":[1]}', '{"n":-%d}', '{"g":null,"n":%d}')


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_rows, "BATCH_ROWS", 2)
    monkeypatch.setattr(bulk, "GET_ROWS", 2)
    monkeypatch.setattr(bulk, "ROWS_MAX", 3)


Facts = dict[bytes, tuple[int, bytes]]
"""key: seqno and body"""


def agrees(view: View, facts: Facts, table: str = "documents", **options: Any) -> None:
    """Ask for aggregates, keys and seqnos, and compare with the documents."""
    with Session(view, threads=1, **options) as session:

        def ask(query: str) -> list[Any]:
            return [tuple(row.values()) for row in session.run(query).reader.read_all().to_pylist()]

        collection = "_default._default" if table == "documents" else table
        if "n" in {each.name for each in session.columns(collection)}:
            total = sum(json.loads(body)["n"] for _, body in facts.values()) if facts else None
            assert ask(f"SELECT count(*), sum(n) FROM {table}") == [(len(facts), total)]
            groups: Counter[str | None] = Counter(json.loads(body).get("g") for _, body in facts.values())
            if any(groups):
                assert dict(ask(f"SELECT g, count(*) FROM {table} GROUP BY 1")) == groups
        answer = ask(f"SELECT _key, _seqno, value FROM {table}")
        found = {key.encode(): (seqno, value.encode()) for key, seqno, value in answer}
        assert found == facts
        for key in sorted(facts)[:2]:
            text = key.decode()
            assert ask(f"SELECT _seqno FROM {table} WHERE _key = '{text}'") == [(facts[key][0],)]
            above = sum(each >= key for each in facts)
            assert ask(f"SELECT count(*) FROM {table} WHERE _key >= '{text}'") == [(above,)]
            beginning = sum(each.startswith(key[:2]) for each in facts)
            assert ask(f"SELECT count(*) FROM {table} WHERE _key LIKE '{text[:2]}%'") == [(beginning,)]
            seqno = facts[key][0]
            newer = sum(each > seqno for each, _ in facts.values())
            assert ask(f"SELECT count(*) FROM {table} WHERE _seqno > {seqno}") == [(newer,)]
            older = sum(each <= seqno for each, _ in facts.values())
            assert ask(f"SELECT count(*) FROM {table} WHERE _seqno <= {seqno}") == [(older,)]
            either = sum(each == key or at > seqno for each, (at, _) in facts.items())
            assert ask(f"SELECT count(*) FROM {table} WHERE _seqno > {seqno} OR _key = '{text}'") == [(either,)]


class StoreAndSql(Store):
    """The store's state machine, with JSON documents and queries instead of its own reads."""

    def __init__(self) -> None:
        super().__init__()
        self.arrows: list[tuple[Any, Facts, Facts]] = []

    def views_show_the_model(self) -> None: ...

    def as_of_shows_every_boundary(self) -> None: ...

    @rule(
        vbid=st.sampled_from(VBIDS),
        data=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, *BODIES])), min_size=1, max_size=8),
    )
    def stage(self, vbid: int, data: list[tuple[int, str | None]]) -> None:
        at = self.writer.vbuckets[vbid].state.staged_seqno
        prefix = self.writer.vbuckets[vbid].prefix
        events, staged = [], []
        for seqno, (number, body) in enumerate(data, at + 1):
            key, value = KEYS[vbid][number], None if body is None else (body % seqno).encode()
            events.append((seqno, key, value))
            frame = (
                encode_deletion(key, seqno) if value is None else records.encode_mutation(key, value, seqno, datatype=1)
            )
            staged.append((prefix + seqno.to_bytes(8, "big"), frame))
        self.writer.vbuckets[vbid].stage(staged, sum(len(r[1]) for r in staged), span(at + 1, events[-1][0] + 3))
        self.open[vbid] += events

    def read(self, *vbids: int) -> View:
        """The view, of the vbuckets that exist."""
        self.view.vbids = list(vbids)  # type: ignore[assignment]
        return self.view  # type: ignore[return-value]

    def whole(self) -> bool:
        return all(self.writer.vbuckets[vbid].state.is_whole for vbid in VBIDS)

    @precondition(lambda self: self.whole())
    @rule()
    def queries_show_the_model(self) -> None:
        live = {key: entry for vbid in VBIDS for key, entry in self.model[vbid].live().items()}
        agrees(self.read(*VBIDS), live)  # type: ignore[arg-type]

    @rule(vbid=st.sampled_from(VBIDS), data=st.data())
    def queries_show_a_boundary(self, vbid: int, data: st.DataObject) -> None:
        if boundaries := self.model[vbid].boundaries:
            seqno = data.draw(st.sampled_from(sorted(boundaries)))
            live = {key: entry for key, entry in boundaries[seqno].items() if entry[1] is not None}
            agrees(self.read(vbid), live, as_of=seqno)  # type: ignore[arg-type]

    @precondition(lambda self: self.whole())
    @rule()
    def begin_arrow(self) -> None:
        live = {key: entry for vbid in VBIDS for key, entry in self.model[vbid].live().items()}
        reader = arrow(self.read(*VBIDS), columns=("key", "seqno", "value"))
        self.arrows.append((reader, live, {}))  # type: ignore[arg-type]
        self.arrows_go_on(1)

    @rule(steps=st.sampled_from([1, 2, 50]))
    def arrows_go_on(self, steps: int) -> None:
        """Each ends with the documents of its beginning, or is refused."""
        left = []
        for reader, live, seen in self.arrows:
            try:
                for _ in range(steps):
                    for row in reader.read_next_batch().to_pylist():
                        seen[row["key"].encode()] = (row["seqno"], row["value"])
            except StopIteration:
                assert seen == live
            except (ViewInvalidated, Closed):  # the crash closed the view
                continue
            else:
                left.append((reader, live, seen))
        self.arrows = left


MANY = [pytest.mark.long, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(settings(LIMITS, max_examples=LIMITS.max_examples // 2), id="few"),
        pytest.param(LIMITS, marks=pytest.mark.ci, id="some"),
        pytest.param(settings(LIMITS, max_examples=1000, stateful_step_count=60), marks=MANY, id="many"),
    ],
)
def test_queries_agree_with_the_model_after_every_step(limits: settings) -> None:
    run_state_machine_as_test(StoreAndSql, settings=limits)


def facts_of(documents: Iterable[Document]) -> Facts:
    return {each.key: (int(each.seqno), each.value) for each in documents}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 100))])
def test_queries_agree_with_scans_under_drops_and_rollbacks(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    mirror = SmallMirror(tmp_path / "mirror")
    ids = collections(mirror, "a", "b")
    times = []
    with open_view(mirror.path) as view:
        for _ in range(8 if seed else 4):
            match rng.randrange(6):
                case 0:
                    ids = collections(mirror, *rng.choice([("a",), ("a", "b"), ("b", "a")]))
                case 1:
                    vbid = rng.randrange(VBUCKETS)
                    mirror.roll_back(vbid, rng.randrange(mirror.seqnos[vbid] // 2, mirror.seqnos[vbid] + 1))
                case _:
                    documents = {
                        f"k{rng.randrange(40)}": json.loads(rng.choice(BODIES) % rng.randrange(99)) for _ in range(20)
                    }
                    put(mirror, documents, collection_id=rng.choice([0, *ids.values()]))
            times.append(mirror.now_ms)
            mirror.now_ms += 1000
            for as_of in (None, Time(rng.choice(times))):
                for name, table in (("_default._default", "documents"), ("inventory.a", "inventory.a")):
                    try:
                        found = facts_of(view.scan(collection=name, as_of=as_of))
                    except UnknownCollection:
                        continue
                    agrees(view, found, table, as_of=as_of)
    mirror.close()


TEXTS = ("''", "'a'", "'k'", "'k1'", "'k10'", "'K1'", "'k1%'", "'é'", "NULL")
KEY_CONDITIONS = st.one_of(
    st.builds("_key {} {}".format, st.sampled_from(("=", "<>", "<", "<=", ">", ">=")), st.sampled_from(TEXTS)),
    st.builds("{} {} _key".format, st.sampled_from(TEXTS), st.sampled_from(("=", "<", ">="))),
    st.builds("_key LIKE {}".format, st.sampled_from(("'k%'", "'k1%'", "'k_'", "'%1'", "'k1'", "'k\\_%'", "''"))),
    st.builds("starts_with(_key, {})".format, st.sampled_from(TEXTS)),
    st.builds("_key BETWEEN {} AND {}".format, st.sampled_from(TEXTS), st.sampled_from(TEXTS)),
    st.builds("_key IN ({}, {})".format, st.sampled_from(TEXTS), st.sampled_from(TEXTS)),
)
SEQNO_CONDITIONS = st.builds("_seqno {} {}".format, st.sampled_from((">", ">=", "=", "<=")), st.integers(0, 9))
NUMBER_CONDITIONS = st.builds(
    "{} {} {}".format,
    st.sampled_from(("_seqno", "_seqno + 0", "n", "_cas", "_vbid", "length(g)")),
    st.sampled_from(("=", "<>", "<", "<=", ">", ">=", "IS DISTINCT FROM")),
    st.sampled_from(("-1", "0", "3", "7.5", "9", "1e30", "'4'", "18446744073709551615", "NULL", "length(_key)")),
)
CONDITIONS = st.recursive(
    KEY_CONDITIONS | SEQNO_CONDITIONS | NUMBER_CONDITIONS | st.sampled_from(("g IS NULL", "more IS NOT NULL", "true")),
    lambda inner: (
        st.builds("({} AND {})".format, inner, inner)
        | st.builds("({} OR {})".format, inner, inner)
        | st.builds("NOT ({})".format, inner)
    ),
    max_leaves=5,
)
QUERIES = st.one_of(
    st.builds("SELECT _key, _seqno FROM documents WHERE {}".format, CONDITIONS),
    st.builds("SELECT count(*), sum(n), min(_key), max(_seqno) FROM documents WHERE {}".format, CONDITIONS),
    st.builds("SELECT g, count(*) FROM documents WHERE {} GROUP BY g".format, CONDITIONS),
    st.builds("SELECT a._key, b._seqno FROM documents a JOIN documents b USING (_key) WHERE {}".format, KEY_CONDITIONS),
    st.builds("SELECT n FROM (SELECT * FROM documents WHERE {}) WHERE {}".format, CONDITIONS, CONDITIONS),
)


@pytest.mark.parametrize("examples", [60, pytest.param(30_000, marks=MANY)])
def test_conditions_pushed_down_to_the_store_do_not_change_an_answer(examples: int, tmp_path: Path) -> None:
    """The same queries over the same rows in a table of DuckDB's own, where nothing is left to the store."""
    mirror = SmallMirror(tmp_path / "mirror")
    put(mirror, {f"k{number}": json.loads(BODIES[number % len(BODIES)] % number) for number in range(30)})
    put(mirror, {"": {"n": 1}, "é": {"n": 2, "g": "ü"}, "K1": {"n": 0.5}})
    with open_view(mirror.path) as view, Session(view, threads=1) as session, duckdb.connect() as plain:
        everything = session.run("SELECT * FROM documents").reader.read_all()
        plain.execute("CREATE TABLE documents AS SELECT * FROM everything")

        def answer(run: Callable[[], Any]) -> object:
            try:
                return sorted((tuple(row.values()) for row in run().to_pylist()), key=repr)
            except (QueryFailed, duckdb.Error) as error:
                return "Conversion" in str(error)

        @settings(LIMITS, max_examples=examples)
        @given(QUERIES)
        def check(query: str) -> None:
            expected = answer(lambda: plain.sql(query).to_arrow_table())
            assert answer(lambda: session.run(query).reader.read_all()) == expected

        check()
        assert everything.num_rows == 33
    mirror.close()
