"""Processes that tests start: none outlives the block that it was started for, whatever ends that block."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2


def without_rootly_powers() -> None:
    """Let permissions bind root too: for a process that is about to start."""
    if os.geteuid() == 0:
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0


def in_child(work: Callable[[], object]) -> None:
    """Do it in a forked child, which must end well."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def end_group(number: int) -> None:
    """SIGKILL to all that is left of a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


def caught_up(status: Mapping[str, Any] | None) -> bool:
    """True if a status says that the mirror follows its source and has published everything."""
    return status is not None and status["state"] == "following" and status["totals"]["lag_seqnos"] == 0


class ProcessGroup(subprocess.Popen[str]):
    """A process that leads a group of its own (`process_group=0`). Leaving the context ends what is left of the group;
    Popen's own waits, without end where a test failed before it had stopped the process.
    """

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""
        end_group(self.pid)
        super().__exit__(kind, value, traceback)
