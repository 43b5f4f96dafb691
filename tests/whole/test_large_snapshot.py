"""A large backfill of one vbucket, all in one disk snapshot: little memory, nothing visible before the end.

The source is a process of its own, as is the mirror; the worker's private memory is read from the system's books the
whole time, and a reader looks in between as any service would.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mirror.sandbox import control
from storage.errors import ViewInvalidated
from storage.read.view import open_view
from tests.cli.conftest import COMMAND, environment
from tests.crash.service import LIMIT_S, Service, until

PRIVATE_BYTES_MAX = 256 << 20
"""Less than the values of the snapshot alone."""
BACKFILL_LIMIT_S = 600.0


@pytest.fixture
def source(tmp_path: Path, documents: int, value_bytes: int) -> Iterator[tuple[str, Path]]:
    """Connection string and control socket of a source with one vbucket, filled."""
    socket = tmp_path / "source.sock"
    load = ["--load", str(documents), "--value-bytes", str(value_bytes)]
    options = ["--vbuckets", "1", *load, "--control", str(socket)]
    with subprocess.Popen(
        [*COMMAND, "sandbox", *options], env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], LIMIT_S)[0], "the source did not get ready"
            yield process.stdout.readline().strip(), socket
        finally:
            process.kill()


def private_bytes(pid: int) -> int:
    """RssAnon: what the process has for itself, without the pages of the map; 0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize(
    ("documents", "value_bytes"),
    [
        (15_000, 20_000),
        pytest.param(250_000, 1_200, marks=[pytest.mark.ci, pytest.mark.timeout(600)]),
        pytest.param(1_500_000, 200, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_a_snapshot_of_300_mb_is_invisible_until_its_end_and_takes_little_memory(
    source: tuple[str, Path], documents: int, tmp_path: Path, record_property: Any
) -> None:
    url, socket = source
    data = tmp_path / "data"
    peak = looks = staged = 0
    with Service(url, data, "--groups", "1", "--workers", "1") as service:
        service.start()
        worker = until("the worker", lambda: service.workers_alive() if (data / "mirror.json").exists() else None)[0]
        with open_view(str(data), partial=True) as view:
            key = b"order::%08d" % (documents // 2)

            def complete() -> bool:
                """Look as a reader does; whatever is seen while nothing is published is a lie."""
                nonlocal peak, looks, staged
                peak = max(peak, private_bytes(worker))
                looks += 1
                seen: object = None
                with contextlib.suppress(ViewInvalidated):  # published while the scan looked
                    seen = view.get(key) or next(view.scan(0, limit=1, deletions=True), None) or view.count(0)
                state = view.state(0)
                if state.published_seqno:
                    return True
                assert not seen, f"{seen} is visible, and nothing is published"
                staged = max(staged, int(state.staged_seqno))
                return False

            until("all documents to be published", complete, limit_s=BACKFILL_LIMIT_S, poll_s=0.03)
            assert staged > documents // 2, "no look happened while rows were staged"
            assert view.state(0).published_seqno == documents
            assert view.count(0) == documents
            rng = Random(1)
            for number in [0, documents - 1, *(rng.randrange(documents) for _ in range(2000))]:
                found = view.get(b"order::%08d" % number)
                assert found is not None
                assert json.loads(found.value)["number"] == number
        peak = max(peak, private_bytes(worker))
        assert service.workers_alive() == [worker], "another worker has taken over meanwhile"
        requests = control.ask(socket, "vbucket", vbid=0)["stream_requests"]
        assert len(requests) == 1, requests
        assert service.terminate() == 0
    stored_mib = os.path.getsize(data / "group-0000" / "data.mdb") >> 20
    record_property("memory", f"peak RssAnon {peak >> 20} MiB, {looks} looks, {stored_mib} MiB stored")
    assert 0 < peak < PRIVATE_BYTES_MAX, f"the worker had {peak / 2**20:.0f} MiB for itself"
