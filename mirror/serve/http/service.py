"""Common parts of the HTTP routes: the mirror, readers and rights, waiting, limits.

A read with mutation tokens is answered only if the tokens' writes are still published after it, so a rollback during
the read cannot give an older value.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mirror.clock import Clock
from mirror.config import Settings, required_data
from mirror.serve.access.auth import Reader, current, users_of
from mirror.serve.access.logins import Logins
from mirror.serve.access.tls import certified_reader
from mirror.serve.http.problems import Problem
from mirror.serve.http.query_pool import Queries
from mirror.serve.http.requests import TOKENS_MAX, WAIT_MS_DEFAULT, WAIT_MS_MAX, Parameters, header, read_body
from mirror.serve.http.status import Report, StatusReporter
from mirror.serve.http.view import Mirror
from mirror.serve.metrics import Requests
from mirror.serve.watch import Watch
from mirror.server.admission import Slot
from mirror.server.errors import RIGHTS_CHANGED
from mirror.server.management import basic
from mirror.server.turns import Budget, Turns, Worker
from storage.read.reading import BoundaryRead
from storage.read.view import AsOf, View
from storage.read.wait import MutationToken, WriteState, WriteStatus, status_in

WAIT_PARAMETERS = ("token", "timeout_ms")
BUDGETED_BYTES = 64 * 1024
"""Answers up to this size fit into a socket's buffers, and do not count in the budget."""
SEND_BYTES = 256 * 1024
WATCH_PAUSE_S = 0.05
"""Pause in which publishes are gathered for streams of changes."""
STREAMS_SHARE = 8
"""One in this many of a process's connections may be a stream of changes."""
WAITS_SHARE = 4
"""One in this many of a process's connections may wait for writes."""

Header = tuple[bytes, bytes]
T = TypeVar("T")


