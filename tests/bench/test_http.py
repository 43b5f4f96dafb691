"""The benchmark measures what it says: real answers of both servers, and an error where there is none."""

from __future__ import annotations

import pytest

from mirror.bench import http
from tests.serve.http_site import Site, Source, service_report


def test_both_servers_answer_every_request(source: Source) -> None:
    keys = [source.key_of(vbid) for vbid in range(8)] * 5
    for key in keys[:8]:
        source.put(key)
    with http.serving(None) as bare, http.serving(source.path) as served:
        for port in (bare, served):
            found = http.measure(port, keys, 4)
            assert found.count == 40
            assert 0 < found.quantile_ms(0.5) <= found.quantile_ms(0.99) <= found.latencies_s[-1] * 1000
            assert found.per_second > 0


def test_an_answer_without_a_document_is_no_figure(site: Site) -> None:
    port = int(site.url.rpartition(":")[2])
    site.stands(service_report(site.data))
    with pytest.raises(RuntimeError, match="404"):
        http.measure(port, [b"none"], 1)
