"""A process that answers one query after the other for an HTTP process. Its stdin is a socket for both directions.

The HTTP process sends a line of JSON for a query, and gets a line of JSON for its answer, then the answer's bytes. When
it hangs up or ends, this process releases its lease, or lets it expire, and ends. The kernel, too, limits the memory of
this process. A process that keeps much memory after a query ends with that query's answer.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import threading
import time
import traceback
from contextlib import ExitStack, closing
from typing import Any

import psutil

from mirror.errors import QueryFailed
from mirror.lease import NoLease
from mirror.serve.access.auth import Reader
from mirror.serve.http.problems import Problem, internal, of_storage
from mirror.sql import Session
from mirror.sql.answers import Body
from mirror.typed.bodies import DocumentDoesNotFit
from storage.errors import StorageError
from storage.read.view import Time, open_view

ABOVE_LIMIT_BYTES = 768 * 1024 * 1024
"""Memory of Python, Arrow and the scan, besides the query's."""
NICENESS = 5
"""Ingest and point reads come first."""
LEAVE_TRIES, LEAVE_TRY_S = 60, 0.05
"""Limit of interrupts of an abandoned query, and seconds after each. DuckDB's planner ignores them."""

LEFT_BYTES_MAX = 128 * 1024 * 1024
"""Memory that a process may keep from earlier queries. If it keeps more it ends, so that the next query has its own."""

JsonObject = dict[str, Any]


def held_bytes() -> int:
    """Return the memory that RLIMIT_DATA counts."""
    return int(psutil.Process().memory_info().data)


class QueryProcess:
    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._session: Session | None = None
        self._held_bytes_max = held_bytes() + LEFT_BYTES_MAX

    def run(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()
        for request in self._line.makefile("rb"):
            head, pieces = self._answer(json.loads(request))
            head["ends"] = held_bytes() > self._held_bytes_max
            self._line.sendall(json.dumps(head).encode() + b"\n")
            for piece in pieces:
                self._line.sendall(piece)
            if head["ends"]:
                return

    def _watch(self) -> None:
        """End this process once the other end has hung up."""
        hung_up = select.poll()
        # Not a read: the bytes are the next query, which the main thread reads.
        hung_up.register(self._line, select.POLLRDHUP)
        hung_up.poll()
        for _ in range(LEAVE_TRIES):
            session = self._session
            if session is None:
                break
            session.interrupt()
            time.sleep(LEAVE_TRY_S)
        os._exit(1)

    def _answer(self, request: JsonObject) -> tuple[JsonObject, list[bytes]]:
        body = Body(request["memory_bytes"])
        try:
            self._query(request, body)
        except NoLease:  # the service's words are for its operator
            traceback.print_exc()
            problem = Problem("unavailable", "the service could not hold the history of this query", hint="ask again")
        except StorageError as error:
            problem = of_storage(error)
        except MemoryError:
            problem = Problem(
                "too-large", "the query needs more memory than it may have", hint="raise sql_memory_bytes"
            )
        except (QueryFailed, DocumentDoesNotFit) as error:
            problem = Problem("bad-request", error.what, hint=error.hint)
        except Exception:
            traceback.print_exc()
            problem = internal()
        else:
            head = {"bytes": sum(map(len, body.pieces)), "rows": body.row_count, "truncated": body.is_cut}
            return head, body.pieces
        detail, hint = (each.replace(request["data"], "DATA") for each in (problem.detail, problem.hint))
        return {"name": problem.name, "detail": detail, "hint": hint, **problem.more}, []

    def _query(self, request: JsonObject, body: Body) -> None:
        reader = Reader("", frozenset(request["patterns"]))
        as_of = None if request["as_of_ms"] is None else Time(request["as_of_ms"])
        with open_view(request["data"], verify_reads=request["verify_reads"]) as view, ExitStack() as stack:
            allowed = None
            if not reader.reads_all:
                allowed = frozenset(filter(reader.may_read, view.reading(as_of=as_of).collections()))
            made = Session(
                view, as_of=as_of, memory_bytes=request["memory_bytes"], threads=1, collections_allowed=allowed
            )
            session = stack.enter_context(made)
            self._session = session
            try:
                with closing(session.run(request["sql"])) as result:
                    body.fill(result.reader, request["rows_max"], arrow=request["arrow"])
            finally:
                self._session = None


def main() -> None:
    line = socket.socket(fileno=os.dup(0))
    os.nice(NICENESS)
    limit = int(sys.argv[1]) + ABOVE_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # A core dump would hold documents.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    QueryProcess(line).run()
    os._exit(0)  # skips the messages of DuckDB's module at exit


if __name__ == "__main__":
    main()
