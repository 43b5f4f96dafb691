"""A recorded data directory of this format is read, checked and followed on, without a refill. One of a pre-release's
format is refused.
"""

from __future__ import annotations

from pathlib import Path

from mirror.sandbox import SandboxThread
from storage.admin.check import check
from storage.env import directory
from storage.read.view import open_view
from tests.cli.conftest import call
from tests.crash.judge import differences, published_seqnos
from tests.crash.service import Service, until
from tests.whole.recorded_directory import FLAGS, RESYNCED, ROLLED_BACK, VBUCKETS, formats, source_of, unpacked

PRE_RELEASE = 2


def test_a_directory_of_a_pre_release_is_refused_in_one_line(tmp_path: Path) -> None:
    data = unpacked(formats()[PRE_RELEASE], tmp_path)
    result = call("state", "--data", data)
    assert result.code == 3
    (line,) = result.err.splitlines()
    assert "format 2, filled by a pre-release" in line
    assert "fill it again" in line


def test_a_recorded_directory_is_read_checked_and_streamed_on(tmp_path: Path) -> None:
    data = unpacked(formats()[directory.FORMAT], tmp_path)
    report = check(str(data))
    assert not report.problems, report.problems
    cluster = source_of(data)
    high_seqnos = [vbucket.high_seqno for vbucket in cluster.vbuckets]
    with open_view(str(data)) as view:
        states = view.states()
        assert [state.published_seqno for state in states] == high_seqnos
        for vbid in range(VBUCKETS):
            assert differences(cluster, view, vbid, high_seqnos[vbid], pinned=False) == []
        assert [bool(state.rollback_count) for state in states] == [vbid == ROLLED_BACK for vbid in range(VBUCKETS)]
        assert [bool(view.history(vbid).resync_count) for vbid in range(VBUCKETS)] == [
            vbid == RESYNCED for vbid in range(VBUCKETS)
        ]
        older = view.boundaries(ROLLED_BACK)[-1].seqno
        assert older < high_seqnos[ROLLED_BACK]
        assert differences(cluster, view, ROLLED_BACK, older, pinned=True) == []
        tokens = [view.token(vbid) for vbid in range(VBUCKETS)]
    with SandboxThread(cluster) as source, Service(source.connection_string, data, *FLAGS) as service:
        service.start()
        for vbid in range(VBUCKETS):
            source.call(cluster.set, f"new-{vbid}", {"vbid": vbid}, vbid=vbid)
        until(
            "the new documents to be published",
            lambda: [*published_seqnos(data).values()] == [seqno + 1 for seqno in high_seqnos],
        )
        assert service.terminate() == 0
        requests = [cluster.sent(vbid).stream_requests for vbid in range(VBUCKETS)]
        assert [each[0].start_seqno for each in requests] == high_seqnos, "nothing is fetched again"
        assert [len(each) for each in requests] == [1] * VBUCKETS
    with open_view(str(data)) as view:
        for vbid in range(VBUCKETS):
            assert differences(cluster, view, vbid, high_seqnos[vbid] + 1, pinned=False) == []
            changes = [change.document.key for change in view.changes(vbid, since=tokens[vbid]) if change.document]
            assert changes == [b"new-%d" % vbid], "a token of before is good"
    assert not check(str(data)).problems
    assert call("restore", "--from", backup(data), "--data", tmp_path / "restored").code == 0


def backup(data: Path) -> Path:
    target = data.parent / "backup"
    assert call("backup", "--data", data, "--to", target).code == 0
    return target
