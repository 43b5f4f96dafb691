"""Waiting for one's own writes: through publishes, rollbacks, failovers not heard of yet, and resyncs."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mirror import MutationToken
from storage.errors import NotPublished, StorageError, WriteLost
from storage.model import FailoverLog, Seqno, Vbuuid
from storage.read import wait
from storage.read.view import View
from storage.read.wait import POLL_MAX_S, POLL_MIN_S, WriteStatus, next_delay_s, wait_for
from storage.write.writer import GroupWriter
from tests.storage.model import keys_of
from tests.storage.rig import open_writer, publish

A = keys_of(0, 1)[0]
OLD, NEW, NEWER = 77, 88, 99


def log_of(*entries: tuple[int, int]) -> FailoverLog:
    return FailoverLog.of(entries)


def token(vbuuid: int, seqno: int, vbid: int = 0) -> MutationToken:
    return MutationToken(vbid, Vbuuid(vbuuid), Seqno(seqno))


def write_status(view: View, token: MutationToken) -> WriteStatus:
    return wait.write_status(view.reader(token.vbid), token)


@pytest.fixture
def writer(path: str) -> Iterator[GroupWriter]:
    opened = open_writer(path)
    opened.vbuckets[0].save(failover_log=log_of((OLD, 0)))
    for seqno in range(1, 11):
        publish(opened, 0, [(A, b"%d" % seqno, seqno)])
    yield opened
    opened.close()


def test_a_wait_for_a_write_ends_when_it_is_published(view: View, writer: GroupWriter) -> None:
    assert write_status(view, token(OLD, 10)) is WriteStatus.PUBLISHED
    assert write_status(view, token(OLD, 11)) is WriteStatus.WAITING
    assert write_status(view, token(0, 10)) is WriteStatus.PUBLISHED
    view.wait_for(token(OLD, 10), 0)
    with pytest.raises(NotPublished, match="0:77:11 is not published after") as caught:
        view.wait_for(token(OLD, 11), 0.01)
    assert caught.value.retryable
    seen: list[bytes] = []

    def wait_and_read() -> None:
        view.wait_for(token(OLD, 11), 60)
        document = view.get(A)
        seen.append(document.value if document else b"")

    waiting = threading.Thread(target=wait_and_read)
    waiting.start()
    publish(writer, 0, [(A, b"11", 11)])
    waiting.join()
    assert seen == [b"11"]


def test_a_write_undone_by_a_failover_is_lost_at_once(view: View, writer: GroupWriter) -> None:
    """Between the rollback and the source's new log nothing is said of what may come again."""
    writer.vbuckets[0].rollback(7)
    assert write_status(view, token(OLD, 7)) is WriteStatus.PUBLISHED
    assert write_status(view, token(OLD, 8)) is WriteStatus.WAITING
    assert write_status(view, token(OLD, 10)) is WriteStatus.WAITING
    writer.vbuckets[0].save(failover_log=log_of((NEW, 8), (OLD, 0)))
    writer.commit()
    assert write_status(view, token(OLD, 8)) is WriteStatus.WAITING
    assert write_status(view, token(OLD, 9)) is WriteStatus.LOST
    assert write_status(view, token(NEW, 9)) is WriteStatus.WAITING
    with pytest.raises(WriteLost, match="0:77:10 was lost") as caught:
        view.wait_for(token(OLD, 10), 60)
    assert not caught.value.retryable
    publish(writer, 0, [(A, b"new", 9)])
    assert write_status(view, token(OLD, 8)) is WriteStatus.PUBLISHED
    assert write_status(view, token(OLD, 9)) is WriteStatus.LOST
    assert write_status(view, token(NEW, 9)) is WriteStatus.PUBLISHED


def test_a_failover_log_that_shows_the_loss_suffices_without_a_rollback(view: View, writer: GroupWriter) -> None:
    writer.vbuckets[0].save(failover_log=log_of((NEW, 10), (OLD, 0)))
    writer.commit()
    assert write_status(view, token(OLD, 10)) is WriteStatus.PUBLISHED
    assert write_status(view, token(OLD, 11)) is WriteStatus.LOST


