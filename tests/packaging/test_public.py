"""`mirror` for other programs: the names are all there, and each is explained where `help(mirror)` shows it."""

from __future__ import annotations

import inspect
import pydoc

import mirror
from storage import errors

OF_WRITERS = {"SeqnoOrder"}
"""Errors that no reader meets."""


def test_every_error_that_a_reader_can_meet_is_public_and_has_a_docstring() -> None:
    defined = {
        name for name, each in vars(errors).items() if inspect.isclass(each) and each.__module__ == errors.__name__
    }
    exported = {
        name
        for name in mirror.__all__
        if inspect.isclass(each := getattr(mirror, name)) and issubclass(each, Exception)
    }
    assert exported == defined - OF_WRITERS
    listed = {
        line.split()[1] for line in (mirror.__doc__ or "").splitlines() if line.strip().startswith(("|--", "`--"))
    }
    assert listed | {"StorageError"} == exported


def test_the_help_shows_every_public_name_with_its_docstring() -> None:
    shown = pydoc.plain(pydoc.render_doc(mirror))
    for name in set(mirror.__all__) - {"__version__"}:
        assert name in shown
        assert (getattr(mirror, name).__doc__ or "").strip()
    public = [each for name, each in inspect.getmembers(mirror.View, callable) if not name.startswith("_")]
    assert all(each.__doc__ for each in public)


def test_the_documented_names_are_public() -> None:
    promised = {"open_view", "View", "Document", "Token", "MutationToken", "Time", "Change"}
    assert promised <= set(mirror.__all__)
