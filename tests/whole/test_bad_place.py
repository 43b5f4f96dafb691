"""A place that misbehaves: a full disk, a directory that may not be written, foreign or damaged data, wrong orders.

What cannot start says why in one line and leaves every byte as it was. What runs already keeps what it has published,
says what is wrong, lets the other groups go on, and goes on itself when the cause is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mirror.clock import SystemClock
from mirror.sandbox import SandboxCluster, SandboxThread
from storage.env import directory
from storage.errors import CorruptedError
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.cli.conftest import call
from tests.crash.judge import judge, published_seqnos, wait_progress
from tests.crash.load import Load
from tests.crash.service import Service, gone, until
from tests.ports import free_ports
from tests.processes import without_rootly_powers

VBUCKETS = GROUPS = 12
FLAGS = ("--groups", str(GROUPS), "--workers", "2")
LOCKS = ("lock.mdb", "service.lock", "writer.lock", "control.sock")


@pytest.fixture(scope="module")
def source() -> Iterator[SandboxThread]:
    cluster = SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=3)
    with SandboxThread(cluster) as thread:
        thread.call(Load(cluster, 3, rate=0, keys=2000).write, 4000)
        yield thread


@pytest.fixture(scope="module")
def mirrored(source: SandboxThread, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror at rest; tests take copies."""
    data = tmp_path_factory.mktemp("place") / "data"
    result = call("run", "--source", source.connection_string, "--data", data, "--until-caught-up", *FLAGS)
    assert result.code == 0, result.err
    judge(source.cluster, data, live=False)
    return data


@pytest.fixture
def data(mirrored: Path, tmp_path: Path) -> Path:
    ignore = shutil.ignore_patterns("*.sock")
    return Path(shutil.copytree(mirrored, tmp_path / "data", ignore=ignore))


@pytest.fixture
def writing(source: SandboxThread) -> Iterator[Load]:
    load = Load(source.cluster, 4, rate=150, keys=2000)
    task = source.call(lambda: asyncio.get_running_loop().create_task(load.run()))
    yield load
    assert not task.done(), task
    source.call(task.cancel)


def files_below(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in LOCKS
    }


# -- what cannot start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "password", "code", "words"),
    [([], "wrong", 4, "password"), (["--groups", "5"], "demo", 2, "12 groups")],
    ids=["a wrong password", "another number of groups"],
)
def test_a_mirror_that_cannot_be_served_is_left_unchanged(
    source: SandboxThread, data: Path, flags: list[str], password: str, code: int, words: str
) -> None:
    before = files_below(data)
    arguments = ("run", "--source", source.connection_string, "--data", data)
    result = call(*arguments, *flags, env={"DCP_MIRROR_PASSWORD": password})
    assert (result.code, result.out) == (code, "")
    assert words in result.complaint
    assert files_below(data) == before
    judge(source.cluster, data, live=False)


def test_data_of_another_bucket_is_left_unchanged(data: Path) -> None:
    before = files_below(data)
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS, seed=99)) as other:
        result = call("run", "--source", other.connection_string, "--data", data)
    assert (result.code, result.out) == (3, "")
    assert "bucket" in result.complaint
    assert files_below(data) == before


def test_a_group_of_another_mirror_is_refused_and_the_others_are_served(
    source: SandboxThread, data: Path, tmp_path: Path
) -> None:
    with SandboxThread(SandboxCluster(vbuckets=VBUCKETS, seed=98)) as other:
        foreign = tmp_path / "foreign"
        made = call("run", "--source", other.connection_string, "--data", foreign, "--until-caught-up", *FLAGS)
        assert made.code == 0, made.err
    shutil.copy(foreign / "group-0001" / "data.mdb", data / "group-0001" / "data.mdb")
    before = files_below(data)
    result = call("run", "--source", source.connection_string, "--data", data, "--until-caught-up", *FLAGS)
    assert result.code == 3
    assert "group-0001" in result.complaint
    after = files_below(data)
    assert after["group-0001/data.mdb"] == before["group-0001/data.mdb"]


