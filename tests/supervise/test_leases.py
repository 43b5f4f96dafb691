"""The book of leases: what may be requested, what a restart keeps, and a lease that a running service honours."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mirror.errors import ConfigError
from mirror.messages import GrantLease, HoldPositions
from mirror.supervise.leases import BOOK_NAME, LeaseBook


def book(directory: Path) -> LeaseBook:
    return LeaseBook(directory, seconds_max=60, age_max_s=100)


ASKING = GrantLease("a", "job", 30, [[0, 1, 5], [3, 2, 7]])


def asking(**values: Any) -> GrantLease:
    return replace(ASKING, **values)


def test_a_granted_lease_is_found_by_the_next_service(tmp_path: Path) -> None:
    first = book(tmp_path)
    first.enter(first.requested(asking(), 8, 1_000))
    second = book(tmp_path)
    (record,) = second.active(2_000)
    assert (record.name, record.until_ms, record.positions) == ("job", 31_000, [(0, 1, 5), (3, 2, 7)])
    assert second.active(31_000) == []


def test_the_book_is_readable_only_by_its_user(tmp_path: Path) -> None:
    kept = book(tmp_path)
    before = os.umask(0)
    try:
        kept.enter(kept.requested(asking(), 8, 1_000))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "leases.json").stat().st_mode) == 0o600


def test_each_worker_gets_the_positions_of_its_own_groups(tmp_path: Path) -> None:
    record = book(tmp_path).requested(asking(), 8, 1_000)
    assert record.order((0,), 4) == HoldPositions("a", 31_000, [[0, 1, 5]])
    assert record.order((1, 2), 4) is None


def test_a_renewal_ends_with_the_age_of_the_first_grant(tmp_path: Path) -> None:
    leases = book(tmp_path)
    leases.enter(leases.requested(asking(), 8, 0))
    assert leases.known(leases.requested(asking(), 8, 20_000), 20_000)
    leases.enter(leases.requested(asking(), 8, 20_000))
    again = leases.requested(asking(), 8, 80_000)
    assert again.until_ms == 100_000
    with pytest.raises(ConfigError, match="older than lease_age_max_s"):
        leases.requested(asking(), 8, 100_000)


def test_an_expired_lease_is_not_renewed(tmp_path: Path) -> None:
    leases = book(tmp_path)
    leases.enter(leases.requested(asking(), 8, 0))
    assert not leases.known(leases.requested(asking(), 8, 30_000), 30_000)


def test_an_expired_lease_is_reported_once(tmp_path: Path) -> None:
    """After a kill every start reported it again, until another lease was granted."""
    leases = book(tmp_path)
    leases.enter(leases.requested(asking(), 8, 0))
    assert leases.expire(29_999) == []
    assert [record.id for record in leases.expire(30_000)] == ["a"]
    assert book(tmp_path).expire(30_001) == []


def test_a_lease_keeps_its_positions(tmp_path: Path) -> None:
    """Workers that had none of the new positions kept the old ones until the lease expired."""
    leases = book(tmp_path)
    leases.enter(leases.requested(asking(), 8, 0))
    other = asking(positions=[[0, 1, 6]])
    with pytest.raises(ConfigError, match="has other positions"):
        leases.requested(other, 8, 1)
    leases.enter(leases.requested(other, 8, 30_000))
    assert leases.known(leases.requested(other, 8, 30_001), 30_001)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"seconds": 61}, "ask for 1 to 60 s"),
        ({"seconds": 0}, "ask for 1 to 60 s"),
        ({"name": ""}, "needs a name"),
        ({"name": "x" * 201}, "needs a name"),
        ({"positions": []}, "positions of a lease"),
        ({"positions": [[8, 1, 1]]}, "positions of a lease"),
        ({"positions": [[0, 1, 1], [0, 1, 2]]}, "positions of a lease"),
        ({"positions": [[0, 1]]}, "positions of a lease"),
        ({"positions": [[0, -1, 1]]}, "positions of a lease"),
        ({"positions": [[True, 1, 1]]}, "positions of a lease"),
        ({"positions": [0, 1, 1]}, "positions of a lease"),
    ],
)
def test_an_invalid_lease_is_refused_and_not_entered(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    leases = book(tmp_path)
    with pytest.raises(ConfigError, match=words):
        leases.requested(asking(**values), 8, 0)
    assert leases.active(0) == []


def test_a_released_lease_is_removed(tmp_path: Path) -> None:
    leases = book(tmp_path)
    leases.enter(leases.requested(asking(), 8, 0))
    assert leases.remove("b") is None
    assert leases.remove("a") is not None
    assert book(tmp_path).active(0) == []


@pytest.mark.parametrize("text", ["", "[1]", '[{"positions": [[1]]}]', '[{"id": "a", "positions": []}]', "\0"])
def test_an_unreadable_book_begins_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / BOOK_NAME).write_text(text)
    leases = book(tmp_path)
    assert leases.active(0) == []
    leases.enter(leases.requested(asking(), 8, 0))
    assert len(book(tmp_path).active(0)) == 1
