"""Collections by name: which collection id a caller means, and what a collection id is called.

Knows manifests alone. Invariant: a name without a scope is one of `_default`; no name is `_default._default`.
"""

from __future__ import annotations

from storage.errors import UnknownCollection
from storage.model import DEFAULT_COLLECTION, Manifest

CollectionName = str | int
"""`scope.collection`, `collection` of the scope `_default`, or a collection id."""


def collection_id_of(manifest: Manifest, name: CollectionName | None, path: str) -> int:
    """The id of a collection. Raises UnknownCollection, which names `path`; an id is returned as it is."""
    if name is None:
        return DEFAULT_COLLECTION
    if isinstance(name, int):
        return name
    scope, _, collection = name.rpartition(".")
    scope = scope or "_default"
    for entry in manifest.collections.values():
        if entry.name == collection and manifest.scopes.get(entry.scope_id) == scope:
            return entry.collection_id
    known = sorted(names_of(manifest).values())
    raise UnknownCollection(f"no collection {name!r}", path=path, hint=f"known here: {', '.join(known[:20]) or 'none'}")


def names_of(manifest: Manifest) -> dict[int, str]:
    """`scope.collection` of each collection, by id."""
    return {
        each.collection_id: f"{manifest.scopes.get(each.scope_id, '?')}.{each.name}"
        for each in manifest.collections.values()
    }
