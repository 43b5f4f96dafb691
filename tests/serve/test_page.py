"""The status page in a real browser: what it says in words, on small screens and large, with nothing from outside."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mirror.health import STATES
from tests.serve.http_site import Site, judged, made, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; .ci/run installs it"),
    pytest.mark.xdist_group("page"),  # one browser
]
PICTURES = os.environ.get("PAGE_PICTURES")
"""A folder: the tests leave pictures of the page there, to look at."""


def report(vbuckets: int = 64) -> dict[str, Any]:
    """A service with everything wrong that can be: vbucket 3 lags, 7 is refused, 11 stalls; 5 was rolled back."""
    now = 1_700_000_000_000
    rows = []
    for vbid in range(vbuckets):
        group = vbid % 8
        row: dict[str, Any] = {
            "vbid": vbid, "group": group, "state": "streaming", "detail": None, "branch": 1, "vbuuid": "00000000abcd",
            "published_seqno": 1000 + vbid, "staged_seqno": 1000 + vbid, "source_high_seqno": 1000 + vbid,
            "lag_seqnos": 0, "lag_s": 0.0, "documents": None, "rollback_count": 0, "last_rollback_ms": None,
            "node": "db1.example:11210", "last_error": None, "worker": group % 2, "report_age_s": 0.1,
        }  # fmt: skip
        rows.append(row)
    rows[3] |= {"source_high_seqno": 2000, "lag_seqnos": 997, "lag_s": 123.0}
    rows[4] |= {"source_high_seqno": 1010, "lag_seqnos": 6, "lag_s": 8.0}
    rows[5] |= {"rollback_count": 1, "last_rollback_ms": now - 60_000}
    rows[7] |= {"state": "refused", "last_error": "the user may not read it <b>now</b>"}
    rows[9] |= {"state": "backfilling"}
    rows[11] |= {
        "state": "stalled", "lag_seqnos": 4, "lag_s": 2.0, "source_high_seqno": 1015, "stalls": 1,
        "detail": "nothing came for 30 s",
    }  # fmt: skip
    figures = {"cpu_percent": 12.5, "private_bytes": 44_000_000}
    workers: list[dict[str, Any]] = [
        {
            "slot": slot, "pid": 100 + slot, "phase": "running", "groups": list(range(slot, 8, 2)), "uptime_s": 4000.0,
            "heartbeat_age_s": 0.1, "restarts": slot, "last_exit": "SIGKILL" if slot else None,
            "last_exit_ms": now - 5000 if slot else None, "last_error": None, "counters": {}, **figures,
        }
        for slot in range(2)
    ]  # fmt: skip
    servers = [
        workers[0] | {"slot": slot, "kind": kind, "groups": [], "counters": {f"{kind}_connections": 5}}
        for slot, kind in ((1000, "kv"), (2000, "http"), (3000, "dcp"))
    ]
    stands = {
        "service": "up", "since_ms": now - 60_000, "pid": 1, "uptime_s": 4000.0,
        "time_ms": now, "data": "/data", "source": "couchbase://db1.example/demo", "source_error": None,
        "bucket": "demo", "vbucket_count": vbuckets, "vbuckets_held": vbuckets,
        "supervisor": figures, "workers": workers, "servers": servers,
        "listeners": {"kv": ["couchbase://127.0.0.1:11210"], "http": ["http://127.0.0.1:8091"]},
        "leases": [{"id": "1", "name": "export of orders", "until_ms": now + 60_000, "vbuckets": 64}],
        "selection": "collections shop.orders", "warnings": ["the user lacks a privilege: <i>stats</i>"],
        "totals": {
            "documents": 54_321, "versions": 60_000, "lag_seqnos": 997, "lag_s": 123.0, "documents_per_s": 1520.0,
            "bytes_per_s": 510_000.0, "rollback_count": 1, "resync_count": 2, "stale": 0,
        },
        "catch_up": None, "vbuckets": rows,
        "events": [
            {"time_ms": now - 5000, "event": "worker-ended", "level": "error", "text": "worker 1 died: <b>SIGKILL</b>"},
            {"time_ms": now - 60_000, "event": "rollback", "level": "warning", "text": "the store has it too"},
        ],
    }  # fmt: skip
    return judged(stands)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    with browser.new_context(viewport={"width": 1200, "height": 900}) as opened:
        yield opened


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with made(tmp_path_factory.mktemp("page")) as source, running(Path(source.path), source) as served:
        yield served


@pytest.fixture
def page(context: Any, site: Site) -> Iterator[Any]:
    """A page whose errors and requests to other hosts are recorded."""
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    opened.on(
        "request",
        lambda request: wrong.append(request.url) if not request.url.startswith((site.url, "data:")) else None,
    )
    yield opened
    opened.close()
    assert wrong == []


def opened(page: Any, site: Site, report: dict[str, Any] | None = None) -> None:
    if report is not None:
        site.stands(report)
    page.goto(site.url)
    page.wait_for_selector("body[data-looks]")


def picture(page: Any, name: str) -> None:
    if PICTURES:
        page.screenshot(path=f"{PICTURES}/{name}.png", full_page=True)


def test_lagging_and_dead_vbuckets_are_marked_and_a_rolled_back_one_is_not(page: Any, site: Site) -> None:
    opened(page, site, report())
    cells = page.locator("#map button")
    assert cells.count() == 64
    signs = {}
    words = {3: "lagging", 4: "a little behind", 5: "up to date", 7: "dead", 9: "filling", 11: "stalled"}
    for vbid, word in words.items():
        cell = cells.nth(vbid)
        assert f"Vbucket {vbid}: {word};" in cell.get_attribute("aria-label")
        signs[cell.inner_text()] = word
    assert len(signs) == 6, "each has a sign of its own"
    legend = page.locator("#legend").inner_text()
    for text in ("1 lagging", "1 dead", "1 filling", "1 a little behind", "1 stalled", "59 up to date"):
        assert text in legend
    assert page.locator("#state").inner_text() == "degraded"
    assert page.locator("#headline").inner_text().startswith("1 of 64 vbuckets refused: 7; 1 of 64 vbuckets stalled: ")
    lines = [line.split("\t") for line in page.locator("#attention tbody tr").all_inner_texts()]
    assert [line[:4] for line in lines] == [
        ["1", "7", "refused", "0 s"],
        ["1", "11", "stalled: the source has more and sends nothing", "2 s"],
        ["1", "3", "more than 30 s behind", "2 min"],
    ]
    assert lines[0][4].startswith("the user may not read it <b>now</b>"), "text is text"
    assert "See docs/troubleshooting.md#states-of-a-vbucket." in lines[0][4]
    assert "54,321\ndocuments" in page.locator("#figures").inner_text()
    assert page.title().startswith("✕")
    assert page.locator("h1").inner_text() == "dcp-mirror of demo, collections shop.orders"
    assert page.locator("#warnings").inner_text() == "the user lacks a privilege: <i>stats</i>"
    picture(page, "wide")


def test_many_vbuckets_with_the_same_news_are_one_line(page: Any, site: Site) -> None:
    changed = report()
    for row in changed["vbuckets"][16:48]:
        row |= {"rollback_count": 1, "last_rollback_ms": changed["time_ms"] - 60_000 + 100 * row["vbid"]}
    for row in changed["vbuckets"][48:]:
        row |= {"state": "waiting", "node": None, "last_error": "connection refused", "lag_seqnos": None, "lag_s": 20.0}
        row |= {"source_high_seqno": None}
    changed["totals"] |= {"stale": 3}
    opened(page, site, judged(changed))
    lines = [line.split("\t") for line in page.locator("#attention tbody tr").all_inner_texts()]
    assert [line[:2] for line in lines] == [["16", "48-63"], ["1", "7"], ["1", "11"], ["1", "3"]]
    assert lines[0][2:4] == ["without contact to the source", "20 s"]
    assert lines[0][4].startswith("connection refused")
    assert "16 waiting" in page.locator("#legend").inner_text()
    assert "1 filling" in page.locator("#legend").inner_text()
    source = page.locator("#source").inner_text()
    assert source.endswith("Source couchbase://db1.example/demo: 48 of 64 vbuckets in contact, with 1 node")
    assert "3 vbuckets are being resynced." in source
    map_box, table = page.locator("#map").bounding_box(), page.locator("#attention").bounding_box()
    assert map_box["y"] + map_box["height"] <= table["y"], "the map stands above the table"
    picture(page, "news")


def test_a_low_spike_has_a_peak_above_zero(page: Any, site: Site) -> None:
    site.stands(report())
    whole = site.get("/v1/status").json()
    looks = [
        whole
        | {"time_ms": 1_700_000_000_000 + 2000 * at, "totals": whole["totals"] | {"documents_per_s": rate}}
        | {"servers": [whole["servers"][0] | {"counters": {"kv_hits": count}}]}
        for at, (rate, count) in enumerate(((0.0, 5), (0.4, 5), (0.0, 9)))
    ]
    page.route("**/v1/status", lambda route: route.fulfill(json=looks.pop(0) if len(looks) > 1 else looks[0]))
    opened(page, site)
    page.wait_for_selector("body[data-looks='3']")
    ingest, reads = (page.locator("#charts figure").nth(number).inner_text() for number in range(2))
    assert "peak 0.4/s" in ingest
    assert "peak 2/s" in reads


def test_an_unreachable_source_is_in_the_headline_and_its_vbuckets_wait(page: Any, site: Site) -> None:
    """Also those whose streams are still open, to a node that answers nothing."""
    for state, waiting in (("waiting", 64), ("streaming", 63)):
        changed = report() | {"state": "source unreachable", "message": "no contact with the source: refused"}
        for row in changed["vbuckets"]:
            row |= {"state": state, "node": None, "lag_seqnos": None, "lag_s": 20.0, "source_high_seqno": None}
        changed["totals"] |= {"lag_seqnos": None, "lag_s": 20.0}
        if state == "streaming":
            changed["vbuckets"][3] |= {"state": "damaged", "lag_s": None}
        opened(page, site, changed)
        assert page.locator("#state").inner_text() == "source unreachable"
        assert page.locator("#headline").inner_text() == "no contact with the source: refused"
        source = page.locator("#source").inner_text()
        assert source.startswith("Since ")
        assert source.endswith("Source couchbase://db1.example/demo: no contact for 20 s")
        assert f"{waiting} waiting" in page.locator("#legend").inner_text()
        picture(page, f"away-{state}")


def test_the_headline_begins_with_the_state_and_bad_states_stand_out(page: Any, site: Site) -> None:
    """The page; tests/supervise/test_status_channels.py has the other channels."""
    opened(page, site, report())
    for state in STATES:
        site.stands(report() | {"state": state, "message": f"why {state}"})
        page.evaluate("look()")
        page.locator("#headline", has_text=f"why {state}").wait_for()
        assert page.locator("#state").inner_text() == state
        colour = page.locator("#state").get_attribute("class")
        well = state in ("starting", "catching up", "following", "stopping")
        assert colour == ("ok" if well else "idle" if state == "stored" else "dead")


def test_the_headline_is_one_sentence_of_at_most_90_characters(page: Any, site: Site) -> None:
    """A damaged group filled four bold lines, which ended in "(593 characters)"."""
    words = "8 of 64 vbuckets damaged: group 3; " + "no space left on the device and so on " * 9
    opened(page, site, report() | {"message": words})
    shown = page.locator("#headline").inner_text()
    assert len(shown) <= 90
    assert words.startswith(shown.removesuffix("…") + " "), "cut between two words"
    assert page.locator("#headline").get_attribute("title") == words


def test_the_map_is_hidden_until_the_source_is_reached(page: Any, site: Site) -> None:
    why = "the source cannot be reached: db1.example:11210 refused"
    never = {"state": "source unreachable", "message": why, "source_error": why, "vbuckets": [], "workers": []}
    opened(page, site, report() | never | dict.fromkeys(("bucket", "vbucket_count", "vbuckets_held")))
    assert page.locator("#headline").inner_text().endswith(why)
    assert page.locator("#source").inner_text().endswith("Source couchbase://db1.example/demo: not reached")
    assert page.locator("#detail").inner_text() == "No vbucket is known before the source is reached."
    assert not page.locator("#map").is_visible()
    assert not page.locator("#legend").is_visible()


def test_a_screen_reader_announces_changes_of_state_and_no_figures(page: Any, site: Site) -> None:
    opened(page, site, report())
    live = page.locator("[aria-live], [role=status], [role=alert]")
    assert live.count() == 1
    assert live.inner_text() == "degraded"
    page.evaluate(
        "globalThis.said = 0; new MutationObserver(() => { said += 1; }).observe("
        "document.querySelector('[role=status]'), { childList: true, characterData: true, subtree: true })"
    )
    moved = report()
    moved["totals"] |= {"lag_seqnos": 5000}
    moved["message"] = "another number"
    site.stands(moved)
    page.evaluate("look()")
    page.locator("#headline", has_text="another number").wait_for()
    assert page.evaluate("said") == 0
    assert page.locator("#map[role=listbox] > [role=option]").count() == 64
    assert page.locator("#map > [aria-selected=true]").count() == 0


@pytest.mark.parametrize(
    "height", [400, pytest.param(600, marks=pytest.mark.ci), pytest.param(900, marks=pytest.mark.ci)]
)
def test_the_map_is_not_covered_by_the_details_below_it(page: Any, site: Site, height: int) -> None:
    site.stands(report(1024))
    page.set_viewport_size({"width": 400, "height": height})
    opened(page, site)
    assert page.evaluate("getComputedStyle(document.getElementById('detail')).position") == "static"
    first = page.locator("#map button").nth(0)
    first.scroll_into_view_if_needed()
    assert page.evaluate(
        "(() => { const cell = document.querySelector('#map button'); const box = cell.getBoundingClientRect();"
        " return document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2) === cell; })()"
    )


def test_processes_listeners_nodes_and_leases_are_shown(page: Any, site: Site) -> None:
    opened(page, site, report())
    processes = [line.split("\t") for line in page.locator("#processes tbody tr").all_inner_texts()]
    named = {line[0]: line[4] for line in processes}
    assert named == {"supervisor": "", "worker 0": "", "worker 1": "", "kv 0": "5", "http 0": "5", "dcp 0": "5"}
    listeners = page.locator("#listeners").inner_text()
    assert listeners == "kv at couchbase://127.0.0.1:11210; http at http://127.0.0.1:8091"
    past = page.locator("#past").inner_text()
    assert "worker 1 died: <b>SIGKILL</b>" in past
    assert "the store has it too" not in past, "rollbacks are those that the store keeps"
    assert "export of orders holds the history of 64 vbuckets until" in page.locator("#leases").inner_text()


def test_the_map_of_a_part_of_the_bucket_is_of_that_part(page: Any, site: Site) -> None:
    changed = report(512) | {"vbucket_count": 1024}
    for row in changed["vbuckets"]:
        row["vbid"] += 512
    opened(page, site, changed)
    assert page.locator("#map button").count() == 512
    assert page.locator("#map button").nth(7).get_attribute("aria-label").startswith("Vbucket 519: dead;")
    assert "512 of 1,024" in page.locator("#figures").inner_text()
    picture(page, "part")


def test_the_vbuckets_of_a_dead_worker_are_dead(page: Any, site: Site) -> None:
    changed = report()
    changed["workers"][1] |= {"phase": "absent", "pid": None, "last_error": "no heartbeat"}
    opened(page, site, changed)
    assert "32 dead" in page.locator("#legend").inner_text()
    label = page.locator("#map button").nth(1).get_attribute("aria-label")
    assert "worker 1 is absent (SIGKILL): no heartbeat" in label
    process = page.locator("#processes tbody tr").nth(2).inner_text()
    assert "worker 1" in process
    assert "absent" in process


def test_the_vbuckets_of_a_silent_worker_are_shown_as_stalled(page: Any, site: Site) -> None:
    changed = report()
    changed["workers"][1]["heartbeat_age_s"] = 20.0
    for row in changed["vbuckets"]:
        row["report_age_s"] = 20.0 if row["worker"] else 0.1
    opened(page, site, judged(changed))
    assert "31 stalled" in page.locator("#legend").inner_text()
    assert "of worker 1, silent for 20 s" in page.locator("#attention").inner_text()
    assert "silent for 20 s" in page.locator("#processes tbody tr").nth(2).inner_text()


def test_a_vbucket_is_chosen_by_finger_or_keys(page: Any, site: Site) -> None:
    opened(page, site, report())
    page.locator("#map button").nth(3).click()
    detail = page.locator("#detail")
    assert "Vbucket 3: lagging" in detail.inner_text()
    assert "published 1,003 of 2,000" in detail.inner_text()
    page.keyboard.press("ArrowRight")
    assert "Vbucket 4: a little behind" in detail.inner_text()
    assert page.locator("#map button[tabindex='0']").count() == 1


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.ci)])
def test_the_page_fits_the_screen_of_a_phone(page: Any, site: Site, scheme: str) -> None:
    site.stands(report(1024))
    page.set_viewport_size({"width": 400, "height": 740})
    page.emulate_media(color_scheme=scheme)
    opened(page, site)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    sideways = (
        "[...document.querySelectorAll('.wide')].filter((each) => each.scrollWidth > each.clientWidth)"
        ".map((each) => each.children[0].id)"
    )
    assert page.evaluate(sideways) == [], "no table scrolls either"
    assert page.locator("#map button").count() == 1024
    first = "#attention tbody tr:first-child td:nth-child"
    count, where = (page.locator(f"{first}({n})").bounding_box() for n in (1, 2))
    assert count["y"] + count["height"] <= where["y"] + 1, "the numbers of many vbuckets have a line of their own"
    size = page.locator("#map button").nth(0).bounding_box()
    assert size["width"] >= 14
    picture(page, f"phone-{scheme}")


def test_the_page_shows_stored_data_with_the_service_down(page: Any, site: Site) -> None:
    site.source.put("a")
    page.emulate_media(color_scheme="dark")
    opened(page, site, {})
    assert page.locator("#headline").inner_text() == "no service runs: nothing follows the source"
    assert "8 stored" in page.locator("#legend").inner_text()
    assert "–" in page.locator("#figures").inner_text()
    picture(page, "down-dark")


def test_rollbacks_and_resyncs_are_reported(page: Any, site: Site) -> None:
    key = site.source.key_of(2)
    for _ in range(3):
        site.source.put(key)
    site.source.rollback(2, 1)
    writer = site.source.writer(4)
    site.source.put(site.source.key_of(4))
    writer.vbuckets[4].begin_resync()
    writer.commit()
    site.source.seqnos[4] = 0
    site.source.put(site.source.key_of(4))
    opened(page, site, {})
    past = page.locator("#past").inner_text()
    assert "rolled back from 3 to 1 (2 seqnos)" in past
    assert "resynced from 0" in past
    assert "Rollbacks: 1; resyncs: 1." in page.locator("#history").inner_text()
    assert "The mirror takes" in page.locator("#disk").inner_text()
    assert page.locator("#disk-legend span").all_inner_texts() == ["this mirror", "other files", "free"]


SCRIPT = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script><a href=x>x</a>"
TURNED = "\u202egnp.exe\u2066 \u200f\u061c\u0000"
LONG = "n" * 100_000


def replaced(value: Any, text: str) -> Any:
    """Return the report with every text of another party replaced by this one."""
    kept = ("service", "state", "phase", "vbuuid", "kind")
    if isinstance(value, dict):
        return {name: each if name in kept else replaced(each, text) for name, each in value.items()}
    if isinstance(value, list):
        return [replaced(each, text) for each in value]
    return text if isinstance(value, str) else value


@pytest.mark.parametrize("text", [SCRIPT, TURNED, LONG], ids=["script", "direction marks", "100 kB"])
def test_hostile_names_and_messages_are_text_and_short(page: Any, site: Site, text: str) -> None:
    """Bucket, nodes, errors, warnings, leases, listeners: the `page` fixture also fails on any error or request."""
    hostile = replaced(report(), text)
    hostile["workers"][1] |= {"phase": "absent", "last_error": text}
    hostile["vbuckets"][9] |= {"detail": text, "node": text}
    opened(page, site, hostile)
    page.locator("#map button").nth(9).click()
    assert page.locator("main img, main script, header img, header script, main a, header a").count() == 0
    shown = page.evaluate("document.body.innerText") + page.title() + page.locator("#map").inner_html()
    assert "pwned" not in page.title().replace(SCRIPT, "")
    assert not set("\u202e\u2066\u200f\u061c\0") & set(shown)
    if text is SCRIPT:
        assert SCRIPT in page.locator("h1").inner_text(), "as text"
    elif text is TURNED:
        assert "\\u202egnp.exe\\u2066" in page.locator("h1").inner_text()
    else:
        assert "(100,000 characters)" in page.locator("h1").inner_text()
        assert "n" * 500 not in shown
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200


def test_hostile_keys_and_documents_are_not_rendered_as_pages(browser: Any, site: Site) -> None:
    key = site.source.key_of(2)
    site.source.put(key, SCRIPT.encode(), datatype=0)
    answer = site.get(site.document(key.decode()))
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    with browser.new_context() as context:
        page = context.new_page()
        for path in (site.document(SCRIPT.replace("/", "%2F")), "/v1/collections/<script>/documents/a", "/<script>"):
            found = page.goto(site.url + path)
            assert found.headers["content-type"] == "application/problem+json"
            assert found.status in (400, 404)
            assert page.locator("script, img").count() == 0
