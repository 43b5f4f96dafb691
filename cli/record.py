"""`record`: writes the frames of a DCP session into a file. An existing file is never overwritten."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Annotated

from cli import options, output, render
from mirror.clock import SystemClock
from mirror.config import Settings, required_source
from mirror.errors import ConfigError, MirrorError
from mirror.feed.connection.connection_string import parse
from mirror.feed.read.reader import Position, Snapshot, SourceReader
from mirror.inspection.recording import Recorder


def record(
    source: options.SourceOption = None,
    to: Annotated[Path | None, options.optional("--to", metavar="FILE", help="New file.")] = None,
    seconds: Annotated[
        float | None, options.optional("--seconds", min=0.1, help="Record for this long. [default: until caught up]")
    ] = None,
    bytes_max: Annotated[
        int | None, options.optional("--bytes", min=1, help="End after this many bytes of frames.")
    ] = None,
    vbid: options.VbidsOption = None,
    config: options.ConfigOption = None,
    pairs: options.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Record a DCP session from the beginning: every frame in both directions with its time, without passwords.

    The file contains the documents: keep it as secret as the bucket.
    """
    settings = options.settings_from({"source": source}, config=config, pairs=pairs).settings
    url = required_source(settings)
    if to is None:
        raise ConfigError("no file is named", hint="give --to FILE")
    options.quiet_logs(settings)
    parse(url)
    recorder = Recorder(to, SystemClock(), bytes_max=bytes_max)
    started = time.monotonic()
    try:
        snapshots, ended_by = record_into(recorder, url, settings, seconds, vbid)
    except BaseException:
        recorder.close()
        if not recorder.frame_count:
            to.unlink(missing_ok=True)
        raise
    recorder.close()
    if recorder.error is not None:
        raise MirrorError(f"{to}: {recorder.error}", hint="the file has all earlier frames")
    facts = {
        "to": str(to),
        "ended_by": ended_by,
        "frames": recorder.frame_count,
        "bytes": recorder.byte_count,
        "file_bytes": to.stat().st_size,
        "snapshots": snapshots,
        "elapsed_s": round(time.monotonic() - started, 3),
    }
    if as_json:
        output.print_json(facts)
    else:
        output.echo(
            f"{to}: {facts['frames']:,} frames, {output.size(recorder.byte_count)}, {snapshots:,} snapshots "
            f"({ended_by})"
        )


def record_into(
    recorder: Recorder, url: str, settings: Settings, seconds: float | None, requested: list[int] | None
) -> tuple[int, str]:
    """Read the source into the recorder. Return the number of snapshots and the reason for the end."""
    with SourceReader(url, settings=settings, tap=recorder.passed) as reader, render.task_screen() as screen:
        recorder.names(bucket=parse(url).bucket, bucket_uuid=reader.bucket_uuid, vbuckets=reader.vbucket_count)
        for vbid in requested or ():
            if not 0 <= vbid < reader.vbucket_count:
                raise ConfigError(f"there is no vbucket {vbid}", hint=f"the bucket has {reader.vbucket_count}")
        vbids = sorted(set(requested)) if requested else list(range(reader.vbucket_count))
        until = {vbid: seqno for vbid, seqno in reader.high_seqnos().items() if vbid in vbids}
        behind = {vbid for vbid, seqno in until.items() if seqno}
        rolled_back = set()
        timer = threading.Timer(seconds, reader.stop_reading) if seconds is not None else None
        if timer is not None:
            timer.start()
        snapshots = 0
        items = reader.read(dict.fromkeys(vbids, Position()))
        try:
            if not behind and timer is None:
                return 0, "caught up"
            for item in items:
                if isinstance(item, Snapshot):
                    snapshots += 1
                    if item.end_seqno >= until[item.vbid]:
                        behind.discard(item.vbid)
                else:  # the reader reads nothing more of this vbucket
                    rolled_back.add(item.vbid)
                    behind.discard(item.vbid)
                size = output.size(recorder.byte_count)
                line = f"{recorder.frame_count:,} frames, {size}, {len(behind)} vbuckets behind"
                screen.show_line(line)
                if recorder.full:
                    return snapshots, recorder.error or "bytes"
                if not behind and timer is None:
                    return snapshots, "rolled back" if rolled_back else "caught up"
            return snapshots, "rolled back" if len(rolled_back) == len(vbids) else "seconds"
        finally:
            items.close()
            if timer is not None:
                timer.cancel()
