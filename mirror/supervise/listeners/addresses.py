"""The readers' addresses, and the slots of the processes that serve them.

A server has a slot like a worker (see `plan`), but without groups, and with a higher number. An address is opened
before its servers start, and closed after they end.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain

from mirror.config import Settings, Values
from mirror.errors import ConfigError
from mirror.messages import StartServer
from mirror.serve.access.auth import users_of
from mirror.serve.access.tls import server_tls
from mirror.serve.bucket.map import named_nodes
from mirror.server.admission import raise_descriptor_limit
from mirror.server.listener import Address, Reserved, check_addresses, parse_addresses, reserve

KINDS = ("kv", "http", "dcp")
SLOTS_PER_KIND = 1000
"""Slots 0 to 999 are workers, 1000 to 1999 KV processes, and so on."""


class Listeners:
    def __init__(self, settings: Settings, revision: int) -> None:
        """Check the addresses without opening them. `revision`, that of the served cluster map, must rise with each
        start. Raises ConfigError.
        """
        self._addresses = check_servers(settings)
        self._held: dict[str, list[Reserved]] = {}
        self._announced: set[str] = set()
        self._revision = revision
        self._login_secret = secrets.token_bytes(16)
        """The secret from which all processes derive the same salts for unknown users."""

    def reserve(self) -> None:
        """Open all addresses, or raise ConfigError and open none."""
        try:
            for kind, addresses in self._addresses.items():
                held = self._held.setdefault(kind, [])
                for address in dict.fromkeys(addresses):
                    held.append(reserve(address, kind))
        except ConfigError:
            self.release()
            raise

    def release(self) -> None:
        for each in chain.from_iterable(self._held.values()):
            each.release()
        self._held = {}

    def desired(self, settings: Settings) -> dict[int, tuple[int, ...]]:
        slots: dict[int, tuple[int, ...]] = {}
        for kind in self._held:
            first = (KINDS.index(kind) + 1) * SLOTS_PER_KIND
            slots |= {first + number: () for number in range(getattr(settings, f"{kind}_processes"))}
        return slots

    def _of(self, slot: int) -> list[Reserved]:
        return self._held.get(kind_of(slot) or "", [])

    def inherited(self, slot: int) -> list[int]:
        return [each.inherited for each in self._of(slot) if each.inherited is not None]

    def start_message(self, slot: int, settings: Values) -> StartServer:
        return StartServer(
            slot=slot,
            settings=settings,
            kind=kind_of(slot) or "",
            revision=self._revision,
            login_secret=self._login_secret.hex(),
            listeners=[[str(each.address), each.inherited] for each in self._of(slot)],
        )

    def ready(self, slot: int) -> list[str]:
        """Return a line for each address of this slot's kind, unless they were announced before."""
        kind = kind_of(slot)
        if kind is None or kind in self._announced:
            return []
        self._announced.add(kind)
        return [f"{kind} {url_of(kind, each.address)}" for each in self._of(slot)]

    def urls(self) -> dict[str, list[str]]:
        return {
            kind: [url_of(kind, each.address) for each in held]
            for kind, held in self._held.items()
            if kind in self._announced
        }


def check_servers(settings: Settings) -> dict[str, list[Address]]:
    found: dict[str, list[Address]] = {}
    owner: dict[Address, str] = {}
    for kind in KINDS:
        text = getattr(settings, kind)
        if text is None:
            continue
        found[kind] = parse_addresses(text, kind)
        check_addresses(found[kind], settings, kind)
        for place in (replace(address, tls=False) for address in found[kind] if address.port or address.path):
            if owner.setdefault(place, kind) != kind:
                raise ConfigError(f"{kind} and {owner[place]} have the same address {place}", hint="give each its own")
    if found:
        users_of(settings)
        server_tls(settings)
        raise_descriptor_limit(settings, settings.groups)  # the servers inherit the limit
    if settings.sql and find_spec("duckdb") is None:
        raise ConfigError("sql needs the package duckdb", hint="pip install 'dcp-mirror[sql]'")
    if settings.kv_nodes is not None:
        named_nodes(settings.kv_nodes)
    return found


def url_of(kind: str, address: Address) -> str:
    if address.path is not None:
        return f"unix:{address.path}"
    scheme = {"kv": "couchbase", "http": "http", "dcp": "couchbase"}[kind] + ("s" if address.tls else "")
    return f"{scheme}://{address.authority}"


def kind_of(slot: int) -> str | None:
    number = slot // SLOTS_PER_KIND
    return KINDS[number - 1] if 0 < number <= len(KINDS) else None


def process_name(slot: int) -> str:
    return f"{kind_of(slot) or 'worker'} {slot % SLOTS_PER_KIND}"
