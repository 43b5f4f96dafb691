"""The selection: the mirrored part of a bucket, by name, and the stream filter with the source's current ids.

A mirror stores names, but a stream request has ids: a collection that is dropped and created again keeps its name and
gets another id. A filter has only ids of the manifest, because a source refuses other ids (kv_engine
docs/Collections.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mirror.errors import ConfigError
from storage.model import DEFAULT_COLLECTION

_NAME = re.compile(r"[A-Za-z0-9_%-]{1,251}")
COLLECTIONS_MAX = 1000
"""Limit of selected collections; a bucket has no more."""
SYSTEM_SCOPE = "_system"
"""The scope of the server's own services. Since 7.6 every bucket has it."""


FilterFields = dict[str, str | list[str]]
"""The JSON value of a stream request: `scope` or `collections`, as hex ids."""

MANIFEST_BYTES_MAX = 4 * 1024 * 1024
"""Limit of a source's manifest: ten times the largest possible manifest."""


class MalformedManifest(Exception): ...


@dataclass(frozen=True, slots=True)
class SourceManifest:
    uid: int
    scopes: dict[str, int]
    collections: dict[tuple[str, str], int]

    @staticmethod
    def parse(body: bytes) -> SourceManifest:
        """Read a manifest. Raises MalformedManifest."""
        if len(body) > MANIFEST_BYTES_MAX:
            raise MalformedManifest(f"a manifest of {len(body)} bytes; {MANIFEST_BYTES_MAX} at most")
        try:
            found = json.loads(body)
            scopes = {str(scope["name"]): int(scope["uid"], 16) for scope in found["scopes"]}
            collections = {
                (str(scope["name"]), str(entry["name"])): int(entry["uid"], 16)
                for scope in found["scopes"]
                for entry in scope.get("collections", ())
            }
            return SourceManifest(int(found["uid"], 16), scopes, collections)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise MalformedManifest(f"{type(error).__name__}: {error}") from None

    @property
    def hides_system(self) -> bool:
        """True if the server's own scope does not exist or is hidden from this user."""
        return SYSTEM_SCOPE not in self.scopes


