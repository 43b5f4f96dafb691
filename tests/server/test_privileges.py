"""Privileges are those that requests need, and no others are granted."""

from __future__ import annotations

from mirror.sandbox.node.node import OPERATIONS
from mirror.server.privileges import ALL_PRIVILEGES, DCP_STREAM, SYSTEM_COLLECTIONS, certified_name


def test_every_privilege_is_needed_somewhere() -> None:
    needed = {operation.privilege for operation in OPERATIONS.values()} - {""}
    assert needed | {DCP_STREAM, SYSTEM_COLLECTIONS} == ALL_PRIVILEGES  # those two are checked stream by stream


def test_a_certificate_is_for_the_common_name_of_its_subject() -> None:
    subject = ((("organizationName", "o"),), (("commonName", "ann"),))
    assert certified_name({"subject": subject}) == "ann"
    assert certified_name({"subject": subject[:1]}) is None
    assert certified_name({}) is None
