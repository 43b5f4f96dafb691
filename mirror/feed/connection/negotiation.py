"""The opening of a DCP connection: DCP_OPEN, then the controls, one at a time (docs/protocol.md 2.2 and 2.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mirror.clock import Clock
from mirror.errors import HandshakeFailed, NotSupported, PrivilegeMissing
from mirror.feed.connection.bootstrap import Access, Handshake, enter
from mirror.feed.connection.connection_string import NodeAddress
from mirror.feed.connection.transport import Link, Opaques
from mirror.wire import events as ev
from mirror.wire.codec_dcp import to_frame
from mirror.wire.constants import ControlKey, DcpOpenFlag, Feature, Opcode, Status, status_name

PLAIN_FLAGS = DcpOpenFlag.PRODUCER | DcpOpenFlag.INCLUDE_XATTRS
FLAGS_WITH_TIMES = PLAIN_FLAGS | DcpOpenFlag.INCLUDE_DELETE_TIMES
OPEN_FLAGS = (FLAGS_WITH_TIMES | DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS, FLAGS_WITH_TIMES, PLAIN_FLAGS)
"""The flags to try in turn: a server answers EINVAL to a flag that it does not know, and may then hang up."""
REQUIRED, OPTIONAL = True, False


async def open_dcp(access: Access, address: NodeAddress, clock: Clock, *, name: str, opaques: Opaques) -> Opening:
    """Log in, open DCP and negotiate. Raises ClusterError or ConfigError, and leaves nothing open."""
    for flags in OPEN_FLAGS:
        link, handshake = await enter(access, address, clock, name=name, opaques=opaques)
        opening = Opening(access, link, handshake, access.settings.noop_interval_s)
        try:
            if await opening.open(name, flags):
                await opening.negotiate()
                return opening
        except BaseException:
            link.close()
            raise
        link.close()
    raise NotSupported(
        f"{address} refused to open a DCP connection: EINVAL", hint="Couchbase Server 5.5 or newer is needed"
    )


@dataclass(slots=True)
class Opening:
    access: Access
    link: Link
    handshake: Handshake
    noop_interval_s: float
    controls: dict[str, bool] = field(default_factory=dict)
    """The controls that were sent, by name: True if the server accepted the control."""
    flags: DcpOpenFlag = PLAIN_FLAGS

    async def open(self, name: str, flags: DcpOpenFlag) -> bool:
        """Send DCP_OPEN; return False if the server does not know one of the flags."""
        if Feature.XATTR not in self.handshake.features:
            flags &= ~(DcpOpenFlag.INCLUDE_XATTRS | DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS)
        if not self.handshake.collections:  # a server without collections may not know this flag
            flags &= ~DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS
        self.flags = flags
        request = to_frame(ev.DcpOpen(name.encode(), int(flags)))
        answer = await self.link.request(
            Opcode.DCP_OPEN,
            extras=request.extras,
            key=request.key,
            value=request.value,
            timeout_s=self.access.settings.request_timeout_s,
        )
        if answer.status == Status.EINVAL:
            return False
        if answer.status == Status.EACCESS:
            raise self._privilege_missing()
        if answer.status != Status.SUCCESS:
            raise HandshakeFailed(
                f"{self.link.address} refused to open DCP: {status_name(answer.status)}",
                hint="the bucket may still be warming up",
            )
        return True

    async def negotiate(self) -> None:
        settings = self.access.settings
        # First: without noops a stream with xattrs is refused (docs/protocol.md 2.3).
        await self._control(ControlKey.ENABLE_NOOP, b"true", REQUIRED)
        await self._set_noop_interval()
        await self._control(ControlKey.CONNECTION_BUFFER_SIZE, str(settings.connection_buffer_size).encode(), REQUIRED)
        # Else a slow mirror holds the server's memory: it may drop our cursor, and continue from its disk.
        await self._control(ControlKey.SUPPORTS_CURSOR_DROPPING_VULCAN, b"true", OPTIONAL)
        await self._control(ControlKey.SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM, b"true", OPTIONAL)
        await self._control(ControlKey.ENABLE_EXPIRY_OPCODE, b"true", OPTIONAL)
        if self.flags & DcpOpenFlag.INCLUDE_DELETED_USER_XATTRS:
            await self._control(ControlKey.INCLUDE_DELETED_USER_XATTRS, b"true", OPTIONAL)
        await self._control(ControlKey.V7_DCP_STATUS_CODES, b"true", OPTIONAL)
        if settings.compression == "forced" and Feature.SNAPPY in self.handshake.features:
            await self._control(ControlKey.FORCE_VALUE_COMPRESSION, b"true", OPTIONAL)
        if not self.handshake.collections:
            return
        await self._control(ControlKey.FLATBUFFERS_SYSTEM_EVENTS, b"true", OPTIONAL)
        if settings.change_streams:
            await self._control(ControlKey.CHANGE_STREAMS, b"true", OPTIONAL)
        await self._control(ControlKey.MAX_MARKER_VERSION, b"2.2", OPTIONAL)

    async def _set_noop_interval(self) -> None:
        interval_s = self.noop_interval_s
        if interval_s != int(interval_s):
            if await self._control(ControlKey.SET_NOOP_INTERVAL, f"{interval_s:g}".encode(), OPTIONAL):
                return
            # Fractions are from 7.6 on; an older server gets the next whole number (docs/protocol.md 2.3).
            self.noop_interval_s = float(math.ceil(interval_s))
        await self._control(ControlKey.SET_NOOP_INTERVAL, str(int(self.noop_interval_s)).encode(), OPTIONAL)

    async def _control(self, name: bytes, value: bytes, required: bool) -> bool:
        address, settings = self.link.address, self.access.settings
        answer = await self.link.request(
            Opcode.DCP_CONTROL, key=name, value=value, timeout_s=settings.request_timeout_s
        )
        taken = self.controls[name.decode()] = answer.status == Status.SUCCESS
        if taken or (not required and answer.status in (Status.EINVAL, Status.NOT_SUPPORTED)):
            return taken
        if answer.status == Status.EACCESS:
            raise self._privilege_missing()
        if answer.status in (Status.EINVAL, Status.NOT_SUPPORTED):
            raise NotSupported(
                f"{address} refused {name.decode()}={value.decode()}", hint="Couchbase Server 5.5 or newer is needed"
            )
        raise HandshakeFailed(f"{address} refused {name.decode()}: {status_name(answer.status)}")

    def _privilege_missing(self) -> PrivilegeMissing:
        bucket = self.access.source.bucket
        return PrivilegeMissing(f"{self.link.address} does not let this user read DCP on bucket {bucket}")
