"""All events in order give the mirror's documents, by the fields of the events alone: for each channel, from any token.

A source with random histories: documents, collections that are created, flushed, dropped and made again under the same
name, rollbacks (deferred ones, too), resyncs, purges. Each consumer reads a part now and then, and folds what it got.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cli.changes import Pump
from mirror.ingest import collections
from mirror.serve.access.auth import entry_of
from mirror.spark.source.options import parse
from mirror.wire import codec_dcp
from mirror.wire.events import (
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    ScopeCreated,
    ScopeDropped,
    SystemEventContent,
)
from mirror.wire.system_events import encode_system_event
from storage.errors import UnknownCollection, ViewInvalidated
from storage.history.purge import Window
from storage.model import Seqno, SnapshotRange
from storage.read.view import View, open_view
from tests.serve.http_site import Site, Source, running
from tests.serve.kv_rig import with_users
from tests.spark.events import applied
from tests.spark.source.follower import Follower
from tests.storage.rig import purge_steps

VBID = 2
SHOP, ORDERS = 8, "shop.orders"
Key = tuple[int, bytes]
Folded = dict[Key, Any]


@dataclass
class History:
    """What the source does to one vbucket."""

    source: Source
    view: View
    rng: Random
    ends: list[int] = field(default_factory=lambda: [0])
    ids: int = 8
    waits: bool = False
    """True while a deferred rollback or a resync waits for its first publish."""

    @property
    def manifest(self) -> Any:
        return self.writer.vbuckets[VBID].state.manifest

    @property
    def writer(self) -> Any:
        return self.source.writer(VBID)

    def published(self) -> None:
        self.ends.append(self.source.seqnos[VBID])
        self.waits = False

    def documents(self) -> None:
        cid = self.rng.choice([*self.manifest.collections])
        names = sorted({b"k%d" % self.rng.randrange(6) for _ in range(self.rng.randrange(1, 4))})
        items = [(name, None if self.rng.random() < 0.25 else b"%d" % self.rng.randrange(1000)) for name in names]
        self.source.snapshot(VBID, *items, collection_id=cid, datatype=1)
        self.published()

    def collection(self) -> None:
        found: list[SystemEventContent] = []
        uid = self.manifest.uid + 1
        known = [each for each in self.manifest.collections.values() if each.collection_id]
        named = {each.name for each in known}
        if SHOP not in self.manifest.scopes:
            found.append(ScopeCreated(uid, SHOP, "shop"))
        else:
            for name in {"orders", "carts"} - named:
                self.ids += 1
                found.append(CollectionCreated(uid, SHOP, self.ids, name))
            for each in known:
                found.append(CollectionCreated(uid, SHOP, each.collection_id, each.name, flush_uid=uid))
                found.append(CollectionDropped(uid, SHOP, each.collection_id))
                found.append(CollectionModified(uid, SHOP, each.collection_id, each.name, max_ttl=uid))
            if not known:
                found.append(ScopeDropped(uid, SHOP))
        found.append(CollectionCreated(uid, 0, 0, "_default", flush_uid=uid))
        content = self.rng.choice(found)
        seqno = self.source.seqnos[VBID] = self.source.seqnos.get(VBID, 0) + 1
        frame = codec_dcp.encode(encode_system_event(content, vbid=VBID, seqno=seqno, version=2))
        after = collections.apply(self.manifest, content, Seqno(seqno))
        vbucket = self.writer.vbuckets[VBID]
        vbucket.system_event(seqno, frame, after, SnapshotRange(Seqno(seqno), Seqno(seqno)))
        vbucket.publish(seqno, seqno)
        self.writer.commit()
        self.published()

    def rollback(self) -> None:
        if self.waits or not self.source.seqnos.get(VBID):
            return
        to = self.rng.choice(self.ends)
        deferred = self.rng.random() < 0.4
        with_boundary = [each.seqno for each in self.view.boundaries(VBID)]
        if to not in with_boundary:
            return
        found = self.writer.vbuckets[VBID].rollback(to, deferred=deferred)
        self.source.seqnos[VBID] = found.boundary_seqno
        self.ends = [each for each in self.ends if each <= found.boundary_seqno]
        self.waits = deferred

    def resync(self) -> None:
        if self.waits:
            return
        self.writer.vbuckets[VBID].begin_resync()
        self.writer.commit()
        self.source.seqnos[VBID] = 0
        self.ends, self.waits = [0], True

    def purge(self) -> None:
        for _ in purge_steps(self.writer, Window(boundaries=self.rng.randrange(1, 4))):
            pass

    def step(self) -> None:
        steps = [self.documents, self.collection, self.rollback, self.resync, self.purge]
        self.rng.choices(steps, [10, 7, 4, 0.4, 0.6])[0]()


def folded(documents: Folded, event: dict[str, Any]) -> None:
    """What docs/reading.md says of events."""
    document = event.get("document")
    if document is None:
        return
    if event["kind"] == "system_event":
        if document["event"] in ("collection_created", "collection_dropped"):
            for key in [key for key in documents if key[0] == document["collection_id"]]:
                del documents[key]
        return
    name = document["key"].encode() if "key" in document else base64.b64decode(document["key_b64"])
    key = document["collection_id"], name
    if event["kind"] in ("mutation", "restoration"):
        documents[key] = document["value"]
    else:
        documents.pop(key, None)


@dataclass
class Consumer:
    documents: Folded = field(default_factory=dict)
    token: str | None = None
    collection: str | None = None
    """A name, as `--collection` and `collection=` take it; None: everything."""

    def take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            folded(self.documents, event)
            self.token = event["token"]

    def begin_again(self) -> None:
        self.documents, self.token = {}, None


class CommandLine(Consumer):
    def read(self, data: Path, limit: int | None) -> None:
        file = data.parent / f"cursor of {self.collection}"
        with open_view(str(data)) as view, captured() as out:
            pump = Pump(view, tokens(self), as_json=True, collection=self.collection, limit=limit)
            try:
                if self.collection is not None:
                    view.check_followed(self.collection, [VBID], pump.tokens.values())
                pump.pump(VBID)
            except UnknownCollection:
                assert not self.documents, "it must learn of the drop"
                return None
            except ViewInvalidated:
                self.begin_again()
                return self.read(data, limit)
            sys.stdout.flush()
        self.take([json.loads(line) for line in out.getvalue().splitlines()])
        self.token = str(pump.tokens[VBID]) if VBID in pump.tokens else None  # as the cursor file
        assert not file.exists()
        return None


def tokens(consumer: Consumer) -> dict[int, Any]:
    from cli.changes import tokens_from

    return tokens_from([consumer.token] if consumer.token else [])


@contextmanager
def captured() -> Iterator[io.BytesIO]:
    raw = io.BytesIO()
    before, sys.stdout = sys.stdout, io.TextIOWrapper(raw, write_through=True)
    try:
        yield raw
    finally:
        sys.stdout.flush()
        sys.stdout.detach()
        sys.stdout = before


@dataclass
class Http(Consumer):
    auth: tuple[str, str] | None = None

    def read(self, site: Site, limit: int | None) -> None:
        params: dict[str, Any] = {"follow": "false", "vbid": VBID}
        params |= {"since": self.token} if self.token else {}
        params |= {"collection": self.collection} if self.collection else {}
        answer = site.client.get("/v1/changes", params=params, auth=self.auth)
        if answer.status_code == 410:
            self.begin_again()
            return self.read(site, limit)
        if answer.status_code == 404:
            assert not self.documents, "it must learn of the drop"
            return None
        assert answer.status_code == 200, answer.text
        for taken, block in enumerate(answer.text.split("\n\n"), 1):
            fields = dict(line.partition(": ")[::2] for line in block.splitlines())
            if fields.get("event") == "reset":
                self.begin_again()
                return self.read(site, limit)
            assert fields.get("event") != "problem", block
            if "data" in fields and fields["event"] != "end":
                folded(self.documents, json.loads(fields["data"]))
            self.token = fields.get("id", self.token)
            if limit is not None and taken >= limit:
                return None
        return None


def mirrored(view: View, name: str | None, reads: str | None = None) -> Folded:
    names = view.manifest(VBID).names()
    return {
        (each.collection_id, each.key): json.loads(each.value)
        for each in view.scan(VBID)
        if name in (None, names[each.collection_id]) and reads in (None, names[each.collection_id])
    }


@pytest.mark.parametrize("seed", range(4))
def test_events_applied_in_order_give_the_documents_of_the_mirror(source: Source, tmp_path: Path, seed: int) -> None:
    rng = Random(seed)
    data = tmp_path / "data"
    users = with_users(tmp_path / "users.json", {"ann": entry_of("pw") | {"read": ["shop.orders"]}}, ["*"])
    everything, orders = CommandLine(), CommandLine(collection=ORDERS)
    by_http, orders_by_http = Http(), Http(collection=ORDERS)
    ann = Http(auth=("ann", "pw"))
    spark = Batches(parse({"path": str(data), "table": "changes", "vbuckets": str(VBID), "onLostHistory": "resync"}))
    seen = 0
    with open_view(str(data)) as view, running(data, source, users_file=users) as site:
        history = History(source, view, rng)
        for _ in range(100):
            history.step()
            if history.waits:
                continue
            limit = rng.choice([None, None, 1, 2, 5])
            for consumer in (everything, orders):
                if rng.random() < 0.4:
                    consumer.read(data, limit)
                    assert limit is not None or consumer.documents == mirrored(view, consumer.collection)
            for client in (by_http, ann, orders_by_http):
                if rng.random() < 0.4:
                    client.read(site, limit)
                    if limit is None:
                        assert client.documents == mirrored(view, client.collection, ORDERS if client is ann else None)
                        seen += len(client.documents)
            if rng.random() < 0.3:
                spark.run()
                assert spark_documents(spark) == {
                    (view.manifest(VBID).names()[cid], key): value for (cid, key), value in mirrored(view, None).items()
                }
    assert seen
    spark.driver.close()


class Batches(Follower):
    def apply(self, row: dict[str, Any]) -> None:
        self.log.append(row)


def spark_documents(follower: Follower) -> dict[tuple[str, bytes], Any]:
    return {name: json.loads(row["value"]) for name, row in applied(follower.log).items()}
