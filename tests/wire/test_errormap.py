"""The error map; next to the recorded one in test_session_requests."""

from __future__ import annotations

import json

from mirror.wire.constants import Status
from mirror.wire.errormap import error_map


def test_every_status_has_name_description_and_attributes() -> None:
    found = json.loads(error_map(2))
    assert found["version"] == 2
    for code, entry in found["errors"].items():
        assert Status(int(code, 16)).name == entry["name"]
        assert entry["desc"]
        assert entry["attrs"]
    assert json.loads(error_map(1))["version"] == 1
