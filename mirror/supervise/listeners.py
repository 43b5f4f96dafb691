"""The addresses that readers come to, and the slots of the processes that serve them.

Knows which kinds of servers there are, how many processes each has, and the sockets that hold their addresses; never
what is spoken. A server's slot is a worker's slot without groups, numbered above all workers. Invariants: an address
is held from before the first process until after the last; it does not change while the service runs, but the number
of processes may; a setting that concerns readers alone restarts no worker, and the other way round.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.serve.admission import raise_descriptor_limit
from mirror.serve.auth import server_tls, users_of
from mirror.serve.kv_map import named_nodes
from mirror.serve.listener import Address, Reserved, check_addresses, parse_addresses, reserve

KINDS = ("kv", "http", "dcp")
SLOTS_PER_KIND = 1000
"""Slots 0 to 999 are workers, 1000 to 1999 KV processes, and so on."""

_BOTH = {"log_level", "log_json", "refill_reads"}
_PREFIXES = ("kv", "http", "dcp", "reader_", "users_", "listen_", "ready_", "verify_reads")
_LIVE = {
    "workers", "kv_nodes", "lease_max_s", "lease_age_max_s", "stop_timeout_s", "on_event",
    *(f"{kind}_processes" for kind in KINDS),
}  # fmt: skip
"""What takes effect without a process started again."""

FIXED = ("data", "source", "groups", "collections", "scope", "vbuckets", "bootstrap_timeout_s", *KINDS)
"""What a reload leaves as it is: it takes effect at the next start of the service."""


class Listeners:
    """The addresses of one service."""

    def __init__(self, settings: Settings, revision: int) -> None:
        """Read and check the addresses; nothing is taken yet. `revision` rises with each start of the service.

        Raises ConfigError.
        """
        self._addresses: dict[str, list[Address]] = {}
        self._held: dict[str, list[Reserved]] = {}
        self._ready: set[str] = set()
        self._revision = revision
        self._login_secret = secrets.token_bytes(16)
        """Makes salts: of an unknown user the same ones in all processes."""
        for kind in KINDS:
            text = getattr(settings, kind)
            if text is None:
                continue
            self._addresses[kind] = parse_addresses(text, kind)
            check_addresses(self._addresses[kind], settings, kind)
        if self._addresses:
            users_of(settings)
            server_tls(settings)
        check_reloaded(settings)

    def reserve(self) -> None:
        """Take the addresses. Raises ConfigError when one is taken."""
        try:
            for kind, addresses in self._addresses.items():
                self._held[kind] = []
                for address in addresses:
                    self._held[kind].append(reserve(address, kind))
        except ConfigError:
            self.release()
            raise

    def renew(self, revision: int) -> int:
        """The map has changed: its new revision."""
        self._revision = max(self._revision + 1, revision)
        return self._revision

    def release(self) -> None:
        """Let go of the addresses."""
        for held in self._held.values():
            for each in held:
                each.release()
        self._held.clear()

    def desired(self, settings: Settings) -> dict[int, tuple[int, ...]]:
        """Slot -> no groups, for each process that there should be."""
        slots: dict[int, tuple[int, ...]] = {}
        for kind in self._held:
            first = (KINDS.index(kind) + 1) * SLOTS_PER_KIND
            slots |= {first + number: () for number in range(getattr(settings, f"{kind}_processes"))}
        return slots

    def inherited(self, slot: int) -> list[int]:
        """Descriptors that the process of a slot inherits."""
        return [each.inherited for each in self._held.get(kind_of(slot) or "", ()) if each.inherited is not None]

    def start_fields(self, slot: int) -> dict[str, Any]:
        """What a START message tells a server beside the settings."""
        kind = kind_of(slot)
        held = self._held.get(kind or "", ())
        return {
            "kind": kind,
            "revision": self._revision,
            "login_secret": self._login_secret.hex(),
            "listeners": [[str(each.address), each.inherited] for each in held],
        }

    def ready(self, slot: int) -> list[str]:
        """A process listens: the lines that tell where, when it is the first of its kind."""
        kind = kind_of(slot)
        if kind is None or kind in self._ready:
            return []
        self._ready.add(kind)
        return [f"{kind} {url_of(kind, each.address)}" for each in self._held.get(kind, ())]

    def urls(self) -> dict[str, list[str]]:
        """Where each kind listens."""
        return {kind: [url_of(kind, each.address) for each in held] for kind, held in self._held.items()}


def check_reloaded(settings: Settings) -> None:
    """Refuse what readers' processes could not take while they run. Raises ConfigError."""
    if settings.kv_nodes is not None:
        named_nodes(settings.kv_nodes)
    if any(getattr(settings, kind) is not None for kind in KINDS):
        raise_descriptor_limit(settings, settings.groups)  # which the processes inherit


def url_of(kind: str, address: Address) -> str:
    """An address as clients write it."""
    if address.path is not None:
        return f"unix:{address.path}"
    scheme = {"kv": "couchbase", "http": "http", "dcp": "couchbase"}[kind] + ("s" if address.tls else "")
    return f"{scheme}://{address.authority}"


def kind_of(slot: int) -> str | None:
    """Which kind of server stands in a slot; None: a worker."""
    number = slot // SLOTS_PER_KIND
    return KINDS[number - 1] if 0 < number <= len(KINDS) else None


def outdated_by(slot: int, changed: Collection[str]) -> bool:
    """Whether the process of a slot has to be started again after these settings changed."""
    concerning = set(changed) - _LIVE
    of_readers = {name for name in concerning if name.startswith(_PREFIXES)}
    if kind_of(slot) is None:
        return bool(concerning - of_readers)
    return bool(of_readers or concerning & _BOTH)


def effect_of(name: str) -> str:
    """Say when a changed setting takes effect, and what is restarted for it."""
    if name in FIXED:
        return "restart"
    restarted = [what for slot, what in ((0, "workers"), (SLOTS_PER_KIND, "servers")) if outdated_by(slot, {name})]
    return f"reload, which restarts {' and '.join(restarted)}" if restarted else "reload"
