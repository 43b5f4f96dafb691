"""Close everything that a test opened, even if it failed."""

from __future__ import annotations

from tests.sandbox.conftest import _nothing_stays_open, cluster

__all__ = ["_nothing_stays_open", "cluster"]
