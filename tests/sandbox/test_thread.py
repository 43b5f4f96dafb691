"""The source in a thread."""

from __future__ import annotations

import threading

import pytest

from mirror.sandbox import SandboxCluster, SandboxThread


def test_calls_happen_in_its_loop_and_return_what_they_return() -> None:
    before = set(threading.enumerate())  # another test's source may live for longer
    with SandboxThread(SandboxCluster(vbuckets=2)) as source:
        assert source.connection_string == source.cluster.connection_string
        item = source.call(source.cluster.set, "k", {"a": 1}, vbid=1)
        assert (item.seqno, source.call(threading.current_thread).name) == (1, "sandbox")
        source.run(source.cluster.kill_node(0))
        assert not source.cluster.nodes[0].alive
        with pytest.raises(LookupError):
            source.call(source.cluster.vbucket, 9)
    assert set(threading.enumerate()) <= before
