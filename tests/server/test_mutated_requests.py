"""Mutated requests get an error with a message, and the server continues.

Every route with a body is tested. A request that stock serves must also be served.
"""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api import bodies
from tests.api.bodies import mutated
from tests.support import ServerProcess, StartServer
from tests.support.scripted import make_thinking_model
from tests.support.stock import samples_with_xtc

CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"
AGENTS, SESSIONS = "/v1/agents", "/v1/kvpersist/sessions"


def without_images(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with texts in place of images: a text model refuses every image."""
    text = json.dumps(body).replace('"type": "image"', '"type": "text", "text": "An image."')
    text = text.replace('"type": "input_image"', '"type": "input_text", "text": "An image."')
    changed: dict[str, Any] = json.loads(text)
    return changed


MESSAGES = without_images(bodies.MESSAGES)
RESPONSES = without_images(bodies.RESPONSES)
CHAT: dict[str, Any] = {
    "model": "default_model",
    "max_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "presence_context_size": 5,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "repetition_context_size": 5,
    "xtc_probability": 0.1 if samples_with_xtc() else 0.0,
    "xtc_threshold": 0.1,
    "logit_bias": {"5": 1.5},
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"enable_thinking": False},
    "stop": ["end"],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Hm.",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"n": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "There."},
        {"role": "developer", "content": "Be brief."},
    ],
}
TEXT = {**{name: CHAT[name] for name in CHAT if name not in ("messages", "tools")}, "prompt": "Hi."}
MESSAGE = {"role": "user", "content": [{"type": "text", "text": "Hi."}]}
AGENT: dict[str, Any] = {
    "system": "Be kind.",
    "messages": [MESSAGE],
    "tools": CHAT["tools"],
    "model": "default_model",
}
SESSION = {"id": "no-such", "pinned": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {**MESSAGES, "model": "default_model"},
    "/v1/messages/count_tokens": {**MESSAGES, "model": "default_model"},
    "/v1/responses": {**RESPONSES, "model": "default_model"},
    CHAT_PATH: CHAT,
    TEXT_PATH: TEXT,
    AGENTS: AGENT,
    f"{AGENTS}/one/generate": {**CHAT, "messages": [MESSAGE]},
    f"{AGENTS}/one/evict": {"id": "one", "force": True},
    f"{AGENTS}/one/pin": {"pinned": True},
    f"{SESSIONS}/pin": SESSION,
    f"{SESSIONS}/evict": SESSION,
    f"{SESSIONS}/delete": SESSION,
}
GENERATING = tuple(path for path in BODIES if "/one/" not in path and not path.startswith(SESSIONS))
N_MANY = {path: 2900 if path in GENERATING else 460 for path in BODIES}
"""Examples for each path: more than 20,000 in total."""


def is_refused(status: int, answer: str) -> bool:
    """Return whether an answer is an error, possibly after the headers of a success.

    After an error, stock's streams can stop without an error event and without a last event.
    """
    is_stream = answer.startswith(("data: ", ": "))
    is_cut = not answer or (is_stream and "data: [DONE]" not in answer)
    return status != 200 or 'data: {"error": ' in answer or is_cut


class ComparedClient:
    """Sends requests to a server, and refused requests also to stock."""

    def __init__(self, start: StartServer, model: Path) -> None:
        self._start, self._model = start, model
        self.server = start.with_plugin(model, "--max-tokens", "2")
        self._stock: ServerProcess | None = None
        self._compared: set[str] = set()
        agent = {"id": "one", "system": "Be kind."}
        assert self.server.request("POST", AGENTS, agent)[0] == 201

    def ask(self, path: str, body: Any) -> tuple[int, str]:
        """Return status and answer. Fail if the answer is wrong for every request."""
        status, answer = post(self.server, path, body)
        assert status < 500 and '"type": "server_error"' not in answer, answer
        assert '"type": "api_error"' not in answer, answer
        if status >= 400:
            error = json.loads(answer)["error"]
            assert len(error["message"]) > 10 and error["type"], answer
        elif path == AGENTS:
            self.server.request("DELETE", f"{AGENTS}/{json.loads(answer)['id']}")
        if path in (CHAT_PATH, TEXT_PATH) and is_refused(status, answer):
            self._compare(path, body, answer)
        return status, answer

    def _compare(self, path: str, body: Any, answer: str) -> None:
        """Fail if stock serves the refused request. Stock may crash or hang."""
        reason = path + re.sub(r"\d+", "0", answer)[:120]
        if reason in self._compared:
            return
        stock = self._stock = self._stock or self._start(self._model, "--max-tokens", "2")
        try:
            stock_answer = post(stock, path, body, timeout_s=20)
        except (OSError, HTTPException):
            stock_answer = (0, "")
        assert is_refused(*stock_answer), f"stock serves a request that is refused with {answer}"
        self._compared.add(reason)
        if not stock.healthy() or stock_answer[0] == 0:
            stock.restart(kill=True)

    def check(self) -> None:
        """Fail unless the server works as before."""
        status, _, _ = self.server.request("POST", CHAT_PATH, {**CHAT, "stream": False})
        assert status == 200 and "Traceback" not in self.server.log


def post(server: ServerProcess, path: str, body: Any, timeout_s: float = 60) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    try:
        # Python's JSON has NaN and Infinity, and the server accepts both.
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def client(started: StartServer, models_dir: Path) -> ComparedClient:
    return ComparedClient(started, make_thinking_model(models_dir / "brief", eos_bias=60.0))


@pytest.mark.parametrize("path", BODIES)
def test_valid_requests_are_served(client: ComparedClient, path: str) -> None:
    status, answer = client.ask(path, BODIES[path])
    expected = 404 if path.startswith(SESSIONS) else 201 if path == AGENTS else 200
    assert status == expected, answer


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_some_mutated_requests_are_served_or_get_an_error(
    client: ComparedClient, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(list(BODIES)))
    client.ask(path, data.draw(mutated(BODIES[path])))


def test_server_still_works_after_mutated_requests(client: ComparedClient) -> None:
    client.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", BODIES)
def test_many_mutated_requests_are_served_or_get_an_error(
    client: ComparedClient, path: str
) -> None:
    @settings(max_examples=N_MANY[path], deadline=None)
    @given(mutated(BODIES[path]))
    def check_body(body: dict[str, Any]) -> None:
        client.ask(path, body)

    check_body()
    client.check()
