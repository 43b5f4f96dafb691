"""Wrong passwords: slower each time, outside of the event loop, and in the log."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from mirror.serve.access.auth import FileUsers, Reader, SourceUser
from mirror.serve.access.logins import (
    DELAY_MAX_S,
    DELAY_MIN_S,
    FORGET_S,
    PACE_S,
    PEER_FAILURES_FREE,
    REMEMBERED_MAX,
    USER_FAILURES_FREE,
    Failures,
    Logins,
)
from mirror.serve.bucket.mirror_session import FAILED_LOGINS_MAX, MirrorClients
from mirror.server.admission import LOCAL
from mirror.server.session import LoginAttempt
from mirror.wire.constants import Status
from mirror.wire.sasl import SaslError, ScramClient
from tests.manual_clock import ManualClock
from tests.oracle import kv_client
from tests.serve.dcp_rig import until
from tests.serve.http_site import Source, request, running
from tests.serve.kv_rig import ALL_FEATURES, Store, serving, with_users
from tests.supervise.conftest import eventually_now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def logins(clock: ManualClock) -> Iterator[Logins]:
    made = Logins(SourceUser("ann", lambda: "right"), clock)
    yield made
    made.close()


def test_the_delay_grows_with_each_failure_and_is_forgotten() -> None:
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


def test_many_failures_are_forgotten_in_minutes_and_their_number_is_bounded() -> None:
    failures = Failures(free=PEER_FAILURES_FREE)
    for _ in range(10_000):
        failures.add("10.0.0.1", 100.0)
    assert failures.delay_s("10.0.0.1", 100.0) == DELAY_MAX_S
    assert failures.delay_s("10.0.0.1", 100.0 + 180) == 0
    for number in range(REMEMBERED_MAX):
        failures.add(str(number), 200.0)
    assert len(failures._found) == REMEMBERED_MAX
    assert "10.0.0.1" not in failures._found


async def finish(attempt: LoginAttempt[Any]) -> Any:
    """The outcome of an attempt that need not wait for the clock."""
    while (done := attempt.done) is None:
        await asyncio.wait_for(attempt.wait(), 20)
    return done[0]


async def begun(attempt: LoginAttempt[Any]) -> asyncio.Task[Any]:
    """An attempt that waits for the clock."""
    task = asyncio.create_task(finish(attempt))
    for _ in range(3):
        await asyncio.sleep(0.01)
    assert not task.done()
    return task


async def test_refusals_are_delayed_more_each_time_and_the_right_password_is_not(
    logins: Logins, clock: ManualClock
) -> None:
    """Eight that guessed a user's password once kept that user out: every attempt waited before it was checked."""
    with capture_logs() as logged:
        for _ in range(USER_FAILURES_FREE - 1):
            assert await finish(logins.by_password("ann", "wrong", "10.0.0.1")) is None
    assert [(each["event"], each["user"], each["peer"]) for each in logged] == [("logins failed", "ann", "10.0.0.1")]
    assert logins.failed_count == USER_FAILURES_FREE - 1
    guess = await begun(logins.by_password("ann", "wrong", "10.0.0.1"))
    for peer in ("10.0.0.1", "10.0.0.2"):
        assert await finish(logins.begin("ann", peer, lambda: "right")) == "right"
    assert await finish(logins.by_password("bob", "wrong", "10.0.0.1")) is None
    clock.advance(DELAY_MIN_S)
    assert await guess is None


async def test_peers_that_guess_wait_in_a_queue_and_others_do_not(logins: Logins, clock: ManualClock) -> None:
    checked: list[int] = []
    for number in range(PEER_FAILURES_FREE):
        logins.failed(f"user{number}", "10.0.0.1")
    tasks = [await begun(logins.begin("ann", "10.0.0.1", partial(checked.append, each))) for each in range(3)]
    right = await begun(logins.by_password("ann", "right", "10.0.0.1"))
    assert checked == [], "one waits for the other"
    assert await finish(logins.by_password("ann", "right", "10.0.0.2")) == Reader("ann")
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert logins.failed_count == PEER_FAILURES_FREE + 1, "to hang up is a failure as well"
    while not right.done():
        clock.advance(PACE_S)
        await asyncio.sleep(0.01)
    assert checked == [0, 2]
    assert right.result() == Reader("ann"), "it waits for no refusal"
    for task in (tasks[0], tasks[2]):
        task.cancel()


@pytest.mark.parametrize("error", [None, SaslError("wrong user or password")], ids=["password", "proof"])
async def test_a_client_that_hangs_up_during_its_check_counts_as_a_failure(
    logins: Logins, error: Exception | None
) -> None:
    """Each wrong proof of a SCRAM login once wrote one, before any login."""
    received: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: received.append(context))
    checking, release = threading.Event(), threading.Event()

    def wrong() -> None:
        checking.set()
        release.wait(20)
        if error is not None:
            raise error

    waiting = asyncio.create_task(logins.begin("ann", "10.0.0.1", wrong).wait())
    await asyncio.to_thread(checking.wait, 20)
    waiting.cancel()
    await asyncio.wait([waiting])
    release.set()
    await until(lambda: logins.failed_count == 1)
    del waiting
    gc.collect()
    await asyncio.sleep(0)
    assert received == []


