"""The doctor against the embedded source: each thing that can be wrong is one finding with what fixes it, and nothing
is changed by asking.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mirror.config_reader import validated
from mirror.errors import ConfigError
from mirror.inspection.doctor import Finding, StepVerdict, examine
from mirror.sandbox.cluster import SandboxCluster
from mirror.supervise.setup import checked
from mirror.wire.constants import Opcode, Status
from storage.env import directory
from storage.env.directory import MapRecord
from storage.read.view import open_view
from storage.write.writer import GroupWriter, WriterOptions
from tests.feed.harness import Mirror
from tests.feed.scripted_node import PASSWORD, ScriptedNode, refuse
from tests.inspection.test_verify import VBUCKETS, cluster, filled, mirror_of, states, verified, write

__all__ = ["cluster"]


async def examined(source: str, path: Path, data: Path | None = None, **values: Any) -> dict[str, list[Finding]]:
    password = path / "password"
    password.write_text(values.pop("password", "demo"))
    status = values.pop("status", None)
    settings = validated({"password_file": password, "request_timeout_s": 5, **values})
    steps: dict[str, list[Finding]] = {}
    async for finding in examine(settings, source, data, check_data=checked, status=status):
        assert (finding.verdict is StepVerdict.OK) == (not finding.remedy), finding
        steps.setdefault(finding.step, []).append(finding)
    return steps


def verdicts(steps: dict[str, list[Finding]]) -> dict[str, str]:
    return {step: str(findings[0].verdict) for step, findings in steps.items()}


def assert_nothing_fetched(cluster: SandboxCluster, before: list[int]) -> None:
    """No more than the ends of streams, 28 bytes each."""
    assert {cluster.sent(vbid).bytes - before[vbid] for vbid in range(VBUCKETS)} <= {0, 28}


async def test_a_sound_source_passes_every_step_and_sends_no_document(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 200)
    sent = [cluster.sent(vbid).bytes for vbid in range(VBUCKETS)]
    steps = await examined(cluster.connection_string, tmp_path, tmp_path / "new")
    assert {step for step, verdict in verdicts(steps).items() if verdict == "fail"} == set()
    assert list(steps) == [
        "connect", "tls", "login", "bucket", "features", "map", "nodes", "controls", "noop", "collections",
        "privileges", "disk",
    ]  # fmt: skip
    assert_nothing_fetched(cluster, sent)
    assert not (tmp_path / "new").exists()


async def test_a_mirror_that_can_resume_is_reported_with_its_lag(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 200)
    mirror = await filled(cluster, tmp_path)
    write(cluster, 50, "later")
    sent = [cluster.sent(vbid).bytes for vbid in range(VBUCKETS)]
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    assert steps["positions"][0].text == "4 vbuckets resume where they are"
    assert verdicts(steps)["identity"] == verdicts(steps)["downtime"] == verdicts(steps)["disk"] == "ok"
    assert_nothing_fetched(cluster, sent)
    with open_view(mirror.path) as view:
        assert all(state.published_seqno < cluster.vbucket(state.vbid).high_seqno for state in view.states())


async def turns(cluster: SandboxCluster, mirror: Mirror, count: int) -> None:
    """Have the mirror keep several boundaries of each vbucket, and stop it."""
    for turn in range(count):
        write(cluster, 50, f"turn-{turn}")
        for vbid in range(VBUCKETS):
            await mirror.until_published(vbid, cluster.vbucket(vbid).high_seqno)
    await mirror.stop()


async def test_a_coming_rollback_and_a_coming_resync_are_reported(cluster: SandboxCluster, tmp_path: Path) -> None:
    write(cluster, 100)
    mirror = mirror_of(cluster, tmp_path)
    mirror.start(cluster.connection_string)
    await turns(cluster, mirror, 3)
    cluster.failover(2, lose=1)
    for number in range(3):
        cluster.set(f"gone-{number}", {}, vbid=1)
        cluster.delete(f"gone-{number}", vbid=1)
    cluster.set("last", {}, vbid=1)
    cluster.bucket.to_disk(1)
    cluster.bucket.purge(1)
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    going, undone, unsure = (finding.text for finding in steps["positions"])
    assert going.startswith("2 vbuckets resume")
    assert undone.startswith("1 vbuckets would go back to a kept boundary")
    assert unsure.startswith("1 vbuckets, the first is 1, would go back to the history that they share")


@pytest.mark.parametrize("deferred", [False, True])
async def test_a_staged_copy_is_not_mistaken_for_the_served_one(
    cluster: SandboxCluster, tmp_path: Path, deferred: bool
) -> None:
    """The failover log of the staged copy has no vbuuid for the served position: "rollback", "resynced"."""
    write(cluster, 100)
    mirror = mirror_of(cluster, tmp_path)
    mirror.start(cluster.connection_string)
    await turns(cluster, mirror, 2)
    options = WriterOptions(group=1, identity=mirror.identity, clock_ms=lambda: 1)
    with closing(GroupWriter(directory.group_path(mirror.path, 1), options)) as writer:
        vbucket = writer.vbuckets[1]
        if deferred:
            vbucket.rollback(int(vbucket.state.published_seqno) - 1, deferred=True)
        else:
            vbucket.begin_resync()
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    assert [finding.text for finding in steps["positions"]] == ["4 vbuckets resume where they are"]
    assert states(await verified(mirror, cluster, service=False)) == ["equal"] * VBUCKETS


async def test_only_answered_stream_requests_are_counted(cluster: SandboxCluster, tmp_path: Path) -> None:
    """A dead node's vbuckets were counted: "-8 vbuckets resume where they are, 16 begin"."""
    mirror = await filled(cluster, tmp_path)
    await cluster.kill_node(1)
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    assert [finding.text for finding in steps["positions"]] == ["0 vbuckets resume where they are, 2 begin"]
    cluster.bucket.stream_faults.refuse(Status.EACCESS)
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    assert "2 of 2 stream requests are refused" in steps["privileges"][0].text
    assert "positions" not in steps


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vbuckets": "0-1"}, "was made to hold vbuckets 0-3, not 0-1"),
        ({"collections": ["shop.orders"]}, "mirrors the whole bucket, not collections shop.orders"),
        ({}, "mirror.json"),
    ],
)
async def test_a_directory_that_run_refuses_is_a_failure(
    cluster: SandboxCluster, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    mirror = await filled(cluster, tmp_path)
    if not change:
        os.unlink(os.path.join(mirror.path, directory.FILE))
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path), **change)
    assert [(finding.verdict, said in finding.text) for finding in steps["data"]] == [(StepVerdict.FAIL, True)]


