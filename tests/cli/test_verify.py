"""`verify`: equal, different, fixed; and every mistake one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

import cli
from cli import verify
from mirror import client
from mirror.messages import GetSource, GrantLease, ReleaseLease
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.env import directory
from storage.format import keys, seal
from storage.history.leases import LEASES_MAX
from storage.read.view import open_view
from tests.cli.conftest import LIMIT_S, background, call, call_here, copy_of, succeed
from tests.processes import caught_up
from tests.storage.frames import sealed
from tests.supervise.conftest import eventually_now as eventually

ALTERED = 3
JSON_MD = Path(cli.__file__).with_name("JSON.md")


def alter(mirrored: Path, data: Path, work: Callable[[bytes], bytes]) -> Path:
    """A copy of the mirror in which one stored row of vbucket 3 is another."""
    copy_of(mirrored, data)
    group = directory.group_path(str(data), ALTERED % 4)
    with lmdb.open(group, max_dbs=64, map_size=1 << 30) as environment:
        tree = environment.open_db(keys.rows_db(ALTERED), create=False)
        with environment.begin(write=True) as txn:
            rows = [(key, row) for key, row in txn.cursor(tree) if len(key) == keys.ROW_KEY_SIZE and row[1] == 0x57]
            row_key, stored = rows[-1]
            txn.put(row_key, work(stored), db=tree)
    return data


@pytest.fixture
def altered(mirrored: Path, tmp_path: Path) -> Path:
    """A copy of the mirror in which one byte of one value of vbucket 3 is another, with a checksum that matches."""

    def work(stored: bytes) -> bytes:
        frame = stored[: -seal.SIZE]
        return sealed(frame[:-1] + bytes([frame[-1] ^ 1]))

    return alter(mirrored, tmp_path / "data", work)


def test_a_damaged_row_is_named_and_fixed(source: SandboxThread, mirrored: Path, tmp_path: Path) -> None:
    def work(stored: bytes) -> bytes:
        damaged = bytearray(stored)
        damaged[-seal.SIZE - 1] ^= 1
        return bytes(damaged)

    data = alter(mirrored, tmp_path / "data", work)
    checked = call("check", "--data", data)
    assert checked.code == 3
    assert "its checksum does not match" in checked.out + checked.err
    verified = ("verify", "--data", data, "--source", source.connection_string, "--repair")
    call(*verified).assert_complains(1, f"no service runs on {data}")
    with background("run", "--data", data, "--source", source.connection_string) as service:
        assert call("status", "--data", data, "--wait-ready", "--timeout", str(LIMIT_S)).code == 0
        fixed = succeed(*verified, "--json")
        assert (fixed.json["repaired"], fixed.json["ok"]) == ([ALTERED], True)
        again = succeed(*verified)
        assert "fetched again" not in again.out
        eventually(lambda: call("check", "--data", data).code == 0)
        assert call("stop", "--data", data).code == 0
        assert service.wait(LIMIT_S) == 0


def test_a_mirror_equals_its_source(source: SandboxThread, mirrored: Path) -> None:
    result = succeed("verify", "--data", mirrored, "--source", source.connection_string, "--json")
    facts = result.json
    assert (facts["ok"], facts["service"], facts["repaired"]) == (True, "down", [])
    assert facts["totals"]["states"] == {"equal": 16}
    assert facts["totals"]["documents"] == facts["totals"]["source_documents"] == 183
    assert facts["totals"]["tombstones"] == 20
    assert [row["vbid"] for row in facts["vbuckets"]] == list(range(16))
    assert all(row["digest"] == row["source_digest"] and row["differences"] == [] for row in facts["vbuckets"])
    plain = call("verify", "--data", mirrored, "--source", source.connection_string, "--vbid", "3")
    assert plain.code == 0
    assert "equal (1 vbuckets" in plain.out


@pytest.mark.ci
def test_many_rows_are_compared_on_all_cores(
    source: SandboxThread, altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "FEW_ROWS", 0)
    result = call_here("verify", "--data", altered, "--source", source.connection_string, "--json")
    assert result.code == 3
    assert [row["vbid"] for row in result.json["vbuckets"]] == list(range(16))
    assert [row["vbid"] for row in result.json["vbuckets"] if row["state"] != "equal"] == [ALTERED]


def test_a_source_that_is_ahead_is_compared_up_to_the_published_seqno(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with SandboxThread(SandboxCluster(vbuckets=4, seed=6)) as thread:
        flags = ["--data", data, "--source", thread.connection_string]
        for number in range(20):
            thread.call(thread.cluster.set, f"old-{number}", {})
        assert call("run", *flags, "--until-caught-up").code == 0
        for number in (0, 0, *range(20, 50)):
            thread.call(thread.cluster.set, f"old-{number}", {"new": number})
        found = call("verify", *flags, "--json").json
        plain = call("verify", *flags)
        promised = JSON_MD.read_text()
    said = "compared up to the published seqnos: the source is 32 seqnos ahead"
    said += ", 31 keys changed meanwhile and were not compared"
    assert (plain.code, said in plain.out) == (1, True), plain.out
    assert "unsure: 4 vbuckets" in plain.out
    assert "NOT equal" not in plain.out
    rows = found["vbuckets"]
    assert (found["totals"]["behind_seqnos"], found["totals"]["not_compared"]) == (32, 31)
    assert all(row["behind_seqnos"] == row["source_seqno"] - row["published_seqno"] for row in rows)
    assert [name for name in rows[0] if f"`{name}`" not in promised] == []


def test_an_altered_row_is_named(source: SandboxThread, altered: Path) -> None:
    result = call("verify", "--data", altered, "--source", source.connection_string, "--json")
    assert result.code == 3
    (row,) = [row for row in result.json["vbuckets"] if row["state"] != "equal"]
    assert (row["vbid"], row["state"], row["different"], row["missing_here"]) == (ALTERED, "different", 1, 0)
    (difference,) = row["differences"]
    assert difference["kind"] == "different"
    assert difference["key"].startswith("order::")
    assert difference["here"]["seqno"] == difference["there"]["seqno"]
    assert difference["here"]["digest"] != difference["there"]["digest"]
    plain = call("verify", "--data", altered, "--source", source.connection_string)
    assert plain.code == 3
    assert difference["key"] in plain.out
    assert "NOT equal: 1 vbuckets" in plain.out


def test_a_healthy_mirror_without_free_leases_is_not_fetched_again(
    source: SandboxThread, mirrored: Path, tmp_path: Path
) -> None:
    data = copy_of(mirrored, tmp_path / "data")
    verified = ("verify", "--data", data, "--source", source.connection_string, "--repair")
    with background("run", "--data", data, "--source", source.connection_string) as service:
        assert call("status", "--data", data, "--wait-ready", "--timeout", str(LIMIT_S)).code == 0
        with open_view(data) as view:
            positions = [[token.vbid, token.branch, token.seqno] for token in map(view.token, view.vbids)]
        for number in range(LEASES_MAX):
            client.ask(data, GrantLease(str(number), "dashboard", 600, positions))
        result = call(*verified)
        assert result.code == 1, result.out
        assert "no lease: " in result.out
        assert "too many leases are held (release some, or wait)" in result.out
        assert "fetched again" not in result.out
        exported = call("export", "--data", data, "--to", tmp_path / "all.jsonl")
        exported.assert_complains(1, "too many leases are held (release some, or wait)")
        assert "history" not in exported.complaint
        for number in range(LEASES_MAX):
            client.ask(data, ReleaseLease(str(number)))
        assert succeed(*verified, "--json").json["repaired"] == []
        service.terminate()
        service.communicate(timeout=LIMIT_S)


def test_every_mistake_is_one_line(source: SandboxThread, mirrored: Path, tmp_path: Path) -> None:
    url = source.connection_string
    for code, said, arguments, env in (
        (2, "no source is given", ["--data", mirrored], {}),
        (2, "no mirror", ["--data", tmp_path, "--source", url], {}),
        (2, "holds no vbucket 99", ["--data", mirrored, "--source", url, "--vbid", "99"], {}),
        (4, "wrong user or password", ["--data", mirrored, "--source", url], {"DCP_MIRROR_PASSWORD": "no"}),
    ):
        result = call("verify", *arguments, env=env)
        result.assert_complains(code, said)
        assert result.out == ""


def test_another_bucket_is_refused(mirrored: Path) -> None:
    with SandboxThread(SandboxCluster(vbuckets=16, seed=99)) as other:
        result = call("verify", "--data", mirrored, "--source", other.connection_string)
    result.assert_complains(3, "uuid")


def test_a_mirror_of_one_collection_is_compared_with_that_collection_only(tmp_path: Path) -> None:
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=8, seed=4)) as thread:
        bucket = thread.cluster.bucket
        thread.call(bucket.create_scope, "shop")
        for name in ("orders", "items"):
            thread.call(bucket.create_collection, "shop", name)
            for number in range(60):
                thread.call(bucket.set, f"{name}-{number}", {"number": number}, collection=f"shop.{name}")
        flags = ["--data", tmp_path / "data", "--source", thread.connection_string]
        result = succeed("run", *flags, "--groups", "2", "--set", "collections=shop.orders", "--until-caught-up")
        result = call("verify", *flags, "--json")
        assert (result.code, result.json["totals"]["documents"]) == (0, 60), result.out
        assert result.json["totals"]["behind_seqnos"] == 0
        thread.call(bucket.delete, "orders-7", collection="shop.orders")
        thread.call(bucket.set, "items-99", {}, collection="shop.items")
        result = call("verify", *flags, "--json")
        assert (result.code, result.json["totals"]["not_compared"]) == (1, 1), result.out
        thread.call(bucket.drop_collection, "shop.orders")
        result = call("verify", *flags, "--json")
        assert (result.code, result.json["totals"]["not_compared"]) == (1, 60), result.out


def test_the_running_service_says_how_to_reach_its_source(
    source: SandboxThread, mirrored: Path, tmp_path: Path
) -> None:
    data = copy_of(mirrored, tmp_path / "data")
    for command in ("verify", "doctor"):
        result = call(command, "--data", data)
        result.assert_complains(2, f"no service runs on {data}")
    with background(
        "run", "--source", source.connection_string, "--data", data, "--set", "tls_minimum_version=1.3"
    ) as run:
        answer = eventually(lambda: client.ask(data, GetSource()))
        assert answer is not None
        assert (answer["settings"]["source"], answer["settings"]["tls_minimum_version"]) == (
            source.connection_string,
            "1.3",
        )
        eventually(lambda: caught_up(call("status", "--data", data, "--json").json))
        for command in ("verify", "doctor"):
            result = call(command, "--data", data, "--json")
            assert (result.code, result.json["source"]) == (0, source.connection_string), result.err
        run.terminate()
        run.communicate(timeout=LIMIT_S)
