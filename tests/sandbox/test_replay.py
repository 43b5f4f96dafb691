"""A recording served again: each client that asks the recorded questions gets the recorded answers, all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mirror.clock import SystemClock
from mirror.errors import AuthRejected, ConfigError
from mirror.feed.read.reader import Position, ReadEnded, Snapshot, SourceReader, SourceRolledBack
from mirror.inspection.recording import Recorder, Recording
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.replay import ReplayedSource, read_script
from mirror.wire.constants import Opcode
from mirror.wire.frame import encode, request, response
from tests.recordings import unpack

Rows = dict[int, list[bytes]]


def rows_of(url: str, **options: Any) -> Rows:
    """Everything that a source has, by vbucket: each row without its opaque."""
    found: Rows = {}
    with SourceReader(url, password="demo", **options) as reader:
        until = reader.high_seqnos()
        for item in reader.read(dict.fromkeys(until, Position()), until):
            if isinstance(item, Snapshot):
                rows = [frame[:12] + frame[16:] for frame in item.frames()]
                found.setdefault(item.vbid, []).extend(rows)
    return found


async def test_what_was_recorded_comes_again_for_every_client(tmp_path: Path) -> None:
    async with SandboxCluster(nodes=2, vbuckets=8, seed=2) as source:
        for number in range(300):
            source.set(f"key-{number}", {"number": number})
        source.bucket.create_collection("_default", "more")
        recorder = Recorder(tmp_path / "file", SystemClock())
        expected = await asyncio.to_thread(rows_of, source.connection_string, tap=recorder)
        recorder.close()
    script = read_script(Recording(tmp_path / "file"))
    assert sorted(script.exchanges) == list(range(8))
    async with ReplayedSource(script, whole=True) as replayed:
        for _ in range(2):
            assert await asyncio.to_thread(rows_of, replayed.connection_string) == expected
        with pytest.raises(AuthRejected):
            await asyncio.to_thread(SourceReader(replayed.connection_string, password="other").__enter__)


async def test_recordings_of_real_engines_are_sources(tmp_path: Path) -> None:
    script = read_script(Recording(unpack("72_b_multiplex_8vb", tmp_path)))

    def read(url: str) -> None:
        found = rows_of(url)
        assert len(found) == 8
        with SourceReader(url, password="demo") as reader:
            assert reader.vbucket_count == 16
            assert {vbid for vbid, seqno in reader.high_seqnos().items() if seqno} == set(found)
            items = list(reader.read({15: Position()}, {15: 0}))
            assert items == [ReadEnded(15, Position())], "what was not recorded is there, and empty"

    async with ReplayedSource(script, whole=True) as source:
        await asyncio.to_thread(read, source.connection_string)


async def test_a_recorded_rollback_is_given_to_the_request_that_got_it(tmp_path: Path) -> None:
    script = read_script(Recording(unpack("72_d3_rollback_unknown_vbuuid", tmp_path)))
    ((vbid, exchanges),) = script.exchanges.items()
    refused = exchanges[0].request

    def read(url: str) -> None:
        with SourceReader(url, password="demo") as reader:
            position = Position(refused.vbuuid, refused.start_seqno)
            items = list(reader.read({vbid: position}, {vbid: reader.high_seqnos()[vbid]}))
            assert items == [SourceRolledBack(vbid, 0)]

    async with ReplayedSource(script, whole=True) as source:
        await asyncio.to_thread(read, source.connection_string)


def test_a_file_of_frames_that_make_no_sense_is_one_clear_error(tmp_path: Path) -> None:
    sent = request(Opcode.DCP_STREAM_REQ, opaque=1, extras=b"short")
    lines = [
        f'{{"t": 1, "dir": "c2s", "hex": "{encode(sent).hex()}"}}',
        f'{{"t": 1, "dir": "s2c", "hex": "{encode(response(sent)).hex()}"}}',
    ]
    (tmp_path / "file").write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError, match="invalid frame"):
        read_script(Recording(tmp_path / "file"))


async def test_a_client_that_sends_garbage_harms_itself_alone(tmp_path: Path) -> None:
    script = read_script(Recording(unpack("72_b_multiplex_8vb", tmp_path)))
    async with ReplayedSource(script, whole=True) as source:
        reader, writer = await asyncio.open_connection("127.0.0.1", source.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 9)
        assert await reader.read() == b""
        writer.close()
        assert len(await asyncio.to_thread(rows_of, source.connection_string, parallel=1)) == 8