async def test_a_directory_with_other_files_is_a_failure(cluster: SandboxCluster, tmp_path: Path) -> None:
    steps = await examined(cluster.connection_string, tmp_path, tmp_path)  # it holds a file with a password
    assert [(finding.verdict, finding.text) for finding in steps["data"]] == [
        (StepVerdict.FAIL, f"{tmp_path} holds other files (password) and no mirror")
    ]


async def test_another_bucket_is_a_failure(cluster: SandboxCluster, tmp_path: Path) -> None:
    mirror = await filled(cluster, tmp_path)
    async with SandboxCluster(vbuckets=8, seed=77) as other:
        steps = await examined(other.connection_string, tmp_path, Path(mirror.path))
    (finding,) = steps["identity"]
    assert (finding.verdict, int(finding.exit_code)) == (StepVerdict.FAIL, 3)


@pytest.mark.parametrize(
    ("change", "step", "said", "code"),
    [
        ({"password": "wrong"}, "login", "wrong user or password", 4),
        ({"bucket": "other"}, "bucket", "no bucket other", 4),
        ({"user": "weak"}, "privileges", "refused", 4),
        ({"user": "none"}, "privileges", "read DCP", 4),
        ({"tls": True}, "tls", "hung up during the TLS handshake", 4),
    ],
)
async def test_each_refusal_is_a_finding_of_its_step(
    cluster: SandboxCluster, tmp_path: Path, change: dict[str, Any], step: str, said: str, code: int
) -> None:
    cluster.add_user("weak", "demo", frozenset({"DcpProducer", "Read", "MetaRead"}))
    cluster.add_user("none", "demo", frozenset({"Read", "MetaRead"}))
    source = cluster.connection_string.replace("demo@", f"{change.get('user', 'demo')}@")
    source = source.removesuffix("/demo") + "/" + change.get("bucket", "demo")
    source = source.replace("couchbase://", "couchbases://") if change.get("tls") else source
    steps = await examined(source, tmp_path, password=change.get("password", "demo"))
    (finding,) = [each for each in steps[step] if each.verdict is StepVerdict.FAIL][:1]
    assert said in finding.text
    assert int(finding.exit_code) == code


