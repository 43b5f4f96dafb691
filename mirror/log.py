"""structlog, as every module of the service gets it: without rich.

Where rich is installed, structlog imports a large part of it for tracebacks that `supervise.logs` does not draw. That
would be a fifth of the time that a worker takes to start.
"""

from __future__ import annotations

import sys

_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]  # to structlog it is not installed
try:
    import structlog
    from structlog import get_logger
finally:
    del sys.modules["rich"]
    if _rich is not None:
        sys.modules["rich"] = _rich

__all__ = ["get_logger", "structlog"]
