"""No query reaches what is not in its reader's collections: not files, the environment, the network, or memory."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest

from mirror.serve.access.auth import entry_of, new_salt_key
from storage.model import Collection, Seqno
from tests.serve.http_site import VBUCKETS, Site, made, running
from tests.sql.escapes import INDIRECT, OTHERS, REFUSED

pytestmark = pytest.mark.xdist_group("sql_http")

CANARY = "TOPSECRET"
PASSWORD = "a good password"


class Place(SimpleNamespace):
    site: Site
    folder: Path
    trap: socket.socket

    def ask(self, sql: str, user: str = "bob") -> tuple[int, str]:
        text = sql.format(folder=self.folder, port=self.trap.getsockname()[1])
        answer = self.site.client.post("/v1/query", json={"sql": text}, auth=(user, PASSWORD))
        return answer.status_code, answer.text


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder, home = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("mirror")
    (folder / "secret.csv").write_text(f"a,b\n1,{CANARY}\n")
    (folder / "secret.txt").write_text(CANARY)
    (folder / "secret.json").write_text(json.dumps({"a": CANARY}))
    with duckdb.connect(str(folder / "secret.duckdb")) as database:
        database.execute(f"CREATE TABLE t AS SELECT '{CANARY}' AS a")
        database.execute(f"COPY t TO '{folder}/secret.parquet'")
    users = {"bob": entry_of(PASSWORD, ("_default._default",)), "ann": entry_of(PASSWORD, ("*",))}
    (home / "users.json").write_text(json.dumps({"users": users, "salt_key": new_salt_key()}))
    with made(home) as source, socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        for vbid in range(VBUCKETS):
            source.collections(vbid, Collection(9, 8, "salaries", Seqno(0)))
        source.put("small", b'{"small": true}')
        source.put("secret", b'{"secret": "%s"}' % CANARY.encode(), collection_id=9)
        with running(Path(source.path), source, sql=True, users_file=home / "users.json") as site:
            yield Place(site=site, folder=folder, trap=trap)


def some(queries: tuple[str, ...]) -> list[Any]:
    """Every fifth query; the others run in CI."""
    return [pytest.param(sql, marks=[pytest.mark.ci] if at % 5 else []) for at, sql in enumerate(queries)]


def files(place: Place) -> dict[Path, bytes]:
    return {each: each.read_bytes() for each in place.folder.rglob("*") if each.is_file()}


@pytest.mark.parametrize("sql", some(REFUSED))
def test_a_query_does_not_leave_the_mirror(sql: str, place: Place) -> None:
    """Not even one of a user who may read all collections."""
    before = files(place)
    status, text = place.ask(sql, "ann")
    assert status == 400, text
    assert CANARY not in text
    assert len(json.loads(text)["detail"].splitlines()) == 1
    assert files(place) == before
    with pytest.raises(BlockingIOError):
        place.trap.accept()


@pytest.mark.parametrize("sql", some(OTHERS))
def test_a_query_does_not_show_data_that_its_reader_may_not_read(sql: str, place: Place) -> None:
    status, text = place.ask(sql)
    assert status in (200, 400), text
    assert CANARY not in text
    shown = text.replace(json.dumps(sql)[1:-1], "").lower()
    if status == 200:
        assert "salaries" not in shown, text
    assert "did you mean" not in shown, text
    for path in (str(place.site.data), str(Path.home()), str(Path.cwd())):
        assert path not in text


def test_the_escapes_would_find_something_if_they_were_possible(place: Place) -> None:
    assert len(set(REFUSED + OTHERS)) >= 60
    assert place.ask("SELECT small FROM documents") == (200, place.ask("SELECT small FROM documents")[1])
    assert '"rows":[[true]]' in place.ask("SELECT small FROM documents")[1]
    assert CANARY in place.ask("SELECT secret FROM shop.salaries", "ann")[1]
    assert "shop.salaries" not in place.ask("SELECT * FROM shop.salarie")[1]
    with duckdb.connect() as free:  # each of the files can be read
        for sql in INDIRECT[:1]:
            text = sql.format(folder=place.folder, port=0).replace("*", "content", 1)
            assert CANARY in str(free.sql(text).fetchall())
