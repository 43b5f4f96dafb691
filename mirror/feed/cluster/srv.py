"""DNS SRV: the hosts behind one name, as SDKs look for them (`_couchbase._tcp.NAME`, `_couchbases._tcp.NAME`).

Invariants: only a single name without a port is looked up (`ConnectionString.srv_name`), and again for each call, so
that no stale answer is kept; if DNS fails, the name itself is the host, as in SDKs: most names have no such records.
"""

from __future__ import annotations

from mirror.errors import ConfigError
from mirror.feed.connection.connection_string import ConnectionString, NodeAddress
from mirror.log import get_logger

log = get_logger("feed")

LOOK_UP_TIMEOUT_S = 2.0
"""Timeout; after it a name counts as one without such records. SDKs wait half a second."""
DNS_PORT = 53


async def first_addresses(source: ConnectionString, dns_server: str | None = None) -> tuple[NodeAddress, ...]:
    """Return the hosts of the string, or those that its one name stands for."""
    name = source.srv_name
    if name is None:
        return source.addresses
    found = await look_up(f"_couchbase{'s' if source.tls else ''}._tcp.{name}", dns_server)
    if found:
        log.debug("srv-hosts", name=name, hosts=[str(address) for address in found])
    return found or source.addresses


async def look_up(record: str, dns_server: str | None = None) -> tuple[NodeAddress, ...]:
    """Return the targets of an SRV record, the most preferred first; empty if there is none, or no answer."""
    import dns.asyncresolver  # here: a twentieth of a second that only such names need
    import dns.exception
    import dns.rdtypes.IN.SRV

    try:
        resolver = dns.asyncresolver.Resolver(configure=dns_server is None)
        if dns_server is not None:
            host, port = server_of(dns_server)
            resolver.nameservers = [host]
            resolver.port = port
        answer = await resolver.resolve(record, "SRV", lifetime=LOOK_UP_TIMEOUT_S)
    except (dns.exception.DNSException, OSError, ValueError) as error:
        log.debug("srv-no-hosts", record=record, why=str(error))
        return ()
    records = [row for row in answer if isinstance(row, dns.rdtypes.IN.SRV.SRV)]
    records.sort(key=lambda row: (row.priority, -row.weight))
    return tuple(NodeAddress(row.target.to_text(omit_final_dot=True), row.port) for row in records)


def server_of(text: str) -> tuple[str, int]:
    """Parse the setting `dns_server`: `10.0.0.2`, `10.0.0.2:5353`, `[::1]:5353`. Raises ConfigError."""
    host, colon, port = text.rpartition(":") if text.count(":") == 1 or "]:" in text else (text, "", "")
    host = host.removeprefix("[").removesuffix("]")
    if colon and not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536):
        raise ConfigError(
            f"dns_server {text!r} has no port behind its colon",
            hint="write ADDRESS or ADDRESS:PORT",
            setting="dns_server",
        )
    return host, int(port) if colon else DNS_PORT
