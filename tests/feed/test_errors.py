"""The tree of errors: one line each, a remedy, an exit code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mirror import errors
from mirror.errors import ClusterError, ConfigError, ExitCode, MirrorError


def every_error(root: type[MirrorError] = MirrorError) -> Iterator[type[MirrorError]]:
    yield root
    for child in root.__subclasses__():
        yield from every_error(child)


OF_A_SOURCE: list[type[MirrorError]] = [*every_error(ClusterError), ConfigError]
SOURCE_ERRORS = [*{(kind.retryable, kind.exit_code): kind for kind in OF_A_SOURCE}.values()]
"""One error of the source or of its login for each of what a service can do about it."""


@pytest.mark.parametrize("error", [kind for kind in every_error() if kind.__module__ == errors.__name__])
def test_an_error_is_one_line_with_a_hint_and_is_in_the_drawing(error: type[MirrorError]) -> None:
    made = error("it broke", hint="fix it")
    assert str(made) == "it broke (fix it)"
    assert made.exit_code in ExitCode
    if error is not MirrorError:
        assert error.__name__ in (errors.__doc__ or "")


def test_a_refusal_by_the_source_is_exit_4_and_another_bucket_is_exit_3() -> None:
    for refused in (errors.AuthRejected, errors.PrivilegeMissing, errors.BucketMissing, errors.TlsFailed):
        assert refused("x").exit_code == 4
        assert not refused("x").retryable
        assert refused("x").hint
    assert errors.BucketChanged("x").exit_code == 3
    assert errors.ConfigError("x").exit_code == 2
    assert errors.ConnectFailed("x").exit_code == 1
    assert errors.ConnectFailed("x").retryable
    assert not errors.ConnectFailed("x", retryable=False).retryable