async def test_hosts_that_do_not_answer_are_warnings_if_one_host_answers(
    cluster: SandboxCluster, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        alive = cluster.connection_string.partition("@")[2].partition(",")[0]
        steps = await examined(f"couchbase://demo@{dead},{alive}/demo", tmp_path)
        assert [finding.verdict for finding in steps["connect"]] == [StepVerdict.WARN, StepVerdict.OK]
        assert "connection refused" in steps["connect"][0].text
        assert verdicts(steps)["privileges"] == "ok"
        steps = await examined(f"couchbase://demo@{dead},no-such-host.invalid:11210/demo", tmp_path)
    assert list(steps) == ["connect"]
    assert "cannot be resolved" in steps["connect"][1].text
    with pytest.raises(ConfigError):
        await examined("couchbase://", tmp_path)


async def test_vbuckets_without_a_node_are_counted(cluster: SandboxCluster, tmp_path: Path) -> None:
    cluster.bucket.map.owners[1] = None  # type: ignore[call-overload]
    cluster.bucket.map_changed(1)
    steps = await examined(cluster.connection_string, tmp_path)
    assert (steps["map"][0].verdict, "1 have no active node" in steps["map"][0].text) == (StepVerdict.WARN, True)


async def test_a_server_that_refuses_streams_for_now_is_a_warning(cluster: SandboxCluster, tmp_path: Path) -> None:
    cluster.faults.streams.refuse(Status.ETMPFAIL)
    steps = await examined(cluster.connection_string, tmp_path)
    assert verdicts(steps)["streams"] == "warn"
    assert "warming up" in steps["streams"][0].text


async def test_a_node_that_refuses_the_handshake_is_one_finding(tmp_path: Path) -> None:
    async with ScriptedNode({Opcode.SELECT_BUCKET: refuse(Status.ETMPFAIL)}) as node:
        steps = await examined(f"couchbase://demo@127.0.0.1:{node.port}/b", tmp_path, password=PASSWORD)
    assert verdicts(steps)["handshake"] == "fail"


async def test_unreadable_data_is_a_failure_and_the_source_is_examined(cluster: SandboxCluster, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "mirror.json").write_text("{}")
    steps = await examined(cluster.connection_string, tmp_path, data)
    assert (verdicts(steps)["data"], verdicts(steps)["privileges"]) == ("fail", "ok")


async def test_a_node_with_an_older_map_is_named_and_not_examined(tmp_path: Path) -> None:
    """The host of the connection string was failed over, and is back as it was."""
    async with SandboxCluster(nodes=2, vbuckets=VBUCKETS, seed=1) as cluster:
        stale = f"127.0.0.1:{cluster.nodes[1].port}"
        cluster.split_off(1)
        await cluster.failover_node(1)
        steps = await examined(f"couchbase://demo@{stale}/demo", tmp_path)
        assert [str(finding.verdict) for finding in steps["map"]] == ["ok", "warn"]
        assert stale in steps["map"][1].text
        assert "DCP opens at 1 of 1" in steps["nodes"][0].text


async def test_a_map_older_than_the_mirror_followed_is_a_failure(cluster: SandboxCluster, tmp_path: Path) -> None:
    mirror = await filled(cluster, tmp_path)
    uuid = cluster.bucket.map.bucket_uuid
    directory.save_map(mirror.path, MapRecord(uuid, 1, cluster.bucket.map.rev))
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    assert [str(finding.verdict) for finding in steps["map"]] == ["ok"]
    directory.save_map(mirror.path, MapRecord(uuid, 1, cluster.bucket.map.rev + 1))
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    assert [str(finding.verdict) for finding in steps["map"]] == ["ok", "fail"]
    assert "map.json" in steps["map"][1].remedy
    (Path(mirror.path) / "map.json").write_text("{")
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path))
    assert "remove the file" in steps["map"][1].text + steps["map"][1].remedy


async def test_an_ephemeral_bucket_is_refused_with_publish_persisted(cluster: SandboxCluster, tmp_path: Path) -> None:
    cluster.bucket.map.ephemeral = True
    cluster.bucket.map.bump()
    steps = await examined(cluster.connection_string, tmp_path, publish="persisted")
    assert (steps["bucket"][1].verdict, steps["bucket"][1].remedy) == (StepVerdict.FAIL, "set publish to received")
    assert "never persists data" in steps["bucket"][1].text
    assert len((await examined(cluster.connection_string, tmp_path))["bucket"]) == 1


async def test_the_status_of_a_running_service_is_shown(cluster: SandboxCluster, tmp_path: Path) -> None:
    mirror = await filled(cluster, tmp_path)
    sound = {"state": "following", "message": "", "reasons": [], "troubles": []}
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path), status=sound)
    assert steps["service"][0].text == "following"
    trouble = {"procedure": "troubleshooting.md#states-of-the-service"}
    wrong = {"state": "degraded", "reasons": ["1 of 4 vbuckets damaged"], "troubles": [trouble]}
    steps = await examined(cluster.connection_string, tmp_path, Path(mirror.path), status=wrong)
    assert steps["service"][0].text == "degraded: 1 of 4 vbuckets damaged"
