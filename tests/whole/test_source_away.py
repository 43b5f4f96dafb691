"""The source is killed: every channel says so, and since when; what is published is served all the same."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from pathlib import Path

from mirror.sandbox import SandboxCluster, SandboxThread
from tests.cli.conftest import call
from tests.crash.service import Service, until
from tests.ports import fetched
from tests.processes import caught_up

VBUCKETS = 8


def test_a_new_mirror_without_contact_to_its_source_reports_it_over_http(tmp_path: Path) -> None:
    """HTTP did not listen, so a load balancer or Prometheus took it for a service that does not run."""
    data = tmp_path / "data"
    with ExitStack() as stack:
        held = stack.enter_context(socket.socket())  # connections are refused until the source listens at its port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        flags = ("--workers", "1", "--http", "0", "--kv", "0")
        service = stack.enter_context(Service(f"couchbase://demo@127.0.0.1:{port}/demo", data, *flags))
        service.start()
        (url,) = until("HTTP to listen", lambda: (service.status() or {}).get("listeners", {}).get("http"))
        until("HTTP to answer", lambda: fetched(f"{url}/livez")[0] == 200)
        why = f"the source cannot be reached: 127.0.0.1:{port}"
        until("the reason", lambda: why in fetched(f"{url}/readyz")[1])
        assert fetched(f"{url}/readyz")[0] == 503
        metrics = fetched(f"{url}/metrics")[1].splitlines()
        assert 'dcp_mirror_state{state="source unreachable"} 1.0' in metrics
        assert "dcp_mirror_ready 0.0" in metrics
        assert "<title>dcp-mirror</title>" in fetched(url)[1]
        status = json.loads(fetched(f"{url}/v1/status")[1])
        assert (status["state"], status["vbuckets"], status["bucket"]) == ("source unreachable", [], None)
        assert "source unreachable since 20" in call("status", "--data", data).out
        document = f"{url}/v1/collections/_default._default/documents/key"
        assert fetched(document)[0] == 503
        assert status["listeners"] == {"http": [url]}, "KV has to know how many vbuckets there are"
        before = [server["pid"] for server in status["servers"]]
        source = stack.enter_context(SandboxThread(SandboxCluster(nodes=1, vbuckets=VBUCKETS, port=port)))
        source.call(source.cluster.set, "key", b"1")
        until("readiness", lambda: fetched(f"{url}/readyz")[0] == 200)
        until("the document", lambda: fetched(document) == (200, "1"))
        status = json.loads(fetched(f"{url}/v1/status")[1])
        assert [server["pid"] for server in status["servers"] if server["kind"] == "http"] == before
        (kv,) = until("KV to listen", lambda: (service.status() or {}).get("listeners", {}).get("kv"))
        socket.create_connection(("127.0.0.1", int(kv.rpartition(":")[2]))).close()
        assert service.terminate() == 0
        assert not service.tracebacks()


def test_a_mirror_of_a_mirror_is_not_ready_while_the_first_lacks_its_source(tmp_path: Path) -> None:
    with ExitStack() as alive, ExitStack() as stack:
        source = alive.enter_context(SandboxThread(SandboxCluster(nodes=1, vbuckets=VBUCKETS)))
        source.call(source.cluster.set, "key", b"1")
        first = stack.enter_context(Service(source.connection_string, tmp_path / "first", "--dcp", "0"))
        first.start()
        (url,) = until("DCP to listen", lambda: (first.status() or {}).get("listeners", {}).get("dcp"))
        url = url.replace("://", "://demo@") + "/" + source.cluster.bucket.name
        second = stack.enter_context(Service(url, tmp_path / "second"))
        second.start()
        until("both to be caught up", lambda: caught_up(second.status()))
        alive.close()
        until("it to be noticed", lambda: (second.status() or {}).get("state") == "source unreachable")
        status = second.status()
        assert status is not None
        assert "a mirror, has no contact with its source" in status["reasons"][0]
        assert status["totals"]["lag_seqnos"] is None
        until("the lag to count from the last contact", lambda: (second.status() or status)["totals"]["lag_s"] > 2)
        assert second.terminate() == 0
        assert first.terminate() == 0


def test_a_source_that_returns_in_steps_is_shown_as_refused_until_complete(tmp_path: Path) -> None:
    """A service that was started before its source ended with exit 4 or 3: port, users and bucket come one by one."""
    data = tmp_path / "data"
    with ExitStack() as stack:
        source = stack.enter_context(SandboxThread(SandboxCluster(nodes=1, vbuckets=VBUCKETS)))
        cluster = source.cluster
        source.call(cluster.set, "key", b"1")
        flags = ("--workers", "1", "--http", "0", "--set", "retry_delay_max_ms=200")
        service = stack.enter_context(Service(source.connection_string, data, *flags))
        service.start()
        until("all to be published", lambda: caught_up(service.status()))
        assert service.terminate() == 0
        source.run(cluster.kill_node(0))
        bucket, uuid = cluster.bucket, cluster.bucket.map.bucket_uuid
        name, bucket.name = bucket.name, "another"
        cluster.add_user("demo", "another")
        service.start()
        (url,) = until("HTTP to listen", lambda: (service.status() or {}).get("listeners", {}).get("http"))
        until("workers to wait", lambda: (service.status() or {}).get("state") == "source unreachable")
        document = f"{url}/v1/collections/_default._default/documents/key"

        def shown(why: str) -> None:
            def refused() -> bool:
                status = service.status() or {"vbuckets": [], "state": "", "source_error": ""}
                rows = all(row["state"] == "refused" and why in row["detail"] for row in status["vbuckets"])
                return rows and (status["state"], status["source_error"]) == ("degraded", None)

            until(f"every vbucket to be refused: {why}", refused)
            assert fetched(document) == (200, "1")

        source.run(cluster.restart_node(0))
        shown("wrong user or password")
        source.call(cluster.add_user, "demo", "demo")
        shown("has no bucket demo")
        bucket.name, bucket.map.bucket_uuid = name, "0" * 32
        source.call(bucket.map_changed)
        shown("is now 0000")
        bucket.map.bucket_uuid = uuid
        source.call(bucket.map_changed)
        source.call(cluster.set, "key", b"2")
        until("the mirror to follow again", lambda: fetched(document) == (200, "2"))
        until("every vbucket", lambda: caught_up(service.status()))
        assert service.terminate() == 0
        assert not service.tracebacks()
