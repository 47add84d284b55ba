"""The operator's page in a browser, and the routes behind it: who sees and changes sessions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    APIResponse,
    Browser,
    Dialog,
    Page,
    Route,
    expect,
    sync_playwright,
)

from mlx_lm_kvpersist.cli.main import main
from tests.support import Message, ServerProcess, StartServer, chromium, synthetic_text

from .stored import wait_for_reply, wait_for_writer

MARKUP = "<img src=x onerror=\"document.title='changed'\">"
SYSTEM: Message = {"role": "system", "content": synthetic_text(500, seed=71)}
SESSIONS = "/v1/kvpersist/sessions"
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
    """A server with sessions that begin alike, one of them without a name."""
    server = started.with_plugin(tiny_model)
    for seed, name in enumerate(("first", "second", MARKUP, None), start=72):
        server.chat(talk(seed), name, max_tokens=8)
    wait_for_writer(server)
    return server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = chromium.find()
    if found is None:
        if os.environ.get("CI") and chromium.can_be_fetched():
            pytest.fail(f"CI has no Chromium: {chromium.HOW}")
        pytest.skip(f"there is no Chromium: {chromium.HOW}")
    with sync_playwright() as playwright:
        with playwright.chromium.launch(
            executable_path=found.path,
            env={**os.environ, **found.env},
            args=["--no-sandbox"],
            timeout=60_000,
        ) as browser:
            expect.set_options(timeout=30_000)  # the machine may be busy with other tests
            yield browser


@pytest.fixture
def opened(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    """The page, shown; its console and the addresses that it asks are checked at the end."""
    page, told, asked = browser.new_page(viewport={"width": 1024, "height": 800}), [], set[str]()
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("request", lambda request: asked.add(request.url))
    wait_for_writer(server)  # so that the page and a test see the same
    page.goto(url_of(server))
    expect(page.locator("#requests tr").first).to_be_visible()
    yield page
    page.close()
    assert told == []
    assert {url.removeprefix(url_of(server, "")) for url in asked} <= {
        *("/kvpersist", "/v1/kvpersist/requests", SESSIONS, "data:,"),
        *(f"{SESSIONS}/{what}" for what in ("pin", "evict", "delete")),
    }


def url_of(server: ServerProcess, path: str = "/kvpersist") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def described(server: ServerProcess) -> dict[str, Any]:
    status, _, body = server.request("GET", SESSIONS)
    assert status == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


def session(server: ServerProcess, name: str | None) -> dict[str, Any]:
    found = [one for one in described(server)["sessions"] if one["name"] == name]
    assert len(found) == 1, found
    one: dict[str, Any] = found[0]
    return one


def change(server: ServerProcess, what: str, body: Any, **headers: str) -> tuple[int, Any]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    status, _, answer = server.request("POST", f"{SESSIONS}/{what}", body, sent)
    return status, json.loads(answer)


def listed(started: StartServer, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what `sessions list` says, by id."""
    assert main(["sessions", "list", "--json", "--kvpersist-dir", str(started.store)]) == 0
    return {one["id"]: one for one in json.loads(capsys.readouterr().out)["sessions"]}


def test_sessions_are_those_on_disk(
    server: ServerProcess, started: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    wait_for_writer(server)
    answer, on_disk = described(server), listed(started, capsys)
    assert answer["is_all"] and answer["model"] == server.model
    assert {one["id"] for one in answer["sessions"]} == set(on_disk)
    for one in answer["sessions"]:
        other = on_disk[one["id"]]
        for name in ("name", "model", "namespace", "tokens", "blocks", "bytes", "pinned"):
            assert one[name] == other[name], name


@pytest.mark.parametrize(
    ("what", "body", "headers", "status", "says"),
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
        ("delete", {"id": 7}, {}, 400, "id is 7, expected text"),
        ("delete", {}, {}, 400, "id is null, expected text"),
        ("pin", {"id": "x", "pinned": 1}, {}, 400, "pinned is 1, expected true or false"),
        ("delete", ["x"], {}, 400, "the body is no JSON object"),
    ],
)
def test_who_may_change_a_session(
    server: ServerProcess,
    what: str,
    body: Any,
    headers: dict[str, str],
    status: int,
    says: str,
) -> None:
    if isinstance(body, dict) and body.get("id") == "x":
        body = {**body, "id": session(server, "first")["id"]}
    before = session(server, "first")
    found, answer = change(server, what, body, **headers)
    assert found == status and says in answer["error"]["message"]
    assert session(server, "first") == before


