"""Users: passwords and privileges."""

from __future__ import annotations

from mirror.sandbox.data.users import SandboxUsers
from mirror.server.privileges import ALL_PRIVILEGES, READ


def test_a_user_is_added_and_changed_in_place() -> None:
    users = SandboxUsers()
    first = users.add("a", "one")
    assert (users.password_of("a"), first.privileges) == ("one", ALL_PRIVILEGES)
    assert users.add("a", "two", frozenset({READ})) is first
    assert (users.password_of("a"), first.privileges) == ("two", frozenset({READ}))
    assert users.password_of("b") is None


def test_a_certificate_is_for_the_user_of_its_common_name() -> None:
    users = SandboxUsers()
    user = users.add("a", "one")
    country, name = (("countryName", "XX"),), (("commonName", "a"),)
    assert users.of_certificate({"subject": (country, name)}) is user
    assert users.of_certificate({"subject": ((("commonName", "b"),),)}) is None
    assert users.of_certificate({"subject": (country,)}) is None
    assert users.of_certificate({}) is None
