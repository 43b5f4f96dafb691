"""A mirror of some of its bucket's vbuckets, over HTTP: of the others it says that they are elsewhere, by every way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirror.serve.http.requests import Page, position_text
from storage.model import Branch, Identity, Seqno
from storage.read.view import Pin, Token
from tests.serve.http_site import VBUCKETS, VBUUID, Site, made, running, service_report

HELD = Identity("cluster", "bucket", "uuid", VBUCKETS, 2, held=(2, 5))
DOCUMENTS = "/v1/collections/_default/documents"


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Site]:
    """Holds vbuckets 2 to 5 of 8, a document in each."""
    with made(tmp_path, HELD) as source, running(Path(source.path), source) as served:
        for vbid in HELD.vbids:
            source.put(source.key_of(vbid), b"%d" % vbid)
        served.stands(service_report(served.data))
        yield served


def elsewhere(answer: Any) -> None:
    assert answer.status_code == 421, answer.text
    assert answer.json()["type"] == "urn:dcp-mirror:not-held"
    assert answer.json()["detail"] == "this mirror holds vbuckets 2 to 5"
    assert answer.json()["hint"] == "ask the mirror that holds it"


def test_held_vbuckets_are_read_as_usual(part: Site) -> None:
    keys = {vbid: part.source.key_of(vbid).decode() for vbid in HELD.vbids}
    for vbid, key in keys.items():
        assert part.get(part.document(key), params={"token": f"{vbid}:{VBUUID}:1"}).json() == vbid
    for found in (part.multi_get(keys.values()), part.scan()):
        assert [each["value"] for each in found["documents"]] == [2, 3, 4, 5]
    pages = part.pages(limit=1)
    assert [each["vbid"] for page in pages for each in page["documents"]] == [2, 3, 4, 5]
    assert {each["data"]["vbid"] for each in part.changes() if each["event"] == "mutation"} == set(HELD.vbids)
    assert part.get("/readyz").json() == {"status": "ready"}


@pytest.mark.parametrize("vbid", [0, 1, 6, 7])
def test_documents_of_other_mirrors_are_elsewhere_and_never_absent(part: Site, vbid: int) -> None:
    key = part.source.key_of(vbid).decode()
    elsewhere(part.client.get(part.document(key)))
    own = [part.source.key_of(each, number).decode() for each in HELD.vbids for number in range(4)]
    for keys in ([key], [*own, key]):
        elsewhere(part.client.post("/v1/collections/_default/multi-get", json={"keys": keys}))
    elsewhere(part.client.get(DOCUMENTS, params={"vbid": vbid}))
    page = Page(Pin(vbid, Branch(1), Seqno(1), 5, 0), b"", "_default._default", b"", b"", None, False, False, None)
    elsewhere(part.client.get(DOCUMENTS, params={"page": page.text()}))
    elsewhere(part.client.get(f"/v1/vbuckets/{vbid}"))
    elsewhere(part.client.get(part.document(own[0]), params={"token": f"{vbid}:{VBUUID}:1"}))


def test_changes_of_vbuckets_of_other_mirrors_are_elsewhere(part: Site) -> None:
    for more in ("", "&since=now", "&since=6:1:1:00000000000000ff", "&collection=_default"):
        for vbids in ([2, 6], range(VBUCKETS)):
            named = "".join(f"&vbid={vbid}" for vbid in vbids)
            elsewhere(part.client.get(f"/v1/changes?follow=false{named}{more}"))
    both = {vbid: Token(vbid, Branch(1), Seqno(1), 5) for vbid in (2, 6)}
    elsewhere(part.client.get("/v1/changes", params={"since": position_text(both), "follow": "false"}))
    elsewhere(part.client.get("/v1/changes", params={"token": f"6:{VBUUID}:1", "follow": "false"}))


def test_vbuckets_beyond_those_of_the_bucket_do_not_exist(part: Site) -> None:
    key = part.source.key_of(2).decode()
    for path, params in (
        (part.document(key), {"token": f"{VBUCKETS}:{VBUUID}:1"}),
        (DOCUMENTS, {"vbid": VBUCKETS}),
        ("/v1/changes", {"vbid": VBUCKETS}),
        ("/v1/changes", {"since": f"{VBUCKETS}:1:1:00000000000000ff"}),
        (f"/v1/vbuckets/{VBUCKETS}", {}),
    ):
        assert part.get(path, 404, params=params).json()["type"] == "urn:dcp-mirror:no-vbucket"