def test_nothing_changes_by_a_link(server: ServerProcess) -> None:
    for what in ("pin", "evict", "delete"):
        assert server.request("GET", f"{SESSIONS}/{what}?id=x")[0] == 404


def test_an_evicted_session_comes_back_from_disk(server: ServerProcess) -> None:
    messages = talk(80)
    server.chat(messages, "evicted", max_tokens=8, seed=1)
    wait_for_reply(server)
    before, other = session(server, "evicted"), session(server, "first")
    assert before["tier"] == "ram" and other["ram_blocks"] == other["blocks"]
    status, done = change(server, "evict", {"id": before["id"]})
    assert status == 200 and done["ram_bytes_freed"] > 0
    after = session(server, "evicted")
    # Its own blocks went; those that others in RAM continue stayed.
    assert after["tier"] == "disk" and 0 < after["ram_blocks"] < before["blocks"]
    assert {**after, "ram_blocks": before["blocks"], "tier": "ram"} == before
    assert session(server, "first") == other
    reply = server.chat(messages, "evicted", max_tokens=8, seed=1)
    assert int(reply.kvpersist["restored"]) > 0
    assert int(reply.kvpersist["reused"]) == reply.prompt_tokens - 1


def test_a_deleted_session_is_gone(
    server: ServerProcess, started: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = talk(81)
    server.chat(messages, "deleted", max_tokens=8)
    server.chat([SYSTEM, {"role": "user", "content": "Where?"}], "quotes it", max_tokens=8)
    wait_for_reply(server)
    one, files = session(server, "deleted"), set((started.store / "blocks").rglob("*.safetensors"))
    n_hot = described(server)["store"]["tiers"]["ram"]["blocks"]
    status, done = change(server, "delete", {"id": one["id"]})
    assert status == 200 and done["deleted"]
    gone = files - set((started.store / "blocks").rglob("*.safetensors"))
    assert 0 < len(gone) < one["blocks"] and done["disk_bytes_freed"] > 0
    assert described(server)["store"]["tiers"]["ram"]["blocks"] == n_hot - len(gone)
    assert one["id"] not in listed(started, capsys)
    assert '"deleted"' not in server.request("GET", "/v1/kvpersist/requests")[2].decode()
    assert main(["why", "--kvpersist-dir", str(started.store)]) == 0
    told = capsys.readouterr().out
    assert '"deleted"' not in told and '"quotes it"' in told
    # What others begin with is still there, and no more than that.
    reply = server.chat(messages, "again", max_tokens=8)
    assert 0 < int(reply.kvpersist["reused"]) < reply.prompt_tokens // 2
    assert change(server, "delete", {"id": one["id"]})[0] == 404


def test_the_page_shows_sessions_and_requests(opened: Page, server: ServerProcess) -> None:
    data = described(server)
    names = opened.locator("#sessions th").all_inner_texts()
    assert names == [one["name"] or f"unnamed {one['id']}" for one in data["sessions"]]
    assert MARKUP in names and opened.title().startswith("KV cache")
    assert opened.locator("img").count() == 0
    records = json.loads(server.request("GET", "/v1/kvpersist/requests")[2])
    sentences = opened.locator("#requests td:last-child").all_inner_texts()
    assert sentences == [record["sentence"] for record in records]
    assert all(record["first_token_s"] > 0 for record in records)
    assert opened.locator("#hits rect").count() == len(records)
    assert opened.locator("#times path").count() == len(records)
    assert opened.locator("#hit-rate").inner_text().endswith("%")


def test_the_buttons(opened: Page, server: ServerProcess) -> None:
    server.chat(talk(82), MARKUP + "2", max_tokens=8)
    wait_for_reply(server)
    status = opened.locator("#status")
    pin = opened.get_by_role("button", name=f"Pin {MARKUP}2", exact=True)
    pin.click()  # the page finds the session by itself
    expect(status).to_contain_text("is pinned")
    assert session(server, MARKUP + "2")["pinned"]
    unpin = opened.get_by_role("button", name=f"Unpin {MARKUP}2", exact=True)
    expect(unpin).to_be_focused()
    opened.keyboard.press("Enter")
    expect(status).to_contain_text("is not pinned")
    assert not session(server, MARKUP + "2")["pinned"]
    opened.keyboard.press("Tab")
    expect(opened.get_by_role("button", name=f"Evict {MARKUP}2")).to_be_focused()
    opened.keyboard.press("Enter")
    expect(status).to_contain_text("of RAM freed")
    assert session(server, MARKUP + "2")["tier"] == "disk"
    asked: list[str] = []

    def refuse(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.dismiss()

    opened.once("dialog", refuse)
    delete = opened.get_by_role("button", name=f"Delete {MARKUP}2")
    delete.click()
    assert MARKUP in asked[0] and session(server, MARKUP + "2")
    opened.once("dialog", lambda dialog: dialog.accept())
    delete.click()
    expect(status).to_contain_text("is deleted")
    expect(delete).to_have_count(0)
    assert MARKUP + "2" not in [one["name"] for one in described(server)["sessions"]]
    expect(opened.locator("#sessions-title")).to_be_focused()


def test_an_old_answer_does_not_undo_a_newer_one(opened: Page, server: ServerProcess) -> None:
    """A poll that began before a button was pressed may be answered after it."""
    held: list[tuple[Route, APIResponse]] = []

    def hold(route: Route) -> None:
        held.append((route, route.fetch()))

    opened.route("**/kvpersist/sessions", hold, times=1)
    while not held:
        opened.wait_for_timeout(50)
    opened.get_by_role("button", name="Pin first", exact=True).click()
    unpin = opened.get_by_role("button", name="Unpin first", exact=True)
    expect(unpin).to_be_visible()
    ((route, old),) = held
    route.fulfill(response=old)
    opened.wait_for_timeout(300)
    assert unpin.is_visible()
    unpin.click()
    expect(unpin).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(opened: Page, scheme: Any) -> None:
    opened.emulate_media(color_scheme=scheme)
    contrasts = opened.evaluate(CONTRAST)
    assert len(contrasts) > 4 and min(contrasts.values()) >= 4.5, contrasts
    background = opened.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(13, 17, 23)") is (scheme == "dark")
    assert opened.evaluate("document.documentElement.scrollWidth <= innerWidth")
    headers = opened.locator("thead th")
    assert headers.count() == opened.locator("thead th[scope=col]").count() == 15
    assert opened.locator("svg[role=img][aria-label*=requests]").count() == 2


def test_no_other_script_runs(browser: Browser, server: ServerProcess) -> None:
    status, headers, body = server.request("GET", "/kvpersist")
    policy = headers["content-security-policy"]
    assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    assert b"://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
    page, told = browser.new_page(), list[str]()
    page.on("console", lambda message: told.append(message.text))
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
    assert any("Content Security Policy" in one for one in told)


def test_the_page_is_the_operators(server: ServerProcess) -> None:
    for headers in ({"Host": "evil.example"}, {"X-Forwarded-For": "203.0.113.9"}):
        for path in ("/kvpersist", SESSIONS):
            assert server.request("GET", path, headers=headers)[0] == 403


def test_with_a_key_the_page_asks_for_it(
    started: StartServer, tiny_model: Path, browser: Browser
) -> None:
    server = started.with_plugin(tiny_model, env={"KVPERSIST_API_KEY": "secret"})
    assert server.request("GET", SESSIONS)[0] == 403
    assert change(server, "delete", {"id": "x"})[0] == 403
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
    page.get_by_role("button", name="Delete").first.wait_for()
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete").first.click()
    expect(page.locator("#status")).to_contain_text("is deleted")
    page.close()
