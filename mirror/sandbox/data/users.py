"""The source's users: names, passwords and privileges (kv_engine docs/rbac.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mirror.server.privileges import ALL_PRIVILEGES, certified_name


@dataclass(slots=True)
class User:
    name: str
    password: str
    privileges: frozenset[str] = ALL_PRIVILEGES


@dataclass(slots=True)
class SandboxUsers:
    """All users. The next login sees a change of passwords, the next operation a change of privileges."""

    by_name: dict[str, User] = field(default_factory=dict)

    def add(self, name: str, password: str, privileges: frozenset[str] = ALL_PRIVILEGES) -> User:
        user = self.by_name.get(name)
        if user is None:
            user = self.by_name[name] = User(name, password, privileges)
        user.password, user.privileges = password, privileges
        return user

    def of_certificate(self, certificate: Mapping[str, Any]) -> User | None:
        return self.by_name.get(certified_name(certificate) or "")

    def password_of(self, name: str) -> str | None:
        user = self.by_name.get(name)
        return None if user is None else user.password