@pytest.mark.parametrize("made", [True, False], ids=["a mirror", "a new place"])
def test_a_read_only_directory_is_refused(source: SandboxThread, data: Path, tmp_path: Path, *, made: bool) -> None:
    place = data
    if not made:
        place = tmp_path / "locked" / "data"
        place.mkdir(parents=True)
    before = files_below(place)
    for each in [*place.rglob("*"), place]:
        each.chmod(0o555 if each.is_dir() else 0o444)
    arguments = ("run", "--source", source.connection_string, "--data", place, "--until-caught-up")
    result = call(*arguments, preexec_fn=without_rootly_powers)
    assert (result.code, result.out) == (2, "")
    assert "cannot be written" in result.complaint
    assert files_below(place) == before
    if made:
        read = call("get", "--data", place, "order::000001", preexec_fn=without_rootly_powers)
        assert read.code == 2
        assert "lock" in read.complaint or "permission" in read.complaint


def test_a_group_folder_without_rights_is_named_and_the_others_are_served(source: SandboxThread, data: Path) -> None:
    (data / "group-0001").chmod(0)
    result = call(
        "run", "--source", source.connection_string, "--data", data, "--until-caught-up", *FLAGS,
        preexec_fn=without_rootly_powers,
    )  # fmt: skip
    assert result.code == 2
    assert f"{data}/group-0001: permission denied (the process needs read and write access" in result.complaint
    (data / "group-0001").chmod(0o700)
    lines = [line for line in result.err.splitlines() if "damage-found" in line]
    assert len(lines) <= 1, "one event for all of its vbuckets"
    assert result.err.count("group-not-opened") == 1
    assert "process-ready" in result.err
    assert "something unknown" not in result.err


# -- a full disk ----------------------------------------------------------------------------------------------------


def wait_reported(service: Service, words: str) -> None:
    def reported() -> bool:
        status = service.status()
        return any(words in str(row["last_error"]) for row in (status["vbuckets"] if status else []))

    until(f"the status to say {words!r}", reported)


def the_rest_stands(source: SandboxThread, service: Service) -> None:
    judge(source.cluster, service.data, live=True)
    assert service.ended() is None
    assert not service.tracebacks()


def level_again(source: SandboxThread, service: Service) -> None:
    wait_progress(service.data, range(VBUCKETS), "every vbucket to go on")
    workers = service.wait_workers(2)
    assert not any(row["restarts"] for row in workers.values()), "a worker died of it"
    judge(source.cluster, service.data, live=True)
    assert service.terminate() == 0
    judge(source.cluster, service.data, live=False)
    assert not service.tracebacks()


def test_a_file_size_limit_is_reported_and_recovered_from_when_lifted(
    source: SandboxThread, data: Path, writing: Load
) -> None:
    with Service(source.connection_string, data, *FLAGS) as service:
        service.start()
        workers = service.wait_workers(2)
        wait_progress(service.data, range(VBUCKETS), "the mirror to follow")
        smallest = min((data / f"group-{group:04d}" / "data.mdb").stat().st_size for group in range(GROUPS))
        for row in workers.values():
            psutil.Process(row["pid"]).rlimit(resource.RLIMIT_FSIZE, (smallest, resource.RLIM_INFINITY))
        source.call(writing.write, 3000)
        wait_reported(service, "no space left")
        the_rest_stands(source, service)
        for row in workers.values():
            psutil.Process(row["pid"]).rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        level_again(source, service)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    mount = [*as_root, "mount", "-t", "tmpfs", "-o", f"size=64m,uid={os.geteuid()}", "tmpfs", str(place)]
    if shutil.which(mount[0]) is None or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a small disk cannot be mounted: needs root, or sudo, and in a container CAP_SYS_ADMIN")
    yield place
    subprocess.run([*as_root, "umount", "-l", str(place)], check=False)


