"""Verify next to a service under load: rows altered behind its back are found, fixed through the service while
it goes on serving, and is equal in the end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import lmdb
import pytest

from mirror.sandbox import SandboxCluster, SandboxThread
from storage.env import directory
from storage.format import keys, seal
from tests.cli.conftest import call
from tests.crash.load import Load
from tests.crash.service import Service
from tests.storage.frames import sealed

VBUCKETS = 8
FLAGS = ("--groups", "3", "--workers", "2", "--set", "resync_reads=stale")


def alter(data: Path, vbid: int) -> None:
    """Change a byte of each value of a vbucket, with a valid checksum, as a wrong write would."""
    group = directory.group_path(str(data), vbid % 3)
    with lmdb.open(group, max_dbs=64, map_size=1 << 30) as environment:
        tree = environment.open_db(keys.rows_db(vbid), create=False)
        with environment.begin(write=True) as txn:
            for row_key, row in list(txn.cursor(tree)):
                if len(row_key) == keys.ROW_KEY_SIZE and row[1] == 0x57:
                    frame = row[: -seal.SIZE]
                    txn.put(row_key, sealed(frame[:-1] + bytes([frame[-1] ^ 1])), db=tree)


@pytest.mark.ci
def test_altered_rows_are_found_and_fixed_under_load(tmp_path: Path) -> None:
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=11)
    load = Load(cluster, 11, rate=100, keys=400)
    with SandboxThread(cluster) as source:
        source.call(load.write, 600)
        verify = ("verify", "--data", tmp_path / "data", "--source", source.connection_string, "--json")
        with Service(source.connection_string, tmp_path / "data", *FLAGS) as service:
            service.start()
            service.wait_workers(2)
            writing = source.call(lambda: asyncio.get_running_loop().create_task(load.run()))
            result = call(*verify)
            assert (result.code, result.json["service"]) == (0, "up"), (result.out, result.err)
            assert result.json["totals"]["documents"] > 0
            assert service.terminate() == 0
            alter(tmp_path / "data", 2)
            alter(tmp_path / "data", 5)
            service.start()
            service.wait_workers(2)
            result = call(*verify)
            assert result.code == 3, (result.out, result.err)
            assert [row["vbid"] for row in result.json["vbuckets"] if row["state"] != "equal"] == [2, 5]
            result = call(*verify, "--repair")
            assert (result.code, result.json["repaired"]) == (0, [2, 5]), (result.out, result.err)
            assert not source.call(writing.done)
            source.call(writing.cancel)
            assert service.terminate() == 0
        assert call("check", "--data", tmp_path / "data").code == 0
        assert call(*verify).code == 0
