"""HTTP on a key-value port: the four paths of a cluster's manager with which Go clients begin.

The map names a node's key-value port as its management port (`cluster_config`). gocbcore reads its first map, and each
new one, from `/pools/default/bs/BUCKET`; go-dcp also reads `/pools` and `/pools/default/buckets/BUCKET`; a ping of Go's
SDK reads `/whoami` (docs/protocol.md 2.12). Each other path is refused at once, because managers of clients must fail
fast.

    GET /pools/default/bs/orders HTTP/1.1        HTTP/1.1 200 OK
    Authorization: Basic ...               -->   Transfer-Encoding: chunked

                                                 {"rev":7,...}  four line feeds    (now)
                                                 {"rev":8,...}  four line feeds    (after each change of the map)

A connection answers one request, and is then closed: clients open another one, and no request waits for a streamed map.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import h11

from mirror.server.session import Session

HEAD_BYTES_MAX = 16 * 1024

NO_MANAGEMENT = "this server has no management service"
"""The answer to every other path. After 404 the Python SDK would report a missing bucket."""

_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
}
_STREAM, _BUCKET = "/pools/default/bs/", "/pools/default/buckets/"


def is_http(data: bytes) -> bool:
    """Return True if `data` begins an HTTP request: it begins with a letter, as no frame does."""
    return data[:1].isalpha()


class Management:
    def __init__(
        self,
        session: Session,
        write: Callable[[bytes], None],
        hang_up: Callable[[], None],
        logged_in: Callable[[], None] = lambda: None,
    ) -> None:
        """`hang_up` closes the connection once everything was sent. `logged_in` is called after a login."""
        self._session = session
        self._write = write
        self._hang_up = hang_up
        self._note_login = logged_in
        self._parser = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._request: h11.Request
        self._user = ""
        self._answering: asyncio.Task[None] | None = None
        self._streams = False

    def feed(self, data: bytes) -> None:
        if self._answering is not None:  # a body, or a second request
            return
        try:
            self._parser.receive_data(data)
            event = self._parser.next_event()
        except h11.RemoteProtocolError as error:
            self._refuse(error.error_status_hint, "not an HTTP request")
            return
        if isinstance(event, h11.Request):
            self._request = event
            self._answering = asyncio.get_running_loop().create_task(self._answer())

    def map_changed(self) -> None:
        if self._streams:
            self._send_map()

    def close(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        self._streams = False

    # -- the answer

    async def _answer(self) -> None:
        path = unquote(self._request.target.partition(b"?")[0].decode("latin-1"), errors="replace")
        bucket = next((path[len(each) :] for each in (_STREAM, _BUCKET) if path.startswith(each)), None)
        if path not in ("/pools", "/whoami") and (not bucket or "/" in bucket):
            self._refuse(501, NO_MANAGEMENT)
        elif self._request.method != b"GET":
            self._refuse(405, "this path can only be read", "Allow: GET\r\n")
        elif not await self._log_in():
            self._refuse(401, "wrong user or password", 'WWW-Authenticate: Basic realm="Couchbase"\r\n')
        elif bucket is not None and bucket != self._session.bucket_name:
            self._refuse(404, "no such bucket")
        elif path == "/pools":
            self._send_json({"implementationVersion": f"{self._session.version.decode()}-0000-enterprise"})
        elif path == "/whoami":
            self._send_json({"id": self._user, "domain": "local"} if self._user else {})
        elif path.startswith(_BUCKET):
            self._send_json(self._described())
        else:
            self._streams = True
            framing = "" if self._is_old else "Transfer-Encoding: chunked\r\n"
            self._head(200, "application/json; charset=utf-8", framing)
            self._send_map()

    async def _log_in(self) -> bool:
        """Return True if the client may read: by the request's password, or else by what the port grants without."""
        session = self._session
        if (authorization := dict(self._request.headers).get(b"authorization")) is not None:
            session.log_out()
            name, password = basic(authorization.decode("latin-1"))
            if name is None or not session.plain_allowed:  # a password only over TLS, or on this machine
                return False
            attempt = session.password_attempt(name, password)
            await attempt.wait()
            if attempt.done == (None,):
                session.login_failed()
                return False
            session.log_in(name)
            self._user = name
        if session.logged_in:
            self._note_login()
        return session.logged_in

    def _described(self) -> dict[str, Any]:
        found = json.loads(self._session.map_text(with_bucket=True))
        kept = {name: found[name] for name in ("name", "uuid", "bucketType", "nodeLocator", "bucketCapabilities")}
        return kept | {"storageBackend": "undefined" if kept["bucketType"] == "ephemeral" else "couchstore"}

    # -- bytes

    @property
    def _is_old(self) -> bool:
        return self._request.http_version == b"1.0"

    def _send_map(self) -> None:
        body = self._session.map_text(with_bucket=True) + b"\n\n\n\n"
        self._write(body if self._is_old else b"%x\r\n%b\r\n" % (len(body), body))

    def _send_json(self, value: dict[str, Any]) -> None:
        self._whole(200, "application/json", json.dumps(value))

    def _refuse(self, status: int, why: str, header: str = "") -> None:
        self._whole(status, "text/plain", why + "\n", header)

    def _whole(self, status: int, content_type: str, body: str, header: str = "") -> None:
        self._head(status, content_type, f"{header}Content-Length: {len(body)}\r\n")
        self._write(body.encode())
        self._hang_up()

    def _head(self, status: int, content_type: str, headers: str) -> None:
        line = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        self._write(f"{line}{headers}Connection: close\r\n\r\n".encode())


def basic(authorization: str) -> tuple[str | None, str]:
    """Return user and password of an `Authorization: Basic` (RFC 7617); None if it is none."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        name, separator, password = base64.b64decode(encoded.strip(), validate=True).decode().partition(":")
    except ValueError:
        return None, ""
    return (name, password) if scheme.lower() == "basic" and separator else (None, "")
