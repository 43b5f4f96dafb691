"""An operator's commands: roll a vbucket back, or read it again from the beginning.

After a command that changes something, a new machine starts from the stored state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from mirror.errors import ConfigError, MirrorError
from mirror.feed.follow.consumer import Consumer
from mirror.feed.follow.group_commits import Group
from mirror.feed.follow.mirrored_vbucket import MirroredVbucket
from mirror.ingest.events import ResyncRefused
from mirror.messages import Resync, RollBack
from storage.errors import StorageError
from storage.write.writer import RollbackResult


def execute(consumer: Consumer, command: RollBack | Resync) -> dict[str, int]:
    """Execute a command; return what it did. Raises ConfigError, MirrorError, StorageError."""
    return _roll_back(consumer, command) if isinstance(command, RollBack) else _resync(consumer, command)


def _vbucket_of(consumer: Consumer, vbid: int) -> MirroredVbucket | None:
    vbucket = consumer.vbuckets.get(vbid)
    if vbucket is not None and vbucket.group.error is not None:
        raise vbucket.group.error
    return vbucket


@contextmanager
def _noticed_by(group: Group) -> Iterator[None]:
    """Stop the group's streams if its store fails."""
    try:
        yield
    except StorageError as error:
        group.failed(error)
        raise


def _roll_back(consumer: Consumer, command: RollBack) -> dict[str, int]:
    """Go back to the newest kept boundary at or below a seqno, and stream from there.

    If that boundary is the published seqno, only commit what is complete.
    """
    vbid, to_seqno = command.vbid, command.to
    vbucket = _vbucket_of(consumer, vbid)
    if vbucket is None or to_seqno < 0:
        raise ConfigError(f"rollback of vb {vbid} to {to_seqno}", hint="give a vbucket of this worker and a seqno")
    with _noticed_by(vbucket.group):
        vbucket.group.commit()
    boundary, state = vbucket.writer.check_rollback(to_seqno), vbucket.writer.state
    if boundary.seqno == state.published_seqno:
        branch, at = state.branch, boundary.seqno
        return {"vbid": vbid} | asdict(RollbackResult(at, from_seqno=at, branch=branch, from_branch=branch))
    vbucket.host.drop_machine()
    with _noticed_by(vbucket.group):
        result = vbucket.writer.rollback(to_seqno)
    vbucket.sink.note_rollback(result)
    vbucket.host.start_machine()
    consumer.attach_if_ready(vbucket)
    return {"vbid": vbid} | asdict(result)


def _resync(consumer: Consumer, command: Resync) -> dict[str, int]:
    vbid = command.vbid
    vbucket = _vbucket_of(consumer, vbid)
    if vbucket is None:
        raise ConfigError(f"resync of vb {vbid}", hint="vbid must be one of this worker")
    vbucket.host.drop_machine()
    with _noticed_by(vbucket.group):
        answer = vbucket.sink.begin_resync("requested by an operator")
    vbucket.host.start_machine()
    consumer.attach_if_ready(vbucket)
    if isinstance(answer, ResyncRefused):
        raise MirrorError(f"vb {vbid}: {answer.text}", hint="free space on the disk")
    return {"vbid": vbid, "staging_branch": int(answer.state.staging_branch)}
