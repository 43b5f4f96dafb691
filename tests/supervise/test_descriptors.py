"""No descriptor is left: the service says so in one line, goes on, and answers when there are some again."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
from pathlib import Path

import pytest

from mirror.client import socket_address
from tests.supervise import in_process
from tests.supervise.conftest import eventually
from tests.supervise.in_process import vbids_of, vbucket


async def test_exhausted_descriptors_are_one_line_of_log_and_commands_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_process.use(monkeypatch, lambda groups: {"vbuckets": [vbucket(vbid) for vbid in vbids_of(groups)]})
    async with in_process.serving(tmp_path) as service:
        await eventually(lambda: service.reports.document()["vbuckets"])
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        said = ""

        def complained() -> bool:
            nonlocal said
            captured = capsys.readouterr()
            said += captured.out + captured.err
            return "control-socket-refuses" in said

        with line:
            with socket_address(tmp_path) as address:
                os.close(lowest_free := os.dup(line.fileno()))
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
                try:
                    line.connect(address)
                    line.sendall(b'{"op": "ping"}\n')
                    await eventually(complained)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            line.setblocking(False)
            answer = await asyncio.get_running_loop().sock_recv(line, 1000)
            assert json.loads(answer) == {"ok": True, "pid": os.getpid()}
        complained()
    assert said.count("control-socket-refuses") == 1
    assert "ulimit -n" in said
    assert "Traceback" not in said
