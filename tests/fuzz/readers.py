"""Mirrors of documents as people have them, and every reader of them against one oracle in plain Python.

The oracle takes each body apart with `json.loads`. A reader's value equals it, or is null for a value that its column's
type cannot have (never in the sample), or one error names a document whose number a column would lose.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql.pandas.types import from_arrow_schema

from cli.export import lines
from mirror import View, open_view
from mirror.errors import ConfigError
from mirror.spark.pipeline.export import export
from mirror.spark.runner import LocalRunner
from mirror.spark.source.data_source import DocumentsReader, MirrorSource
from mirror.sql import Session, to_pandas
from mirror.sql.answers import Body, csv_writer, parquet_writer
from mirror.typed.bodies import DocumentDoesNotFit, Reading
from tests.fuzz.documents import Documents
from tests.spark.mirrors import SmallMirror

DOCUMENTS_PER_MIRROR = 300
LATE_SHARE = 0.2
"""Documents that are written after the columns were sampled."""
METADATA = {
    *("_key", "_collection", "_vbid", "_seqno", "_rev_seqno", "_cas", "_flags", "_expiry", "_datatype"),
    *("_value", "value"),
}
Row = dict[str, Any]


# -- the oracle -------------------------------------------------------------------------------------------------------


class Misfit(Exception):
    """A value that the type cannot have."""


class Json:
    """A value that is shown as JSON text."""

    def __init__(self, value: Any) -> None:
        self.value = value


def parsed(text: str) -> Any:
    def integer(digits: str) -> Any:
        return int(digits) if len(digits) < 4_000 else Decimal(digits)

    return json.loads(text, parse_float=Decimal, parse_int=integer, strict=False)


def object_in(body: bytes) -> dict[str, Any]:
    """The document's fields; none if it is no JSON object."""
    try:
        found = parsed(body.decode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@cache
def folded(name: str) -> str:
    return "".join(each.lower() if each.isascii() else each for each in name)


def clean(value: Any) -> Any:
    """The value with `?` for each lone surrogate, which is no character."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [clean(each) for each in value]
    if isinstance(value, dict):
        return {clean(name): clean(each) for name, each in value.items()}
    return value


@dataclass
class Lost:
    """True if a number is not in its column."""

    number: bool = False


def is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def field(document: Mapping[str, Any], name: str, lost: Lost) -> Any:
    found = [each for other, each in document.items() if folded(other) == folded(name) and each is not None]
    if len(found) > 1:
        lost.number |= any(map(is_number, found))
        raise Misfit
    return found[0] if found else None


def fitting(value: Any, kind: pa.DataType, lost: Lost) -> Any:
    if value is None:
        return None
    types = pa.types
    if isinstance(kind, pa.JsonType):
        return Json(clean(value))
    if types.is_string(kind):
        return clean(value) if isinstance(value, str) else Json(clean(value))
    if types.is_struct(kind) and isinstance(value, dict):
        return {each.name: column(value, each, lost) for each in kind}
    if types.is_list(kind) and isinstance(value, list):
        return [fitting(each, kind.value_type, lost) for each in value]
    if types.is_boolean(kind) and isinstance(value, bool):
        return value
    if is_number(value) and types.is_integer(kind) and not isinstance(value, Decimal) and -(2**63) <= value < 2**63:
        return value
    if is_number(value) and types.is_floating(kind) and math.isfinite(found := float(str(value))):
        return found
    lost.number |= is_number(value) and (types.is_integer(kind) or types.is_floating(kind))
    raise Misfit


def column(document: Mapping[str, Any], of: pa.Field, lost: Lost) -> Any:
    try:
        return fitting(field(document, of.name, lost), of.type, lost)
    except Misfit:
        return None


def same(answer: Any, want: Any) -> bool:
    if isinstance(want, Json):
        return isinstance(answer, str) and parsed(answer) == want.value
    if isinstance(want, dict):
        return isinstance(answer, dict) and all(same(answer[name], each) for name, each in want.items())
    if isinstance(want, list):
        return isinstance(answer, list) and len(answer) == len(want) and all(map(same, answer, want))
    return type(answer) is type(want) and bool(answer == want)


def whole(text: str) -> Any:
    """The JSON value; None for malformed JSON."""
    try:
        return clean(parsed(text))
    except ValueError:
        return None


def shown(want: Any) -> str:
    return repr(want.value if isinstance(want, Json) else want)


# -- the readers ------------------------------------------------------------------------------------------------------


class Mirror:
    """A mirror, its documents and what they should be."""

    def __init__(self, folder: Path, figures: Counter[str], rng: Random) -> None:
        self.folder = folder
        self.figures = figures
        self.rng = rng
        self.bodies: dict[str, bytes] = {}
        self.objects: dict[str, dict[str, Any]] = {}
        self._wants: dict[tuple[str, str], tuple[dict[str, Any], set[str]]] = {}
        self.made = SmallMirror(folder / "mirror")

    def put(self, bodies: Mapping[str, bytes]) -> None:
        self.made.put(dict(bodies))
        self.bodies.update(bodies)
        self.objects.update((key, object_in(body)) for key, body in bodies.items())
        self._wants.clear()

    def wants(self, of: pa.Field) -> tuple[dict[str, Any], set[str]]:
        """A column by the keys of documents, and the documents whose number it loses."""
        at = (of.name, str(of.type))
        if at not in self._wants:
            found, losing = {}, set()
            for key, document in self.objects.items():
                lost = Lost()
                found[key] = column(document, of, lost)
                if lost.number:
                    losing.add(key)
            self._wants[at] = (found, losing)
        return self._wants[at]

    def check(self, reader: str, answers: Iterable[Row], fields: Iterable[pa.Field]) -> None:
        rows = {row["_key"]: row for row in answers}
        assert rows.keys() == self.bodies.keys(), (
            f"{reader}: {len(self.bodies.keys() - rows.keys())} documents are missing"
        )
        for of in fields:
            for key, want in self.wants(of)[0].items():
                answer = rows[key][of.name]
                of_document = f"{of.name!r} of {self.bodies[key][:300]!r}"
                assert same(answer, want), f"{reader}: {of_document}: {answer!r}, not {shown(want)}"
        self.figures[reader] += len(rows)

    def check_sample(self, session: Session) -> None:
        """Each field has one column, whatever its name, but those that no column can have."""
        spelled: dict[str, set[str]] = {}
        twice = set()
        for document in self.objects.values():
            there = Counter(folded(name) for name, value in document.items() if value is not None)
            twice |= {name for name, count in there.items() if count > 1}
            for name in document:
                spelled.setdefault(folded(name), set()).add(name)
        alike = Counter(name.lower() for name in spelled)
        expected = {
            name
            for name in spelled
            if name and name.isprintable() and name not in METADATA | twice and alike[name.lower()] == 1
        }
        found = [each.name for each in session.columns("_default._default") if folded(each.name) not in METADATA]
        assert Counter(map(folded, found)) == dict.fromkeys(expected, 1)
        assert all(name in spelled[folded(name)] for name in found)

    def read_everywhere(self, view: View, session: Session) -> None:
        columns = session.columns("_default._default")
        kinds = {each.name: pa.json_() if each.mixed else each.type for each in columns}
        fields = [pa.field(name, kind) for name, kind in kinds.items() if folded(name) not in METADATA]
        kept = [each for each in fields if not self.wants(each)[1]]
        for of in fields:
            if of not in kept:
                self.refused(session, of.name, self.wants(of)[1])
        self.sql(session, kept)
        self.aggregates(session, kept)
        plain = [each.with_type(pa.string()) if isinstance(each.type, pa.JsonType) else each for each in kept]
        self.arrow(view, plain)
        self.spark(plain)
        self.exports(view, plain)

    def refused(self, session: Session, name: str, keys: set[str]) -> None:
        said = ""
        try:
            session.run(f"SELECT sum(length(({quoted(name)})::VARCHAR)) FROM documents").reader.read_all()
        except DocumentDoesNotFit as error:
            said = str(error)
        assert any(repr(key) in said for key in keys), f"{name!r}: {said!r}, not one of {keys}"
        assert "\n" not in said
        self.figures["refused with a number"] += 1

    def sql(self, session: Session, fields: list[pa.Field]) -> None:
        names = ", ".join(["_key", *(quoted(each.name) for each in fields)])
        table = session.run(f"SELECT {names} FROM documents").reader.read_all()
        self.check("SQL", table.to_pylist(), fields)
        self.check("SQL to pandas", from_pandas(to_pandas(table)), fields)
        answer = Body(1 << 30)
        answer.fill(session.run(f"SELECT {names} FROM documents").reader, 10**9, arrow=False)
        query = json.loads(b"".join(answer.pieces))
        own = [each["name"] for each in query["columns"]]
        self.check("HTTP query", (dict(zip(own, row, strict=True)) for row in query["rows"]), fields)
        file = io.BytesIO()
        with parquet_writer(file, table.schema) as write:
            for batch in table.to_batches():
                write(batch)
        self.check("SQL to Parquet", pq.read_table(file).to_pylist(), fields)
        output = io.StringIO(newline="")
        write_csv = csv_writer(output, table.schema)
        for batch in table.to_batches():
            write_csv(batch)
        output.seek(0)
        texts = [each for each in fields if pa.types.is_integer(each.type) or pa.types.is_floating(each.type)]
        self.check("SQL to CSV", (from_csv(row, texts) for row in csv.DictReader(output)), texts)
        found = session.run("SELECT _key, value FROM documents").reader.read_all().to_pylist()
        for row in found:
            body = self.bodies[row["_key"]].decode(errors="replace")
            text = row["value"]
            assert text == body or (r"\ud" in body.lower() and whole(text) == whole(body)), f"{body!r}: {text!r}"

    def aggregates(self, session: Session, fields: list[pa.Field]) -> None:
        for of in fields:
            wants, _ = self.wants(of)
            values = [each for each in wants.values() if each is not None]
            name = quoted(of.name)
            is_number = pa.types.is_integer(of.type) or pa.types.is_floating(of.type)
            total = f"sum({name})" if is_number else "NULL"
            query = f"SELECT count(*) AS rows, count({name}) AS count, {total} AS total FROM documents"
            (answer,) = session.run(query).reader.read_all().to_pylist()
            assert (answer["rows"], answer["count"]) == (len(wants), len(values)), f"{of.name!r}: {answer}"
            if pa.types.is_integer(of.type):
                assert int(answer["total"] or 0) == sum(values), f"{of.name!r}: {answer['total']}, not {sum(values)}"
            elif is_number and sum(map(abs, values)) < 1e300:
                close = math.isclose(answer["total"] or 0, math.fsum(values), abs_tol=1e-9 * sum(map(abs, values)))
                assert close, f"{of.name!r}: {answer['total']}, not {math.fsum(values)}"
            if not pa.types.is_nested(of.type) and not any(isinstance(each, Json) for each in values):
                found = session.run(f"SELECT {name} AS each, count(*) AS n FROM documents GROUP BY 1").reader.read_all()
                assert {row["each"]: row["n"] for row in found.to_pylist()} == Counter(wants.values()), f"{of.name!r}"
                self.condition(session, of)
            self.figures["columns summed, counted and grouped"] += 1

    def condition(self, session: Session, of: pa.Field) -> None:
        """A condition on a column, which DuckDB leaves to the table."""
        wants, _ = self.wants(of)
        value = self.rng.choice([each for each in wants.values() if each is not None] or [None])
        if value is None or (isinstance(value, str) and "\0" in value):
            return
        literal = "'{}'".format(value.replace("'", "''")) if isinstance(value, str) else repr(value).lower()
        found = session.run(f"SELECT _key FROM documents WHERE {quoted(of.name)} = {literal}").reader.read_all()
        keys = set(found.column("_key").to_pylist())
        assert keys == {key for key, each in wants.items() if each == value}, f"{of.name!r} = {literal}"
        self.figures["conditions"] += 1

    def arrow(self, view: View, fields: list[pa.Field]) -> None:
        schema = pa.schema([pa.field("_key", pa.string()), *fields])
        self.check("Arrow", view.arrow(schema=schema).read_all().to_pylist(), fields)
        self.check("pandas", from_pandas(view.to_pandas(schema=schema)), fields)
        self.check("Polars", view.to_polars(schema=schema).to_dicts(), fields)

    def spark(self, fields: list[pa.Field]) -> None:
        path = {"path": str(self.made.path), "partitions": "2", "columnNameOfCorruptRecord": "misfit"}
        schema = from_arrow_schema(pa.schema([pa.field("_key", pa.string()), *fields]))
        self.check("Spark", read_source(MirrorSource(path | {"mode": "permissive"}), schema), fields)
        inferring = MirrorSource(path | {"inferSchema": "true"})
        schema = inferring.schema()
        inferred = [pa.field(each.name, each.type) for each in as_arrow(schema) if each.name != "_key"]
        losing = any(self.wants(each)[1] for each in inferred)
        try:
            self.check("Spark, inferred", read_source(inferring, schema), inferred)
        except DocumentDoesNotFit:
            assert losing
        else:
            assert not losing

    def exports(self, view: View, fields: list[pa.Field]) -> None:
        found = {}
        with view.reading(view.vbids) as reading:
            for line in chain.from_iterable(lines(reading, vbid, None, xattrs=False) for vbid in view.vbids):
                row = parsed(line.decode())
                found[row["key"]] = row
        for key, body in self.bodies.items():
            try:
                want = parsed(body.decode())
            except ValueError:
                continue
            assert found[key]["value"] == want, f"{body[:300]!r}: {found[key]}"
        assert found.keys() == self.bodies.keys()
        schema = pa.schema(fields)
        for delta_table in (False, True) if fields else ():
            target, said = self.folder / f"export-{delta_table}", ""
            options: dict[str, Any] = {"reading": Reading("permissive", None), "misfits_max": 1.0}
            try:
                export(self.made.path, target, LocalRunner(1), delta_table=delta_table, fields=schema, **options)
            except ConfigError as error:
                said = str(error)
            if said:
                assert delta_table
                assert "a Delta table cannot have this column name" in said
                self.figures["Delta refused a name"] += 1
                continue
            table = DeltaTable(str(target)).to_pyarrow_table() if delta_table else ds.dataset(target).to_table()
            self.check("Delta" if delta_table else "Parquet", table.to_pylist(), fields)
            shutil.rmtree(target)


def quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


def as_arrow(schema: Any) -> pa.Schema:
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def read_source(source: MirrorSource, schema: Any) -> Iterator[Row]:
    reader = source.reader(schema)
    assert isinstance(reader, DocumentsReader)
    for share in reader.partitions():
        for batch in reader.read(share):
            yield from batch.to_pylist()


def from_pandas(frame: Any) -> Iterator[Row]:
    for row in frame.to_dict("records"):
        yield {name: plain(each) for name, each in row.items()}


def plain(value: Any) -> Any:
    """A value of pandas as Python has it."""
    import numpy
    import pandas

    if isinstance(value, numpy.ndarray):
        return [plain(each) for each in value.tolist()]
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if value is None or value is pandas.NA or value != value:
        return None
    return value.item() if isinstance(value, numpy.generic) else value


def from_csv(row: Mapping[str, str], numbers: list[pa.Field]) -> Row:
    found: Row = {"_key": row["_key"]}
    for of in numbers:
        text = row[of.name]
        found[of.name] = (int if pa.types.is_integer(of.type) else float)(text) if text else None
    return found


def run(count: int, rng: Random) -> Counter[str]:
    """Figures of `count` documents, each read by every reader."""
    figures: Counter[str] = Counter()
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    while figures["documents in mirrors"] < count:
        number = min(max(DOCUMENTS_PER_MIRROR, count // 500), count - figures["documents in mirrors"])
        documents = Documents(rng)
        collection = documents.collection()
        early = number - int(number * LATE_SHARE) * rng.randrange(2)
        with TemporaryDirectory(dir=shared) as folder:
            mirror = Mirror(Path(folder), figures, rng)
            mirror.put({f"k{at}": documents.document(collection) for at in range(early)})
            with open_view(mirror.made.path) as view, Session(view, threads=1) as session:
                mirror.check_sample(session)
                documents.odd_one_in = rng.choice((300, 3))
                mirror.put({f"k{at}": documents.document(collection) for at in range(early, number)})
                mirror.read_everywhere(view, session)
            mirror.made.close()
        figures["documents in mirrors"] += number
        figures["mirrors"] += 1
    return figures
