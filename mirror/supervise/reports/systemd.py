"""Notifications to systemd: READY, STATUS, WATCHDOG, STOPPING.

Protocol: sd_notify(3), a datagram to the socket in NOTIFY_SOCKET for each message; without that variable every call
does nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = os.environ if environment is None else environment
        address = self._environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # @: an abstract name
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        self._status = ""

    def watchdog_interval_s(self) -> float | None:
        """Half of the unit's watchdog limit; None without a watchdog."""
        allowed_us = self._environment.get("WATCHDOG_USEC", "")
        meant_for = self._environment.get("WATCHDOG_PID", str(os.getpid()))
        if not allowed_us.isdigit() or int(allowed_us) == 0 or meant_for != str(os.getpid()):
            return None
        return int(allowed_us) / 2_000_000

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        text = " ".join(text.split())
        if text != self._status:
            self._status = text
            self._send(f"STATUS={text}")

    def watchdog(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _send(self, message: str) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                # The manager may be gone, or its queue full: the service goes on.
                self._line.sendto(message.encode(), self._address)
