"""The API held against its own description: what it allows is answered as it says, and what it does not is refused."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from mirror.serve import http_problems
from mirror.serve.http_openapi import SCHEMAS, description
from storage.model import Collection, Seqno
from tests.serve.http_site import VBUCKETS, Site, made, running, service_report


def never_an_internal_error(context: Any, response: Any, case: Any) -> None:
    """503 and 504 are answers like others (and described); 500 is a fault."""
    assert response.status_code not in (500, 501, 502), response.text


CHECKS = (
    never_an_internal_error,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
DESCRIPTION = description("test")
# a stream that follows has no end, and a wait for tokens may take a minute: neither is for a thousand calls
for _parameter in DESCRIPTION["paths"]["/v1/changes"]["get"]["parameters"]:
    if _parameter["name"] == "follow":
        _parameter |= {"required": True, "schema": {"type": "string", "enum": ["false"]}}
for _path in DESCRIPTION["paths"].values():
    for _operation in _path.values():
        for _parameter in _operation["parameters"]:
            if _parameter["name"] == "timeout_ms":
                _parameter |= {"required": True, "schema": {"type": "integer", "minimum": 0, "maximum": 5}}

schema = schemathesis.openapi.from_dict(DESCRIPTION)
schema.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with something in every vbucket, that calls itself healthy."""
    folder = tmp_path_factory.mktemp("http")
    with made(folder) as source, running(Path(source.path), source) as served:
        for vbid in range(VBUCKETS):
            source.collections(vbid, Collection(9, 8, "orders", Seqno(0)))
            for number in range(3):
                source.put(source.key_of(vbid, number), b'{"n": %d}' % number)
        for key in (b"a", b"0", b"\xff"):
            source.put(key, b"\x00binary", datatype=0)
        source.put("a", None)
        served.stands(service_report(served.data))
        yield served


@schema.parametrize()
@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
def test_the_api_does_what_it_says(case: Any, busy: Site) -> None:
    case.call_and_validate(base_url=busy.url, checks=CHECKS, timeout=30)


def test_what_is_served_is_the_description(busy: Site) -> None:
    served = busy.get("/openapi.json").json()
    assert served["openapi"] == "3.1.0"
    assert served["paths"].keys() == DESCRIPTION["paths"].keys()
    for path in served["paths"]:
        filled = path.replace("{collection}", "_default").replace("{key}", "a").replace("{vbid}", "1")
        answer = busy.client.request("OPTIONS", filled)
        assert answer.status_code == 405, path
        allowed = {each.strip().lower() for each in answer.headers["allow"].split(",")}
        assert set(served["paths"][path]) <= allowed


def test_every_kind_of_problem_is_described() -> None:
    names = {each.removeprefix(http_problems.TYPE_PREFIX) for each in SCHEMAS["Problem"]["properties"]["type"]["enum"]}
    assert names == set(http_problems.TITLES)


def test_a_page_of_what_the_description_promises(busy: Site) -> None:
    """The examples that a person would try first, by hand."""
    with httpx.Client(base_url=busy.url) as client:
        page = client.get("/v1/collections/_default/documents", params={"limit": 2}).json()
        seldom = {"key_b64", "value_b64", "problem"}
        assert page["documents"][0].keys() == SCHEMAS["Document"]["properties"].keys() - seldom


def test_keys_of_every_length_that_is_answered_are_described(busy: Site) -> None:
    members = SCHEMAS["Keys"]["properties"]
    text, encoded = members["keys"]["items"], members["keys_b64"]["items"]
    collection = "/v1/collections/_default"
    for size in (1, 2, 3, 249, 250, 251):
        key = "k" * size
        key_b64 = base64.urlsafe_b64encode(key.encode()).rstrip(b"=").decode()
        is_described = len(key_b64) <= encoded["maxLength"] and re.fullmatch(encoded["pattern"], key_b64) is not None
        assert is_described is (size <= 250)
        assert (len(key) <= text["maxLength"]) is is_described
        assert busy.client.get(f"{collection}/documents/{key}").status_code == (404 if is_described else 400)
        answer = busy.client.post(f"{collection}/multi-get", json={"keys": [key], "keys_b64": [key_b64]})
        assert answer.status_code == (200 if is_described else 400), answer.text
