"""Look up paths in one document: in its body, its xattrs and its metadata (kv_engine docs/SubDocument.md).

A path sees the xattrs as the members of one JSON object. A lookup of many paths checks the body's JSON at most once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from google_crc32c import value as crc32c

from mirror.document import jsonpath, values, walk
from mirror.document.jsonpath import PathError
from mirror.wire.constants import Opcode, Status

XATTR_PATH = 0x04
PATH_FLAGS = 0x01 | XATTR_PATH | 0x10
"""Allowed flags of a path: make parents, xattr, expand macros."""

LOOKUPS = (Opcode.GET, Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT)
"""Operations that a lookup may name for a path. GET returns the whole body."""

JUDGED_BYTES_MAX = 64 * 1024
"""A larger body is not checked, because checking takes long. Its datatype tells if it is JSON."""


@dataclass(frozen=True, slots=True)
class About:
    cas: int
    seqno: int
    rev_seqno: int
    flags: int
    expiry: int
    datatype: int
    deleted: bool
    vbuuid: int


@dataclass(slots=True)
class Content:
    xattrs: values.Xattrs
    body: bytes
    about: About
    _is_json: bool | None = field(default=None, repr=False)

    @staticmethod
    def of(value: bytes, datatype: int, about: About) -> Content:
        """Raises ValueError for a damaged value."""
        xattrs, body = values.split(value, datatype)
        return Content(xattrs, body, about)

    def lookup(self, opcode: int, path: str, flags: int) -> bytes:
        """Return the value of one path. Raises PathError."""
        if opcode == Opcode.GET and not path:
            return self.body
        if flags & ~PATH_FLAGS:
            raise PathError(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
        data = self.attributes_text(path).encode() if flags & XATTR_PATH else self._json_body()
        parts = jsonpath.parse_path(path)
        if opcode == Opcode.SUBDOC_GET_COUNT:
            return str(walk.count(data, parts)).encode()
        start, end = walk.find(data, parts)
        return b"" if opcode == Opcode.SUBDOC_EXISTS else data[start:end]

    def _json_body(self) -> bytes:
        if self._is_json is None:
            if len(self.body) > JUDGED_BYTES_MAX:
                self._is_json = bool(self.about.datatype & values.JSON)
            else:
                self._is_json = values.is_json(self.body)
        if not self._is_json:
            raise PathError(Status.SUBDOC_DOC_NOT_JSON)
        return self.body

    def attributes_text(self, path: str) -> str:
        """Return all xattrs as one JSON object, or only the virtual attribute that the path names. Raises PathError."""
        name = first_name(path)
        if name.startswith("$"):
            return json.dumps({name: self._virtual(name)}, separators=(",", ":"))
        pairs = ",".join(f"{json.dumps(key.decode())}:{content.decode()}" for key, content in self.xattrs.items())
        return f"{{{pairs}}}"

    def _virtual(self, name: str) -> object:
        if name == "$XTOC":
            return [key.decode() for key in self.xattrs]
        if name == "$document":
            return self._about_document()
        if name == "$vbucket":
            return {"HLC": {"now": "0", "mode": "real"}}
        raise PathError(Status.SUBDOC_XATTR_UNKNOWN_VATTR)

    def _about_document(self) -> dict[str, object]:
        about = self.about
        names = {values.JSON: "json", values.SNAPPY: "snappy", values.XATTR: "xattr"}
        found: dict[str, object] = {
            "CAS": f"0x{about.cas:016x}",
            "datatype": [name for bit, name in names.items() if about.datatype & bit] or ["raw"],
            "deleted": about.deleted,
            "exptime": 0 if about.deleted else about.expiry,
            "flags": about.flags,
            "last_modified": str(about.cas // 1_000_000_000),
            "revid": str(about.rev_seqno),
            "seqno": f"0x{about.seqno:016x}",
            "value_bytes": len(self.body),
            "value_crc32c": f"0x{crc32c(self.body):08x}",
            "vbucket_uuid": f"0x{about.vbuuid:016x}",
        }
        return found


def first_name(path: str) -> str:
    """Return the attribute's name at the start of an xattr path. Raises PathError."""
    parts = jsonpath.parse_path(path)
    if not parts or not isinstance(parts[0], str):
        raise PathError(Status.SUBDOC_PATH_EINVAL)
    return parts[0]
