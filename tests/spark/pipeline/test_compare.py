"""Comparison in tasks: one result for each vbucket, whatever the tasks are, and errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from mirror.config import Settings
from mirror.config_reader import load
from mirror.errors import BucketChanged, ConfigError, ConnectFailed
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from mirror.spark.pipeline.compare import Compared, compare
from mirror.spark.pipeline.runner import LocalRunner
from storage.env import directory
from storage.format import keys, seal
from storage.read.view import open_view
from tests.cli.conftest import call, fill
from tests.storage.frames import sealed

VBUCKETS = 16


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxThread, Path]]:
    data = tmp_path_factory.mktemp("compare") / "data"
    with SandboxThread(SandboxCluster(nodes=2, vbuckets=VBUCKETS)) as source:
        source.call(fill, source.cluster)
        mirror_it(source, data)
        yield source, data


def mirror_it(source: SandboxThread, data: Path) -> None:
    done = call("run", "--source", source.connection_string, "--data", data, "--until-caught-up", "--groups", "4")
    assert done.code == 0, done.err


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "demo")
    return load().settings


def alter(data: Path, vbid: int) -> bytes:
    """Another value of one document, with its checksum, as a wrong write would leave it; returns the key."""
    with open_view(str(data)) as view:
        identity = view.identity
        document = next(iter(view.scan(vbid)))
    folder = directory.group_path(str(data), vbid % identity.group_count)
    with lmdb.open(folder, max_dbs=1000, map_size=1 << 30) as environment, environment.begin(write=True) as txn:
        tree = environment.open_db(keys.rows_db(vbid), txn=txn, create=False)
        row_key = keys.ROW.pack(1, document.seqno)
        found = txn.get(row_key, db=tree)
        assert found is not None
        frame = bytearray(found[: -seal.SIZE])
        frame[-1] ^= 1
        txn.put(row_key, sealed(bytes(frame)), db=tree)
    return document.key


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.ci)])
def test_equal_copies_are_equal_vbucket_by_vbucket(
    pair: tuple[SandboxThread, Path], settings: Settings, processes: int
) -> None:
    source, data = pair
    seen: list[tuple[int, int]] = []
    done = compare(
        data, source.connection_string, settings, LocalRunner(processes), progress=lambda *each: seen.append(each)
    )
    assert [each.vbid for each in done.vbuckets] == list(range(VBUCKETS))
    assert (done.different, done.unfinished) == (False, False)
    assert sum(each.documents for each in done.vbuckets) == 203
    assert all(each.digest == each.source_digest for each in done.vbuckets)
    assert seen[-1][0] == seen[-1][1] > 1


def test_a_key_that_differs_is_named_and_no_other(settings: Settings, tmp_path: Path) -> None:
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS)) as source:
        source.call(fill, source.cluster)
        mirror_it(source, tmp_path / "data")
        key = alter(tmp_path / "data", 3)
        done: Compared = compare(tmp_path / "data", source.connection_string, settings, LocalRunner(1))
    different = [each for each in done.vbuckets if each.state != "equal"]
    assert [each.vbid for each in different] == [3]
    assert [keys.split_key(each.key)[1] for each in different[0].differences] == [key]
    assert done.different


def test_some_vbuckets_only(pair: tuple[SandboxThread, Path], settings: Settings) -> None:
    source, data = pair
    done = compare(data, source.connection_string, settings, LocalRunner(1), vbids=[2, 5])
    assert [each.vbid for each in done.vbuckets] == [2, 5]
    with pytest.raises(ConfigError, match="does not hold vbucket 99"):
        compare(data, source.connection_string, settings, LocalRunner(1), vbids=[99])


def test_another_bucket_and_no_source_are_said_in_one_line(
    pair: tuple[SandboxThread, Path], settings: Settings
) -> None:
    _, data = pair
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS, seed=9)) as other, pytest.raises(BucketChanged):
        compare(data, other.connection_string, settings, LocalRunner(1))
    with pytest.raises(ConnectFailed):
        compare(data, "couchbase://demo@127.0.0.1:1/demo", settings, LocalRunner(1))
