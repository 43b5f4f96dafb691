"""Wrong passwords: slower each time, outside of the event loop, and in the log."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from mirror.serve.auth import FileUsers, Reader, SourceUser, entry_of
from mirror.serve.logins import (
    DELAY_MAX_S,
    DELAY_MIN_S,
    FORGET_S,
    PEER_FAILURES_FREE,
    REMEMBERED_MAX,
    USER_FAILURES_FREE,
    Attempt,
    Failures,
    Logins,
)
from mirror.wire import codec_kv
from mirror.wire.constants import Status
from mirror.wire.sasl import SaslError
from tests.manual_clock import ManualClock
from tests.serve.dcp_rig import until
from tests.serve.http_site import Source, running
from tests.serve.kv_rig import ALL_FEATURES, Store, serving

T = TypeVar("T")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def logins(clock: ManualClock) -> Iterator[Logins]:
    made = Logins(SourceUser("ann", lambda: "right"), clock)
    yield made
    made.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    made.logs()
    yield made
    made.close()


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    file = tmp_path / "users.json"
    file.write_text(json.dumps({"users": {"ann": entry_of("pw")}}))
    return file


def test_failures_cost_more_each_time_and_are_forgotten() -> None:
    failures = Failures(free=3)
    delays = []
    for _ in range(12):
        delays.append(failures.delay_s("ann", 100.0))
        failures.add("ann", 100.0)
    assert delays[:5] == [0, 0, 0, DELAY_MIN_S, 2 * DELAY_MIN_S]
    assert delays[-1] == DELAY_MAX_S
    assert failures.delay_s("bob", 100.0) == 0
    assert failures.delay_s("ann", 100.0 + 9 * FORGET_S) == DELAY_MIN_S
    assert failures.delay_s("ann", 100.0 + 10 * FORGET_S) == 0
    failures.forget("ann")
    assert failures.delay_s("ann", 100.0) == 0


def test_no_more_names_are_remembered_than_may_be() -> None:
    failures = Failures(free=0)
    for number in range(REMEMBERED_MAX + 10):
        failures.add(str(number), 0.0)
    assert len(failures._found) == REMEMBERED_MAX
    assert "0" not in failures._found
    assert str(REMEMBERED_MAX) in failures._found


def finish(attempt: Attempt[T]) -> T | None:
    """The outcome of an attempt that need not wait for the clock."""
    while (done := attempt.poll()) is None:
        assert attempt._future is not None, "it waits for the clock"
        attempt._future.exception()
    return done[0]


def test_a_user_that_fails_waits_and_others_do_not(logins: Logins, clock: ManualClock) -> None:
    with capture_logs() as logged:
        for _ in range(USER_FAILURES_FREE):
            assert finish(logins.by_password("ann", "wrong", "10.0.0.1")) is None
    assert [(each["event"], each["user"], each["peer"]) for each in logged] == [("logins failed", "ann", "10.0.0.1")]
    assert logins.failed_count == USER_FAILURES_FREE
    waiting = logins.by_password("ann", "right", "10.0.0.2")
    assert waiting.poll() is None
    assert waiting._future is None, "it is not even checked"
    assert finish(logins.by_password("bob", "wrong", "10.0.0.1")) is None
    clock.advance(DELAY_MIN_S)
    assert finish(waiting) == Reader("ann")
    assert finish(logins.by_password("ann", "right", "10.0.0.2")) == Reader("ann"), "a success forgives"


def test_a_peer_that_tries_many_users_waits(logins: Logins) -> None:
    for number in range(PEER_FAILURES_FREE):
        assert finish(logins.by_password(f"user{number}", "x", "10.0.0.1")) is None
    waiting = logins.by_password("ann", "right", "10.0.0.1")
    assert waiting.poll() is None
    assert waiting._future is None
    assert finish(logins.by_password("ann", "right", "10.0.0.2")) == Reader("ann")


def test_a_scram_login_that_fails_counts_as_well(logins: Logins) -> None:
    def refuse() -> bytes | None:
        raise SaslError("wrong user or password")

    attempt = logins.begin("ann", "10.0.0.1", refuse)
    with pytest.raises(SaslError):
        finish(attempt)
    assert logins.failed_count == 1


async def test_a_refused_proof_leaves_no_traceback_in_the_log(logins: Logins) -> None:
    """Each wrong proof of a SCRAM login once wrote one, before any login. Here its connection is closed meanwhile."""
    received: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: received.append(context))
    checking = threading.Event()

    def check() -> bytes:
        checking.wait(10)
        raise SaslError("wrong user or password")

    attempt = logins.begin("ann", "local", check)
    waiting = asyncio.create_task(attempt.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    checking.set()
    await asyncio.wait([waiting])
    future = attempt._future
    assert future is not None
    await until(future.done)
    for _ in range(2):  # the loop hears of it
        await asyncio.sleep(0)
    del attempt, waiting, future
    gc.collect()
    await asyncio.sleep(0)
    assert received == []


async def test_attempts_at_the_end_of_a_process_are_refused_without_an_error(logins: Logins) -> None:
    started, release = threading.Event(), threading.Event()

    def slow() -> bytes:
        started.set()
        release.wait(20)
        return b"done"

    running, queued = (logins.begin("ann", "local", slow) for _ in range(2))
    assert running.poll() is None
    assert queued.poll() is None
    assert started.wait(20)
    logins.close()
    release.set()
    late = logins.begin("ann", "local", slow)
    for attempt, found in ((running, b"done"), (queued, None), (late, None)):
        await attempt.wait()
        assert attempt.poll() == (found,)
    assert logins.failed_count == 0


async def test_passwords_are_checked_outside_of_the_event_loop(store: Store, users_file: Path) -> None:
    threads: list[threading.Thread] = []
    release = threading.Event()

    class Slow(FileUsers):
        def check(self, name: str, password: str) -> Reader | None:
            threads.append(threading.current_thread())
            assert release.wait(20)
            return super().check(name, password)

    async with serving(store.path, readers=Slow(users_file)) as endpoint:
        logging_in, other = await endpoint.connect(), await endpoint.connect()
        pending = asyncio.create_task(logging_in.login("ann", "pw"))
        await until(lambda: bool(threads))
        assert await other.alive(), "the others are answered meanwhile"
        release.set()
        assert await pending == Status.SUCCESS
        assert await other.login("ann", "no") == Status.AUTH_ERROR
        assert threading.main_thread() not in threads
        assert endpoint.server.status()["kv_failed_logins"] == 1


async def test_what_follows_a_login_waits_for_it(store: Store, users_file: Path) -> None:
    """Also for a client that takes answers in any order, or it would be refused what it may have."""
    async with serving(store.path, readers=FileUsers(users_file)) as endpoint:
        client = await endpoint.connect()
        await client.hello(*ALL_FEATURES)
        await client.send(codec_kv.sasl_auth(b"PLAIN", b"\0ann\0pw"), codec_kv.select_bucket(b"orders"))
        for _ in range(2):
            answer = await client.receive()
            assert answer is not None
            assert answer.status == Status.SUCCESS


async def test_an_attempt_whose_connection_was_closed_is_not_checked(store: Store, users_file: Path) -> None:
    checked: list[str] = []

    class Counted(FileUsers):
        def check(self, name: str, password: str) -> Reader | None:
            checked.append(name)
            return super().check(name, password)

    async with serving(store.path, readers=Counted(users_file)) as endpoint:
        for _ in range(50):
            endpoint.server._logins.failed("ann", "local")
        client = await endpoint.connect()
        await client.send(codec_kv.sasl_auth(b"PLAIN", b"\0ann\0pw"))
        await until(lambda: any(each._later for each in endpoint.server.connections))
        (connection,) = endpoint.server.connections
        (task,) = connection._later
        connection.abort()
        await asyncio.wait([task])
        assert task.cancelled()
        assert checked == []


def test_a_proven_password_does_not_wait_for_those_who_guess(source: Source, tmp_path: Path, users_file: Path) -> None:
    source.put("a", b"1")
    with running(tmp_path / "data", source, users_file=users_file) as site:
        site.get(site.document("a"), auth=("ann", "pw"))
        logins = site.server.service.logins
        for _ in range(50):
            logins.failed("ann", "local")
        assert logins.starts_s("ann", "local") > logins.clock.monotonic() + DELAY_MAX_S / 2

        def begin(*_: object) -> None:
            raise AssertionError("it waits with the others")

        logins.by_password = begin  # type: ignore[assignment, method-assign]
        site.get(site.document("a"), auth=("ann", "pw"))
