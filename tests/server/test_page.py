"""The operator's page in a browser, and its routes that list and change sessions."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection, IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    APIResponse,
    Browser,
    Download,
    Page,
    Route,
    expect,
    sync_playwright,
)

from mlx_lm_kvpersist.cli.main import main
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.index import Index
from tests.store.conftest import chain, save_turn
from tests.support import Message, ServerProcess, StartServer, chromium, synthetic_text

from .stored import wait_for_reply, wait_for_writer

MARKUP = "<img src=x onerror=\"document.title='changed'\">"
SYSTEM: Message = {"role": "system", "content": synthetic_text(500, seed=71)}
SESSIONS = "/v1/kvpersist/sessions"
OPENAPI = "/v1/kvpersist/openapi.json"
LONG_ID = "386d61b8-91d0-4b5c-a1ce-9f4f8ad9ce11"
FITS = "document.documentElement.scrollWidth <= innerWidth"
CONTRAST = """() => {
  const light = (colour) => {
    const parts = colour.match(/[\\d.]+/g).map(Number);
    const [r, g, b] = parts.slice(0, 3).map((n) => n / 255).map(
      (n) => (n <= 0.04045 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)") return colour;
    }
  };
  const found = {};
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!own || !element.checkVisibility() || element.closest("script, style")) continue;
    const style = getComputedStyle(element);
    const ink = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(ink), light(behind(element))].sort((one, other) => other - one);
    found[`${ink} on ${behind(element)}`] = (a + 0.05) / (b + 0.05);
  }
  return found;
}"""


def talk(seed: int) -> list[Message]:
    return [SYSTEM, {"role": "user", "content": synthetic_text(900, seed=seed)}]


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    """A server with sessions that share a system prompt; one session has no name."""
    server = started.with_plugin(tiny_model, "--kvpersist-memory", "256M")
    for seed, name in enumerate(("first", "second", MARKUP, None), start=72):
        server.chat(talk(seed), name, max_tokens=8)
    wait_for_writer(server)
    return server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    installed = chromium.find()
    if installed is None:
        if os.environ.get("CI") and chromium.can_be_fetched():
            pytest.fail(f"CI has no Chromium: {chromium.HOW}")
        pytest.skip(f"there is no Chromium: {chromium.HOW}")
    with sync_playwright() as playwright:
        with playwright.chromium.launch(
            executable_path=installed.path,
            env={**os.environ, **installed.env},
            args=["--no-sandbox"],
            timeout=60_000,
        ) as browser:
            expect.set_options(timeout=30_000)  # the machine may be busy with other tests
            yield browser


@pytest.fixture(params=[pytest.param(390, marks=pytest.mark.slow), 1440])
def width(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def opened(browser: Browser, server: ServerProcess, width: int) -> Iterator[Page]:
    """The page in a browser; its console and its requested addresses are checked at the end."""
    page, messages, urls = (
        browser.new_page(viewport={"width": width, "height": 800}),
        [],
        set[str](),
    )
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: urls.add(request.url))
    wait_for_writer(server)  # the page and a test then see the same state
    page.goto(url_of(server))
    expect(page.locator(".request").first).to_be_visible()
    yield page
    assert page.evaluate(FITS)
    page.close()
    assert messages == []  # no console message, no error
    paths = {url.removeprefix(url_of(server, "")).partition("?")[0] for url in urls}
    assert {path for path in paths if not path.startswith("blob:")} <= {
        *("/kvpersist", "/v1/kvpersist/requests", SESSIONS, "data:,"),
        *(
            f"{SESSIONS}/{operation}"
            for operation in ("select", "pin", "evict", "delete", "rename", "export")
        ),
    }


def url_of(server: ServerProcess, path: str = "/kvpersist") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def get_sessions(server: ServerProcess) -> dict[str, Any]:
    status, _, body = server.request("GET", SESSIONS)
    assert status == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


def session(server: ServerProcess, name: str | None) -> dict[str, Any]:
    matches = [entry for entry in get_sessions(server)["sessions"] if entry["name"] == name]
    assert len(matches) == 1, matches
    entry: dict[str, Any] = matches[0]
    return entry


def change(server: ServerProcess, operation: str, body: Any, **headers: str) -> tuple[int, Any]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, answer = server.request("POST", f"{SESSIONS}/{operation}", body, sent)
    return status, json.loads(answer)


def size_text(n_bytes: float) -> str:
    """Return a size as the page shows it."""
    units = iter(("B", "KiB", "MiB"))
    while n_bytes >= 1024 and next(units):
        n_bytes /= 1024
    return f"{n_bytes:.1f} {next(units)}"


def sessions_on_disk(started: StartServer, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the output of `sessions list`, by id."""
    assert main(["sessions", "list", "--json", "--kvpersist-dir", str(started.store)]) == 0
    return {entry["id"]: entry for entry in json.loads(capsys.readouterr().out)["sessions"]}