@dataclass(frozen=True, slots=True)
class StreamFilter:
    scope_id: int | None = None
    collection_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The canonical form, which the store keeps with the position."""
        if self.scope_id is not None:
            return f"scope {self.scope_id:x}"
        return "collections " + ",".join(f"{each:x}" for each in self.collection_ids)

    @staticmethod
    def parse(text: str) -> StreamFilter | None:
        kind, _, ids = text.partition(" ")
        try:
            if kind == "scope":
                return StreamFilter(scope_id=int(ids, 16))
            if kind == "collections":
                return StreamFilter(collection_ids=tuple(int(each, 16) for each in ids.split(",")))
        except ValueError:
            pass
        return None

    @property
    def fields(self) -> FilterFields:
        if self.scope_id is not None:
            return {"scope": f"{self.scope_id:x}"}
        return {"collections": [f"{each:x}" for each in self.collection_ids]}

    def shows_by_itself(self, collection_id: int, scope_id: int) -> bool:
        """Return True if the filter includes this collection, which no event creates (the default collection)."""
        return self.scope_id == scope_id if self.scope_id is not None else collection_id in self.collection_ids

    def within(self, other: StreamFilter | None) -> bool:
        """Return True if `other` is a filter of the same kind that includes all of this filter."""
        if other is None or self.scope_id is not None or other.scope_id is not None:
            return self == other
        return set(self.collection_ids) <= set(other.collection_ids)

    def continues(self, before: str | None, held_ids: Iterable[int]) -> bool:
        """Return True if a stream with this filter can continue a stream with the filter text `before`.

        This filter must include each collection that the mirror holds: otherwise the source would not send that
        collection's drop. It must add no collection: the source would not send the earlier rows of an added one. Even
        an equal filter can lack a held collection, if the staged rows with that collection's drop were abandoned.
        """
        old = None if before is None else StreamFilter.parse(before)
        if old is None or old.scope_id is not None or self.scope_id is not None:
            return before == self.text
        old_ids, ids = set(old.collection_ids), set(self.collection_ids)
        left_out = set(held_ids) - ids
        if DEFAULT_COLLECTION not in old_ids:
            left_out.discard(DEFAULT_COLLECTION)  # in every manifest, even if no stream includes it
        return ids <= old_ids and not left_out


@dataclass(frozen=True, slots=True)
class Resolved:
    uid: int
    filter: StreamFilter | None
    """None: the whole bucket or, if `missing` is not empty, no collection at all."""
    missing: tuple[str, ...] = ()
    collection_ids: tuple[int, ...] = ()
    """Ids of the selected collections that exist. Their high seqnos are polled."""
    scope_names: Mapping[int, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return self.filter is not None or not self.missing


@dataclass(frozen=True, slots=True)
class Selection:
    """The names of the mirrored scope or collections; the whole bucket if there are none."""

    scope: str | None = None
    collections: tuple[str, ...] = ()

    @staticmethod
    def of(scope: str | None, collections: Iterable[str] | None) -> Selection:
        """Check the names, and return the selection. Raises ConfigError."""
        names = tuple(sorted(set(collections or ())))
        if scope is not None and names:
            raise ConfigError(
                "both a scope and collections are given",
                hint="give --scope NAME alone, or name each collection as --collection SCOPE.NAME",
            )
        if scope is not None and not _NAME.fullmatch(scope):
            raise ConfigError(f"{scope!r} is not the name of a scope", hint="--scope NAME")
        for name in names:
            before, dot, after = name.partition(".")
            if not (dot and _NAME.fullmatch(before) and _NAME.fullmatch(after)):
                raise ConfigError(
                    f"{name!r} is not the name of a collection",
                    hint="write SCOPE.COLLECTION, such as inventory.airline or _default._default",
                )
        if len(names) > COLLECTIONS_MAX:
            raise ConfigError(f"{len(names)} collections are given", hint=f"at most {COLLECTIONS_MAX}")
        return Selection(scope, names)

    @staticmethod
    def parse(text: str) -> Selection:
        """Parse the canonical text. Raises ConfigError."""
        kind, _, names = text.partition(" ")
        if kind == "scope":
            return Selection.of(names, None)
        if kind == "collections":
            return Selection.of(None, names.split(","))
        if text:
            raise ConfigError(f"the mirror holds {text!r}, which this version does not know", hint="use a newer one")
        return Selection()

    @property
    def text(self) -> str:
        """The canonical form, which is part of a mirror's identity; empty for the whole bucket."""
        if self.scope is not None:
            return f"scope {self.scope}"
        return "collections " + ",".join(self.collections) if self.collections else ""

    @property
    def whole(self) -> bool:
        return not self.text

    def __str__(self) -> str:
        return self.text.replace(",", ", ") or "the whole bucket"

    def resolve(self, manifest: SourceManifest) -> Resolved:
        scope_names = {scope_id: name for name, scope_id in manifest.scopes.items()}
        if self.scope is not None:
            scope_id = manifest.scopes.get(self.scope)
            if scope_id is None:
                return Resolved(manifest.uid, None, (self.scope,), (), scope_names)
            ids = tuple(sorted(cid for (scope, _), cid in manifest.collections.items() if scope == self.scope))
            return Resolved(manifest.uid, StreamFilter(scope_id), (), ids, scope_names)
        if self.collections:
            found: list[int] = []
            missing: list[str] = []
            for name in self.collections:
                scope, _, collection = name.partition(".")
                collection_id = manifest.collections.get((scope, collection))
                if collection_id is None:
                    missing.append(name)
                else:
                    found.append(collection_id)
            ids = tuple(sorted(found))
            return Resolved(manifest.uid, StreamFilter(None, ids) if ids else None, tuple(missing), ids, scope_names)
        return Resolved(manifest.uid, None, (), tuple(sorted(manifest.collections.values())), scope_names)