class Memory:
    """Bytes of the budget that one request has taken. `GuardedApp` gives them back once the answer was taken."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.held_bytes = 0

    def hold(self, byte_count: int) -> None:
        """Hold this many bytes from now on. Raises Problem if too few are left."""
        if byte_count > self.held_bytes and not self._budget.try_take(byte_count - self.held_bytes):
            raise Problem("too-busy", "no memory for another request: slow clients hold all of it")
        if byte_count < self.held_bytes:
            self._budget.give_back(self.held_bytes - byte_count)
        self.held_bytes = byte_count


class Shares:
    """A limit of what all clients have at once. One user, or one peer without a login, may have half of it."""

    def __init__(self, what: str, all_max: int, held: Counter[str] | None = None) -> None:
        """`held`: counts by user or peer (`owner_of`)."""
        self.held: Counter[str] = Counter() if held is None else held
        self.all_max = all_max
        self._what = what

    def take(self, owner: str, count: int = 1) -> None:
        """Raises Problem if this is too much."""
        if self.held.total() + count > self.all_max:
            raise Problem("too-busy", f"this process has {self.all_max} {self._what} at most")
        if self.held[owner] + count > max(1, self.all_max // 2):
            raise Problem("too-busy", f"{owner} may have {self.all_max // 2} {self._what} at most")
        self.held[owner] += count

    def give_back(self, owner: str, count: int = 1) -> None:
        self.held[owner] -= count
        if not self.held[owner]:
            del self.held[owner]

    @contextlib.contextmanager
    def taken(self, owner: str) -> Iterator[None]:
        self.take(owner)
        try:
            yield
        finally:
            self.give_back(owner)


class Plain(Response):
    def __init__(self, status: int, headers: Iterable[Header], body: bytes = b"") -> None:
        self.status_code, self.body, self.background = status, body, None
        self.raw_headers = [*headers]


class Budgeted(Plain):
    """An answer whose bytes count in the budget until the client has taken them."""

    def __init__(self, memory: Memory, body: bytes, headers: Iterable[Header], media_type: bytes) -> None:
        """Raises Problem if answers hold too much memory."""
        typed = (b"content-length", b"%d" % len(body)), (b"content-type", media_type)
        super().__init__(200, (*headers, *typed), body)
        memory.hold(len(body) if len(body) > BUDGETED_BYTES else 0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_and_drain(send, b"" if scope["method"] == "HEAD" else bytes(self.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_and_drain(send: Send, body: bytes) -> None:
    """Send a part of a body; return when the client has taken it, except for what fits into buffers."""
    if len(body) <= BUDGETED_BYTES:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        return
    for at in range(0, len(body), SEND_BYTES):  # the server copies what it gets
        await send({"type": "http.response.body", "body": body[at : at + SEND_BYTES], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until the rest was taken


class Service:
    def __init__(
        self,
        settings: Settings,
        stored: Callable[[Path], Report],
        clock: Clock,
    ) -> None:
        """`stored` makes a status from the store alone."""
        self.clock = clock
        self.users = users_of(settings)
        self.logins = Logins(self.users, clock)
        self.requests = Requests()
        self.mirror = Mirror(required_data(settings), verify_reads=settings.verify_reads)
        self.status = StatusReporter(self.mirror, stored, clock, lag_limit_s=settings.ready_lag_limit_s)
        self.turns = Turns()
        self.worker = Worker(settings.reader_unsent_bytes_max)
        self.budget = self.worker.budget
        self.queries = Queries(settings) if settings.sql else None
        """The processes that answer SQL; None without the setting `sql`."""
        self.watch = Watch(lambda: self.view, WATCH_PAUSE_S)
        """Wakes the streams of changes."""
        self.changes_thread = ThreadPoolExecutor(1, "changes")
        """Reads the batches of all streams of changes, one after the other."""
        streams_max = max(1, settings.reader_connections_max // STREAMS_SHARE)
        self.streams = Shares("streams", streams_max, self.requests.streams)
        self.write_watch = Watch(lambda: self.view)
        """Wakes the requests that wait for writes."""
        self.waiting = Shares("requests that wait for writes", max(2, settings.reader_connections_max // WAITS_SHARE))
        self.bodies = Shares("bytes of requests", settings.reader_unsent_bytes_max)
        self.heartbeat_s = 10.0
        self.stopping = asyncio.Event()

    @property
    def view(self) -> View:
        return self.mirror.view

    async def read_batch(self, read: Callable[[], T]) -> T:
        """Call `read` in the thread of the streams of changes. Raises Problem once the thread has ended."""
        try:
            reading = self.changes_thread.submit(read)
        except RuntimeError:
            raise Problem("unavailable", "this process stops", hint="connect again") from None
        return await asyncio.wrap_future(reading)

    # readers

    async def reader(self, request: Request) -> Reader:
        """Return the reader by password, by certificate, or as the listener grants. Raises Problem."""
        state = request.scope["state"]
        slot: Slot = state["slot"]
        authorization = header(request, b"authorization")
        if authorization is None:
            anonymous = self.users.anonymous if state["local"] else None
            reader = certified_reader(self.users, state["transport"]) or anonymous
            if reader is None:
                raise Problem("not-authenticated", "this listener requires a login", hint="send Basic authentication")
        else:
            name, password = basic(authorization)
            if name is None:
                raise Problem("not-authenticated", "wrong user or password", hint="send Basic authentication")
            reader = None if slot.pending and self.logins.guesses(slot.peer) else self.users.proven(name, password)
            if reader is None:
                slot.logging_in = True
                try:
                    with leaves_line(request):
                        reader = await self.logins.check(name, password, slot.peer)
                finally:
                    slot.logging_in = False
            if reader is None:
                raise Problem("not-authenticated", "wrong user or password")
        slot.establish()
        state["reader"] = reader
        return reader

    def rights_changed(self, reader: Reader) -> Problem | None:
        """Return the refusal if the reader's rights have changed since its request began."""
        if current(self.users, reader) == reader:
            return None
        return Problem("forbidden", RIGHTS_CHANGED, hint="log in again")

    def has_lost_rights(self, state: dict[str, Any]) -> bool:
        reader: Reader | None = state.get("reader")
        return reader is not None and self.rights_changed(reader) is not None

    def judge(self, reader: Reader, collection: str | int, vbids: Iterable[int], as_of: AsOf = None) -> None:
        """Refuse a collection that the reader may not read. If it is an id, the manifests of `vbids` give its name."""
        if reader.reads_all:
            return
        if isinstance(collection, str):
            if not reader.may_read(collection):
                raise _may_not_read(reader)
        else:
            reading = self.view.reading(vbids, as_of=as_of)
            for vbid in reading.vbids:
                self.judge_at(reader, collection, reading, vbid)

    def judge_at(
        self, reader: Reader, collection: str | int, reading: BoundaryRead, vbid: int, *, unknown: bool = False
    ) -> None:
        """Refuse a collection that the reader may not read. An id has its name at a vbucket's boundary. An id without a
        name there is refused, too, unless `unknown` is true: a read then finds no documents.
        """
        if reader.reads_all:
            return
        name = collection if isinstance(collection, str) else reading.manifest(vbid).name_of(collection)
        if name is None and unknown:
            return
        if name is None or not reader.may_read(name):
            raise _may_not_read(reader)

    # waiting

    def tokens(self, parameters: Parameters) -> tuple[list[MutationToken], float]:
        found = []
        texts = parameters.all("token")
        if len(texts) > TOKENS_MAX:
            raise Problem("bad-request", f"{len(texts)} tokens; {TOKENS_MAX} at most")
        for text in texts:
            try:
                token = MutationToken.parse(text)
            except ValueError as error:
                raise Problem("bad-request", str(error), hint="token=vbid:vbuuid:seqno, all decimal") from None
            if token.vbid >= self.view.identity.vbucket_count:
                raise Problem("no-vbucket", f"unknown vbucket {token.vbid} in a token")
            found.append(token)
        return found, parameters.integer("timeout_ms", WAIT_MS_DEFAULT, 0, WAIT_MS_MAX) / 1000

    @contextlib.asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """Read a request's body. It counts in the budget, and in its user's share, from its first byte to the end of
        the block. Raises Problem.
        """
        owner, memory, held = owner_of(request), Memory(self.budget), 0

        def hold(byte_count: int) -> None:
            nonlocal held
            self.bodies.take(owner, byte_count)
            held += byte_count
            memory.hold(held)

        try:
            yield await read_body(request, hold)
        finally:
            memory.hold(0)
            self.bodies.give_back(owner, held)

    async def read_in_bulk(self, request: Request, read: Callable[[], T]) -> T:
        """Call `read` in the worker thread. Raises Problem if the client hangs up before the end of the call."""
        with leaves_line(request):
            return await self.worker.run(read)

    async def after(
        self,
        request: Request,
        tokens: Sequence[MutationToken],
        timeout_s: float,
        read: Callable[[], T],
        *,
        in_bulk: bool = False,
    ) -> T:
        """Call `read` once all tokens' writes are published; if one no longer is afterwards, repeat. Raises Problem."""
        deadline = self.clock.monotonic() + timeout_s
        while True:
            waiting = self._not_published(tokens)
            if waiting is None:
                found = await self.read_in_bulk(request, read) if in_bulk else read()
                if (waiting := self._not_published(tokens)) is None:
                    return found
            left = deadline - self.clock.monotonic()
            if left <= 0 or self.stopping.is_set():
                raise Problem(
                    "not-published-in-time",
                    f"the write is not published after {timeout_s:g} s",
                    hint="ask again with a longer timeout_ms, or look at the lag in /v1/status",
                )
            with leaves_line(request), self.waiting.taken(owner_of(request)):
                await self._wait(waiting, left)
                await self.turns.turn()

    async def _wait(self, token: MutationToken, timeout_s: float) -> None:
        """Wait until the write is published, the process stops, or `timeout_s` is over."""
        changed = asyncio.Event()

        def news(_vbid: int) -> None:
            changed.set()

        self.write_watch.follow(token.vbid, news)
        try:
            async with asyncio.timeout(timeout_s):
                while not self.stopping.is_set() and self._not_published((token,)):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            pass
        finally:
            self.write_watch.leave(token.vbid, news)

    def _not_published(self, tokens: Sequence[MutationToken]) -> MutationToken | None:
        """Return the first token whose write is not published yet. Raises Problem if one is lost."""
        seen: dict[int, WriteState] = {}
        for token in tokens:
            state = seen.get(token.vbid)
            if state is None:
                state = seen[token.vbid] = WriteState.of(self.view.reader(token.vbid))
            status = status_in(state, token)
            if status is WriteStatus.LOST:
                raise Problem(
                    "write-lost",
                    f"the write {token} was undone by a failover of the source",
                    hint="write it again",
                    vbid=int(token.vbid),
                    token=str(token),
                )
            if status is not WriteStatus.PUBLISHED:
                return token
        return None


