"""The differences between server releases, as tables: features, DCP_CONTROL settings and capabilities.

Sources: docs/protocol.md 2.2 to 2.11, and recordings of servers 6.0.5 and 7.2.0; if they differ, the recordings decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from mirror.errors import ConfigError
from mirror.server.controls import ENABLE_EXT_METADATA, ENABLE_VALUE_COMPRESSION, STREAM_BUFFER_SIZE, Abilities
from mirror.wire.constants import ControlKey, DcpOpenFlag, Feature, StreamRequestFlag

Release = tuple[int, int]
T = TypeVar("T")

_OLDEST: Release = (5, 0)

FEATURES: dict[int, Release] = {
    Feature.TCP_NODELAY: _OLDEST,
    Feature.MUTATION_SEQNO: _OLDEST,
    Feature.XATTR: _OLDEST,
    Feature.XERROR: _OLDEST,
    Feature.SELECT_BUCKET: _OLDEST,
    Feature.SNAPPY: (5, 5),
    Feature.JSON: (5, 5),
    Feature.DUPLEX: (5, 5),
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION: (5, 5),
    Feature.UNORDERED_EXECUTION: (5, 5),
    Feature.TRACING: (5, 5),
    Feature.ALT_REQUEST: (6, 5),
    Feature.SYNC_REPLICATION: (6, 5),
    Feature.VATTR: (6, 5),
    Feature.SUBDOC_CREATE_AS_DELETED: (6, 6),
    Feature.COLLECTIONS: (7, 0),
    Feature.PRESERVE_TTL: (7, 0),
    Feature.GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION: (7, 6),
    Feature.DEDUPE_NOT_MY_VBUCKET_CLUSTERMAP: (7, 6),
    Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF: (7, 6),
}
"""Feature -> first release. Before 7.0 collections were a preview, off by default."""

CONTROLS: dict[bytes, tuple[Release, Release | None]] = {
    ControlKey.ENABLE_NOOP: (_OLDEST, None),
    ControlKey.SET_NOOP_INTERVAL: (_OLDEST, None),
    ControlKey.CONNECTION_BUFFER_SIZE: (_OLDEST, None),
    ControlKey.SET_PRIORITY: (_OLDEST, None),
    ENABLE_EXT_METADATA: (_OLDEST, (7, 0)),
    ENABLE_VALUE_COMPRESSION: (_OLDEST, (5, 5)),
    ControlKey.SUPPORTS_CURSOR_DROPPING: (_OLDEST, None),
    ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN: ((5, 5), None),
    ControlKey.SUPPORTS_HIFI_MFU: ((5, 5), None),
    ControlKey.FORCE_VALUE_COMPRESSION: ((5, 5), None),
    ControlKey.SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM: ((5, 5), None),
    ControlKey.ENABLE_EXPIRY_OPCODE: ((6, 5), None),
    ControlKey.ENABLE_STREAM_ID: ((6, 5), None),
    ControlKey.ENABLE_SYNC_WRITES: ((6, 5), None),
    ControlKey.CONSUMER_NAME: ((6, 5), None),
    ControlKey.BACKFILL_ORDER: ((6, 6), None),
    ControlKey.INCLUDE_DELETED_USER_XATTRS: ((6, 6), None),
    ControlKey.ENABLE_OUT_OF_ORDER_SNAPSHOTS: ((7, 0), None),
    ControlKey.V7_DCP_STATUS_CODES: ((7, 0), None),
    ControlKey.CHANGE_STREAMS: ((7, 2), None),
    ControlKey.FLATBUFFERS_SYSTEM_EVENTS: ((7, 2), None),
    ControlKey.MAX_MARKER_VERSION: ((8, 0), None),
    STREAM_BUFFER_SIZE: (_OLDEST, None),
}
"""DCP_CONTROL setting -> first release with it, first later release without it. Other settings get EINVAL."""

OPEN_FLAGS: dict[int, Release] = {
    DcpOpenFlag.PRODUCER: _OLDEST,
    DcpOpenFlag.INCLUDE_XATTRS: _OLDEST,
    DcpOpenFlag.NO_VALUE: _OLDEST,
    DcpOpenFlag.INCLUDE_DELETE_TIMES: (5, 5),
    DcpOpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE: (5, 5),
    DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS: (6, 6),
}
"""DCP_OPEN: flag -> first release."""

STREAM_FLAGS: dict[int, Release] = {
    StreamRequestFlag.TAKEOVER: _OLDEST,
    StreamRequestFlag.TO_LATEST: _OLDEST,
    StreamRequestFlag.DISK_ONLY: _OLDEST,
    StreamRequestFlag.ACTIVE_VB_ONLY: _OLDEST,
    StreamRequestFlag.STRICT_VBUUID: (5, 5),
    StreamRequestFlag.IGNORE_PURGED_TOMBSTONES: (7, 2),
    StreamRequestFlag.FROM_LATEST: (7, 6),
}
"""DCP_STREAM_REQ: flag -> first release. Other flags are refused with EINVAL from 7.2 on, and ignored before
(kv_engine, daemon/mcbp_validators.cc, dcp_stream_req_validator).
"""

STREAM_KEYS: dict[str, Release] = {
    "uid": (7, 0),
    "collections": (7, 0),
    "scope": (7, 0),
    "sid": (7, 0),
    "purge_seqno": (8, 0),
}
"""Key in the JSON value of a stream request -> first release; other keys are ignored."""

CAPABILITIES: dict[str, Release] = {
    "durableWrite": (6, 5),
    "tombstonedUserXAttrs": (6, 6),
    "collections": (7, 0),
    "preserveExpiry": (7, 0),
    "subdoc.ReplaceBodyWithXattr": (7, 0),
    "subdoc.DocumentMacroSupport": (7, 0),
}
"""Bucket capability in the cluster map -> first release; other capabilities are in every release."""


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    release: Release

    def since(self, major: int, minor: int) -> bool:
        return self.release >= (major, minor)

    @property
    def version(self) -> bytes:
        return b"%d.%d.0" % self.release

    @property
    def features(self) -> frozenset[int]:
        return frozenset(self._known(FEATURES))

    @property
    def open_flags(self) -> int:
        return sum(self._known(OPEN_FLAGS))

    @property
    def stream_keys(self) -> frozenset[str]:
        return frozenset(self._known(STREAM_KEYS))

    def abilities(self, *, keeps_history: bool) -> Abilities:
        known = (
            name
            for name, (since, until) in CONTROLS.items()
            if since <= self.release and (until is None or self.release < until)
        )
        return Abilities(
            frozenset(known),
            fractional_noop_interval=self.since(7, 6),
            change_streams=keeps_history,
            oso_with_seqno_advanced=self.since(7, 1),
            stream_flags=sum(self._known(STREAM_FLAGS)),
            refuses_unknown_stream_flags=self.since(7, 2),
        )

    def has_capability(self, name: str) -> bool:
        return CAPABILITIES.get(name, _OLDEST) <= self.release

    @property
    def collections(self) -> bool:
        return self.since(7, 0)

    @property
    def system_collections(self) -> bool:
        """True if the system's collections (`_...`) are hidden from users who lack the privilege for them."""
        return self.since(7, 6)

    def _known(self, table: dict[T, Release]) -> list[T]:
        return [entry for entry, since in table.items() if since <= self.release]


_RELEASES: tuple[Release, ...] = ((5, 0), (5, 5), (6, 0), (6, 5), (6, 6), (7, 0), (7, 1), (7, 2), (7, 6), (8, 0))

PROFILES: dict[str, Profile] = {
    f"{major}.{minor}": Profile(f"{major}.{minor}", (major, minor)) for major, minor in _RELEASES
}
PROFILES |= {f"{major}.x": profile for (major, _), profile in zip(_RELEASES, PROFILES.values(), strict=True)}
"""Name -> profile; `7.x` is the newest release of 7."""

DEFAULT_PROFILE = "8.x"


def profile_named(name: str) -> Profile:
    profile = PROFILES.get(name)
    if profile is None:
        raise ConfigError(f"no server profile {name!r}", hint=f"take {', '.join(PROFILES)}")
    return profile
