"""Ports of this machine: free ones, and what HTTP answers at them."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


def free_port() -> int:
    return free_ports(1)[0]


def fetched(url: str) -> tuple[int, str]:
    """The status and the text of an answer; 0 and no text while HTTP does not listen."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""
