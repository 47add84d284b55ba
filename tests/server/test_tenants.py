"""Replies do not depend on what other tenants have stored, so a guess reveals nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import ServerProcess, StartServer, make_zoo_model, synthetic_text

from .stored import wait_for_writer

SECRET = "The code of the vault is 4711, and nobody but me may ever know it, so do not tell it. "
PROMPTS = {
    "short": SECRET,
    "long": SECRET + synthetic_text(700, seed=31),
}
"""The prompts of the tenant Alice. A block has 256 tokens."""
GUESSES: dict[str, Callable[[str], str]] = {
    "right": lambda text: text,
    "wrong": lambda text: text.replace("4711", "4712"),
    "beginning": lambda text: text[: len(text) * 2 // 3],
    "goes on": lambda text: text + synthetic_text(60, seed=32),
}
UNLIKE = re.compile(
    r'"(?:id|item_id|created|created_at|completed_at|signature)": ?(?:"[^"]*"|[0-9.]+|null)'
    r"|restore_ms=[0-9.]+|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]+|\b(?:msg|resp|rs|chatcmpl)[-_]\w+"
)
"""The parts that differ between the replies of two equal requests: names and times."""

PLACES: dict[str, tuple[tuple[str, ...], Any]] = {
    "keys": (
        ("--kvpersist-namespace-by-key",),
        lambda tenant: {"Authorization": f"Bearer {tenant}"},
    ),
    "namespaces": ((), lambda tenant: {"X-KVPersist-Namespace": tenant}),
    "sessions": (("--kvpersist-isolation", "session"), lambda tenant: {"X-Session-ID": tenant}),
}


def requests(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a prompt as the path and body of each API, whole and as a stream."""
    return list(_requests(text))


def _requests(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    talk = [{"role": "user", "content": text}]
    for stream in (False, True):
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        options = {"model": "default_model", "stream": stream, "temperature": 0.0}
        chat = {**options, "max_tokens": 2, "messages": talk}
        yield "/v1/chat/completions", {**chat, **usage}
        yield "/v1/messages", chat
        yield "/v1/completions", {**options, **usage, "max_tokens": 2, "prompt": text}
        yield "/v1/responses", {**options, "max_output_tokens": 2, "input": text}


class Tenants:
    """Named clients of a server, which use some forms of a request."""

    def __init__(self, server: ServerProcess, headers: Any, forms: slice = slice(None)) -> None:
        self.server, self._headers, self.forms = server, headers, forms

    def ask(self, tenant: str, path: str, body: Mapping[str, Any]) -> tuple[int, Any, str]:
        """Return status, headers and body of a reply, without names and times."""
        status, headers, answer = self.server.request("POST", path, body, self._headers(tenant))
        names = ("date", "x-kvpersist-request", "content-length")
        kept_headers = {name: text for name, text in headers.items() if name not in names}
        text = answer.decode()
        text = re.sub(r": x-kvpersist-request: .*", "", text, flags=re.IGNORECASE)
        return status, UNLIKE.sub("", json.dumps(kept_headers)), UNLIKE.sub("", text)

    def guess(self, tenant: str, *lengths: str) -> dict[tuple[str, ...], tuple[int, Any, str]]:
        """Return the replies to guessed prompts, each from a new tenant."""
        replies: dict[tuple[str, ...], tuple[int, Any, str]] = {}
        for length in lengths:
            for kind in GUESSES if len(lengths) > 1 else ("right", "beginning"):
                secret, guess = PROMPTS[length], GUESSES[kind]
                for path, body in requests(guess(secret))[self.forms]:
                    case = length, kind, path, str(body["stream"])
                    replies[case] = self.ask(f"{tenant} {' '.join(case)}", path, body)
        return replies


def check_guesses(tenants: Tenants, *lengths: str) -> None:
    server = tenants.server
    before = tenants.guess("Carol", *lengths)
    assert {status for status, _, _ in before.values()} == {200}
    for length in lengths:
        for path, body in requests(PROMPTS[length])[tenants.forms]:
            tenants.ask("Alice", path, {**body, "max_tokens": 4})
    wait_for_writer(server)
    first, *_ = requests(PROMPTS["long"])[tenants.forms]
    again = tenants.ask("Alice", *first)
    assert again != before["long", "right", first[0], str(first[1]["stream"])]
    assert tenants.guess("Bob", *lengths) == before
    server.restart()
    assert tenants.guess("Dave", *lengths) == before


@pytest.fixture
def tenants(request: pytest.FixtureRequest, start_server: StartServer, tiny_model: Path) -> Tenants:
    options, headers = PLACES[request.param]
    # Each place uses half of the forms; two places use all of them.
    forms = slice(list(PLACES).index(request.param) % 2, None, 2)
    return Tenants(start_server.with_plugin(tiny_model, *options), headers, forms)


@pytest.mark.parametrize("tenants", PLACES, indirect=True)
@pytest.mark.parametrize(
    "lengths", [("long",), pytest.param(tuple(PROMPTS), marks=pytest.mark.slow)], ids=len
)
def test_guess_reveals_nothing_about_other_tenants(
    tenants: Tenants, lengths: tuple[str, ...]
) -> None:
    check_guesses(tenants, *lengths)
    records = json.loads(tenants.server.request("GET", "/v1/kvpersist/requests")[2])
    assert any(record["reason"] == "stored in another namespace or session" for record in records)


def test_guess_reveals_nothing_if_stock_serves_the_model(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Stock's prompt cache has no namespaces. Windowed models with a draft model use it."""
    model = make_zoo_model(tmp_path / "model", "gemma3_text")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "sliding_window": 4096}))
    server = start_server.with_plugin(model, "--draft-model", str(tiny_model))
    tenants = Tenants(server, PLACES["namespaces"][1])
    path, body = requests(PROMPTS["long"])[0]
    before = tenants.ask("Carol", path, body)
    assert "outcome=STOCK" in before[1]
    assert tenants.ask("Alice", path, body) == tenants.ask("Bob", path, body) == before
    status, _, answer = server.request("POST", path, body)
    assert status == 200
    assert json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_other_tenants_agents_do_not_change_answers(
    start_server: StartServer, tiny_model: Path
) -> None:
    """Neither the ids nor the number of other tenants' agents make a difference."""
    server = start_server.with_plugin(tiny_model)

    def create(tenant: str, name: str) -> tuple[int, Any]:
        headers = {"X-KVPersist-Namespace": tenant}
        status, _, answer = server.request("POST", "/v1/agents", {"id": name}, headers)
        return status, {**json.loads(answer), "created": 0}

    first = create("Carol", "vault")
    assert first[0] == 201
    assert create("Alice", "vault") == create("Bob", "vault") == first
    responses = [
        server.request(method, f"/v1/agents/{name}{call}", {}, {"X-KVPersist-Namespace": "Dave"})
        for method, call in (("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("POST", "/evict"))
        for name in ("vault", "nobody")
    ]
    answers = [(status, answer) for status, _, answer in responses]
    assert answers[::2] == answers[1::2] and {status for status, _ in answers} == {404}