def test_listed_sessions_are_those_on_disk(
    server: ServerProcess, started: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_writer(server)
    answer, on_disk = get_sessions(server), sessions_on_disk(started, capsys)
    assert answer["is_all"] and answer["model"] == server.model
    assert {entry["id"] for entry in answer["sessions"]} == set(on_disk)
    for entry in answer["sessions"]:
        stored = on_disk[entry["id"]]
        for name in ("name", "model", "namespace", "tokens", "blocks", "bytes", "pinned"):
            assert entry[name] == stored[name], name


@pytest.mark.parametrize(
    ("operation", "body", "headers", "status", "message"),
    [
        ("pin", {"id": "x", "pinned": True}, {"Origin": "http://evil.example"}, 403, "Origin"),
        ("pin", {"id": "x", "pinned": True}, {"Origin": "null"}, 403, "Origin"),
        ("delete", {"id": "x"}, {"Origin": "http://127.0.0.1:1"}, 403, "Origin is"),
        ("delete", {"id": "x"}, {"Sec_Fetch_Site": "cross-site"}, 403, "Sec-Fetch-Site is"),
        ("delete", {"id": "x"}, {"Sec_Fetch_Site": "same-site"}, 403, "Sec-Fetch-Site is"),
        ("delete", {"id": "x"}, {"Host": "evil.example"}, 403, "Host names another machine"),
        ("delete", {"id": "x"}, {"Content_Type": "text/plain"}, 415, "expected application/json"),
        (
            "evict",
            {"id": "x"},
            {"Content_Type": "multipart/form-data; boundary=b"},
            415,
            "expected",
        ),
        ("evict", {"id": "no-such"}, {}, 404, "no session has the id 'no-such'"),
        ("export", {"id": "x"}, {"Origin": "http://evil.example"}, 403, "Origin"),
        ("export", {"id": "no-such"}, {}, 404, "no session has the id 'no-such'"),
        ("rename", {"id": "x", "title": "y"}, {"Sec_Fetch_Site": "cross-site"}, 403, "Sec-Fetch"),
        ("rename", {"id": "x"}, {}, 400, "title is null, expected text"),
        ("rename", {"id": "x", "title": "y" * 201}, {}, 400, "expected at most 200 characters"),
        ("delete", {"id": 7}, {}, 400, "id is 7, expected text"),
        ("delete", {}, {}, 400, "id is null, expected text"),
        ("pin", {"id": "x", "pinned": 1}, {}, 400, "pinned is 1, expected true or false"),
        ("delete", ["x"], {}, 400, "the body is not a JSON object"),
        ("select", {"ids": ["x"]}, {"Origin": "http://evil.example"}, 403, "Origin"),
        ("select", {"ids": "x"}, {}, 400, "expected a list of ids"),
        ("select", {"ids": [1]}, {}, 400, "expected a list of ids"),
        ("select", {"ids": [], "find": ""}, {}, 400, "without find"),
        ("select", {}, {}, 400, "find is null, expected text"),
    ],
)
def test_invalid_and_foreign_changes_of_a_session_are_refused(
    server: ServerProcess,
    operation: str,
    body: Any,
    headers: dict[str, str],
    status: int,
    message: str,
) -> None:
    if isinstance(body, dict) and body.get("id") == "x":
        body = {**body, "id": session(server, "first")["id"]}
    before = session(server, "first")
    actual, answer = change(server, operation, body, **headers)
    assert actual == status and message in answer["error"]["message"]
    assert session(server, "first") == before


def test_get_requests_change_no_session(server: ServerProcess) -> None:
    for operation in ("pin", "evict", "delete", "rename", "export"):
        assert server.request("GET", f"{SESSIONS}/{operation}?id=x")[0] == 404


def test_evicted_session_is_restored_from_disk(server: ServerProcess) -> None:
    messages = talk(80)
    server.chat(messages, "evicted", max_tokens=8, seed=1)
    wait_for_reply(server)
    before, other = session(server, "evicted"), session(server, "first")
    assert before["tier"] == "ram" and other["ram_blocks"] == other["blocks"]
    status, done = change(server, "evict", {"id": before["id"]})
    assert status == 200 and done["ram_bytes_freed"] > 0
    after = session(server, "evicted")
    # Only blocks that other conversations in RAM continue are still in RAM.
    assert after["tier"] == "disk" and 0 < after["ram_blocks"] < before["blocks"]
    assert {**after, "ram_blocks": before["blocks"], "tier": "ram"} == before
    assert session(server, "first") == other
    reply = server.chat(messages, "evicted", max_tokens=8, seed=1)
    assert int(reply.kvpersist["restored"]) > 0
    assert int(reply.kvpersist["reused"]) == reply.prompt_tokens - 1


def test_deleting_a_session_removes_its_blocks_and_records(
    server: ServerProcess, started: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = talk(81)
    server.chat(messages, "deleted", max_tokens=8)
    server.chat([SYSTEM, {"role": "user", "content": "Where?"}], "quotes it", max_tokens=8)
    wait_for_reply(server)
    entry, files = (
        session(server, "deleted"),
        set((started.store / "blocks").rglob("*.safetensors")),
    )
    n_hot = get_sessions(server)["store"]["tiers"]["ram"]["blocks"]
    status, selected = change(server, "select", {"ids": [entry["id"], "no-such"]})
    assert status == 200 and selected["ids"] == [entry["id"]]
    status, done = change(server, "delete", {"id": entry["id"]})
    assert status == 200 and done["deleted"]
    assert selected["disk_bytes"] == done["disk_bytes_freed"]
    removed = files - set((started.store / "blocks").rglob("*.safetensors"))
    assert 0 < len(removed) < entry["blocks"] and done["disk_bytes_freed"] > 0
    assert get_sessions(server)["store"]["tiers"]["ram"]["blocks"] == n_hot - len(removed)
    assert entry["id"] not in sessions_on_disk(started, capsys)
    assert '"deleted"' not in server.request("GET", "/v1/kvpersist/requests")[2].decode()
    assert main(["why", "--kvpersist-dir", str(started.store)]) == 0
    output = capsys.readouterr().out
    assert '"deleted"' not in output and '"quotes it"' in output
    # Only blocks that other conversations share are left.
    reply = server.chat(messages, "again", max_tokens=8)
    assert 0 < int(reply.kvpersist["reused"]) < reply.prompt_tokens // 2
    assert change(server, "delete", {"id": entry["id"]})[0] == 404


@pytest.mark.parametrize("width", [390, 768, 1440], indirect=True)  # the page has three layouts
def test_page_shows_sessions_and_requests(opened: Page, server: ServerProcess) -> None:
    data = get_sessions(server)
    names = opened.locator(".session b").all_inner_texts()
    assert names == [entry["name"] or f"unnamed {entry['id']}" for entry in data["sessions"]]
    assert MARKUP in names and opened.title().startswith("KV cache")
    assert opened.locator("img").count() == 0
    expect(opened.locator(".session .tier").first).to_be_visible()
    # The time is at least one line below "0%", so that they do not touch.
    (y_of_share, y_of_time), line = opened.locator("#hits").evaluate("""(svg) => {
      const texts = [...svg.querySelectorAll("text")];
      const all = [texts[0], texts[3]].map((one) => Number(one.getAttribute("y")));
      return [all, parseFloat(getComputedStyle(texts[0]).fontSize)];
    }""")
    assert y_of_time - y_of_share >= line
    records = json.loads(server.request("GET", "/v1/kvpersist/requests")[2])
    assert all(record["first_token_s"] > 0 for record in records)
    assert opened.locator("#hits rect").count() == len(records)
    assert opened.locator("#times path").count() == len(records)
    assert opened.locator("#hit-rate").inner_text().endswith("%")
    tokens, timed, saved_s = (data["saved"][name] for name in ("tokens", "timed", "seconds"))
    assert tokens >= sum(record["reused_tokens"] for record in records) > 0
    assert (timed > 0) == (saved_s > 0)
    assert f"{tokens:,} tokens" in opened.locator("#saved-tokens").inner_text()
    n_prompt, n_restored = (
        sum(entry[f"{kind}_tokens"] for entry in records) for kind in ("prompt", "restored")
    )
    expect(opened.locator("#hit-tiers")).to_contain_text(f"{n_restored / n_prompt:.0%} from disk")
    # A request's line unfolds, and polls keep it unfolded.
    line = opened.locator(".request").first
    expect(line.locator("dl")).to_be_hidden()
    line.locator("summary").click()
    expect(line.locator("dl")).to_contain_text(records[0]["sentence"])
    expect(line.locator("dl")).to_contain_text(records[0]["id"])


def test_page_draws_memory_and_written_bytes(opened: Page, server: ServerProcess) -> None:
    data = get_sessions(server)
    memory, store = data["memory"], data["store"]
    drawn = opened.locator("#memory .bar div").evaluate_all(
        "all => all.map((one) => [one.className, one.offsetWidth / one.parentElement.offsetWidth])"
    )
    shares = dict(drawn)
    assert sum(shares.values()) == pytest.approx(1, abs=0.05)
    for part in ("pool", "records"):
        assert shares[part] == pytest.approx(memory[part] / memory["total"], abs=0.03), part
    named = opened.locator("#memory li").evaluate_all("all => all.map((one) => one.className)")
    assert named == [part for part, _ in drawn] and shares["free"] > 0.5
    expect(opened.locator("#memory")).to_contain_text("of 256.0 MiB, beside")
    assert store["written_last_hour_bytes"] > store["written_turn_bytes"] > 0
    expect(opened.locator("#written")).to_have_text(size_text(store["written_last_hour_bytes"]))
    expect(opened.locator("#turn")).to_have_text(f"{size_text(store['written_turn_bytes'])} a turn")


def test_page_draws_memory_above_the_budget_as_a_full_bar(
    browser: Browser, server: ServerProcess
) -> None:
    """A request that runs alone may use more than the budget."""
    data = get_sessions(server)
    data["memory"] |= {"caches": 3 * data["memory"]["total"], "waiting": 2}
    data["store"]["tiers"]["ram"]["asked_again_tokens"] = 1234
    data["sessions"][0]["title"] = cut = "Refactor the parser " * 6 + "o…"
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.route("**/kvpersist/sessions?*", lambda route: route.fulfill(json=data))
    page.goto(url_of(server))
    expect(page.locator("#memory")).to_contain_text("2 requests wait for more")
    expect(page.locator("#again")).to_have_text("1,234 evicted tokens asked for again")
    widths = page.locator("#memory .bar div").evaluate_all("all => all.map((e) => e.offsetWidth)")
    assert max(widths) == widths[0] > 200 and page.locator("#memory .free").count() == 0
    name = page.locator(".session b").first
    expect(name).to_have_text(cut)
    assert name.locator(".end").count() == 0  # a truncated title has no separate end
    assert page.evaluate(FITS)
    page.close()


def action(page: Page, name: str, button: str) -> None:
    page.get_by_label(f"Actions for {name}", exact=True).click()
    page.locator(".menu[open]").get_by_role("button", name=button, exact=True).click()


def test_menu_actions_change_the_session(
    opened: Page, server: ServerProcess, tmp_path: Path, width: int
) -> None:
    name, status = f"{MARKUP}{width}", opened.locator("#status")
    reply = server.chat(talk(82), name, max_tokens=8)
    wait_for_reply(server)
    action(opened, name, "Pin")  # the page finds the session without a reload
    expect(status).to_contain_text("is pinned")
    assert session(server, name)["pinned"]
    expect(opened.get_by_label(f"Actions for {name}", exact=True)).to_be_focused()
    opened.keyboard.press("Enter")
    opened.keyboard.press("Tab")
    expect(opened.get_by_role("button", name="Unpin", exact=True)).to_be_focused()
    opened.keyboard.press("Enter")
    expect(status).to_contain_text("is not pinned")
    assert not session(server, name)["pinned"]
    expect(opened.get_by_label(f"Actions for {name}", exact=True)).to_be_focused()
    opened.keyboard.press("Enter")
    expect(opened.locator(".menu[open]")).to_have_count(1)
    opened.keyboard.press("Shift+Tab")  # a menu closes when it loses the focus
    expect(opened.locator(".menu[open]")).to_have_count(0)
    action(opened, name, "Evict from RAM")
    expect(status).to_contain_text("of RAM freed")
    assert session(server, name)["tier"] == "disk"

    with opened.expect_download() as download:
        action(opened, name, "Export")
    download.value.save_as(tmp_path / "one.session")
    expect(status).to_contain_text("exported")
    into = ["--kvpersist-dir", str(tmp_path / "other")]
    assert main(["sessions", "import", str(tmp_path / "one.session"), *into]) == 0
    assert main(["sessions", "show", name, *into]) == 0

    action(opened, name, "Rename")
    opened.get_by_role("textbox", name="Rename").fill(f"<b>&amp; {width}")
    opened.get_by_role("button", name="Save").click()
    expect(status).to_contain_text(f"called <b>&amp; {width}")
    renamed = session(server, name)
    assert renamed["title"] == f"<b>&amp; {width}"
    more: list[Message] = [{"role": "assistant", "content": reply.text}]
    server.chat([*talk(82), *more, {"role": "user", "content": "On"}], name, max_tokens=8)
    wait_for_reply(server)
    assert session(server, name)["title"] == f"<b>&amp; {width}"  # a later turn keeps the title

    action(opened, f"<b>&amp; {width}", "Delete")
    dialog = opened.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Delete <b>&amp; {width}?")
    dialog.get_by_role("button", name="Cancel").click()
    assert session(server, name)
    action(opened, f"<b>&amp; {width}", "Delete")
    dialog.get_by_role("button", name="Delete").click()
    expect(status).to_contain_text("is deleted")
    assert name not in [entry["name"] for entry in get_sessions(server)["sessions"]]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["session", "server"])
def test_interrupted_export_is_not_accepted_as_complete(
    lost: str, browser: Browser, tiny_model: Path, tmp_path: Path
) -> None:
    """The session is deleted, or the server killed, while a page and a program read the file."""
    with closing(StartServer(tmp_path)) as servers:
        with closing(BlockStore(servers.store, StoreLimits(64 << 20, 64 << 20))) as store:
            save_turn(store, chain(*([n] * 16 for n in range(24))), "long")
        server = servers.with_plugin(tiny_model)
        exported = session(server, "long")
        assert exported["bytes"] > 24 << 20  # more than fits into socket buffers
        page, saved = browser.new_page(), list[Download]()
        page.on("download", lambda download: saved.append(download))
        page.goto(url_of(server))
        page.get_by_label("Actions for long", exact=True).click()
        slow = {"downloadThroughput": 1 << 20, "uploadThroughput": -1, "latency": 0}
        network = page.context.new_cdp_session(page)
        network.send("Network.emulateNetworkConditions", {"offline": False, **slow})
        with page.expect_response(f"**{SESSIONS}/export"):
            page.locator(".menu[open]").get_by_role("button", name="Export", exact=True).click()
        with closing(HTTPConnection("127.0.0.1", server.port, timeout=60)) as client:
            body, kind = json.dumps({"id": exported["id"]}), {"Content-Type": "application/json"}
            client.request("POST", f"{SESSIONS}/export", body, kind)
            reply = client.getresponse()
            content = reply.read(1000)
            if lost == "server":
                server.kill9()
            else:
                assert change(server, "delete", {"id": exported["id"]})[0] == 200
            try:
                content += reply.read()
            except (IncompleteRead, ConnectionError) as error:
                content += getattr(error, "partial", b"")
        status = page.locator("#status")
        expect(status).to_contain_text(re.compile("broke off and nothing is saved|exported"))
        assert ("exported" in status.inner_text()) == bool(saved)
        page.close()
        log = server.log
    is_whole = len(content) == int(reply.headers["Content-Length"])
    assert "Traceback" not in log
    assert ("was removed at the same time" in log) == (
        lost == "session" and not (is_whole and saved)
    )
    assert lost == "session" or not (is_whole or saved)
    file, other = tmp_path / "one.session", tmp_path / "other"
    file.write_bytes(content)
    status_of_import = main(["sessions", "import", str(file), "--kvpersist-dir", str(other)])
    assert (status_of_import == 0) == is_whole == other.exists()


def answered_with(answer: dict[str, Any], route: Route) -> None:
    route.fulfill(**answer)


def test_page_shows_a_message_for_bad_answers(browser: Browser, server: ServerProcess) -> None:
    page = browser.new_page()
    page.goto(url_of(server))
    status = page.locator("#status")
    for answer, message in (
        ({"status": 502, "body": "<html>"}, "The server answered 502"),
        ({"status": 200, "body": "[1, 2"}, "cannot be read"),
        ({"status": 503, "json": {"error": {"message": "it ends"}}}, "it ends"),
    ):
        page.route("**/sessions/pin", partial(answered_with, answer), times=1)
        action(page, "first", "Pin")
        expect(status).to_contain_text(message)
    page.route("**/kvpersist/requests", lambda route: route.abort())
    expect(status).to_contain_text("No answer from the server")
    page.close()


@pytest.fixture(scope="module")
def crowded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that may show text, with 500 sessions."""
    with closing(StartServer(tmp_path_factory.mktemp("crowded"))) as servers:
        server = servers.with_plugin(tiny_model, "--kvpersist-show-text")
        headers = {"User-Agent": "claude-cli/2.0 (external)", "x-claude-code-session-id": LONG_ID}
        text = f"<system-reminder>quiet</system-reminder>{MARKUP} Refactor the parser"
        server.chat([SYSTEM, {"role": "user", "content": text}], max_tokens=4, headers=headers)
        wait_for_reply(server)
        with closing(Index(servers.store / "index.sqlite")) as index:
            (first,) = (entry for entry in index.sessions() if entry.name)
            with index.database.transaction():
                for n in range(498):
                    copied = replace(first, id=f"{n:08x}", name="w" * 200, used=first.used - n)
                    index.put_session(copied)
                    index.state.add_note(copied.id, client="curl", words=f"number {n} " * 12)
        yield server


def test_page_with_500_sessions_filters_and_deletes_them(
    browser: Browser, crowded: ServerProcess, width: int
) -> None:
    page, messages = browser.new_page(viewport={"width": width, "height": 800}), list[str]()
    page.on("console", lambda message: messages.append(message.text))
    page.goto(url_of(crowded))
    names, place = page.locator(".session b"), page.locator("#place")
    expect(place).to_have_text(re.compile("^1 to 20 of "))
    # The session's first words, without the agent's reminder, and its client.
    expect(page.get_by_text(f"{MARKUP} Refactor the parser", exact=True).first).to_be_visible()
    expect(page.get_by_text("Claude Code").first).to_be_visible()
    assert names.count() == 20 and page.evaluate(FITS)
    assert page.evaluate("document.documentElement.scrollHeight") < 5000
    page.get_by_role("button", name="Older").click()
    expect(place).to_have_text(re.compile("^21 to 40 of "))
    # The page says how many chosen sessions are on other pages.
    chosen = page.locator("#chosen")
    page.get_by_label("Choose all on this page").check()
    expect(chosen).to_have_text("20 chosen")
    page.get_by_role("button", name="Newer").click()
    expect(chosen).to_have_text("20 chosen, 20 not on this page")
    request_names = page.locator(".request .called")
    before = request_names.all_inner_texts()
    assert f"{MARKUP} Refactor the parser" in before
    find = page.get_by_label("Filter sessions")
    find.fill(f"NUMBER {width} ")
    expect(place).to_have_text("No session has that." if width > 498 else "1 to 1 of 1")
    find.fill(f"number 4{width // 384}")
    expect(place).to_have_text("1 to 11 of 11")  # 4n, and 4n0 to 4n9
    expect(chosen).to_have_text("Choose all on this page")
    assert request_names.all_inner_texts() == before
    page.get_by_label("Choose all on this page").check()
    expect(page.locator("#choose-matches")).to_be_hidden()
    page.get_by_role("button", name="Delete them").click()
    expect(page.get_by_role("dialog")).to_contain_text("This frees 0 B of disk")  # shared
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#status")).to_contain_text("11 sessions are deleted")
    expect(place).to_have_text("No session has that.")
    assert page.evaluate(FITS)
    page.close()
    assert messages == []


@pytest.mark.parametrize("width", [390, 768, 1440], indirect=True)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sessions_are_sorted_and_chosen_with_the_keyboard(
    browser: Browser, crowded: ServerProcess, width: int, scheme: Any
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.goto(url_of(crowded))
    names, place, keys = page.locator(".session b"), page.locator("#place"), page.keyboard
    expect(place).to_have_text(re.compile("^1 to 20 of "))
    page.locator("#sort").focus()
    keys.type("Largest")
    expect(page.locator("#older")).to_have_text("Smaller")
    total = json.loads(crowded.request("GET", SESSIONS)[2])["total"]
    largest = json.loads(crowded.request("GET", f"{SESSIONS}?sort=size")[2])["sessions"]
    expect(page.locator(".session .size").first).to_have_text(size_text(largest[0]["bytes"]))
    # A long name keeps its end, at each width.
    name = names.filter(has_text="w" * 200).first
    start, end = name.locator(".start"), name.locator(".end")
    assert start.evaluate("e => e.scrollWidth > e.clientWidth")  # its middle is hidden
    place_of = "e => [e.getBoundingClientRect().top, e.getBoundingClientRect().right]"
    (top, right), (top_of_end, right_of_end) = name.evaluate(place_of), end.evaluate(place_of)
    assert right_of_end <= right and top_of_end == pytest.approx(top, abs=3)  # in the same line
    assert name.inner_text() == "w" * 200
    n_lines = "e => Math.round(e.clientHeight / parseFloat(getComputedStyle(e).lineHeight))"
    details = page.locator(".session .about", has_text="number").first
    assert details.evaluate(n_lines) == (1 if width > 1000 else 2)
    # All matches are chosen, on all pages.
    page.locator("#choose-all").focus()
    keys.press("Space")
    expect(page.locator("#chosen")).to_have_text("20 chosen")
    keys.press("Tab")
    expect(page.get_by_role("button", name=f"Choose all {total}", exact=True)).to_be_focused()
    keys.press("Enter")
    expect(page.locator("#chosen")).to_have_text(f"{total} chosen, {total - 20} not on this page")
    expect(page.locator("#choose-matches")).to_be_hidden()
    expect(page.locator("#choose-all")).to_be_focused()
    everything = change(crowded, "select", {"find": ""})[1]
    keys.press("Tab")
    expect(page.get_by_role("button", name="Delete them")).to_be_focused()
    keys.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Delete {total} sessions?")
    expect(dialog).to_contain_text(f"This frees {size_text(everything['disk_bytes'])} of disk")
    if folder := os.environ.get("KVPERSIST_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/dialog-{width}-{scheme}.png")
    keys.press("Escape")
    expect(dialog).to_be_hidden()
    if folder:
        page.screenshot(path=f"{folder}/page-{width}-{scheme}.png", full_page=True)
    contrasts = page.evaluate(CONTRAST)
    assert min(contrasts.values()) >= 4.5, contrasts
    assert page.evaluate(FITS)
    page.locator("#choose-none").focus()
    keys.press("Enter")
    expect(page.locator("#choose-all")).to_be_focused()
    page.close()


def test_root_address_leads_to_the_page(browser: Browser, server: ServerProcess) -> None:
    page = browser.new_page()
    page.goto(url_of(server, "/"))
    assert page.url == url_of(server)
    page.close()


def test_page_without_sessions_shows_a_welcome(
    browser: Browser, tiny_model: Path, tmp_path: Path
) -> None:
    with closing(StartServer(tmp_path)) as servers:
        server = servers.with_plugin(tiny_model)
        page = browser.new_page(viewport={"width": 390, "height": 800})
        page.goto(url_of(server))
        expect(page.locator("#welcome")).to_contain_text(f":{server.port}/v1")
        expect(page.locator("#charts")).to_be_hidden()
        assert page.evaluate(FITS)
        page.close()


@pytest.mark.parametrize(
    ("options", "is_stored"),
    [((), True), (("--kvpersist-no-text", "--kvpersist-show-text"), False)],
)
def test_prompt_text_is_not_shown_unless_allowed(
    options: tuple[str, ...], is_stored: bool, tiny_model: Path, tmp_path: Path
) -> None:
    with closing(StartServer(tmp_path)) as servers:
        server = servers.with_plugin(tiny_model, *options)
        server.chat([{"role": "user", "content": "Refactor it"}], "s", max_tokens=4)
        wait_for_reply(server)
        assert session(server, "s")["words"] is None
        for path in (SESSIONS, f"{SESSIONS}?find=refactor", "/v1/kvpersist/requests"):
            assert b"Refactor" not in server.request("GET", path)[2]
        matches = json.loads(server.request("GET", f"{SESSIONS}?find=refactor")[2])
        assert matches["sessions"] == [] and matches["total"] == 0
        with closing(Index(servers.store / "index.sqlite")) as index:
            (stored,) = index.sessions_named("s")
            assert ("words" in index.state.note(stored.id)) is is_stored
        assert change(server, "delete", {"id": stored.id})[0] == 200
        with closing(Index(servers.store / "index.sqlite")) as index:
            assert index.state.note(stored.id) == {}


def test_late_answer_does_not_undo_a_newer_change(opened: Page, server: ServerProcess) -> None:
    """A poll that began before a click may be answered after it."""
    held_answers: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        held_answers.append((route, route.fetch()))

    opened.route("**/kvpersist/sessions?*", hold, times=1)
    while not held_answers:
        opened.wait_for_timeout(50)
    action(opened, "first", "Pin")
    pinned = opened.locator(".session .about", has_text="pinned")
    expect(pinned).to_be_visible()
    ((route, old),) = held_answers
    route.fulfill(response=old)
    opened.wait_for_timeout(300)
    assert pinned.is_visible()
    action(opened, "first", "Unpin")
    expect(pinned).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_enough_contrast(opened: Page, scheme: Any) -> None:
    opened.emulate_media(color_scheme=scheme)
    contrasts = opened.evaluate(CONTRAST)
    assert len(contrasts) > 4 and min(contrasts.values()) >= 4.5, contrasts
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(13, 17, 23)") is (scheme == "dark")
    assert opened.locator("svg[role=img][aria-label*=requests]").count() == 2


def test_content_security_policy_blocks_injected_scripts(
    browser: Browser, server: ServerProcess
) -> None:
    status, headers, body = server.request("GET", "/kvpersist")
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    assert b"://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    page, messages = browser.new_page(), list[str]()
    page.on("console", lambda message: messages.append(message.text))
    page.goto(url_of(server))
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.append("document.title = 'changed'");
        document.body.append(script);
    }""")
    assert page.title().startswith("KV cache")
    with pytest.raises(Exception, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert page.evaluate("fetch('http://127.0.0.1:1/').catch((error) => error.message)")
    page.close()
    assert any("Content Security Policy" in text for text in messages)


def test_only_operators_may_open_the_page(server: ServerProcess) -> None:
    for headers in ({"Host": "evil.example"}, {"X-Forwarded-For": "203.0.113.9"}):
        for path in ("/kvpersist", SESSIONS):
            assert server.request("GET", path, headers=headers)[0] == 403


def test_page_asks_for_the_api_key(
    started: StartServer, tiny_model: Path, browser: Browser
) -> None:
    server = started.with_plugin(tiny_model, env={"KVPERSIST_API_KEY": "secret"})
    status, _, body = server.request("GET", SESSIONS)
    assert status == 403 and b"KVPERSIST_API_KEY; commands read the key from" in body
    assert change(server, "delete", {"id": "x"})[0] == 403
    assert server.request("GET", OPENAPI)[0] == 200  # the description has no secrets
    status, _, body = server.request("GET", "/kvpersist", headers={"Host": "public.example"})
    assert status == 200 and b"secret" not in body
    page = browser.new_page()
    page.goto(url_of(server))
    key = page.get_by_label("Key", exact=True)
    expect(key).to_be_focused()
    assert not page.locator("main").is_visible()
    key.fill("wröng")
    page.keyboard.press("Enter")
    key.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("This key is not right")
    key.fill("secret")
    page.get_by_role("button", name="Show the cache").click()
    expect(page.locator("main")).to_be_visible()
    page.reload()
    expect(page.locator("main")).to_be_visible()
    page.locator(".menu summary").first.click()
    page.locator(".menu[open]").get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(page.locator("#status")).to_contain_text("is deleted")
    page.close()
