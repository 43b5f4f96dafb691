"""Records a DCP session in a file: every frame of every connection in both directions, with its time, without secrets.

The format, version 1: JSON lines in order of time.

    {"format": "dcp-mirror-recording", "version": 1, "time_ms": ...}    the first line
    {"t": seconds, "bucket": ..., "bucket_uuid": ..., "vbuckets": N}    once the bucket is known
    {"t": seconds, "conn": N, "node": "host:port"}                      a new connection and its number
    {"t": seconds, "conn": N, "dir": "c2s" | "s2c", "hex": "..."}       whole frames: c2s sent by us, s2c received

`t` counts from the start of the recording. SASL requests and answers are recorded without their values. Documents are
recorded unchanged, so the file is as secret as the bucket (mode 0600). A crash may cut off the last line. The tests'
recordings of real servers have only `hex` lines, and frames may continue on the next line. A full disk, or `bytes_max`,
ends the recording, not the tapped session.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mirror.clock import Clock
from mirror.errors import ConfigError
from mirror.feed.connection.transport import Link
from mirror.wire.buffer import FrameBuffer
from mirror.wire.constants import BODY_LENGTH_MAX, Opcode
from mirror.wire.errors import ProtocolError
from mirror.wire.frame import encode

FORMAT, VERSION = "dcp-mirror-recording", 1
SECRETS = frozenset((Opcode.SASL_AUTH, Opcode.SASL_STEP))


class Recorder:
    """Writes a recording until it is `full`. A SourceReader calls `passed` with all bytes of its connections."""

    def __init__(self, path: Path, clock: Clock, *, bytes_max: int | None = None) -> None:
        """Create the file. Raises ConfigError if it exists or cannot be created."""
        self.frame_count = 0
        self.byte_count = 0
        self.full = False
        self.error: str | None = None
        self._clock = clock
        self._bytes_max = bytes_max
        self._started = clock.monotonic()
        self._buffers: dict[tuple[int, bool], FrameBuffer] = {}
        self._numbers: dict[Link, int] = {}
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(f"{path} exists already", hint="name a new file") from None
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be created: {error.strerror}", hint="choose a writable directory"
            ) from None
        self._file = os.fdopen(descriptor, "w", encoding="ascii")
        self._write({"format": FORMAT, "version": VERSION, "time_ms": clock.wall_ms()})

    def names(self, *, bucket: str, bucket_uuid: str, vbuckets: int) -> None:
        self._write({"t": self._t(), "bucket": bucket, "bucket_uuid": bucket_uuid, "vbuckets": vbuckets})

    def passed(self, link: Link, data: bytes, ours: bool) -> None:
        if self.full:
            return
        number = self._numbers.get(link)
        if number is None:
            number = self._numbers[link] = len(self._numbers)
            self._write({"t": self._t(), "conn": number, "node": str(link.address)})
        buffer = self._buffers.setdefault((number, ours), FrameBuffer(BODY_LENGTH_MAX))
        whole = []
        try:
            buffer.feed(data)
            while (frame := buffer.next_frame()) is not None:
                whole.append(frame if frame.opcode not in SECRETS else replace(frame, value=b""))
        except ProtocolError:  # the reader finds the same error; earlier frames are recorded
            del self._buffers[number, ours]
        if whole:
            text = b"".join(map(encode, whole))
            self.frame_count += len(whole)
            self.byte_count += len(text)
            self._write({"t": self._t(), "conn": number, "dir": "c2s" if ours else "s2c", "hex": text.hex()})
            if self._bytes_max is not None and self.byte_count >= self._bytes_max:
                self.full = True

    def close(self) -> None:
        self.full = True
        try:
            self._file.close()
        except OSError as error:
            self.error = self.error or error.strerror

    def _t(self) -> float:
        return round(self._clock.monotonic() - self._started, 6)

    def _write(self, line: Mapping[str, object]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except (OSError, ValueError) as error:
            self.full, self.error = True, getattr(error, "strerror", None) or str(error)
