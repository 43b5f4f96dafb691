"""The API held against its own description: what it allows is answered as it says, and what it does not is refused."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from mirror.serve.http import requests as http_requests
from mirror.serve.http.api import description
from mirror.serve.http.protocol import HEAD_BYTES_MAX, READ_BYTES
from storage.model import DOCUMENT_FIELDS, JSON_FIELDS, SEQNO_MAX, Branch, Collection, Seqno
from storage.read.view import Token
from storage.read.wait import MutationToken
from tests.serve.http_site import VBUCKETS, Site, events, made, running, service_report


def never_an_internal_error(context: Any, response: Any, case: Any) -> None:
    """503 and 504 are answers like others (and described); 500 is a fault."""
    assert response.status_code not in (500, 501, 502), response.text


CHECKS = (
    never_an_internal_error, content_type_conformance, negative_data_rejection, response_headers_conformance,
    response_schema_conformance, status_code_conformance, unsupported_method,
)  # fmt: skip
KEY_LENGTH_IN_BASE64 = len(http_requests.to_base64url(bytes(http_requests.KEY_LENGTH_MAX)))
DESCRIPTION = json.loads(description())
COMPONENTS = DESCRIPTION["components"]
SCHEMAS = COMPONENTS["schemas"]
for _path in DESCRIPTION["paths"].values():
    for _operation in _path.values():
        _operation["parameters"] = [
            COMPONENTS["parameters"][each["$ref"].rpartition("/")[2]] if "$ref" in each else each
            for each in _operation["parameters"]
        ]
# a stream that follows has no end; not `required`, because a request without it is right
for _method in DESCRIPTION["paths"]["/v1/changes"].values():
    for _parameter in _method["parameters"]:
        if _parameter["name"] == "follow":
            _parameter |= {"schema": {"type": "string", "enum": ["false"]}}

schema = schemathesis.openapi.from_dict(DESCRIPTION)
schema.config.checks.negative_data_rejection.expected_statuses += ["413"]
schema.config.generation.update(modes=[schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A server with something in every vbucket, that calls itself healthy."""
    folder = tmp_path_factory.mktemp("http")
    with made(folder) as source, running(Path(source.path), source, sql=True) as served:
        for vbid in range(VBUCKETS):
            source.collections(vbid, Collection(9, 8, "orders", Seqno(0)))
            for number in range(3):
                source.put(source.key_of(vbid, number), b'{"n": %d}' % number)
        for key in (b"a", b"0", b"\xff"):
            source.put(key, b"\x00binary", datatype=0)
        source.put("a", None)
        served.stands(service_report(served.data))
        yield served


EXAMPLES = settings(
    deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True, database=None
)


def does_what_it_says(case: Any, busy: Site) -> None:
    assume(len(quote(str(case.query))) < HEAD_BYTES_MAX - READ_BYTES)  # a longer head may be reset before its 400
    wait = case.query.get("timeout_ms", 0)
    names = {each.name for each in case.operation.query}
    takes_it = "timeout_ms" in names
    if "follow" in names:
        case.query.setdefault("follow", "false")
    if takes_it and str(wait).isdecimal() and int(wait) <= http_requests.WAIT_MS_MAX:
        case.query["timeout_ms"] = 5
    case.call_and_validate(base_url=busy.url, checks=CHECKS, timeout=30)


@schema.parametrize()
@settings(EXAMPLES, max_examples=6)
def test_the_api_answers_as_it_is_described(case: Any, busy: Site) -> None:
    does_what_it_says(case, busy)


@pytest.mark.ci
@schema.parametrize()
@settings(EXAMPLES, max_examples=100)
def test_the_api_answers_as_it_is_described_in_many_cases(case: Any, busy: Site) -> None:
    does_what_it_says(case, busy)


def test_the_served_description_lists_every_route(busy: Site) -> None:
    served = busy.get("/openapi.json").json()
    assert served["openapi"] == "3.1.0"
    assert served["paths"].keys() == DESCRIPTION["paths"].keys()
    for path in served["paths"]:
        filled = path.replace("{collection}", "_default").replace("{key}", "a").replace("{vbid}", "1")
        answer = busy.client.request("OPTIONS", filled)
        assert answer.status_code == 405, path
        allowed = {each.strip().lower() for each in answer.headers["allow"].split(",")}
        assert set(served["paths"][path]) == allowed
        assert answer.json()["type"] == "urn:dcp-mirror:method-not-allowed"


