"""Rules that the program lives by, each broken in one line, and the tests that must notice.

A line of the table: the file, what is replaced (it occurs once there), what it is replaced with, and the tests. A
change of such a line changes the table, too: `test_mutations` says where it no longer applies.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """A rule that is broken."""

    file: str
    old: str
    new: str
    suite: str
    """Arguments of pytest."""


_ASSEMBLER, _MACHINE = "mirror/ingest/assembler.py", "mirror/ingest/machine.py"
_HANDSHAKE, _STREAMING = "mirror/ingest/handshake.py", "mirror/ingest/streaming.py"
_OFFSET = "mirror/ingest/offset.py"
_PERSISTENCE, _VBUCKET = "mirror/feed/follow/persistence.py", "mirror/feed/follow/mirrored_vbucket.py"
_STORE_SINK = "mirror/feed/follow/store_sink.py"
_BRANCHES, _PURGE = "storage/history/branches.py", "storage/history/purge.py"
_OWNER, _LEAVING = "storage/write/owner.py", "storage/write/vbucket_writer.py"
_RETRACTIONS, _OF_RETRACTIONS = "storage/read/retractions.py", "tests/storage/test_retractions.py"

_OF_WATCH_END = "tests/feed/test_watch.py -k snapshot_without"
_SPARK_CHANGES, _OF_SPARK_CHANGES = "mirror/spark/source/changes.py", "tests/spark/source/test_changes.py -k flushed"

_OF_ASSEMBLER, _OF_MACHINE = "tests/ingest/test_assembler.py", "tests/ingest/test_machine.py"
_OF_ROLLBACK, _OF_OFFSET = "tests/server/test_rollback.py", "tests/ingest/test_offset.py"
_OF_GATE, _OF_STORE_SINK = "tests/feed/test_persistence.py", "tests/feed/test_store_sink.py"
_MODEL, _OF_MODEL = "storage/model.py", "tests/storage/test_model.py"
_MERGE, _OF_MERGE = "storage/history/merge.py", "tests/storage/test_merge.py"
_OF_KV_LARGE = "tests/serve/test_kv_large.py -k 'behind or bounded'"
_OF_KV_BUCKET = "tests/serve/test_kv_bucket.py -k 'manifest or replaced'"
_CHANGES, _OF_CHANGES = "storage/read/changes.py", "tests/storage/test_changes.py"
_VALIDITY, _OF_SCAN = "storage/read/validity.py", "tests/storage/test_scan.py"
_OF_OWNER = "tests/storage/test_owner.py"
_OF_LEAVING, _OF_PURGE = "tests/storage/test_left_branches.py", "tests/storage/test_purge.py"
_STATUS, _OF_STATUS = "mirror/supervise/reports/progress.py", "tests/supervise/test_status.py"
_OF_WATCH = "tests/feed/test_watch.py -k nothing_is_not_in_contact"
_OF_STREAMS = "tests/serve/test_dcp_requests.py -k beyond_the_limit"
_MAPS, _OF_MAPS = "mirror/supervise/context.py", "tests/supervise/test_maps.py"
_OF_FORKS = "tests/storage/test_forks.py -k 'not counts and not server'"
_OF_MOUNTS = "tests/storage/test_access.py -k 'overlay or overwritten'"
_ENVIRONMENT, _OF_ENVIRONMENT = "storage/env/environment.py", "tests/storage/test_environment.py"
_DOCUMENTS, _OF_DOCUMENTS = "mirror/spark/tables/documents.py", "tests/spark/tables/test_documents.py"
_LAKE_MERGE, _LAKE, _OF_LAKE = (
    "mirror/spark/tables/merge.py",
    "mirror/spark/tables/lake.py",
    "tests/spark/tables/test_lake.py",
)
_OF_MERGE_OF_PART = "tests/spark/tables/test_merge.py"
_HEALTH, _OF_HEALTH = "mirror/health.py", "tests/supervise/test_health.py"
_POINT_READS, _READER = "storage/read/point_reads.py", "storage/read/vbucket_reader.py"
_OF_BIT_FLIPS = "tests/storage/test_bit_flips.py -k 'not no_wrong_document'"
_REPORTS, _OF_CHANNELS = "mirror/supervise/reports/collector.py", "tests/supervise/test_status_channels.py -k never"
_BODIES, _OF_BODIES = "mirror/typed/bodies.py", "tests/typed/test_bodies.py"
_OF_RISING = "tests/spark/source/test_changes.py -k its_retractions"
_OF_OWNERSHIP = "tests/supervise/test_ownership.py"
_OF_LOGINS = "tests/serve/test_logins.py"
_DELTA, _OF_DELTA = "mirror/spark/tables/delta.py", "tests/spark/tables/test_delta.py"

MUTATIONS = (
    # --- the steps of a listener's event loop
    Mutation(
        "mirror/serve/kv/scans.py",
        "byte_count += sum(len(each.value) for each in documents)",
        "pass",
        "tests/serve/test_kv_scans.py",
    ),
    # --- the snapshots of a backlog
    Mutation(
        "storage/read/stream_reads.py",
        "for seqno in seqnos or [now.pub.seqno]]",
        "for seqno in [now.pub.seqno]]",
        "tests/serve/test_dcp_stream.py",
    ),
    Mutation(
        "storage/read/stream_reads.py",
        "return 0 if crossed or resynced or",
        "return 0 if crossed or",
        "tests/storage/test_stream.py -k replaced_copy",
    ),
    Mutation(
        "storage/read/stream_reads.py",
        "each.to_seqno < base_seqno or _lost_settled(txn, each, base_seqno, floor)",
        "_lost_settled(txn, each, base_seqno, floor)",
        "tests/storage/test_stream.py -k rollback_on_command",
    ),
    Mutation(
        "storage/read/stream_reads.py",
        "self._number = txn.raw.id()",
        "self._number = reader.environment.newest_commit()",
        "tests/storage/test_stream.py -k looks_during",
    ),
    Mutation(
        "mirror/serve/watch.py",
        "found += [each for each in self._followers if each % group_count == group]",
        "raise",
        "tests/serve/test_watch.py",
    ),
    # --- a mirror as the source
    Mutation(
        "mirror/feed/follow/watch.py",
        "if by_mirror and collections is None and (seqno or 0) < published.get(vbucket.vbid, 0):",
        "if by_mirror and (seqno or 0) < published.get(vbucket.vbid, 0):",
        "tests/serve/test_dcp_cascade.py -k one_collection_of",
    ),
    Mutation(
        "mirror/feed/follow/watch.py",
        "if by_mirror and collections is None and (seqno or 0) < published.get(vbucket.vbid, 0):",
        "if False:",
        "tests/serve/test_dcp_cascade.py -k mirror_that_is_behind",
    ),
    Mutation(
        "mirror/feed/follow/watch.py",
        "vbucket.source_silent_ms = lost_ms.get(vbucket.vbid)",
        "pass",
        "tests/serve/test_dcp_cascade.py -k without_contact",
    ),
    Mutation(
        _HANDSHAKE,
        "machine.features.by_mirror and newest in [entry.vbuuid for entry in machine.stored.failover_log[1:]]",
        "False",
        f"{_OF_MACHINE} -k behind",
    ),
    Mutation(
        "mirror/serve/dcp/producer.py",
        "if end_seqno is not None and history.high_seqno < held_seqno <= end_seqno:",
        "if False:",
        "tests/serve/test_dcp_requests.py -k ahead_of_the_mirror",
    ),
    # --- the tombstones that a follower may lack
    Mutation(_STREAMING, "max(earlier, SEQNO_MAX if", "(SEQNO_MAX if", _OF_MACHINE),
    Mutation(_STREAMING, "SEQNO_MAX if reported is None else reported", "reported or 0", _OF_MACHINE),
    Mutation(
        _STREAMING,
        "    if not machine.assembler.boundary_seqno:\n        earlier",
        "    if True:\n        earlier",
        _OF_MACHINE,
    ),
    Mutation(
        "storage/write/commit.py",
        "missing_seqno=min(state.missing_seqno, seqno) if first else state.missing_seqno",
        "missing_seqno=state.missing_seqno",
        "tests/storage/test_stream.py -k purge_seqno_for_followers",
    ),
    # --- which seqnos make a whole snapshot
    Mutation(_ASSEMBLER, "Seqno(max(event.end_seqno, self._resumed_end))", "Seqno(event.end_seqno)", _OF_ASSEMBLER),
    Mutation(_ASSEMBLER, "if end_seqno < self.position_seqno:", "if False:", _OF_ASSEMBLER),
    Mutation(_ASSEMBLER, "if end_seqno >= SEQNO_MAX:", "if end_seqno > SEQNO_MAX:", _OF_ASSEMBLER),
    Mutation(_BRANCHES, "    if not state.has_served_log:", "    if False:", _OF_LEAVING),
    Mutation(_ASSEMBLER, "if first_seqno <= self.position_seqno:", "if False:", _OF_ASSEMBLER),
    Mutation(_ASSEMBLER, "if last_seqno - first_seqno < len(rows) - 1:", "if False:", _OF_ASSEMBLER),
    Mutation(
        _ASSEMBLER,
        "if seqno == self.open_snapshot.end_seqno:",
        "if seqno + 1 >= self.open_snapshot.end_seqno:",
        _OF_ASSEMBLER,
    ),
    Mutation(_ASSEMBLER, "if open_snapshot is None or self._replaces_end:", "if open_snapshot is None:", _OF_ASSEMBLER),
    Mutation(_ASSEMBLER, "if seqno > self.open_snapshot.end_seqno:", "if False:", _OF_ASSEMBLER),
    Mutation(
        _ASSEMBLER,
        "if not self._collections and event.start_seqno > current.end_seqno:",
        "if event.start_seqno > current.end_seqno:",
        _OF_ASSEMBLER,
    ),
    Mutation(_ASSEMBLER, "if isinstance(event, Commit):", "if False:", _OF_ASSEMBLER),
    Mutation(
        "mirror/wire/scan.py", "and 0 < key_length <= 251", "and 0 < key_length", "tests/wire/test_scan.py -k key_that"
    ),
    # --- the conversation with the source
    Mutation(
        _HANDSHAKE,
        "if machine.offset.inside_snapshot and seqno >= boundary_seqno:",
        "if machine.offset.inside_snapshot:",
        _OF_MACHINE,
    ),
    Mutation(
        _HANDSHAKE, "if seqno == 0 or too_many or seqno >= machine.offset.start_seqno:", "if seqno == 0:", _OF_MACHINE
    ),
    Mutation(_HANDSHAKE, "if machine.handshake.common_tried:", "if True:", _OF_MACHINE),
    Mutation(_HANDSHAKE, "if common.seqno < boundary_seqno:", "if False:", _OF_MACHINE),
    Mutation(
        _STREAMING,
        "due = [opaque for end_seqno, opaque in machine.marker_acks if end_seqno <= event.seqno]",
        "due = [opaque for end_seqno, opaque in machine.marker_acks]",
        _OF_MACHINE,
    ),
    Mutation(_STREAMING, "if event.end_seqno <= machine.durable_seqno:", "if True:", _OF_MACHINE),
    Mutation(
        _MACHINE,
        "if opaque != self.opaque or self.phase is not Phase.STREAMING or not rows:",
        "if self.phase is not Phase.STREAMING or not rows:",
        _OF_MACHINE,
    ),
    Mutation(
        _HANDSHAKE,
        "failover_log=event.failover_log or stored.failover_log",
        "failover_log=stored.failover_log",
        _OF_MACHINE,
    ),
    Mutation(_MODEL, "for entry in self if entry.seqno <= seqno]", "for entry in self]", f"{_OF_MODEL} {_OF_LEAVING}"),
    Mutation(_MODEL, "kept = [FailoverEntry(Vbuuid(vbuuid), Seqno(seqno))]", "pass", _OF_MODEL),
    Mutation(
        _HANDSHAKE,
        "seqno = min(own_end_seqno, source_end_seqno, own_seqno)",
        "seqno = min(own_end_seqno, own_seqno)",
        _OF_ROLLBACK,
    ),
    Mutation(_MODEL, "if entry.seqno <= seqno:", "if entry.seqno < seqno:", _OF_MODEL),
    Mutation(_OFFSET, "failover_log.vbuuid_at(end_seqno)", "failover_log.vbuuid_at(staged_seqno)", _OF_OFFSET),
    Mutation(
        _OFFSET,
        "boundary_seqno < staged_seqno < open_snapshot.end_seqno",
        "boundary_seqno < staged_seqno <= open_snapshot.end_seqno",
        _OF_OFFSET,
    ),
    # --- publish=persisted
    Mutation(_STORE_SINK, "if held[0] <= persisted_seqno]", "]", _OF_GATE),
    Mutation(_STORE_SINK, "if not ready or ready[-1][0] < at_least:", "if not ready:", _OF_GATE),
    Mutation(
        _PERSISTENCE, "if self._copies.copies_of(vbucket.vbid) == slowest.copies:", "if slowest.copies:", _OF_GATE
    ),
    Mutation(
        _PERSISTENCE, "min(seen.persisted_seqno, seen.last_seqno_received or 0)", "seen.persisted_seqno", _OF_GATE
    ),
    Mutation(_VBUCKET, "if self.gate is None or vbuuid != self.observed_vbuuid:", "if self.gate is None:", _OF_GATE),
    Mutation(_STORE_SINK, "POLLS_MIN = 2", "POLLS_MIN = 1", _OF_GATE),
    Mutation(_STORE_SINK, "deferred=self.gate is not None", "deferred=False", _OF_GATE),
    Mutation(
        _STORE_SINK,
        "if not state.has_served_log and not state.rollback_deferred:",
        "if False:",
        _OF_STORE_SINK,
    ),
    Mutation(
        _STORE_SINK,
        "        self.forget()\n        self.writer.begin_resync(",
        "        self.writer.begin_resync(",
        f"{_OF_STORE_SINK} -k held_ends",
    ),
    Mutation(
        _STORE_SINK,
        "        self.forget()\n        if not self.writer.abandon(",
        "        if not self.writer.abandon(",
        f"{_OF_STORE_SINK} -k held_ends",
    ),
    # --- the consumer core
    Mutation(
        "mirror/feed/host.py",
        "            if self.machine is None:\n                return\n            answer",
        "            answer",
        "tests/feed/test_host.py",
    ),
    Mutation(
        "mirror/feed/read/snapshot.py",
        "self.forget()\n                    return StagingRefused(",
        "return StagingRefused(",
        "tests/feed/test_spool_sink.py -k refused",
    ),
    Mutation(
        "mirror/feed/read/reading.py", "self.full = self.full or (", "self.full = (", "tests/feed/test_reading.py"
    ),
    Mutation(
        "mirror/feed/cluster/connections.py",
        "check=connections.check",
        "check=None",
        "tests/feed/test_reader.py -k was_recreated",
    ),
    Mutation(
        "mirror/feed/cluster/connections.py",
        "session.acks_held = connections.acks_held",
        "pass",
        "tests/feed/test_connections.py",
    ),
    # --- the store
    Mutation(
        _OWNER,
        'if txn.get(keys.DB_META, b"fence") != fence:',
        "if False:",
        "tests/storage/test_owner.py -k lost_its_group",
    ),
    Mutation(
        _LEAVING,
        "if keep_complete and self.complete_seqno is not None:",
        "if False:",
        f"{_OF_LEAVING} -k a_complete_snapshot",
    ),
    Mutation(
        _OWNER,
        "                txn.raw.abort()\n                self.reload()\n                raise storage_error(",
        "                txn.raw.abort()\n                raise storage_error(",
        "tests/crash/test_disk_errors.py",
    ),
    Mutation(_LEAVING, "to_seqno = min(to_seqno, state.staging_published_seqno)", "pass", _OF_GATE),
    Mutation(
        "storage/write/commit.py",
        "log = state.failover_log if known else FailoverLog()",
        "log = state.failover_log",
        "tests/storage/test_commit.py",
    ),
    Mutation(
        _BRANCHES,
        "change_purge_row(txn, vbid, purged_seqno=0, local_purge_seqno=0)",
        "pass",
        f"{_OF_PURGE} -k its_own_purge_record",
    ),
    Mutation(_BRANCHES, "log = own_log.pruned(at, boundary.vbuuid)", "log = own_log", _OF_LEAVING),
    Mutation(_BRANCHES, "pub._replace(flags=pub.flags | flags)", "pub", "tests/storage/test_resync_reads.py"),
    Mutation(_PURGE, "target = max(floor, min(target, base))", "pass", _OF_GATE),
    Mutation(_PURGE, "target = max(floor, min(target, held))", "pass", "tests/storage/test_leases.py"),
    Mutation(
        _PURGE,
        "if is_tombstone and chain.newest_version(self._cursor, wire_key, self._at_floor) == dup:",
        "if is_tombstone:",
        _OF_PURGE,
    ),
    Mutation(
        _MERGE,
        "parent = parent._replace(history_ids=ids, kept_seqno=SEQNO_MAX)",
        "parent = parent._replace(kept_seqno=SEQNO_MAX)",
        _OF_MERGE,
    ),
    Mutation(_MERGE, "    branches.draw_chain_id(txn, vbid)", "    pass", _OF_MERGE),
    Mutation(
        _MERGE, "not parent_has and not chain.has_rows(txn, vbid, pair.branch, pair.top_seqno)", "pair", _OF_MERGE
    ),
    Mutation(_PURGE, "for branch in (dead.branch, dead.left_by)}", "for branch in (dead.branch,)}", _OF_PURGE),
    Mutation(_PURGE, "(in_window and dead.after_seqno >= floor)", "in_window", _OF_PURGE),
    Mutation(_MERGE, "if number and link.cut < floor_seqno]", "if number and link.cut <= floor_seqno]", _OF_MERGE),
    Mutation(
        _PURGE,
        ", *(newest_of.get(copy_of[branch], 0) for branch in with_rows)}",
        "}",
        _OF_MERGE,
    ),
    Mutation(
        "storage/read/validity.py",
        "if not chain.same(links, chain.recut(whole, links[0].cut)):",
        "if False:",
        _OF_MERGE,
    ),
    Mutation(
        "storage/env/environment.py",
        "while self.running:",
        "while False:",
        "tests/storage/test_environment.py -k new_size",
    ),
    # --- what was found by breaking it: maps, files, readers, clocks, disks
    Mutation(
        _MAPS, "if self._maps.judge(found) is MapVerdict.OLDER and self._maps.floor is not None:", "if False:", _OF_MAPS
    ),
    Mutation(_MAPS, "record = directory.load_map(data, bucket_uuid)", "record = None", _OF_MAPS),
    Mutation(
        _VBUCKET,
        "return seqno if session.answers else None",
        "return seqno",
        "tests/feed/test_consumer.py -k lag_behind_a_lost_node",
    ),
    Mutation(
        "mirror/feed/follow/status.py",
        "int(state.staged_seqno)) - int(state.staging_published_seqno))",
        "int(state.staged_seqno)) - int(state.published_seqno))",
        "tests/feed/test_commands.py -k old_copy",
    ),
    Mutation(
        "mirror/feed/follow/status.py",
        "max(0, max(high_seqno, int(state.staged_seqno)) -",
        "max(0, high_seqno -",
        "tests/feed/test_vbucket.py -k count_as_lag",
    ),
    Mutation(_OWNER, "        self._begin_history(txn)", "        pass", "tests/storage/test_branches.py"),
    Mutation(
        _BRANCHES,
        "history_ids=((history_id, 0),))\n    draw_chain_id(txn, vbid)",
        "history_ids=((history_id, 0),))",
        "tests/storage/test_branches.py",
    ),
    Mutation(
        _ENVIRONMENT,
        "self.replaced = _identity_of(self.path) != self._file",
        "pass",
        "tests/storage/test_groups.py -k replaced_its_own",
    ),
    Mutation(
        _OWNER,
        "READER_CHECK_INTERVAL_MS\n            self.environment.env.reader_check()",
        "READER_CHECK_INTERVAL_MS",
        f"{_OF_ENVIRONMENT} -k killed",
    ),
    Mutation(
        _PURGE,
        "if manifests.forget_before(txn, vbid, links, keys.ROW.unpack(key)):",
        "if False:",
        "tests/storage/test_manifests.py -k every_boundary",
    ),
    Mutation(
        _PURGE,
        "tip.row_bytes - at.row_bytes",
        "sum(len(frame) for _, frame in chain.rows_after(txn, vbid, links, int(at.seqno)))",
        f"{_OF_PURGE} -k costs_the_same",
    ),
    Mutation(_PURGE, "if wire_key != current and looked >= looks:", "if False:", f"{_OF_PURGE} -k flushed"),
    Mutation(_PURGE, "chain.check_place(txn, vbid, key, frame)", "pass", "tests/storage/test_bit_flips.py -k purger"),
    Mutation(_PURGE, "if len(links) <= merge.LINKS_MAX + 1:", "if True:", _OF_MERGE),
    Mutation(
        "storage/write/owner.py",
        "min(max(0, downtime_ms), downtime_max_ms)",
        "max(0, downtime_ms)",
        "tests/storage/test_history_clock.py",
    ),
    Mutation(
        _OWNER,
        "        except Exception as error:\n            raise storage_error(error, owner.path)",
        "        except OSError as error:\n            raise storage_error(error, owner.path)",
        "tests/feed/test_group_commits.py -k only_that_group",
    ),
    Mutation(
        "mirror/supervise/processes/quarantine.py",
        "if group is None or -status not in SIGNALS or group in self.groups:",
        "if group is None or group in self.groups:",
        "tests/supervise/test_quarantine.py -k do_not_accuse",
    ),
    Mutation(
        "mirror/feed/follow/group_commits.py",
        "call_soon(self._commit_next)",
        "call_later(0.001, self._commit_next)",
        "tests/feed/test_group_commits.py -k busy_groups",
    ),
    Mutation(
        "mirror/feed/follow/group_commits.py",
        "self._retry_later(STORE_RETRY_S * min(2**self.reopen_count, REOPEN_FACTOR_MAX))",
        "pass",
        "tests/feed/test_group_commits.py -k device_failed",
    ),
    Mutation(
        _ENVIRONMENT,
        "                self._settle_meta_pages()",
        "                pass",
        "tests/crash/test_power_cut.py",
    ),
    Mutation("mirror/feed/follow/watch.py", " and not machine.waits_for_end:", ":", _OF_WATCH_END),
    Mutation("mirror/feed/follow/watch.py", "if is_behind and progress.stalled", "if progress.stalled", _OF_WATCH_END),
    # --- what readers of changes and of their own writes hear
    Mutation("storage/history/chain.py", "if row.kept_seqno < link.cut:", "if False:", _OF_RETRACTIONS),
    Mutation("storage/write/commit.py", "if flush_open or at <= seqno:", "if True:", "tests/storage/test_commit.py"),
    Mutation(_SPARK_CHANGES, "before, manifest = manifest, ", "before, _ = manifest, ", _OF_SPARK_CHANGES),
    Mutation(
        "storage/read/wait.py",
        "return here if token.seqno <= end_seqno else WriteStatus.LOST",
        "return here",
        "tests/storage/test_wait.py",
    ),
    # --- what other clients wait for
    Mutation(
        "mirror/serve/dcp/producer.py",
        "if own.stream_filter is not None:",
        "if False:",
        "tests/serve/test_dcp_cascade.py -k does_not_go_on",
    ),
    Mutation(
        "mirror/serve/dcp/producer.py",
        "max(self._bucket.manifest(), own.manifest, key=lambda each: each.uid)",
        "self._bucket.manifest()",
        "tests/server/test_conformance.py -k FILTER_EMPTY",
    ),
    Mutation(
        "mirror/serve/access/tls.py",
        "connection.session_reused and stamp[-1] != self._first_authorities",
        "False",
        "tests/serve/test_tls.py -k session",
    ),
    Mutation(
        "mirror/server/connection.py",
        "self.host.turns.call(self._next_turn)",
        "self._loop.call_soon(self._next_turn)",
        "tests/serve/test_kv_connection.py -k one_busy_client",
    ),
    Mutation(
        "mirror/serve/dcp/producer.py", "self._counters.open_streams >= PROCESS_STREAMS_MAX", "False", _OF_STREAMS
    ),
    Mutation(
        "mirror/serve/http/service.py",
        "self.bodies.take(owner, byte_count)",
        "pass",
        "tests/serve/test_http_service.py -k bodies",
    ),
    Mutation(
        "storage/read/point_reads.py",
        "if not above < dup <= up_to or",
        "if not above < dup or",
        "tests/storage/test_point_reads.py -k not_followed",
    ),
    Mutation(
        "storage/read/point_reads.py",
        "txn = None if reader.environment.remapping else reader.begin()",
        "txn = reader.begin()",
        "tests/storage/test_point_reads.py -k taken_over",
    ),
    Mutation(
        "storage/read/point_reads.py",
        "visible if visible[0] == known[1] else reader.look(known[0])",
        "visible if visible[0] >= 0 else reader.look(known[0])",
        "tests/storage/test_view.py -k once_for_each_commit",
    ),
    Mutation(
        "storage/read/point_reads.py",
        "else records.bytes_to_read(view)",
        "else len(view)",
        "tests/storage/test_large_documents.py -k from_its_head",
    ),
    Mutation("storage/read/states.py", "seen is None or seen[0] != at", "seen is None", _OF_KV_BUCKET),
    Mutation("storage/read/states.py", "known[first][0] is not environment", "False", _OF_KV_BUCKET),
    Mutation(
        "mirror/server/outgoing.py",
        "if len(data) <= SLICE_BYTES and not self._waiting:",
        "if len(data) <= SLICE_BYTES:",
        _OF_KV_LARGE,
    ),
    Mutation("mirror/server/turns.py", "await asyncio.wait({granted})", "pass", _OF_KV_LARGE),
    # --- what a compaction of a Delta table copies, and what it says to streams that read the table
    Mutation("mirror/spark/tables/parts.py", "if before and size <= total:", "if before:", _OF_DELTA),
    Mutation(_DELTA, "add_action(part, new_rows=False)", "add_action(part)", _OF_DELTA),
    # --- which batches a table of documents has, and which of its rows an event may change
    Mutation(
        _LAKE,
        "compact(self.changes_folder, self.changes, CHANGES, [mark])",
        "compact(self.changes_folder, self.changes, CHANGES)",
        _OF_LAKE,
    ),
    Mutation(_LAKE_MERGE, "risen = met.filter(rises)", "risen = met", f"{_OF_LAKE} -k older_event"),
    # --- the order of events before a drop, a flush and a resync, and which rows each of them removes
    Mutation(
        _LAKE_MERGE,
        'last = last.filter(pc.or_(pc.not_equal(last["vbid"], vbid), pc.greater(last["number"], number)))',
        "pass",
        _OF_MERGE_OF_PART,
    ),
    Mutation(
        _LAKE_MERGE, 'last = last.filter(pc.or_(other, pc.greater(last["number"], number)))', "pass", _OF_MERGE_OF_PART
    ),
    Mutation(
        _LAKE_MERGE, "void = pc.or_(void, pc.and_(mine, _below", "pc.or_(void, pc.and_(mine, _below", _OF_MERGE_OF_PART
    ),
    Mutation(
        _LAKE_MERGE,
        'mine = pc.and_(pc.equal(rows["vbid"], vbid), pc.equal(',
        "mine = pc.and_(True, pc.equal(",
        _OF_MERGE_OF_PART,
    ),
    Mutation(_LAKE_MERGE, "rises = pc.or_(rises, pc.is_in(met", "pc.or_(rises, pc.is_in(met", _OF_MERGE_OF_PART),
    Mutation(
        _LAKE_MERGE,
        'aggregate([("number", "max")])["number_max"]',
        'aggregate([("number", "min")])["number_min"]',
        _OF_MERGE_OF_PART,
    ),
    Mutation(
        _LAKE_MERGE,
        "same = pc.and_(pc.equal(branch, other_branch), pc.less(seqno, other_seqno))",
        "return pc.less(seqno, other_seqno)",
        _OF_MERGE_OF_PART,
    ),
    # --- a batch and its position are one commit
    Mutation(
        _LAKE,
        "marks = [Transaction(BATCH_MARK, number), Transaction(POSITION_MARK, mark)]",
        "marks = [Transaction(BATCH_MARK, number)]",
        _OF_LAKE,
    ),
    Mutation(_DELTA, "return all(each.name in fields and", "return all(each.name not in fields or", _OF_DOCUMENTS),
    Mutation(_SPARK_CHANGES, "here = (at[0], 0) if retracted else at", "here = at", _OF_RISING),
    Mutation(_BODIES, "types.is_decimal(kind) or ", "", _OF_BODIES),
    Mutation(_BODIES, "lines.view(pa.string()).validate(full=True)", "pass", _OF_BODIES),
    Mutation(_BODIES, "odd = pc.is_valid(objects)  # every one", "return None", _OF_BODIES),
    Mutation(_BODIES, "order = pc.sort_indices(rows)", "order = rows", _OF_BODIES),
    Mutation(_LAKE_MERGE, "self.bodies_count += len(rows)", "pass", _OF_DOCUMENTS),
    Mutation(
        _DOCUMENTS,
        "self._commit(merged, marks, {}, again=True)",
        "self._commit(merged, [], {}, again=True)",
        _OF_DOCUMENTS,
    ),
    # --- one judgement, and who hears it
    Mutation(_HEALTH, 'and row["group"] not in failed]', "]", _OF_HEALTH),
    Mutation(_HEALTH, "if away and len(away) == len(going):", "if False:", _OF_HEALTH),
    Mutation(
        _HEALTH,
        "rank = (DEGRADED, DISK_FULL, STARTING, CATCHING_UP).index",
        "rank = (DISK_FULL, DEGRADED, STARTING, CATCHING_UP).index",
        _OF_HEALTH,
    ),
    Mutation(_STATUS, "since_ms = now_ms if self.in_contact else self.contact_ms", "since_ms = now_ms", _OF_STATUS),
    Mutation(
        _REPORTS,
        "if self._processes.working and running == len(self._processes.desired)",
        "if running == len(self._processes.desired)",
        _OF_CHANNELS,
    ),
    Mutation(_STATUS, '= now_ms - (row["silent_ms"] or 0)', "= now_ms", _OF_STATUS),
    Mutation(_VBUCKET, "seqno if session.answers else", "seqno if session.ready else", _OF_WATCH),
    Mutation(
        "mirror/ingest/selection.py",
        "return ids <= old_ids and not left_out",
        "return ids <= old_ids",
        "tests/ingest/test_selection.py",
    ),
    # --- a reader ends with what is at the boundary that it names, or is told
    Mutation(_VALIDITY, "if after_seqno < now and now != purge_seqno_before:", "if False:", _OF_CHANGES),
    Mutation(_CHANGES, "        check_kept(reader, txn, way)\n", "", _OF_CHANGES),
    Mutation(_READER, "if commit != (seen := txn.raw.id()):", "if (seen := txn.raw.id()) and commit < 0:", _OF_CHANGES),
    Mutation(_VALIDITY, "return SEQNO_MAX if kept is None else int(kept.seqno)", "return 0", _OF_CHANGES),
    Mutation(
        _CHANGES, "validity.check_tombstones(reader, txn, served, position, purge_seqno_before)", "pass", _OF_CHANGES
    ),
    Mutation(_READER, "if links and (links[0].branch, links", "if links and (branch, links", _OF_CHANGES),
    Mutation("storage/history/chain.py", "if row.base_seqno < cut:", "if True:", _OF_PURGE),
    Mutation(_BRANCHES, "else (at.branch, at.seqno)", "else (newest, at.seqno)", _OF_PURGE),
    Mutation(_VALIDITY, "    check(reader, txn, pinned)\n    return pinned", "    return pinned", _OF_SCAN),
    # --- a vbucket without a node gets one as soon as there is one
    Mutation(
        "mirror/feed/cluster/map_queries.py",
        "happens(self._wake, interval_s)",
        "happens(self._wake, None)",
        "tests/feed/test_map_follower.py -k found_by_polling",
    ),
    # --- who may read an answer is judged when it is made
    Mutation(
        "mirror/serve/http/api.py",
        "if refusal := self._service.rights_changed(reader):",
        "if refusal := None:",
        "tests/serve/test_http_api.py -k waited",
    ),
    Mutation(
        "mirror/server/connection.py",
        "if session.reader != reader:",
        "if False:",
        "tests/serve/test_kv_server.py -k waited",
    ),
    Mutation(
        "mirror/serve/http/api.py",
        'report["reasons"] if reads_all or not',
        'report["reasons"] if report or not',
        "tests/serve/test_http_api.py -k readiness_is",
    ),
    Mutation(
        "mirror/serve/http/service.py",
        'if request.scope["state"]["transport"].is_closing():',
        "if False:",
        "tests/serve/test_http_service.py -k gone",
    ),
    # --- no user is recognised, delayed or cut off by another
    Mutation("mirror/wire/sasl.py", "self._verifier_of(self.username) != verifier", "not verifier", _OF_LOGINS),
    Mutation("mirror/serve/access/logins.py", "if self.guesses(peer):", "if False:", _OF_LOGINS),
    Mutation("mirror/server/admission.py", "if not slot.logging_in)", "if slot)", _OF_LOGINS),
    Mutation(
        "mirror/serve/dcp/dcp_session.py",
        "self._name = self.known_reader.name, name",
        'self._name = "", name',
        "tests/serve/test_dcp_server.py -k belongs",
    ),
    # --- damage is an error, and what is copied is on the disk
    Mutation("storage/admin/backup.py", "os.fsync(self._descriptor)", "pass", "tests/storage/test_backup.py -k synced"),
    Mutation(_POINT_READS, "if reader.verify_reads and crc32c(stored) != RESIDUE:", "if False:", _OF_BIT_FLIPS),
    Mutation(
        _POINT_READS,
        "if stored[55 : 55 + stored[3]] != wire_key or (has_older and stored[24:32] != dup[SEQNO]):",
        "if False:",
        _OF_BIT_FLIPS,
    ),
    Mutation(
        _POINT_READS,
        "cursor.value() >= dup:\n        raise reader.mismatch(wire_key)\n    if not",
        "False:\n        raise reader.mismatch(wire_key)\n    if not",
        _OF_BIT_FLIPS,
    ),
    Mutation(_READER, "if reference[KIND] not in KINDS:", "if False:", _OF_BIT_FLIPS),
    Mutation(_READER, "if cursor.value() >= reference:", "if False:", _OF_BIT_FLIPS),
    Mutation(
        _READER, 'self.check_row(txn.get(reference[ROW_KEY], b"", self.rows), behind, reference)', "pass", _OF_BIT_FLIPS
    ),
    Mutation(
        _READER, 'self.check_row(txn.get(reference[ROW_KEY], b"", self.rows), before, reference)', "pass", _OF_BIT_FLIPS
    ),
    Mutation(
        _READER, "if stored[start : start + (stored[2] << 8 | stored[3])] != wire_key:", "if False:", _OF_BIT_FLIPS
    ),
    Mutation("storage/read/bulk.py", "        self._check(rows)\n", "", _OF_BIT_FLIPS),
    Mutation(
        _POINT_READS,
        "        if options.admit is not None:\n            options.admit(manifest)\n",
        "",
        "tests/serve/test_kv_bucket.py -k rights",
    ),
    Mutation("storage/read/scan.py", " or not all(map(lt, pairs, islice(pairs, 1, None))):", ":", _OF_BIT_FLIPS),
    Mutation("storage/read/scan.py", "    if pairs and not wire_range", "    if not wire_range", f"{_OF_SCAN} -k once"),
    Mutation(
        "storage/history/chain.py",
        "check_place(txn, vbid, *row)\n                if not cursor.next() or bytes(cursor.key()) > key:",
        "if True:",
        _OF_BIT_FLIPS,
    ),
    Mutation("storage/env/environment.py", "lmdb.BadTxnError,", "lmdb.CorruptedError,", _OF_ENVIRONMENT),
    # --- forks, overlays, read-only mounts
    Mutation(_ENVIRONMENT, "        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.env))\n", "", _OF_FORKS),
    Mutation(_ENVIRONMENT, "for environment in list(_environments):", "for environment in []:", _OF_FORKS),
    Mutation(_ENVIRONMENT, "    SHARED.open = {}\n", "", _OF_FORKS),
    Mutation(_ENVIRONMENT, "(os.getpid(), *each)", "each", _OF_FORKS),
    Mutation(
        "storage/read/point_reads.py",
        "[key.encode() if isinstance(key, str) else key for key in document_keys]",
        "(key.encode() if isinstance(key, str) else key for key in document_keys)",
        _OF_FORKS,
    ),
    Mutation("storage/read/reading.py", "if not self._groups.inherited:", "if True:", _OF_FORKS),
    Mutation(_ENVIRONMENT, "if commit > self.newest_commit():", "if False:", _OF_MOUNTS),
    Mutation(_ENVIRONMENT, " or _identity_of(self.path, LOCK_FILE) == self._lock_file", "", _OF_MOUNTS),
    Mutation(_ENVIRONMENT, "self.newest_commit() > commit + 1:", "False:", _OF_MOUNTS),
    # --- files of others are not believed, and documents are written for this user alone
    Mutation("mirror/ownership.py", "(stat.S_IWGRP | stat.S_IWOTH)", "stat.S_IWOTH", _OF_OWNERSHIP),
    Mutation("mirror/ownership.py", "found.st_uid not in (0, os.geteuid())", "False", _OF_OWNERSHIP),
)
