"""An operator's commands to a consumer: roll a vbucket back, or read it again from the beginning.

Knows how to check a command, and its effect on a vbucket's store. Afterwards the machine starts again from the stored
state and decides what to request from the source. Invariants: a refused command changes nothing; the store is committed
before it is rolled back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from mirror.errors import ConfigError, MirrorError
from mirror.feed.connection.session import NodeSession
from mirror.feed.follow.group_commits import Group, GroupCommits
from mirror.feed.follow.vbucket import MirroredVbucket
from mirror.messages import Resync, RollBack
from storage.errors import StorageError
from storage.write.writer import RollbackResult


class ConsumerCommands:
    def __init__(self, commits: GroupCommits, attach: Callable[[MirroredVbucket, NodeSession], None]) -> None:
        """`attach` lets a vbucket ask for its stream over a session."""
        self._commits = commits
        self._attach = attach

    def request(self, command: RollBack | Resync) -> dict[str, int]:
        """Execute a command; return what it did. Raises ConfigError, MirrorError, StorageError."""
        return self._roll_back(command) if isinstance(command, RollBack) else self._resync(command)

    def _of(self, vbid: int) -> tuple[Group, MirroredVbucket] | None:
        for group in self._commits.groups:
            if (vbucket := group.vbuckets.get(vbid)) is not None:
                if group.error is not None:
                    raise group.error
                return group, vbucket
        return None

    def _roll_back(self, command: RollBack) -> dict[str, int]:
        """Go back to the newest kept boundary at or below a seqno, and stream on from there.

        If that boundary is the published one, change nothing.
        """
        vbid, to_seqno = command.vbid, command.to
        found = self._of(vbid)
        if found is None or to_seqno < 0:
            raise ConfigError(f"rollback of vb {vbid} to {to_seqno}", hint="give a vbucket of this worker and a seqno")
        group, vbucket = found
        session = vbucket.session
        try:
            group.commit()
        except StorageError as error:
            group.failed(error)
            raise
        boundary = group.writer.vbuckets[vbid].check_rollback(to_seqno)
        state = group.writer.vbuckets[vbid].state
        if boundary.seqno == state.published_seqno:
            branch, at = state.branch, boundary.seqno
            return {"vbid": vbid} | asdict(RollbackResult(at, from_seqno=at, branch=branch, from_branch=branch))
        vbucket.drop_machine()
        try:
            result = group.writer.vbuckets[vbid].rollback(to_seqno)
        except StorageError as error:
            group.failed(error)
            raise
        vbucket.note_rollback(result)
        vbucket.start_machine()
        if session is not None and session.ready:
            self._attach(vbucket, session)
        return {"vbid": vbid} | asdict(result)

    def _resync(self, command: Resync) -> dict[str, int]:
        """Fetch a vbucket again next to its old copy, and swap it in when it is whole."""
        vbid = command.vbid
        found = self._of(vbid)
        if found is None:
            raise ConfigError(f"resync of vb {vbid}", hint="vbid must be one of this worker")
        group, vbucket = found
        session = vbucket.session
        vbucket.drop_machine()
        try:
            vbucket.begin_resync("requested by an operator")
        except StorageError as error:
            group.failed(error)
            raise
        state = group.writer.vbuckets[vbid].state
        vbucket.start_machine()
        if session is not None and session.ready:
            self._attach(vbucket, session)
        if state.published_seqno and state.staging_branch == state.branch:
            raise MirrorError(f"vb {vbid} cannot be resynced", hint="free space on the disk for a second copy of it")
        return {"vbid": vbid, "staging_branch": int(state.staging_branch)}