def test_the_described_bounds_and_names_are_those_of_the_code() -> None:
    served = json.loads(description())["components"]
    keys, parameters = SCHEMAS["Keys"]["properties"], served["parameters"]
    assert keys["keys"]["maxItems"] == keys["keys_b64"]["maxItems"] == http_requests.KEYS_MAX // 2
    assert keys["keys"]["items"]["maxLength"] == http_requests.KEY_LENGTH_MAX
    assert parameters["key"]["schema"]["maxLength"] == KEY_LENGTH_IN_BASE64
    assert parameters["collection"]["schema"]["maxLength"] == http_requests.NAME_LENGTH_MAX
    assert parameters["token"]["schema"]["maxItems"] == http_requests.TOKENS_MAX
    wait = parameters["timeout_ms"]["schema"]
    assert (wait["maximum"], wait["default"]) == (http_requests.WAIT_MS_MAX, http_requests.WAIT_MS_DEFAULT)
    assert parameters["as_of"]["schema"]["anyOf"][0]["maximum"] == SEQNO_MAX
    scan = {
        each["name"]: each["schema"]
        for each in DESCRIPTION["paths"]["/v1/collections/{collection}/documents"]["get"]["parameters"]
    }
    limit = scan["limit"]
    assert (limit["maximum"], limit["default"]) == (http_requests.PAGE_LIMIT_MAX, http_requests.PAGE_LIMIT_DEFAULT)
    assert {scan[name]["maxLength"] for name in ("prefix", "start", "end")} == {KEY_LENGTH_IN_BASE64}
    assert scan["page"]["maxLength"] == http_requests.PAGE_LENGTH_MAX


def of_changes(name: str) -> dict[str, Any]:
    parameters = DESCRIPTION["paths"]["/v1/changes"]["get"]["parameters"]
    return next(each["schema"] for each in parameters if each["name"] == name)


VBIDS, BRANCHES, NUMBERS = st.integers(0, 65535), st.integers(0, 2**32 - 1), st.integers(0, SEQNO_MAX)
TOKENS = st.builds(Token, VBIDS, BRANCHES, NUMBERS, NUMBERS)


@given(st.lists(TOKENS, min_size=1, max_size=20, unique_by=lambda each: each.vbid))
@example([Token(65535, Branch(2**32 - 1), Seqno(SEQNO_MAX), SEQNO_MAX)])
@example([Token(vbid, Branch(1), Seqno(vbid << 20), hash(str(vbid)) % 2**64) for vbid in range(4096)])
def test_a_position_that_the_service_sends_is_one_that_the_description_allows(tokens: list[Token]) -> None:
    position = http_requests.position_text({int(each.vbid): each for each in tokens})
    for name in ("since", "Last-Event-ID"):
        allowed = of_changes(name)
        assert re.search(allowed["pattern"], position), position
        assert len(position) <= allowed["maxLength"] <= HEAD_BYTES_MAX


@given(st.builds(MutationToken, VBIDS, NUMBERS, NUMBERS))
def test_a_mutation_token_is_one_that_the_description_allows(token: MutationToken) -> None:
    assert re.search(COMPONENTS["parameters"]["token"]["schema"]["items"]["pattern"], str(token))


def test_sent_ids_and_page_tokens_are_allowed_as_parameters(busy: Site) -> None:
    single = busy.changes(vbid=2)
    several = busy.get("/v1/changes", params={"follow": "false"}).text
    ids = [each["id"] for each in (*single, *events(several)) if "id" in each]
    assert len(ids) > VBUCKETS
    assert [each for each in ids if not re.search(of_changes("since")["pattern"], each)] == []
    for each in ids[:3] + ids[-1:]:
        vbid = {"vbid": 2} if ":" in each else {}
        busy.get("/v1/changes", params={"follow": "false", "since": each} | vbid)


def test_each_field_of_a_document_is_a_member_and_a_header() -> None:
    members = SCHEMAS["Document"]
    assert set(members["required"]) == {*JSON_FIELDS, "deleted"} < members["properties"].keys()
    headers = {f"Mirror-{each.name.replace('_', '-').title()}" for each in DOCUMENT_FIELDS}
    assert COMPONENTS["headers"].keys() == headers | {"ETag"}
    assert all("schema" in each for each in COMPONENTS["headers"].values())


def test_the_described_lengths_of_keys_are_those_answered(busy: Site) -> None:
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


@pytest.mark.ci
def test_a_generated_client_reads_pages_a_query_and_the_status(busy: Site, tmp_path: Path) -> None:
    """It sends declared defaults with every request, and leaves out what it cannot describe by a type."""
    (tmp_path / "openapi.json").write_bytes(busy.get("/openapi.json").content)
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none"]
    made = subprocess.run(
        [*command, "--path", tmp_path / "openapi.json", "--output-path", tmp_path / "generated", "--fail-on-warning"],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (made.returncode, "WARNING" in made.stdout + made.stderr) == (0, False), made.stdout + made.stderr
    program = tmp_path / "program.py"
    program.write_text(GENERATED.format(url=busy.url, key=busy.source.key_of(0).decode()))
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    pages, rows, status, document = json.loads(ran.stdout)
    assert pages[0] == pages[1] == 5
    assert pages[2] > 0
    assert (rows, status, document) == ([[1, "a"]], "streaming", {"n": 0})


GENERATED = """
import json
from generated import Client
from generated.api.default import get_documents, get_status, post_query, scan_documents
from generated.models import Keys, Query

client = Client(base_url="{url}")
pages, following = [], None
for _ in range(3):
    more = {{}} if following is None else {{"page": following}}
    page = scan_documents.sync("_default", client=client, limit=5, **more)
    pages.append(len(page.documents))
    following = page.next_
answer = post_query.sync(client=client, body=Query(sql="SELECT 1 AS n, 'a' AS text"))
status = get_status.sync(client=client)
found = get_documents.sync("_default", client=client, body=Keys(keys=["{key}"]))
print(json.dumps([pages, answer.rows, status.vbuckets[0].state, found.documents[0].value]))
"""