async def test_attempts_at_the_end_of_a_process_are_refused_without_an_error(logins: Logins) -> None:
    started, release = threading.Event(), threading.Event()

    def slow() -> bytes:
        started.set()
        release.wait(20)
        return b"done"

    attempts = [logins.begin("ann", "local", slow) for _ in range(3)]
    tasks = [asyncio.create_task(finish(attempt)) for attempt in attempts[:2]]
    await asyncio.to_thread(started.wait, 20)
    logins.close()
    release.set()
    assert await asyncio.gather(*tasks, finish(attempts[2])) == [b"done", None, None]
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


async def test_requests_behind_a_login_wait_for_it(store: Store, users_file: Path) -> None:
    """Also for a client that takes answers in any order, or it would be refused what it may have."""
    async with serving(store.path, readers=FileUsers(users_file)) as endpoint:
        client = await endpoint.connect()
        await client.hello(*ALL_FEATURES)
        await client.send(kv_client.sasl_auth(b"PLAIN", b"\0ann\0pw"), kv_client.select_bucket(b"orders"))
        for _ in range(2):
            assert (await client.answer()).status == Status.SUCCESS


def test_an_attempt_over_http_leaves_the_queue_with_its_client(
    source: Source, tmp_path: Path, users_file: Path
) -> None:
    """Thousands that had hung up once stood before the next right password, for longer than a login may take."""
    with running(tmp_path / "data", source, users_file=users_file) as site:
        logins, state = site.server.service.logins, site.server.gate
        for _ in range(50):
            logins.failed("ann", LOCAL)
        site.call(logins._line.acquire())
        with site.connect() as line:
            line.sendall(request("/v1/status", user="ann:pw"))
            eventually_now(lambda: logins._line._waiters)
        eventually_now(lambda: not state.answering)
        assert not logins._line._waiters
        site.loop.call_soon_threadsafe(logins._line.release)


async def test_unanswered_challenges_are_failed_logins(store: Store, users_file: Path) -> None:
    """A single connection once got 600 of them."""
    async with serving(store.path, readers=FileUsers(users_file)) as endpoint:
        client = await endpoint.connect()
        for number in range(4):
            first = ScramClient("SCRAM-SHA512", "ann", "pw").first()
            answer = await client.ask(kv_client.sasl_auth(b"SCRAM-SHA512", first))
            assert answer.status == (Status.AUTH_CONTINUE if number < FAILED_LOGINS_MAX else Status.AUTH_ERROR)
        assert await client.receive() is None


async def test_a_login_that_began_before_the_password_was_changed_is_refused(store: Store, users_file: Path) -> None:
    async with serving(store.path, readers=FileUsers(users_file)) as endpoint:
        client, exchange = await endpoint.connect(), ScramClient("SCRAM-SHA512", "ann", "pw")
        challenge = await client.ask(kv_client.sasl_auth(b"SCRAM-SHA512", exchange.first()))
        with_users(users_file, {"ann": "another"})
        answer = await client.ask(kv_client.sasl_step(b"SCRAM-SHA512", exchange.final(challenge.value)))
        assert answer.status == Status.AUTH_ERROR


async def test_guesses_and_silent_connections_do_not_lock_users_out(store: Store, users_file: Path) -> None:
    """Eight guessers of one user's password, and others that connect and say nothing, once did."""
    async with serving(store.path, readers=FileUsers(users_file), reader_connections_max=64) as endpoint:
        assert isinstance(endpoint.server.clients, MirrorClients)
        logins = endpoint.server.clients.logins
        for _ in range(50):
            logins.failed("ann", "local")
        for _ in range(8):
            client = await endpoint.connect()
            await client.send(kv_client.sasl_auth(b"PLAIN", b"\0ann\0wrong"))
        late = await endpoint.connect()
        await late.send(kv_client.sasl_auth(b"PLAIN", b"\0ann\0pw"))
        await until(lambda: sum(each.slot.logging_in for each in endpoint.server.connections) == 9)
        for _ in range(endpoint.server.admission.pending_max * 2):
            await endpoint.connect()
        assert (await late.answer()).status == Status.SUCCESS, "it was not closed for those who say nothing"


def test_a_known_password_does_not_wait_behind_guesses(source: Source, tmp_path: Path, users_file: Path) -> None:
    source.put("a", b"1")
    with running(tmp_path / "data", source, users_file=users_file) as site:
        site.get(site.document("a"), auth=("ann", "pw"))
        logins = site.server.service.logins
        for _ in range(50):
            logins.failed("ann", "local")
        assert logins.guesses("local")

        def begin(*_: object) -> None:
            raise AssertionError("it waits with the others")

        logins.check = begin  # type: ignore[assignment, method-assign]
        site.get(site.document("a"), auth=("ann", "pw"))
