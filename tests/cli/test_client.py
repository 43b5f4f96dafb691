from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mirror import client
from mirror.client import SOCKET_NAME, socket_address
from mirror.errors import SupervisionError
from mirror.messages import GetStatus, GrantLease, Ping, RollBack


class Service:
    def __init__(self, directory: Path, answer: Callable[[socket.socket, bytes], object]) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        with socket_address(directory) as address:
            self._listener.bind(address)
        self._listener.listen()
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Service:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        line, _ = self._listener.accept()
        with line:
            self._answer(line, line.recv(1 << 16))


def test_a_missing_service_is_not_an_error(tmp_path: Path) -> None:
    assert client.ask(tmp_path, Ping()) is None
    assert client.ask(tmp_path / "missing", Ping()) is None
    (tmp_path / SOCKET_NAME).touch()
    assert client.ask(tmp_path, Ping()) is None


def test_an_answer_in_pieces_is_joined(tmp_path: Path) -> None:
    received = []

    def answer(line: socket.socket, request: bytes) -> None:
        received.append(request)
        for piece in (b'{"ok": true, "va', b'lue": "' + b"x" * 300_000, b'"}\n'):
            line.sendall(piece)

    with Service(tmp_path, answer):
        found = client.ask(tmp_path, RollBack(3, 5))
    assert found is not None
    assert len(found["value"]) == 300_000
    assert received == [b'{"op": "rollback", "vbid": 3, "to": 5}\n']


def test_a_refusal_keeps_its_text_and_exit_code(tmp_path: Path) -> None:
    refusal = b'{"ok": false, "error": "no", "exit_code": 2}\n'
    with Service(tmp_path, lambda line, _: line.sendall(refusal)), pytest.raises(client.ServiceSaidNo) as caught:
        client.ask(tmp_path, Ping())
    assert (str(caught.value), caught.value.exit_code) == ("no", 2)


def test_a_refusal_before_the_whole_command_was_sent_is_reported(tmp_path: Path) -> None:
    long = GrantLease("a", "job", 30, [[vbid, 1, 5] for vbid in range(65_536)])
    refusal = b'{"ok": false, "error": "64 clients"}\n'
    with Service(tmp_path, lambda line, _: line.sendall(refusal)), pytest.raises(client.ServiceSaidNo, match="64"):
        client.ask(tmp_path, long)


def test_a_service_that_dies_in_the_middle_of_an_answer_counts_as_down(tmp_path: Path) -> None:
    with Service(tmp_path, lambda line, _: line.sendall(b'{"ok": tr')):
        assert client.ask(tmp_path, GetStatus()) is None


@pytest.mark.parametrize("answer", [b"[]\n", b'"ok"\n'])
def test_an_invalid_answer_is_an_error(tmp_path: Path, answer: bytes) -> None:
    with Service(tmp_path, lambda line, _: line.sendall(answer)), pytest.raises(SupervisionError, match="invalid"):
        client.ask(tmp_path, GetStatus())


def test_a_service_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    waiting = threading.Event()
    with Service(tmp_path, lambda line, _: waiting.wait(30)):
        with pytest.raises(SupervisionError, match="does not answer"):
            client.ask(tmp_path, GetStatus(), timeout_s=0.05)
        waiting.set()
