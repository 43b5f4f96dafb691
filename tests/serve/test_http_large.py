"""Large documents over HTTP: the same answers as for small ones, within the budget."""

from __future__ import annotations

import pytest

from mirror.server.turns import Budget
from storage.read.view import View
from tests.serve.http_site import Site
from tests.serve.test_kv_large import BODY, DAMAGED, VALUES
from tests.supervise.conftest import eventually_now


@pytest.mark.parametrize(("value", "datatype", "body"), VALUES.values(), ids=VALUES)
def test_a_large_document_is_answered_as_a_small_one(site: Site, value: bytes, datatype: int, body: bytes) -> None:
    site.source.put("large", value, datatype=datatype)
    answer = site.get(site.document("large"))
    assert answer.content == body
    assert answer.headers["mirror-datatype"] == str(datatype & 1)
    assert answer.headers["content-type"] == ("application/json" if datatype & 1 else "application/octet-stream")
    assert answer.headers["content-length"] == str(len(body))
    head = site.client.head(site.document("large"))
    assert {**head.headers, "date": ""} == {**answer.headers, "date": ""}
    stored = site.get(site.document("large"), params={"form": "stored"})
    assert (stored.content, stored.headers["mirror-datatype"]) == (value, str(datatype))
    tag = answer.headers["etag"]
    assert site.client.get(site.document("large"), headers={"If-None-Match": tag}).status_code == 304
    eventually_now(lambda: site.server.service.budget.out_bytes == 0)


@pytest.mark.parametrize(("value", "datatype"), DAMAGED.values(), ids=DAMAGED)
def test_a_malformed_large_document_is_an_error_and_holds_no_memory(site: Site, value: bytes, datatype: int) -> None:
    site.source.put("large", value, datatype=datatype)
    problem = site.get(site.document("large"), 500).json()
    assert problem["type"] == "urn:dcp-mirror:damaged"
    section, snappy = (
        "the xattr section of a value is longer than the value",
        "a compressed value cannot be decompressed",
    )
    assert (snappy if datatype == 3 else section) in problem["detail"]
    assert site.get(site.document("large"), params={"form": "stored"}).content == value
    eventually_now(lambda: site.server.service.budget.out_bytes == 0)


def test_a_large_document_is_read_only_with_budget_for_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.source.put("large", BODY)
    budget = site.server.service.budget = Budget(len(BODY))
    assert budget.try_take(1)
    get = View.get

    def refused(view: View, *given: object, bytes_max: int, **more: object) -> object:
        assert bytes_max < len(BODY), "it was read"
        return get(view, *given, bytes_max=bytes_max, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(View, "get", refused)
    assert site.get(site.document("large"), 503).json()["type"] == "urn:dcp-mirror:too-busy"
    assert budget.out_bytes == 1