def test_a_history_that_was_left_is_lost_once_the_source_sent_its_log(view: View, writer: GroupWriter) -> None:
    """The source failed over to a node that never knew the mirror's newest history."""
    writer.vbuckets[0].save(failover_log=log_of((NEW, 8), (OLD, 0)))
    publish(writer, 0, [(A, b"11", 11)])
    assert write_status(view, token(NEW, 11)) is WriteStatus.PUBLISHED
    writer.vbuckets[0].rollback(7)
    assert write_status(view, token(NEW, 11)) is WriteStatus.WAITING
    writer.vbuckets[0].save(failover_log=log_of((NEWER, 7), (OLD, 0)))
    writer.commit()
    assert write_status(view, token(NEW, 11)) is WriteStatus.LOST
    assert write_status(view, token(NEW, 8)) is WriteStatus.LOST
    assert write_status(view, token(OLD, 7)) is WriteStatus.PUBLISHED


def test_a_write_below_a_rollback_is_not_lost_once_the_log_has_forgotten_its_history(
    view: View, writer: GroupWriter
) -> None:
    """A log has 25 entries: "write it again" was said of a write that is here."""
    writer.vbuckets[0].rollback(7)
    writer.vbuckets[0].save(failover_log=log_of(*((100 + number, 9) for number in reversed(range(25)))))
    publish(writer, 0, [(A, b"new", 12)])
    assert write_status(view, token(OLD, 7)) is WriteStatus.WAITING
    assert write_status(view, token(OLD, 8)) is WriteStatus.LOST


def test_a_write_of_an_unknown_history_is_waited_for(view: View, writer: GroupWriter) -> None:
    assert write_status(view, token(NEWER, 3)) is WriteStatus.WAITING
    with pytest.raises(NotPublished):
        view.wait_for(token(NEWER, 3), 0)
    writer.vbuckets[0].save(failover_log=log_of((NEWER, 10), (OLD, 0)))
    publish(writer, 0, [(A, b"11", 11)])
    view.wait_for(token(NEWER, 11), 0)


def test_a_write_is_waited_for_during_a_resync(view: View, writer: GroupWriter) -> None:
    writer.vbuckets[0].begin_resync()
    writer.vbuckets[0].save(failover_log=log_of((NEW, 0)))
    writer.commit()
    assert write_status(view, token(NEW, 3)) is WriteStatus.WAITING
    assert write_status(view, token(0, 3)) is WriteStatus.WAITING
    publish(writer, 0, [(A, b"3", 3)])
    assert write_status(view, token(NEW, 3)) is WriteStatus.PUBLISHED


def test_a_vbucket_that_does_not_exist_is_an_error(view: View) -> None:
    with pytest.raises(StorageError, match="no vbucket 900"):
        view.wait_for(token(OLD, 1, vbid=900), 60)


def test_pauses_between_looks_grow_up_to_their_limit(view: View) -> None:
    now = [0.0]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    with pytest.raises(NotPublished):
        wait_for(view.groups, token(OLD, 11), 0.2, sleep=sleep, monotonic=lambda: now[0])
    assert pauses[0] == POLL_MIN_S
    assert pauses[:-1] == sorted(pauses[:-1])
    assert max(pauses) == POLL_MAX_S
    assert sum(pauses) == pytest.approx(0.2)
    assert next_delay_s(POLL_MAX_S) == POLL_MAX_S


def test_a_token_is_read_from_text_and_from_the_sdk() -> None:
    assert MutationToken.parse("3:18446744073709551615:5") == token(2**64 - 1, 5, vbid=3)
    assert MutationToken.parse(str(token(OLD, 5))) == token(OLD, 5)
    for bad in ("", "1:2", "1:2:3:4", "a:1:2", "-1:1:1", "70000:1:1", f"1:1:{2**64}", "1:1:" + "9" * 5000, "1:1:²"):
        with pytest.raises(ValueError, match="not a mutation token"):
            MutationToken.parse(bad)

    class SdkToken:
        def as_dict(self) -> dict[str, object]:
            return {"partition_id": 7, "partition_uuid": 9, "sequence_number": 4, "bucket_name": "b"}

    assert MutationToken.of(SdkToken()) == token(9, 4, vbid=7)
