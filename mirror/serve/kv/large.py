"""Answers from large documents. A document is found at once, read when the budget has memory, and sent in pieces.

Knows unread documents and requests for memory; never frames or connections. Invariants: all clients' answers together
are within the budget, from before a value is read until its answer was written; a value that cannot be read or decoded
fails only its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from mirror.document.walk import Buffer
from mirror.serve.large import LargeReads, Pieces, drop, held_bytes, let_go
from mirror.serve.turns import Budget, Turns
from mirror.server.session import Later, Reply
from storage.errors import StorageError
from storage.model import Document
from storage.read.large import LargeDocument

Steps = Iterator[Reply | None]


class UnreadDocument(Document):
    """A large document whose value was not read; `large` reads it."""

    large: LargeDocument

    @classmethod
    def of(cls, large: LargeDocument) -> UnreadDocument:
        found = cls(*large.document)
        found.large = large
        return found


class LargeAnswers:
    def __init__(self, turns: Turns, bytes_max: int, failed: Callable[[StorageError], Exception]) -> None:
        """`failed` converts a StorageError to the client's error."""
        self.budget = Budget(bytes_max)
        self.turns = turns
        self.reads = LargeReads(turns)
        self.failed = failed

    def whole(self, found: LargeDocument, reply_with: Callable[[Pieces, int], Reply], *, decompress: bool) -> Later:
        """Read the value; the answer is `reply_with(pieces, datatype)`. A piece is released once it is sent."""

        async def read() -> _Held:
            pieces, datatype = await self.reads.pieces(found, decompress=decompress)
            return iter([reply_with(pieces, datatype)]), partial(drop, pieces)

        return self._answer(read, held_bytes(found, decompress=decompress))

    def lookup(self, found: LargeDocument, steps: Callable[[bytes, Buffer], Steps]) -> Later:
        """Read the value; the answer is the last value of `steps(xattr section, body)`."""

        async def read() -> _Held:
            section, body = await self.reads.body(found)
            return steps(section, body.data), body.release

        return self._answer(read, held_bytes(found, decompress=True))

    def _answer(self, read: Callable[[], Awaitable[_Held]], byte_count: int) -> Later:
        answer = _LargeAnswer(self, read, byte_count)
        return Later(answer.step, wait=answer.wait, barrier=True, done=answer.done)


_Held = tuple[Steps, Callable[[], bool]]
"""The steps of an answer, and the function that releases a piece of its value."""


class _LargeAnswer:
    def __init__(self, answers: LargeAnswers, read: Callable[[], Awaitable[_Held]], byte_count: int) -> None:
        self._answers = answers
        self._read = read
        self._byte_count = byte_count
        self._granted: asyncio.Future[None] | None = None
        self._steps: Steps | None = None
        self._release: Callable[[], bool] = lambda: False
        self._error: Exception | None = None

    async def wait(self) -> None:
        if self._steps is not None:
            await self._answers.turns.turn()
            return
        self._granted = self._answers.budget.request(self._byte_count)
        await asyncio.wait({self._granted})
        try:
            self._steps, self._release = await self._read()
        except ValueError as error:  # the value is invalid; UnreadableValue is a StorageError too
            self._error = error
        except StorageError as error:
            self._error = self._answers.failed(error)

    def step(self) -> Reply | None:
        if self._error is not None:
            raise self._error
        return None if self._steps is None else next(self._steps)

    def done(self) -> None:
        self._steps = None
        if self._granted is not None:
            withdraw = partial(self._answers.budget.withdraw, self._byte_count, self._granted)
            let_go(self._answers.turns, self._release, withdraw)
            self._granted = None
