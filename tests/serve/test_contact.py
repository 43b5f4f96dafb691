"""The contact with the source, as clients that are mirrors learn of it."""

from __future__ import annotations

import json
from pathlib import Path

from mirror.serve.dcp.connection import NOTED_S, SourceContact
from mirror.wire import frame as fr
from mirror.wire.constants import CONTACT_STATISTIC, Opcode, Status
from tests.manual_clock import ManualClock
from tests.serve.dcp_rig import serving_dcp
from tests.serve.kv_rig import Store


def test_what_is_not_noted_lately_is_not_in_contact() -> None:
    clock = ManualClock()
    contact = SourceContact([0, 1], clock)
    assert contact.lost_ms() == {0: 0, 1: 0}
    contact.note({1: 700})
    clock.advance(1)
    assert contact.lost_ms() == {1: 1700}
    contact.note({})
    assert contact.lost_ms() == {}
    clock.advance(NOTED_S + 1)
    assert contact.lost_ms() == {0: 6000, 1: 6000}


async def test_it_is_a_statistic_of_the_dcp_port(tmp_path: Path) -> None:
    store = Store(tmp_path, vbuckets=2)
    request = fr.request(Opcode.STAT, key=CONTACT_STATISTIC)
    async with serving_dcp(store.path) as endpoint:
        client = await endpoint.client()
        assert (await client.ask(request)).status == Status.KEY_ENOENT
        endpoint.server.contact = SourceContact([0, 1], ManualClock())
        endpoint.server.contact.note({1: 700})
        answer = await client.ask(request)
        assert (answer.key, json.loads(answer.value)) == (CONTACT_STATISTIC, {"1": 700})
    store.close()
