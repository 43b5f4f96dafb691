"""Programs that read a mirror and fork, and a writer beside them; each reports what it found, line by line.

python -m tests.storage.forking PARENT PATH STATE   obeys the lines `read` and a way to end of `ENDS`
python -m tests.storage.forking FORKER PATH SEED    forks until its standard input ends
python -m tests.storage.forking WRITER PATH         writes until its standard input ends
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from storage.errors import Closed, StorageError, ViewInvalidated
from storage.history.purge import Window
from storage.read import scan
from storage.read.view import View, open_view
from tests.storage.model import keys_of
from tests.storage.rig import open_writer, publish

KEYS = keys_of(0, 2_000)
ENDS = ("sys.exit", "os._exit", "SIGKILL", "exec", "garbage collection")
HANG_S = 60
"""SIGALRM ends a child after this time."""
REQUESTS_MAX = 4
"""A worker of the server ends after so many."""
TURN_S = 0.002
KEPT_COMMITS = 100
"""A scan takes as long as some five."""


def document(seqno: int) -> bytes:
    return b"%d-" % seqno + b"x" * 200


def fill(path: str) -> None:
    writer = open_writer(path)
    publish(writer, 0, [(key, document(seqno), seqno) for seqno, key in enumerate(KEYS, 1)])
    writer.close()


def found_in(view: View) -> str:
    """`right`, or what is wrong with the documents. A read that the purger overtook begins again, as its error says."""
    while True:
        try:
            found = list(view.scan(0))
            wrong = [each for each in found if int(each.value.split(b"-")[0]) != each.seqno]
            many = view.get_many(KEYS[:20])
            counts = {len(found), view.count(0), len({each.key for each in found})}
        except ViewInvalidated:
            continue
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "right" if counts == {len(KEYS)} and len(many) == 20 and not wrong else f"{counts}, {wrong[:1]}"


def read_again(path: str) -> str:
    with open_view(path) as view:
        return found_in(view)


# -- what the parent does while it forks -------------------------------------------------------------------------------


def kept_exception(view: View) -> object:
    try:
        view.get(KEYS[0], as_of=0)
    except StorageError as error:
        return error
    raise AssertionError("there is nothing as of 0")


def begun(read: Iterator[object]) -> object:
    next(read)
    return read


def in_thread(target: Callable[[threading.Event], object]) -> object:
    ready = threading.Event()
    threading.Thread(target=target, args=(ready,), daemon=True).start()
    ready.wait()
    return ready


def inside_a_scan(view: View, ready: threading.Event) -> None:
    for _ in view.scan(0):
        ready.set()
        time.sleep(3600)


def inside_a_transaction(view: View, ready: threading.Event) -> None:
    with view.reader(0).environment.read() as txn:
        for _ in txn.raw.cursor(view.reader(0).keys).iternext():
            ready.set()
            time.sleep(3600)


def opens_and_closes(path: str, ready: threading.Event) -> None:
    while True:
        with open_view(path) as view:
            view.get(KEYS[0])
            list(view.scan(limit=5))
        ready.set()


def many_that_open_and_close(path: str) -> object:
    sys.setswitchinterval(1e-5)
    return [in_thread(lambda ready: opens_and_closes(path, ready)) for _ in range(3)]


STATES: dict[str, Callable[[View, str], object]] = {
    "a view that was not read": lambda view, path: None,
    "a view that was read": lambda view, path: view.get(KEYS[0]),
    "an unfinished scan": lambda view, path: begun(view.scan(0)),
    "unfinished changes": lambda view, path: begun(view.changes(0)),
    "a kept exception": lambda view, path: kept_exception(view),
    "a thread inside a scan": lambda view, path: in_thread(lambda ready: inside_a_scan(view, ready)),
    "a thread inside a transaction": lambda view, path: in_thread(lambda ready: inside_a_transaction(view, ready)),
    "threads that open and close views": lambda view, path: many_that_open_and_close(path),
}


# -- a child -----------------------------------------------------------------------------------------------------------


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except Closed as error:
        return "" if "open another view in the child" in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "was read"


def check_child(path: str, inherited: View, held: object) -> str:
    """`right`, or what is wrong in a forked child."""
    calls: list[Callable[[], object]] = [lambda: inherited.get(KEYS[0]), lambda: list(inherited.scan(0))]
    if isinstance(held, Iterator):
        calls.append(lambda: list(held))
    said = [refused(call) for call in calls]
    found = read_again(path)
    inherited.close()
    if any(said):
        return f"an inherited view: {said}"
    return found


def leave(end: str, path: str) -> None:
    """End a child that has a view open."""
    kept = open_view(path)
    kept.get(KEYS[0])
    if end == "exec":
        os.execv(sys.executable, [sys.executable, "-c", f"import os; os.stat({path!r})"])
    if end == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "os._exit":
        os._exit(0)


def forked(end: str, path: str, view: View, held: object) -> str:
    """What a forked child found, and how it ended if that was not as it should."""
    receiving, sending = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(HANG_S)
        said = check_child(path, view, held)
        if end == "garbage collection":
            del view, held
            gc.collect()
            said = said if said != "right" else read_again(path)
        os.write(sending, said.encode()[:4000])
        leave(end, path)
        raise SystemExit(0)
    os.close(sending)
    with open(receiving) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said if code == (-signal.SIGKILL if end == "SIGKILL" else 0) else f"{said}, ended with {code}"


# -- the programs ------------------------------------------------------------------------------------------------------


def end_of_input() -> threading.Event:
    """Set once the standard input has ended. The thread holds no lock that a child would inherit."""
    ended = threading.Event()

    def wait() -> None:
        os.read(0, 1)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def parent(path: str, state: str) -> None:
    view = open_view(path)
    held = STATES[state](view, path)
    say("ready")
    for line in sys.stdin:
        end = line.strip()
        say(found_in(view) if end == "read" else forked(end, path, view, held))
    os._exit(0)  # threads read for ever


def forker(path: str, seed: str) -> None:
    """Fork all the time: by hand and by multiprocessing, some children that stay for a while, in every state."""
    rng, ended = Random(seed), end_of_input()
    view = open_view(path)
    pool = multiprocessing.get_context("fork").Pool
    forks = 0
    while not ended.is_set():
        forks += 1
        held = STATES[rng.choice(list(STATES)[:5])](view, path)
        if rng.random() < 0.2:
            with pool(2) as workers:
                said = workers.map(read_again, [path] * 4)
        else:
            said = [forked(rng.choice(ENDS), path, view, held)]
        for each in (*said, found_in(view)):
            if each != "right":
                say(each)
    say(str(forks))


def writer(path: str) -> None:
    """Write the same keys again and again, and purge all that is older: every page is used again soon.

    The history is counted in commits: on a busy machine a scan outlasted any that was counted in milliseconds.
    """
    opened: Any = open_writer(
        path, clock=lambda: int(time.time() * 1000), window=Window(boundaries=KEPT_COMMITS), sync="unsafe"
    )
    rng, ended = Random(1), end_of_input()
    seqno = int(opened.vbuckets[0].state.published_seqno)
    while not ended.is_set():
        chosen = rng.sample(KEYS, 100)
        publish(opened, 0, [(key, document(seqno + at), seqno + at) for at, key in enumerate(chosen, 1)])
        seqno += len(chosen)
        for _ in range(20):
            opened.step()
        time.sleep(TURN_S)
    opened.close()


def found_preloaded(path: str) -> str:
    """What a child of the forkserver finds."""
    from tests.storage import preloaded

    assert preloaded.DOCUMENT is not None
    return refused(lambda: preloaded.VIEW.get(KEYS[0])) or read_again(path)


def forkserver(path: str) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.storage.preloaded"])
    with context.Pool(2, maxtasksperchild=1) as workers:
        for said in workers.map(found_preloaded, [path] * 6, chunksize=1):
            say(said)


class Application:
    """Answers with what it found, in a view that it opens with the first request of a process."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._views: dict[int, View] = {}

    def __call__(self) -> str:
        view = self._views.get(os.getpid()) or self._views.setdefault(os.getpid(), open_view(self._path, partial=True))
        return found_in(view)


