from __future__ import annotations

import base64
from pathlib import Path

import pytest

from cli.get import as_of_from
from mirror.errors import ConfigError
from storage.read.view import Time
from tests.bench import stores
from tests.cli.conftest import call
from tests.terminal import Terminal, plain


def test_a_terminal_gets_no_control_characters_of_the_value(mirrored: Path) -> None:
    key = b"\xff\xfekey".decode(errors="surrogateescape")
    with Terminal("get", "--data", mirrored, key, cwd=mirrored) as terminal:
        assert terminal.end() == 0
        assert plain(terminal.shown) == "..binary\r\n"


def test_a_binary_key_is_found_and_printed_in_base64(mirrored: Path) -> None:
    found = call("get", "--data", mirrored, b"\xff\xfekey".decode(errors="surrogateescape"), "--json")
    assert base64.b64decode(found.json["key_b64"]) == b"\xff\xfekey"
    assert base64.b64decode(found.json["value_b64"]) == b"\x00\x01binary"


ODD = {
    b"digits": b'{"total":12345678901234567890.50}',
    b"surrogate": b'{"half":"\\ud800"}',
    b"NaN": b"NaN",
    b"deep": b"[" * 1500 + b"]" * 1500,
}
"""Values that Python's own reader of JSON changes, accepts or fails on, though the datatype says JSON."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("odd") / "data")
    stores.store(path, stores.rows_of(ODD.items(), 1))
    return path


@pytest.mark.parametrize("command", ["get", "scan", "changes"])
def test_a_value_that_json_readers_change_is_printed_as_it_is_or_as_bytes(odd: str, command: str) -> None:
    if command == "get":
        results = [call("get", "--data", odd, key.decode(), "--json") for key in ODD]
    else:
        results = [call(command, "--data", odd, "--json")]
    assert [(each.code, each.err) for each in results] == [(0, "")] * len(results)
    printed = b"".join(each.raw for each in results)
    assert printed.count(b"\n") == len(ODD)
    assert b'"value":' + ODD[b"digits"] in printed
    assert b'"value":' + ODD[b"surrogate"] in printed
    assert b'"value_b64":"' + base64.b64encode(ODD[b"NaN"]) in printed
    assert b'"value_b64":"' + base64.b64encode(ODD[b"deep"]) in printed


@pytest.mark.parametrize("key", ["nonesuch", "order::010", "x" * 300, ""], ids=["never", "deleted", "long", "empty"])
def test_an_absent_document_is_exit_5(mirrored: Path, key: str) -> None:
    result = call("get", "--data", mirrored, key)
    assert (result.code, result.out) == (5, "")
    assert "no document" in result.complaint


def test_a_collection_is_given_by_name_or_number(mirrored: Path) -> None:
    for collection, code in (("_default", 0), ("0", 0), ("12345", 2)):
        assert call("get", "--data", mirrored, "order::001", "--collection", collection).code == code, collection


def test_meta_shows_all_but_the_value(mirrored: Path) -> None:
    result = call("get", "--data", mirrored, "order::001", "--meta")
    assert "datatype" in result.out
    assert "13 bytes" in result.out
    assert "number" not in result.out


def test_a_read_as_of_a_seqno_names_its_boundary(mirrored: Path) -> None:
    now = call("get", "--data", mirrored, "order::001", "--json").json
    high = call("state", "--data", mirrored, "--vbid", str(now["vbid"]), "--json").json["vbuckets"][0][
        "published_seqno"
    ]
    result = call("get", "--data", mirrored, "order::001", "--as-of", str(high))
    assert result.raw == b'{"number": 1}'
    assert f"vbucket {now['vbid']}, seqno {high}" in result.err
    assert call("get", "--data", mirrored, "order::001", "--as-of", "2999-01-01").code == 0
    early = call("get", "--data", mirrored, "order::001", "--as-of", "2000-01-01")
    assert early.code == 1
    assert early.out == ""
    assert early.complaint


def test_the_option_as_of_is_a_seqno_or_a_time() -> None:
    assert as_of_from(None) is None
    assert as_of_from("17") == 17
    assert as_of_from("1970-01-01T00:00:01+00:00") == Time(1000)
    with pytest.raises(ConfigError, match="neither"):
        as_of_from("yesterday")
    with pytest.raises(ConfigError, match="neither a seqno nor a time"):
        as_of_from("\xb2")
