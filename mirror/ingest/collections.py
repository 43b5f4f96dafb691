"""The effect of system events on a vbucket's manifest (its scopes and collections from some seqno on).

Documents at or below a collection's `begin_seqno` count as deleted: the source sends no deletions for a drop or a flush
(docs/protocol.md 2.11). A flush arrives as a creation of a known collection. An event may be missing because a later
event replaced it, so the drop of an unknown collection is no error, nor is the drop of a scope that still has
collections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    CollectionSettings,
    ScopeCreated,
    ScopeDropped,
    SystemEventContent,
)
from storage.model import DEFAULT_COLLECTION, Collection, Manifest, ManifestChange, ManifestUid, Seqno

DEFAULT_SCOPE = 0
NAMES_MAX = 10_000
"""Limit of a manifest's scopes plus collections, because each event copies them. A bucket has at most 1,000 of each."""


def apply(
    manifest: Manifest, content: SystemEventContent, seqno: Seqno, scope_names: Mapping[int, str] | None = None
) -> Manifest:
    """Return the manifest as it stands from `seqno` on.

    `scope_names`: names by scope id, for streams of single collections, which carry no scope events.
    """
    changed = _RULES[type(content)](manifest, content, seqno)
    if scope_names and isinstance(content, (CollectionCreated, CollectionModified)):
        scope_id = content.scope_id
        if scope_id not in changed.scopes and scope_id in scope_names:
            changed = replace(changed, scopes=changed.scopes | {scope_id: scope_names[scope_id]})
    return replace(changed, uid=ManifestUid(max(manifest.uid, content.manifest_uid)))


def change_by(content: SystemEventContent, before: Manifest, after: Manifest) -> ManifestChange:
    """Return the change from `before` to `after` in the scope and the collection that the event names."""
    named = () if isinstance(content, (ScopeCreated, ScopeDropped)) else (content.collection_id,)
    return ManifestChange.between(before, after, (content.scope_id,), named)


def without_default(manifest: Manifest) -> Manifest:
    collections = {cid: entry for cid, entry in manifest.collections.items() if cid != DEFAULT_COLLECTION}
    in_use = {entry.scope_id for entry in collections.values()}
    scopes = {sid: name for sid, name in manifest.scopes.items() if sid != DEFAULT_SCOPE or sid in in_use}
    return replace(manifest, scopes=scopes, collections=collections)


def _with_collection(manifest: Manifest, content: CollectionSettings, begin_seqno: Seqno) -> Manifest:
    entry = Collection(content.collection_id, content.scope_id, content.name, begin_seqno, content.max_ttl)
    return replace(manifest, collections=manifest.collections | {entry.collection_id: entry})


def _created(manifest: Manifest, content: CollectionCreated, seqno: Seqno) -> Manifest:
    known = manifest.collections.get(content.collection_id)
    return _with_collection(manifest, content, seqno if known is None else max(seqno, known.begin_seqno))


def _modified(manifest: Manifest, content: CollectionModified, _seqno: Seqno) -> Manifest:
    # The settings changed, the documents did not. For an unknown collection 0 will do: no older one had the same id.
    known = manifest.collections.get(content.collection_id)
    return _with_collection(manifest, content, Seqno(0) if known is None else known.begin_seqno)


def _dropped(manifest: Manifest, content: CollectionDropped, _seqno: Seqno) -> Manifest:
    kept = {cid: collection for cid, collection in manifest.collections.items() if cid != content.collection_id}
    return replace(manifest, collections=kept)


def _scope_created(manifest: Manifest, content: ScopeCreated, _seqno: Seqno) -> Manifest:
    return replace(manifest, scopes=manifest.scopes | {content.scope_id: content.name})


def _scope_dropped(manifest: Manifest, content: ScopeDropped, _seqno: Seqno) -> Manifest:
    return replace(manifest, scopes={sid: name for sid, name in manifest.scopes.items() if sid != content.scope_id})


_RULES: dict[type, Callable[[Manifest, Any, Seqno], Manifest]] = {
    CollectionCreated: _created,
    CollectionModified: _modified,
    CollectionDropped: _dropped,
    ScopeCreated: _scope_created,
    ScopeDropped: _scope_dropped,
}