def owner_of(request: Request) -> str:
    """Return the request's user, or the peer of a client without a login."""
    state = request.scope["state"]
    reader: Reader | None = state.get("reader")
    return f"user {reader.name}" if reader is not None and reader.name else f"peer {state['slot'].peer}"


def _may_not_read(reader: Reader) -> Problem:
    return Problem("forbidden", f"{reader.name or 'anonymous'} may not read that collection")


def refuse_websites(request: Request) -> None:
    """Refuse requests that a website can make its visitor's browser send: cross-site requests that are not links to the
    status page, and requests without a login that reach a local listener by a foreign host name. Raises Problem.
    """
    if header(request, b"sec-fetch-site") == "cross-site" and not (
        header(request, b"sec-fetch-mode") == "navigate" and request.url.path == "/"
    ):
        raise Problem("forbidden", "cross-site request", hint="open the address itself")
    if request.scope["state"]["local"] and header(request, b"authorization") is None:
        name = _strange_name(header(request, b"host") or "")
        if name is not None:
            raise Problem("forbidden", f"unknown host name {name[:80]!r}", hint="use the address, or log in")


@contextlib.contextmanager
def leaves_line(request: Request) -> Iterator[None]:
    """Interrupt the block, and raise Problem, as soon as the client has hung up."""
    refuse_gone(request)
    slot: Slot = request.scope["state"]["slot"]
    slot.in_line = asyncio.current_task()
    try:
        yield
    except asyncio.CancelledError:
        refuse_gone(request)
        raise
    finally:
        slot.in_line = None


def refuse_gone(request: Request) -> None:
    if request.scope["state"]["transport"].is_closing():
        raise Problem("unavailable", "the client is gone")


@lru_cache(maxsize=16)
def _strange_name(host: str) -> str | None:
    """Return the host name of a Host header, if it is neither an address nor this machine's name."""
    name = host[: host.rindex("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    name = name.lower().removesuffix(".")
    if not name or name == "localhost" or name.endswith(".localhost"):
        return None
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return name
    return None
