"""The connection string: `couchbase://user@host[:port][,host2]/bucket[?network=external]`, and its parts.

A password in the string is refused, because other users can read command lines.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import parse_qsl, quote, unquote

from mirror.errors import ConfigError

KV_PORT = 11210
KV_PORT_TLS = 11207
HOSTS_MAX = 64
"""Limit of the hosts in a string. A few are enough, because the cluster map names the others."""

_SCHEMES = {"couchbase": False, "couchbases": True}
_NAME = re.compile(
    r"^(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\.?$"
)
_HOST_PORT = re.compile(r"(?:\[(?P<ip6>[^\]]*)\]|(?P<name>[^:\[]*))(?::(?P<port>[^:]*))?")
_BUCKET = re.compile(r"^[A-Za-z0-9_.%-]{1,100}$")
_EXAMPLE = "couchbase://user@host/bucket"

Network = Literal["auto", "default", "external"]
"""The set of advertised addresses to use; `auto`: the set with the address from which we got the first map."""


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A host (name, IPv4 or IPv6 without brackets) and its KV port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ConnectionString:
    tls: bool
    user: str | None
    addresses: tuple[NodeAddress, ...]
    bucket: str
    explicit_port: bool = False
    """True if a port was given: then a name is looked up as a host, without DNS SRV records."""
    network: Network | None = None
    """The value of `?network=`; None: the setting decides."""

    def __str__(self) -> str:
        """Return the string with all ports, except after a name that may have DNS SRV records (`srv_name`)."""
        user = f"{quote(self.user, safe='')}@" if self.user else ""
        hosts = self.srv_name or ",".join(str(address) for address in self.addresses)
        network = f"?network={self.network}" if self.network else ""
        return f"couchbase{'s' if self.tls else ''}://{user}{hosts}/{quote(self.bucket, safe='')}{network}"

    @property
    def srv_name(self) -> str | None:
        """The only host, if it may have DNS SRV records: a name without a port, and not localhost. Otherwise None."""
        (first, *others) = self.addresses
        if others or self.explicit_port or not is_name(first.host) or first.host == "localhost":
            return None
        return first.host


def is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return True
    return False


def parse(text: str) -> ConnectionString:
    """Parse a connection string. Raises ConfigError."""
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in _SCHEMES:
        raise _wrong(f"{scheme[:40]!r} is not a scheme we know", f"write {_EXAMPLE} or couchbases://...")
    tls = _SCHEMES[scheme]
    rest, _, options = rest.partition("?")
    network = _network(options)
    authority, separator, path = rest.partition("/")
    bucket = unquote(path.rstrip("/"))
    if not bucket:
        raise _wrong("no bucket is named", f"write it after the host: {_EXAMPLE}")
    if not _BUCKET.match(bucket):
        raise _wrong(f"{bucket[:100]!r} cannot be a bucket's name", "names are letters, digits and . _ - %")
    user_text, _, hosts_text = authority.rpartition("@")
    if ":" in user_text:
        raise _wrong(
            "it must not hold a password", "set DCP_MIRROR_PASSWORD or a password file, and write user@host only"
        )
    parts = re.split("[,;]", hosts_text)
    if len(parts) > HOSTS_MAX:
        raise _wrong(f"it names {len(parts)} hosts; {HOSTS_MAX} is the most", "name a few; the map names the rest")
    default_port = KV_PORT_TLS if tls else KV_PORT
    found = [_address(part.strip(), default_port) for part in parts]
    addresses, named_ports = tuple(address for address, _ in found), any(named for _, named in found)
    return ConnectionString(tls, unquote(user_text) or None, addresses, bucket, named_ports, network)


def _network(options: str) -> Network | None:
    found: Network | None = None
    for name, value in parse_qsl(options, keep_blank_values=True):
        if name != "network":
            raise _wrong(
                f"unknown option {name[:40]!r}; only network= is known",
                "set it as a setting: `dcp-mirror config show` lists them",
            )
        if value not in get_args(Network):
            raise _wrong(f"{value[:40]!r} is not a network", f"take one of {', '.join(get_args(Network))}")
        found = value  # type: ignore[assignment]  # checked above
    return found


def _address(text: str, default_port: int) -> tuple[NodeAddress, bool]:
    """Return the address, and True if the text names its port."""
    found = _HOST_PORT.fullmatch(text)
    if found is None and text.startswith("["):
        raise _wrong(f"{text[:60]!r} has unpaired brackets", "write IPv6 as [::1]:11210")
    if found is None:
        raise _wrong(f"{text[:60]!r} is ambiguous", "write IPv6 in brackets: [::1]:11210")
    host, port = found["ip6"] or found["name"] or "", found["port"]
    if found["ip6"] is not None:
        try:
            ipaddress.IPv6Address(host.partition("%")[0])
        except ValueError:
            raise _wrong(f"{host[:60]!r} is not an IPv6 address", "write IPv6 as [::1]:11210") from None
    elif not _NAME.match(host):
        raise _wrong(f"{host[:60]!r} cannot be a host", f"write {_EXAMPLE}")
    if port is None:
        return NodeAddress(host, default_port), False
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536):
        raise _wrong(f"{port[:20]!r} cannot be a port", "a port is the KV port, usually 11210 (11207 with TLS)")
    return NodeAddress(host, int(port)), True


def _wrong(what: str, hint: str) -> ConfigError:
    return ConfigError(f"the connection string is wrong: {what}", hint=hint)
