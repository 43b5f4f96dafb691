"""Users: passwords and privileges."""

from __future__ import annotations

from mirror.sandbox.users import ALL_PRIVILEGES, READ, Users


def test_a_user_is_added_and_changed_in_place() -> None:
    users = Users()
    first = users.add("a", "one")
    assert (users.password_of("a"), first.privileges) == ("one", ALL_PRIVILEGES)
    assert users.add("a", "two", frozenset({READ})) is first
    assert (users.password_of("a"), first.privileges) == ("two", {READ})
    assert users.password_of("b") is None
