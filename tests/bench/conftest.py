"""A server to measure."""

from tests.serve.conftest import site, source

__all__ = ["site", "source"]
