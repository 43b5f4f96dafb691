"""The readers' addresses, and the slots of the processes that serve them.

A server has a slot like a worker (see `plan`), but without groups, and with a higher number. An address is opened
before its servers start, and closed after they end or a reload drops the address. A reload changes all addresses or
none.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator
from dataclasses import replace
from importlib.util import find_spec

from mirror.config import EFFECTS, Effect, Settings, Values
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

Held = dict[str, dict[Address, Reserved]]
"""Kind -> configured address -> the open socket."""


class Listeners:
    def __init__(self, settings: Settings, revision: int) -> None:
        """Check the addresses without opening them. `revision`, that of the served cluster map, must rise with each
        start. Raises ConfigError.
        """
        self._addresses = check_servers(settings)
        self._held: Held = {}
        self._announced: set[tuple[str, Address]] = set()
        self._revision = revision
        self._login_secret = secrets.token_bytes(16)
        """The secret from which all processes derive the same salts for unknown users."""

    def reserve(self) -> None:
        self._held = self._taken(self._addresses)

    def change(self, settings: Settings) -> None:
        """Open new addresses and close those no longer configured; the others stay open throughout.

        Raises ConfigError, without a change, if a setting is wrong or a new address is taken.
        """
        desired = check_servers(settings)
        fresh = self._taken(desired)
        kept = {id(each.socket) for _, _, each in _each(fresh)}
        for _, _, each in _each(self._held):
            if id(each.socket) not in kept:
                each.release()
        self._addresses, self._held = desired, fresh
        self._announced &= {(kind, each.address) for kind, _, each in _each(fresh)}

    def _taken(self, desired: dict[str, list[Address]]) -> Held:
        """Return sockets for these addresses, reusing open ones. Raises ConfigError."""
        found: Held = {}
        new: list[Reserved] = []
        try:
            for kind, addresses in desired.items():
                found[kind] = {}
                for address in addresses:
                    reserved = self._reserved(kind, address)
                    if reserved is None:
                        reserved = self._reserve(kind, address)
                        new.append(reserved)
                    found[kind][address] = replace(reserved, address=replace(reserved.address, tls=address.tls))
        except ConfigError:
            for each in new:
                each.release()
            raise
        return found

    def _reserved(self, kind: str, address: Address) -> Reserved | None:
        place = _place(address)
        for configured, reserved in self._held.get(kind, {}).items():
            if place in (_place(configured), _place(reserved.address)):
                return reserved
        return None

    def _reserve(self, kind: str, address: Address) -> Reserved:
        for other, _, reserved in _each(self._held):
            if other != kind and _place(reserved.address) == _place(address):
                raise ConfigError(
                    f"{kind}: {address} is the address of {other} until {other} has changed",
                    hint=f"reload once without it, and again with {kind} at that address",
                )
        own_ports = {reserved.address.port for reserved in self._held.get(kind, {}).values()}
        return reserve(address, kind, shared=address.path is None and address.port in own_ports)

    def renew(self, revision: int) -> int:
        self._revision = max(self._revision + 1, revision)
        return self._revision

    def release(self) -> None:
        for _, _, each in _each(self._held):
            each.release()
        self._held = {}

    def desired(self, settings: Settings) -> dict[int, tuple[int, ...]]:
        slots: dict[int, tuple[int, ...]] = {}
        for kind in self._held:
            first = (KINDS.index(kind) + 1) * SLOTS_PER_KIND
            slots |= {first + number: () for number in range(getattr(settings, f"{kind}_processes"))}
        return slots

    def inherited(self, slot: int) -> list[int]:
        held = self._held.get(kind_of(slot) or "", {})
        return [each.inherited for each in held.values() if each.inherited is not None]

    def start_message(self, slot: int, settings: Values) -> StartServer:
        kind = kind_of(slot) or ""
        return StartServer(
            slot=slot,
            settings=settings,
            kind=kind,
            revision=self._revision,
            login_secret=self._login_secret.hex(),
            listeners=[[str(each.address), each.inherited] for each in self._held.get(kind, {}).values()],
        )

    def ready(self, slot: int) -> list[str]:
        """Return a line for each address of this slot's kind that was not announced before."""
        kind = kind_of(slot) or ""
        new = [
            each.address for each in self._held.get(kind, {}).values() if (kind, each.address) not in self._announced
        ]
        self._announced |= {(kind, address) for address in new}
        return [f"{kind} {url_of(kind, address)}" for address in new]

    def urls(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for kind, _, each in _each(self._held):
            if (kind, each.address) in self._announced:
                found.setdefault(kind, []).append(url_of(kind, each.address))
        return found


def _each(held: Held) -> Iterator[tuple[str, Address, Reserved]]:
    return ((kind, address, each) for kind, addresses in held.items() for address, each in addresses.items())


def _place(address: Address) -> Address:
    """The address without its TLS prefix."""
    return replace(address, tls=False)


def check_servers(settings: Settings) -> dict[str, list[Address]]:
    found: dict[str, list[Address]] = {}
    owner: dict[Address, str] = {}
    for kind in KINDS:
        text = getattr(settings, kind)
        if text is None:
            continue
        found[kind] = parse_addresses(text, kind)
        check_addresses(found[kind], settings, kind)
        for place in (_place(address) for address in found[kind] if address.port or address.path):
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


def outdated_by(slot: int, changed: Collection[str]) -> bool:
    """True if the `changed` settings restart the process of a slot."""
    kind = kind_of(slot)
    effects = {EFFECTS[name] for name in changed}
    restarting = {Effect.ALL, Effect.WORKERS if kind is None else Effect.SERVERS}
    return kind in changed or not restarting.isdisjoint(effects)
