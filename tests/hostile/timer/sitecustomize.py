"""Python reads this when a process of an attacked service starts: a listener writes its long steps to a file."""

import os
import runpy
import sys
from pathlib import Path

if "mirror.supervise.processes.server" in sys.orig_argv and "LONG_STEPS" in os.environ:
    steps = runpy.run_path(str(Path(__file__).parents[1] / "steps.py"))
    steps["write_long_steps"](Path(os.environ["LONG_STEPS"]) / str(os.getpid()))