def serve(listener: socket.socket, application: Application) -> None:
    """A worker, which ends after a few requests and on SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for _ in range(REQUESTS_MAX):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(f"{os.getpid()} {application()}\n".encode())
    sys.exit(0)


def server(path: str) -> None:
    """A preforking server: it loads and calls the application, forks workers, and replaces those that end."""
    application = Application(path)
    listener = socket.create_server(("127.0.0.1", 0))
    say(f"{application()} {listener.getsockname()[1]}")
    workers: set[int] = set()
    ended = end_of_input()
    while not ended.is_set():
        while len(workers) < 3:
            pid = os.fork()
            if pid == 0:
                serve(listener, application)
            workers.add(pid)
        pid, status = os.waitpid(-1, os.WNOHANG)
        workers.discard(pid)
        if pid and os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            say(f"a worker ended with {os.waitstatus_to_exitcode(status)}")
        if (said := application()) != "right":
            say(said)
        time.sleep(TURN_S)
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


PROGRAMS: dict[str, Callable[..., None]] = {
    "PARENT": parent,
    "FORKER": forker,
    "FORKSERVER": forkserver,
    "SERVER": server,
    "WRITER": writer,
}

if __name__ == "__main__":
    scan.CHUNK_ROWS = 500  # an unfinished read has something to read yet
    with contextlib.suppress(KeyboardInterrupt):
        PROGRAMS[sys.argv[1]](*sys.argv[2:])
