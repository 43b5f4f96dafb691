"""The line to a running service, as commands use it; `mirror.client` is it. Knows nothing else."""

from __future__ import annotations

from mirror.client import ServiceSaidNo, ask

__all__ = ["ServiceSaidNo", "ask"]
