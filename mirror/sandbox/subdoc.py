"""Sub-document operations on one document in memory: look up and change paths of its body and of its xattrs.

Knows the operations and flags (kv_engine docs/SubDocument.md) and the virtual attributes; must never know requests,
vbuckets or how documents are stored. Invariants: xattrs are worked on as if they were one object whose members they
are; a virtual attribute is never changed; a change that fails leaves the draft to be thrown away.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache

from mirror.sandbox import jsonpath, values
from mirror.sandbox.item import Item
from mirror.sandbox.jsonpath import PathError
from mirror.wire.constants import Opcode, Status

MKDIR_P = 0x01
XATTR_PATH = 0x04
EXPAND_MACROS = 0x10
_PATH_FLAGS = MKDIR_P | XATTR_PATH | EXPAND_MACROS

_VIRTUAL = ("$document", "$vbucket", "$XTOC")


@dataclass(slots=True)
class Draft:
    """A document being looked at or changed."""

    xattrs: values.Xattrs
    body: bytes
    item: Item | None
    vbuuid: int
    deleted: bool = False

    @staticmethod
    def of(item: Item | None, vbuuid: int, empty_body: bytes = b"{}") -> Draft:
        """A draft of a stored version, or of a new document."""
        if item is None:
            return Draft({}, empty_body, None, vbuuid)
        xattrs, body = values.split(item.value, item.datatype)
        return Draft(xattrs, body, item, vbuuid, item.deleted)

    def lookup(self, opcode: int, path: str, flags: int) -> bytes:
        """What one path of a lookup gives. Raises PathError."""
        if opcode == Opcode.GET and not path:
            return self.body
        if flags & ~_PATH_FLAGS:
            raise PathError(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
        text = self._attributes(path) if flags & XATTR_PATH else self._body_text()
        parts = jsonpath.parse_path(path)
        if opcode == Opcode.SUBDOC_GET_COUNT:
            return str(jsonpath.count(text, parts)).encode()
        start, end = jsonpath.find(text, parts)
        return b"" if opcode == Opcode.SUBDOC_EXISTS else text[start:end].encode()

    def change(self, opcode: int, path: str, value: bytes, flags: int) -> bytes:
        """Change one path; returns what the operation answers (a counter its number). Raises PathError."""
        if flags & ~_PATH_FLAGS:
            raise PathError(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
        if flags & EXPAND_MACROS:
            raise PathError(Status.SUBDOC_XATTR_UNKNOWN_MACRO)
        if flags & XATTR_PATH:
            return self._change_attribute(opcode, path, value, flags)
        if opcode == Opcode.SET and not path:
            self.body = value
            return b""
        if opcode == Opcode.DELETE and not path:
            self.body, self.deleted = b"", True
            return b""
        if opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
            self.body = self.lookup(Opcode.SUBDOC_GET, path, XATTR_PATH)
            return b""
        text, answer = _changed(self._body_text(), opcode, path, value, flags)
        self.body = text.encode()
        return answer

    def stored(self) -> tuple[bytes, int]:
        """The draft as a value and its datatype."""
        return values.join(self.xattrs, self.body, values.datatype_of(self.body) if self.body else 0)

    def _body_text(self) -> str:
        if not values.is_json(self.body):
            raise PathError(Status.SUBDOC_DOC_NOT_JSON)
        return self.body.decode()

    def _attributes(self, path: str) -> str:
        """All xattrs as the text of one object."""
        name = _first_name(path)
        if name.startswith("$"):
            return json.dumps({name: self._virtual(name)}, separators=(",", ":"))
        pairs = ",".join(f"{json.dumps(key.decode())}:{content.decode()}" for key, content in self.xattrs.items())
        return f"{{{pairs}}}"

    def _change_attribute(self, opcode: int, path: str, value: bytes, flags: int) -> bytes:
        name = _first_name(path)
        if name.startswith("$"):
            raise PathError(Status.SUBDOC_XATTR_CANT_MODIFY_VATTR)
        text = self._attributes(path)
        if len(jsonpath.parse_path(path)) > 1 and name.encode() not in self.xattrs:
            flags |= MKDIR_P  # the attribute itself is made as it is needed (captures/sdk_72_conn2.jsonl)
        text, answer = _changed(text, opcode, path, value, flags)
        self.xattrs = {
            str(member.name).encode(): text[member.value_start : member.end].encode()
            for member in jsonpath.members(text, 0)
        }
        return answer

    def _virtual(self, name: str) -> object:
        if name == "$XTOC":
            return [key.decode() for key in self.xattrs]
        if name == "$document" and self.item is not None:
            return self._about_document(self.item)
        if name == "$vbucket":
            return {"HLC": {"now": "0", "mode": "real"}}
        raise PathError(Status.SUBDOC_XATTR_UNKNOWN_VATTR)

    def _about_document(self, item: Item) -> dict[str, object]:
        names = {values.JSON: "json", values.SNAPPY: "snappy", values.XATTR: "xattr"}
        return {
            "CAS": f"0x{item.cas:016x}",
            "datatype": [name for bit, name in names.items() if item.datatype & bit] or ["raw"],
            "deleted": item.deleted,
            "exptime": 0 if item.deleted else item.expiry,
            "flags": item.flags,
            "last_modified": str(item.cas // 1_000_000_000),
            "revid": str(item.rev_seqno),
            "seqno": f"0x{item.seqno:016x}",
            "value_bytes": len(self.body),
            "value_crc32c": f"0x{crc32c(self.body):08x}",
            "vbucket_uuid": f"0x{self.vbuuid:016x}",
        }


def _first_name(path: str) -> str:
    parts = jsonpath.parse_path(path)
    if not parts or not isinstance(parts[0], str):
        raise PathError(Status.SUBDOC_PATH_EINVAL)
    return parts[0]


def _changed(text: str, opcode: int, path: str, value: bytes, flags: int) -> tuple[str, bytes]:
    parts = jsonpath.parse_path(path)
    make_parents = bool(flags & MKDIR_P)
    if opcode == Opcode.SUBDOC_DELETE:
        return jsonpath.remove(text, parts), b""
    if opcode == Opcode.SUBDOC_COUNTER:
        try:
            delta = int(value)
        except ValueError:
            raise PathError(Status.SUBDOC_DELTA_EINVAL) from None
        text, number = jsonpath.add_number(text, parts, delta, make_parents=make_parents)
        return text, str(number).encode()
    several = opcode in (Opcode.SUBDOC_ARRAY_PUSH_LAST, Opcode.SUBDOC_ARRAY_PUSH_FIRST, Opcode.SUBDOC_ARRAY_INSERT)
    fragment = _fragment(value, several=several)
    if opcode in (Opcode.SUBDOC_DICT_ADD, Opcode.SUBDOC_DICT_UPSERT):
        add_only = opcode == Opcode.SUBDOC_DICT_ADD
        return jsonpath.insert_member(text, parts, fragment, make_parents=make_parents, add_only=add_only), b""
    if opcode == Opcode.SUBDOC_REPLACE:
        return jsonpath.replace(text, parts, fragment), b""
    if opcode == Opcode.SUBDOC_ARRAY_INSERT:
        return jsonpath.insert_element(text, parts, fragment), b""
    if opcode == Opcode.SUBDOC_ARRAY_ADD_UNIQUE:
        return jsonpath.add_unique(text, parts, fragment, make_parents=make_parents), b""
    if several:
        first = opcode == Opcode.SUBDOC_ARRAY_PUSH_FIRST
        return jsonpath.push(text, parts, fragment, first=first, make_parents=make_parents), b""
    raise PathError(Status.SUBDOC_INVALID_COMBO)


def _fragment(value: bytes, *, several: bool) -> str:
    """A value to be put in: JSON, or for arrays several of them with commas between."""
    if not values.is_json(b"[%b]" % value if several else value) or (several and not value.strip()):
        raise PathError(Status.SUBDOC_VALUE_CANTINSERT)
    return value.decode()


@cache
def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F6_3B78 if crc & 1 else crc >> 1
        table.append(crc)
    return table


def crc32c(data: bytes) -> int:
    """CRC-32 by Castagnoli's polynomial, as `$document.value_crc32c` has it."""
    table = _crc_table()
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFF_FFFF