@pytest.mark.ci
def test_a_full_disk_is_reported_and_survived(
    source: SandboxThread, small_disk: Path, writing: Load, tmp_path: Path
) -> None:
    small = ("--set", "batch_bytes_max=65536")
    with Service(source.connection_string, small_disk / "data", *FLAGS, *small, log=tmp_path / "log") as service:
        service.start()
        service.wait_workers(2)
        wait_progress(service.data, range(VBUCKETS), "the mirror to follow")
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(65536))
        assert shutil.disk_usage(small_disk).free < 65536
        source.call(writing.write, 3000)
        wait_reported(service, "no space left")
        the_rest_stands(source, service)
        ballast.unlink()
        level_again(source, service)


# -- damage ---------------------------------------------------------------------------------------------------------


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGES: dict[int, Callable[[Path], object]] = {
    1: lambda file: file.write_bytes(os.urandom(8192) + file.read_bytes()[8192:]),
    3: lambda file: file.write_bytes(b"garbage" * 1000),
    5: cut_short,
    7: lambda file: os.truncate(file, 0),
    9: Path.unlink,
}
"""By group. All are of the second worker, which has group 11 besides."""


REMEDY = "stop the service, move this group's folder away and start again"


@pytest.mark.parametrize(
    ("groups", "runs"), [(tuple(DAMAGES), False), ((9,), True)], ids=["before the start", "while it runs"]
)
def test_every_screen_names_the_same_working_remedy_for_a_damaged_group(
    source: SandboxThread, data: Path, writing: Load, tmp_path: Path, groups: tuple[int, ...], runs: bool
) -> None:
    """The service said "leave it away"; after that its restart, `check` and `doctor` said "run `dcp-mirror check`"."""

    def details() -> list[str]:
        rows = until("a status", service.status)["vbuckets"]
        return [str(row["detail"]) for row in rows if row["state"] == "damaged"]

    def damage() -> None:
        for group in groups:
            DAMAGES[group](data / f"group-{group:04d}" / "data.mdb")

    with Service(source.connection_string, data, *FLAGS) as service:
        if not runs:
            damage()
        service.start()
        wait_progress(service.data, range(11, 12), "the group of no damage to go on")
        if runs:
            damage()
        until("the damage to be noticed", lambda: len(details()) == len(groups))
        sound = [vbid for vbid in range(VBUCKETS) if vbid not in groups]
        wait_progress(service.data, sound, "the others to go on, those of the damaged ones' worker too")
        said = details()
        assert all(f"group-{group:04d}" in text for group, text in zip(groups, said, strict=True)), said
        assert service.terminate() == 0
        assert not service.tracebacks()
        checked = call("check", "--data", data)
        assert checked.code == 3
        assert "Traceback" not in checked.err
        said += [line for line in checked.out.splitlines() if line.startswith("group")]
        with open_view(str(data), partial=True) as view:
            assert all(view.count(vbid) for vbid in sound)
            for group in groups:
                if DAMAGES[group] is not cut_short:  # missing pages end the process that reads: only writers look first
                    with pytest.raises(CorruptedError):
                        view.state(group)
        doctor = call("doctor", "--source", source.connection_string, "--data", data).out
        said += [line for line in doctor.splitlines() if "data " in line and line.startswith("fail")]
        assert len(said) == 2 * len(groups) + 1, said
        assert all(line.count(REMEDY) == 1 and "dcp-mirror check" not in line for line in said), said
        for group in groups:
            (data / f"group-{group:04d}").rename(tmp_path / f"away-{group}")
        service.start()
        until("every vbucket to follow", lambda: (service.status() or {}).get("state") == "following")
        assert service.terminate() == 0
    assert call("check", "--data", data).code == 0


