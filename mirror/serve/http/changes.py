"""Changes as server-sent events (WHATWG HTML, "Server-sent events"): everything published after a position, in order,
until the client leaves.

A stream of one vbucket sends an id with each change, and can be resumed exactly after that change. A stream of several
vbuckets sends an id after each batch, so a client that resumes may get changes twice. A rollback comes as `rollback`,
`retraction` and `restoration` events. A stream that cannot go on without a gap sends `reset` and ends. After an error
it sends `problem` (browsers have an `error` of their own) and ends; the client can resume it.

Memory is bounded for any number of streams, even if clients do not read them: one thread reads one batch at a time; a
batch above `BUDGETED_BYTES` is counted in the budget for answers; a stream that waits for budget holds only its
position and less than `PIECE_BYTES` of text.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mirror.log import get_logger
from mirror.serve.access.auth import Reader
from mirror.serve.http.problems import Problem, internal, of_storage
from mirror.serve.http.requests import Parameters, collection_name, parse_position, position_text, vbucket
from mirror.serve.http.service import (
    BUDGETED_BYTES,
    WAIT_PARAMETERS,
    Service,
    Shares,
    leaves_line,
    owner_of,
    send_and_drain,
)
from mirror.serve.objects import CollectionNames, change_parts, collection_of, dumps
from storage.errors import Closed, StorageError, Unavailable, ViewInvalidated
from storage.read.states import Unreadable
from storage.read.view import Change, Pieces, Served, Token, View

BATCH_EVENTS_MAX = 256
BATCH_BYTES_MAX = 256 * 1024
"""A batch ends with the event that reaches this size, or `BUDGETED_BYTES` if the budget cannot grant this much."""
PIECE_BYTES = 64 * 1024
"""Bytes that a stream reads from the store at a time."""
RIGHTS_CHECK_S = 1.0
RETRY_MS = 1_000
"""Pause before a browser connects again."""

Keep = Callable[[Change], bool]

log = get_logger("http")


async def get_changes(request: Request) -> Response:
    service: Service = request.state.service
    reader = await service.reader(request)
    if request.scope["http_version"] == "1.0":  # the server would send chunks all the same
        raise Problem("bad-request", "changes are sent in chunks, which HTTP/1.0 lacks", hint="use HTTP/1.1")
    await service.turns.turn()  # parsing 1,024 vbuckets takes 1 ms
    parameters = Parameters(request, ("vbid", "since", "follow", "collection", *WAIT_PARAMETERS))
    view = service.view
    count = view.identity.vbucket_count
    vbids: list[int] = sorted({vbucket(text, count) for text in parameters.all("vbid")}) or list(view.vbids)
    await service.read_in_bulk(request, partial(view.check_readable, vbids))  # 1,024 vbuckets take milliseconds
    since = request.headers.get("last-event-id") or parameters.text("since")
    follow = parameters.flag("follow", True)
    name = parameters.text("collection")
    collection = None if name is None else collection_name(name)
    if collection is not None:
        service.judge(reader, collection, vbids[:1])
    keep = _keeper(service, reader, collection)
    tokens, timeout_s = service.tokens(parameters)
    position: dict[int, Token]
    if since == "now":
        now = await service.after(request, tokens, timeout_s, partial(_served, view, vbids), in_bulk=True)
        position = {vbid: _token(vbid, now[vbid]) for vbid in vbids}
    else:
        await service.after(request, tokens, timeout_s, lambda: None)
        position = {} if since is None else await service.read_in_bulk(request, partial(parse_position, since, count))
    if strange := set(position) - set(vbids):
        view.check_readable(strange)
        raise Problem("bad-request", f"the position is of vbucket {min(strange)}, which is not requested")
    if since != "now":
        await service.read_in_bulk(request, partial(_check_since, service, position))
    if collection is not None:
        await service.read_in_bulk(request, partial(view.check_followed, collection, vbids, position.values()))
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", "X-Content-Type-Options": "nosniff"}
    if request.method == "HEAD":
        return Response(None, 200, headers, "text/event-stream")
    texts = ChangeStream(service, vbids, position, keep, reader).run(follow=follow)
    return EventStream(texts, headers, service.streams, owner_of(request))


class EventStream(Response):
    def __init__(
        self, texts: AsyncGenerator[bytes, None], headers: dict[str, str], streams: Shares, owner: str
    ) -> None:
        """The answer counts as a stream of `owner` until it was sent, and closes `texts` in any case. Raises Problem if
        there are too many.
        """
        super().__init__(None, 200, headers, "text/event-stream")
        del self.headers["content-length"]
        self._texts = texts
        streams.take(owner)
        self._streams, self._owner = streams, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._texts) as texts:
                with leaves_line(Request(scope)):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    async for text in texts:
                        await send_and_drain(send, text)
                        del text
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._streams.give_back(self._owner)


def _served(view: View, vbids: Iterable[int]) -> dict[int, Served]:
    """Return the served state of all readable vbuckets. Raises StorageError if one of `vbids` is unreadable."""
    unreadable: Unreadable = {}
    now = view.published(unreadable)
    for vbid in vbids:
        if vbid not in now:
            raise unreadable[vbid % view.identity.group_count]
    return now


def _token(vbid: int, published: Served) -> Token:
    return Token(vbid, *published.position)


def _check_since(service: Service, position: Mapping[int, Token]) -> None:
    """Raise Problem if the position is gone, so that the client gets a status instead of an event."""
    for vbid, token in position.items():
        try:
            service.view.check_since(token)
        except ViewInvalidated as error:
            problem = of_storage(error)
            raise Problem(problem.name, problem.detail, hint=error.hint, vbid=vbid, token=str(token)) from None


def _keeper(service: Service, reader: Reader, collection: str | int | None) -> Keep | None:
    """Return the filter of events for a reader; None: all pass. Every reader gets rollbacks, and the events that begin
    or end a collection that it gets.
    """
    if collection is None and reader.reads_all:
        return None
    names = CollectionNames()

    def keep(change: Change) -> bool:
        document = change.document
        if document is None:
            return True
        if isinstance(collection, int):
            return collection_of(document) == collection
        name = names.of(service.view, document)
        return reader.may_read(name) if collection is None else name == collection

    return keep


@dataclass(slots=True)
class EventBatch:
    """Events of one vbucket, as text. No document is kept."""

    events: list[tuple[bytes, Token]] = field(default_factory=list)
    """The text and token of each event. The text is empty if the reader does not get the event."""
    size: int = 0

    def leave_last(self) -> int:
        size = len(self.events.pop()[0])
        self.size -= size
        return size


class ChangeStream:
    def __init__(
        self, service: Service, vbids: list[int], position: dict[int, Token], keep: Keep | None, reader: Reader
    ) -> None:
        """Begin after `position`; vbuckets without a token begin at 0."""
        self._service = service
        self._reader = reader
        self._checked_s = float("-inf")
        self._vbids = vbids
        self._position = dict(position)
        self._keep = keep
        self._changed = set(vbids)
        self._moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once a vbucket is in `_changed`, or the process stops."""

    async def run(self, *, follow: bool) -> AsyncGenerator[bytes, None]:
        service = self._service
        for vbid in self._vbids:
            service.watch.follow(vbid, self._note)
        try:
            at = self._text()  # a client whose line breaks before the first event repeats its URL, perhaps `since=now`
            yield b"retry: %d\n" % RETRY_MS + (b"id: %b\n\n" % at.encode() if at else b"\n")
            while not service.stopping.is_set():
                async for text in self._catch_up():
                    yield text
                if not follow:
                    at = self._text()
                    yield (b"id: " + at.encode() + b"\n" if at else b"") + _event("end", {"position": at})
                    return
                async for beat in self._beats(self._moved):
                    yield beat
        except _Reset as reset:
            yield _event("reset", reset.problem.object() | {"vbid": reset.vbid})
        except Problem as refused:
            yield _event("problem", refused.object())
        except StorageError as error:
            problem = of_storage(error)
            log.error("changes-ended", problem=problem.name, error=str(error))
            yield _event("problem", problem.object())
        except Exception:
            log.exception("internal error", route="get_changes")
            yield _event("problem", internal().object())
        finally:
            for vbid in self._vbids:
                service.watch.leave(vbid, self._note)

    def _note(self, vbid: int) -> None:
        self._changed.add(vbid)
        if not self._moved.done():
            self._moved.set_result(None)

    async def _beats(self, awaited: asyncio.Future[None]) -> AsyncGenerator[bytes, None]:
        """Generate heartbeats until `awaited` is done. Raises Problem if the process stops, or the rights change."""
        service = self._service
        beat_s = service.clock.monotonic() + service.heartbeat_s
        while not awaited.done():
            left_s = beat_s - service.clock.monotonic()
            await asyncio.wait({awaited}, timeout=min(max(left_s, 0), RIGHTS_CHECK_S))
            self._check_rights()
            if awaited.done():
                return
            if service.stopping.is_set():
                raise Problem("unavailable", "this process stops", hint="connect again")
            if service.clock.monotonic() >= beat_s:
                beat_s += service.heartbeat_s
                yield b": heartbeat\n\n"

    def _check_rights(self) -> None:
        """Raise Problem once the reader's rights have changed. Looks once a second."""
        now_s = self._service.clock.monotonic()
        if now_s - self._checked_s >= RIGHTS_CHECK_S:
            self._checked_s = now_s
            if refusal := self._service.rights_changed(self._reader):
                raise refusal

    async def _catch_up(self) -> AsyncGenerator[bytes, None]:
        await self._service.turns.turn()  # a publish wakes all streams: take turns
        changed, self._changed = sorted(self._changed), set()
        self._moved = asyncio.get_running_loop().create_future()
        for vbid in changed:
            async for text in self._changes_of(vbid):
                yield text

    async def _changes_of(self, vbid: int) -> AsyncGenerator[bytes, None]:
        """Generate the changes of a vbucket. If a rollback interrupts, start again at the stream's position."""
        while True:
            started_at = self._position.get(vbid)
            try:
                pieces = Pieces(PIECE_BYTES)
                changes = self._service.view.changes(vbid, since=started_at, pieces=pieces)
                async with contextlib.aclosing(self._texts(changes, pieces)) as texts:
                    async for text in texts:
                        yield text
                return
            except Unavailable:
                return  # a new copy will replace this one: the stream then ends with a reset
            except (ViewInvalidated, Closed) as error:
                await asyncio.sleep(0)
                if isinstance(error, Closed) or started_at is None or self._position.get(vbid) != started_at:
                    continue  # the rows or the view are gone: continue after the last event
                if not self._leads_on(started_at):
                    raise _Reset(vbid, of_storage(error)) from error

    def _leads_on(self, token: Token) -> bool:
        try:
            self._service.view.check_since(token)
        except StorageError:
            return False
        return True

    async def _texts(self, changes: Iterator[Change], pieces: Pieces) -> AsyncGenerator[bytes, None]:
        budget = self._service.budget
        held = 0
        try:
            while True:
                if not held and budget.try_take(BATCH_BYTES_MAX):  # otherwise the batch ends at BUDGETED_BYTES
                    held = BATCH_BYTES_MAX
                batch = await self._service.read_batch(partial(self._batch, changes, held or BUDGETED_BYTES))
                self._check_rights()
                requested = 0
                if batch.size > max(held, BUDGETED_BYTES):
                    if budget.try_take(batch.size - held):
                        held = batch.size
                    else:
                        pieces.again = True
                        requested = batch.leave_last()
                kept = batch.size if batch.size > BUDGETED_BYTES else 0
                budget.give_back(held - kept)
                held = kept
                if requested and not batch.events:
                    async with contextlib.aclosing(self._budget_for(requested)) as beats:
                        async for beat in beats:
                            yield beat
                    held = requested
                    continue
                finished = not batch.events
                text = self._text_of(batch)
                del batch
                if text:
                    yield text
                del text
                budget.give_back(held)
                held = 0
                if finished:
                    return
        finally:
            budget.give_back(held)

    async def _budget_for(self, byte_count: int) -> AsyncGenerator[bytes, None]:
        """Generate heartbeats until the budget grants this stream `byte_count`."""
        granted = self._service.budget.request(byte_count)
        used = False
        try:
            async for beat in self._beats(granted):
                yield beat
            used = True
        finally:
            if not used:
                self._service.budget.withdraw(byte_count, granted)

    def _batch(self, changes: Iterator[Change], bytes_max: int) -> EventBatch:
        single = len(self._vbids) == 1
        batch = EventBatch()
        for change in islice(changes, BATCH_EVENTS_MAX):
            event = b""
            if self._keep is None or self._keep(change):
                name = b"id: " + str(change.token).encode() + b"\n" if single else b""
                head = name + b"event: " + change.kind.encode() + b"\ndata: "
                event = b"".join((head, *change_parts(change), b"\n\n"))
            batch.events.append((event, change.token))
            batch.size += len(event)
            if batch.size >= bytes_max:
                break
        return batch

    def _text_of(self, batch: EventBatch) -> bytes:
        """Return a batch's text, and set the position to its last event."""
        if not batch.events:
            return b""
        last = batch.events[-1][1]
        self._position[last.vbid] = last
        events = [event for event, _ in batch.events if event]
        self._service.requests.document_total += len(events)
        if len(self._vbids) > 1 or not events:
            events.append(b"id: " + self._text().encode() + b"\n\n")
        return b"".join(events)

    def _text(self) -> str:
        return position_text(self._position) if self._position else ""


def _event(kind: str, data: object) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + dumps(data) + b"\n\n"


class _Reset(Exception):
    def __init__(self, vbid: int, problem: Problem) -> None:
        super().__init__("reset")
        self.vbid, self.problem = vbid, problem
