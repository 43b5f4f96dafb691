"""What is not known yet is None, and what is known is counted."""

from __future__ import annotations

from pathlib import Path

from mirror.clock import SystemClock
from mirror.config import Settings
from mirror.supervise.context import ServiceContext
from storage.model import Identity


def test_the_vbuckets_are_counted_once_the_directory_is_known(tmp_path: Path) -> None:
    context = ServiceContext(Settings(), tmp_path, SystemClock())
    assert (context.vbucket_count, context.stopping) == (None, False)
    context.identity = Identity("c1", "demo", "b1", 8, 4, (2, 5))
    assert context.vbucket_count == 4