def test_a_group_that_another_process_holds_at_the_start_is_opened_later(
    source: SandboxThread, data: Path, writing: Load
) -> None:
    """It once was called damaged until a restart, and the procedure said to set a sound folder aside."""
    options = WriterOptions(group=1, identity=directory.load(str(data)), clock_ms=SystemClock().wall_ms)
    holder = GroupWriter(directory.group_path(str(data), 1), options)
    with ExitStack() as held, Service(source.connection_string, data, *FLAGS) as service:
        held.callback(holder.close)
        service.start()
        wait_progress(service.data, [vbid for vbid in range(VBUCKETS) if vbid != 1], "the other groups to go on")
        status = until("a status", service.status)
        row = status["vbuckets"][1]
        assert (row["state"], "another process" in row["detail"]) == ("refused", True), row
        held.close()
        wait_progress(service.data, range(VBUCKETS), "every vbucket to go on")
        assert service.terminate() == 0
        assert not service.tracebacks()


@pytest.mark.ci
def test_a_group_that_is_lost_while_it_runs_silences_no_reader_of_the_others(
    source: SandboxThread, data: Path, writing: Load, tmp_path: Path
) -> None:
    """Streams of changes, a mirror of this mirror and what all vbuckets are asked for go on without the lost group."""
    http, dcp = free_ports(2)
    url, changes = f"http://localhost:{http}", {"since": "now"}
    lost = 1
    with ExitStack() as stack:
        first = stack.enter_context(
            Service(source.connection_string, data, *FLAGS, "--http", str(http), "--dcp", str(dcp))
        )
        first.start()
        wait_progress(first.data, range(VBUCKETS), "the mirror to follow")
        next_url = f"couchbase://demo@127.0.0.1:{dcp}/{source.cluster.bucket.name}"
        second = stack.enter_context(Service(next_url, tmp_path / "second", *FLAGS, log=tmp_path / "2.log"))
        second.start()
        until("the mirror of the mirror", lambda: (tmp_path / "second" / "mirror.json").exists())
        wait_progress(second.data, range(VBUCKETS), "the mirror of the mirror to follow")
        streams = [
            stack.enter_context(httpx.stream("GET", f"{url}/v1/changes", params=changes | {"vbid": vbid}, timeout=90))
            for vbid in (0, lost)
        ]
        (data / f"group-{lost:04d}").rename(tmp_path / "away")
        lines = list(streams[1].iter_lines())
        assert "event: problem" in lines
        assert "the group's data file is missing" in lines[-2]
        seqno = published_seqnos(data, range(1))[0]
        ids = (line for line in streams[0].iter_lines() if line.startswith("id: "))
        assert next(text for text in ids if int(text.split(":")[3]) > seqno)
        assert httpx.get(f"{url}/v1/collections").status_code == 200
        wait_progress(second.data, range(2, VBUCKETS), "the others to follow on")

        def rows() -> dict[int, dict[str, Any]]:
            return {row["vbid"]: row for row in until("a status", second.status)["vbuckets"]}

        until("the lost one to be known", lambda: rows()[lost]["state"] == "waiting")
        until("the others' lags", lambda: [v for v, row in rows().items() if row["lag_seqnos"] is None] == [lost])
        for service in (second, first):
            assert service.terminate() == 0
            assert not service.tracebacks()


@pytest.mark.parametrize("how", ["removed", pytest.param("moved", marks=pytest.mark.ci)])
def test_a_directory_deleted_under_the_service_ends_it_with_one_clear_error(
    source: SandboxThread, data: Path, writing: Load, tmp_path: Path, how: str
) -> None:
    with Service(source.connection_string, data, *FLAGS, log=tmp_path / "service.log") as service:
        service.start()
        workers = [row["pid"] for row in service.wait_workers(2).values()]
        if how == "removed":
            shutil.rmtree(data)
        else:
            data.rename(tmp_path / "elsewhere")
        assert until("the service to end", service.ended) == 1
        assert all(map(gone, workers))
        assert not service.tracebacks()
        said = [line for line in service.tail(1000).splitlines() if f"{data} was removed or moved" in line]
        assert len(said) == 1, service.tail(1000)
        assert "start the service again" in said[0]
    if how == "moved":
        judge(source.cluster, tmp_path / "elsewhere", live=True)
