"""`dcp-mirror sql` and `schema` as people use them: one query, a pipe, and the shell on a terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from mirror.typed.ddl import fields_of
from storage.model import Collection, Seqno
from tests.cli.conftest import Result, call, call_here
from tests.crash.service import until
from tests.serve.http_site import VBUCKETS, made
from tests.terminal import Terminal, plain

pytestmark = pytest.mark.xdist_group("sql_cli")

ENDLESS = "SELECT count(*) FROM range(1000000000000) t(a) WHERE a % 7 = 3"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with made(tmp_path_factory.mktemp("cli")) as source:
        for vbid in range(VBUCKETS):
            source.collections(vbid, Collection(9, 8, "orders", Seqno(0)))
        for number in range(30):
            source.put(
                f"o{number}", b'{"city":"c%d","n":%d,"tags":["a"],"state":"\\u001b[31mred"}' % (number % 3, number)
            )
            source.put(f"s{number}", b'{"total":%d.5}' % number, collection_id=9)
        source.put(b"\xff\xfe", b"\x00binary", datatype=0)
        source.put("broken", b"{broken", datatype=1)
        yield Path(source.path)


Ask = Callable[..., Result]


def until_busy(terminal: Terminal) -> None:
    """Wait until another thread than the first computes: the query's."""
    process = psutil.Process(terminal.process.pid)
    known = {each.id: each.user_time for each in process.threads()}
    until(
        "a busy query",
        lambda: any(
            each.user_time > known.get(each.id, 0.0) + 0.5 for each in process.threads() if each.id != process.pid
        ),
    )


@pytest.fixture
def ask(data: Path) -> Ask:

    return lambda *words: call_here(*words, "--data", data)


def test_an_answer_into_a_pipe_is_csv(data: Path) -> None:
    ended = call("sql", "SELECT city, count(*) AS n, list(n ORDER BY n)[:2] AS l FROM documents WHERE city = 'c1' "
                 "GROUP BY city", "--data", data)  # fmt: skip
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == 'city,n,l\nc1,10,"[1,4]"\n'


def test_an_answer_as_json_has_an_object_a_line(ask: Ask) -> None:
    assert ask("sql", "SELECT _key, tags FROM documents WHERE n < 2 ORDER BY n", "--json").lines == [
        {"_key": "o0", "tags": ["a"]},
        {"_key": "o1", "tags": ["a"]},
    ]


def test_an_answer_as_parquet_is_complete_or_not_there(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "answer.parquet"
    ended = ask("sql", "SELECT * FROM shop.orders", "--to", file)
    assert (ended.code, ended.out) == (0, "")
    assert "30 rows" in ended.err
    assert pq.read_table(file).num_rows == 30
    assert ask("sql", "SELECT INTERVAL 1 DAY", "--to", tmp_path / "no.parquet").code == 2
    assert [each.name for each in tmp_path.iterdir()] == ["answer.parquet"]


def test_documents_that_are_not_json_are_rows_with_null_columns(ask: Ask) -> None:
    ended = ask("sql", "SELECT count(*), count(city), sum(n) FROM documents", "--json")
    assert list(ended.json.values()) == [32, 30, 435]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["SELEC 1"], "syntax error"),
        (["SELECT * FROM nowhere"], "documents, shop.orders"),
        ([""], "dcp-mirror:"),
        (["SELECT 'infinity'::timestamp"], "VARCHAR"),
        (["SELECT 1 AS a, 2 AS a", "--json"], "two columns are named a"),
        (["SELECT 1 AS a, 2 AS a", "--to", "answer.parquet"], "two columns are named a"),
        (["SELECT 1", "--json", "--to", "a.parquet"], "exclude each other"),
        (["SELECT 1", "--to", "answer.txt"], "parquet"),
        (["SELECT 1", "--to", "/dev/null/a.parquet"], "/dev/null"),
        (["SELECT n FROM documents", "--as-of", "soon"], "soon"),
        (["SELECT n FROM documents", "--as-of", "12"], "seqno"),
        (["SELECT n FROM documents", "--as-of", "2001-01-01T00:00"], "nothing is kept"),
        (["SELECT CAST(city AS INT) FROM documents"], "Conversion"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], text: str, ask: Ask) -> None:
    ended = ask("sql", *arguments)
    assert ended.code != 0
    assert ended.out in ("", "CAST('infinity' AS TIMESTAMP)\n")
    assert ended.err.startswith("dcp-mirror: ")
    assert text in ended.err
    assert ended.err.count("\n") == 1


def test_an_error_for_missing_packages_says_how_to_install_them(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cli.sql import need
    from mirror.errors import ConfigError

    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(ConfigError, match="duckdb") as caught:
        need("duckdb")
    assert "pip install 'dcp-mirror[sql]'" in str(caught.value)


def test_a_query_on_a_terminal_is_a_table_and_ctrl_c_ends_it(data: Path) -> None:
    with Terminal("sql", "SELECT city, n, state FROM documents WHERE n = 4", "--data", data, cwd=data) as terminal:
        shown = plain(terminal.until("red"))
        assert "city" in shown
        assert "\x1b[31mred" not in terminal.shown
        assert terminal.end() == 0
    slow = "SELECT sum(a.range % 7) FROM range(800000000) a"
    with Terminal("sql", slow, "--data", data, cwd=data) as terminal:
        until_busy(terminal)
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.end() == 130


def test_the_shell_answers_completes_and_cancels(data: Path, tmp_path: Path) -> None:
    with Terminal(
        "sql", "--data", data, cwd=tmp_path, XDG_STATE_HOME=str(tmp_path), PROMPT_TOOLKIT_NO_CPR="1"
    ) as terminal:
        terminal.until("sql>")
        terminal.type("SELECT count(*) AS answer FROM shop.ord\t")
        terminal.until("ers")
        terminal.type("\r")
        terminal.until("answer")
        terminal.until("30")
        terminal.until("1 row, ")
        terminal.type("\\d\r")
        terminal.until("shop.orders")
        terminal.until("sql>")
        terminal.type("\\d shop.orders\r")
        terminal.until("total")
        terminal.until("double")
        terminal.until("sql>")
        terminal.type("SELECT * FROM nowhere\r")
        terminal.until("does not exist")
        terminal.until("sql>")
        terminal.type(f"{ENDLESS}\r")
        until_busy(terminal)
        terminal.type("\x03")
        terminal.until("cancelled")
        terminal.until("sql>")
        terminal.type("SELECT 41 + 1 AS sum\r")
        terminal.until("42")
        terminal.until("sql>")
        terminal.type("\x04")
        assert terminal.end() == 0
    history = tmp_path / "dcp-mirror" / "sql_history"
    assert "41 + 1" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_printed_schema_is_accepted_by_pipelines_and_spark(ask: Ask) -> None:
    ended = ask("schema")
    assert ended.code == 0
    assert "_default._default: 4 columns" in ended.out
    assert "--collection shop.orders --schema 'total double'" in ended.out
    rows = ask("schema", "--json").lines
    assert [each["collection"] for each in rows] == ["_default._default", "shop.orders"]
    assert fields_of(rows[0]["schema"]).names == ["city", "n", "tags", "state"]
    assert rows[0]["columns"][1] == {
        "column": "n",
        "type": "bigint",
        "share": 1.0,
        "example": rows[0]["columns"][1]["example"],
    }
    wrong = ask("schema", "nowhere")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
