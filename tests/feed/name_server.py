"""A small real name server on the loopback interface, for tests."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from unittest import mock

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rrset
from dns.asyncresolver import Resolver


class NameServer:
    """`with NameServer({"_couchbase._tcp.db.example": ["0 0 11210 a.example"]}) as server:`; `records` may change."""

    def __init__(self, records: dict[str, list[str]]) -> None:
        self.records = records
        self.queried: list[str] = []
        self.silent = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._patch = mock.patch("dns.asyncresolver.Resolver", self._resolver)

    def _resolver(self) -> dns.asyncresolver.Resolver:
        resolver = Resolver(configure=False)
        host, resolver.port = self._socket.getsockname()
        resolver.nameservers = [host]
        return resolver

    def __enter__(self) -> NameServer:
        self._thread.start()
        self._patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.stop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._socket.getsockname())
        self._thread.join(30)
        self._socket.close()

    def _serve(self) -> None:
        while data := self._socket.recvfrom(4096):
            packet, sender = data
            if not packet:
                return
            query = dns.message.from_wire(packet)
            question = query.question[0]
            name = question.name.to_text(omit_final_dot=True)
            self.queried.append(name)
            if self.silent:
                continue
            answer = dns.message.make_response(query)
            if name in self.records:
                answer.answer.append(dns.rrset.from_text(question.name, 60, "IN", "SRV", *self.records[name]))
            else:
                answer.set_rcode(dns.rcode.NXDOMAIN)
            self._socket.sendto(answer.to_wire(), sender)
