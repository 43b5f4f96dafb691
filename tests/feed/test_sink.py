"""Sinks: what stands behind a vbucket has every operation of the protocol, so that no instruction is without one."""

from __future__ import annotations

import inspect

import pytest

from mirror.feed.follow.store_sink import StoreSink
from mirror.feed.read.spool_sink import SpoolSink
from mirror.feed.stream.sink import Sink

OPERATIONS = [name for name in vars(Sink) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [StoreSink, SpoolSink])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_sink_has_every_operation_under_the_same_parameters(name: str, kind: type) -> None:
    """The type checker holds the types; the names are what a reader of the executor looks for."""
    expected = inspect.signature(getattr(Sink, name)).parameters
    assert list(inspect.signature(getattr(kind, name)).parameters) == list(expected)
