"""Sub-document changes of one document in memory (kv_engine docs/SubDocument.md); `mirror.document.lookup` has reads.

Xattrs are changed as members of one JSON object. The caller discards the draft after a failed change.
"""

from __future__ import annotations

from dataclasses import dataclass

from mirror.document import jsonpath, values
from mirror.document.jsonpath import PathError
from mirror.document.lookup import PATH_FLAGS, XATTR_PATH, About, Content, first_name
from mirror.sandbox.data.item import Item
from mirror.wire.constants import Opcode, Status

MKDIR_P = 0x01
EXPAND_MACROS = 0x10


@dataclass(slots=True)
class Draft(Content):
    deleted: bool = False

    @staticmethod
    def of_item(item: Item | None, vbuuid: int, empty_body: bytes = b"{}") -> Draft:
        if item is None:
            return Draft({}, empty_body)
        xattrs, body = values.split(item.value, item.datatype)
        about = About(
            item.cas, item.seqno, item.rev_seqno, item.flags, item.expiry, item.datatype, item.deleted, vbuuid
        )
        return Draft(xattrs, body, about, deleted=item.deleted)

    def change(self, opcode: int, path: str, value: bytes, flags: int) -> bytes:
        """Change one path; return the operation's answer, such as a counter's number. Raises PathError."""
        if flags & ~PATH_FLAGS:
            raise PathError(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO)
        if flags & EXPAND_MACROS:
            raise PathError(Status.SUBDOC_XATTR_UNKNOWN_MACRO)
        if flags & XATTR_PATH:
            return self._change_attribute(opcode, path, value, flags)
        if opcode == Opcode.SET and not path:
            self._set_body(value)
            return b""
        if opcode == Opcode.DELETE and not path:
            self._set_body(b"")
            self.deleted = True
            return b""
        if opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
            self._set_body(self.lookup(Opcode.SUBDOC_GET, path, XATTR_PATH))
            return b""
        text, answer = _changed(self.body_text(), opcode, path, value, flags)
        self._set_body(text.encode())
        return answer

    def _set_body(self, body: bytes) -> None:
        self.body, self._text, self._is_json = body, None, None

    def stored(self) -> tuple[bytes, int]:
        body = bytes(self.body)
        return values.join(self.xattrs, body, values.datatype_of(body) if body else 0)

    def _change_attribute(self, opcode: int, path: str, value: bytes, flags: int) -> bytes:
        name = first_name(path)
        if name.startswith("$"):
            raise PathError(Status.SUBDOC_XATTR_CANT_MODIFY_VATTR)
        text = self.attributes_text(path)
        if len(jsonpath.parse_path(path)) > 1 and name.encode() not in self.xattrs:
            flags |= MKDIR_P  # a missing attribute is always created (recording sdk_72_conn2)
        text, answer = _changed(text, opcode, path, value, flags)
        self.xattrs = {
            str(member.name).encode(): text[member.value_start : member.end].encode()
            for member in jsonpath.members(text, 0)
        }
        return answer


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
    """Return the JSON to insert: one value, or with `several` values separated by commas."""
    if not values.is_json(b"[%b]" % value if several else value) or (several and not value.strip()):
        raise PathError(Status.SUBDOC_VALUE_CANTINSERT)
    return value.decode()
