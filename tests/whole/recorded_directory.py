"""A data directory of each format there was, with the source that it mirrors, to be opened by today's program.

`python -m tests.whole.recorded_directory` follows the story of the source with the current program and keeps the
directory as `directories/format-N.tar.xz`. Run it once for each new format, never for one that was released. A test
tells the story to a source of its own, which has the same seqnos and documents, and gets the directory's histories.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mirror.sandbox import SandboxCluster, SandboxThread
from storage.env import directory
from storage.read.view import open_view
from tests.crash.service import Service, until
from tests.manual_clock import ManualClock
from tests.processes import caught_up
from tests.sandbox.past import expire

FOLDER = Path(__file__).with_name("directories")
VBUCKETS = 8
FLAGS = ("--groups", "2", "--set", "history_boundaries=4")
ROLLED_BACK, RESYNCED = 3, 5


def cluster() -> SandboxCluster:
    return SandboxCluster(vbuckets=VBUCKETS, seed=29, clock=ManualClock())


def _documents(source: SandboxCluster) -> None:
    bucket = source.bucket
    bucket.create_scope("shop")
    for name in ("carts", "orders", "old"):
        bucket.create_collection("shop", name)
    for number in range(200):
        bucket.set(f"plain-{number}", {"n": number, "note": "kettle " * (number % 20)})
        bucket.set(f"order-{number}", {"n": number}, collection="shop.orders", compressed=number % 3 == 0)
        bucket.set(f"old-{number}", b"\0\1" * number, collection="shop.old")
    bucket.set("with-xattrs", {"a": 1}, xattrs={"_sync": {"rev": 1}, "seen": True}, expiry=2_000_000_000)


def _changes(source: SandboxCluster) -> None:
    bucket = source.bucket
    for number in range(0, 200, 4):
        bucket.delete(f"plain-{number}")
        bucket.set(f"plain-{number + 1}", {"n": number, "second": True})
    bucket.set("durable", {"committed": True}, durable=True)
    expire(bucket, "with-xattrs")
    bucket.drop_collection("shop.old")
    bucket.flush_collection("shop.orders")
    bucket.set("cart", "after the flush", collection="shop.orders")


def _more(source: SandboxCluster) -> None:
    for number in range(VBUCKETS * 10):
        source.multi_write(number % VBUCKETS, [(f"v{number % VBUCKETS}-{number}", {"n": number})] * 2)


def _rollback(source: SandboxCluster) -> None:
    source.failover(ROLLED_BACK, lose=12)


def _resync(source: SandboxCluster) -> None:
    source.failover(RESYNCED, lose=source.vbucket(RESYNCED).high_seqno - 20)


def _purge(source: SandboxCluster) -> None:
    source.bucket.purge(1)
    source.bucket.to_disk()
    for vbid in range(VBUCKETS):
        source.set(f"last-{vbid}", {"vbid": vbid}, vbid=vbid)


STORY = (_documents, _changes, *[_more] * 3, _rollback, _resync, _purge)


def source_of(path: Path) -> SandboxCluster:
    """The source after the whole story, with the histories of the directory at `path`."""
    source = cluster()
    for step in STORY:
        step(source)
    identity = directory.load(str(path))
    source.bucket.map.bucket_uuid = identity.bucket_uuid
    with open_view(str(path)) as view:
        for state in view.states():
            source.vbucket(state.vbid).failover_log = state.failover_log
    return source


def formats() -> dict[int, Path]:
    return {int(path.name.split("-")[1].split(".")[0]): path for path in FOLDER.glob("format-*.tar.xz")}


def unpacked(path: Path, folder: Path) -> Path:
    with tarfile.open(path) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12's Python has no filters yet
        archive.extractall(folder)
    return folder / "data"


def follow(data: Path) -> None:
    with SandboxThread(cluster()) as source, Service(source.connection_string, data, *FLAGS) as service:
        service.start()
        for step in STORY:
            source.call(step, source.cluster)
            until(f"{step.__name__} to be published", lambda: _level(source, service.status()))
        assert service.terminate() == 0


def _level(source: SandboxThread, status: dict[str, Any] | None) -> bool:
    if status is None or not caught_up(status):
        return False
    rows = status["vbuckets"]
    return all(
        row["published_seqno"] == source.cluster.vbucket(row["vbid"]).high_seqno
        and int(row["vbuuid"], 16) == source.cluster.vbucket(row["vbid"]).vbuuid
        for row in rows
    )


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        follow(data)
        with tarfile.open(FOLDER / f"format-{directory.FORMAT}.tar.xz", "w:xz", preset=9) as archive:
            for file in sorted([data / "mirror.json", data / "map.json", *data.glob("group-*/data.mdb")]):
                archive.add(file, file.relative_to(data.parent), filter=_without_owner)


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
