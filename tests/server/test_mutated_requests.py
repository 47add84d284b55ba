"""Requests with wrong parts: an error with a sentence, and a server that continues.

Every route that takes a body is tested. Requests that stock serves are served, too.
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
    found: dict[str, Any] = json.loads(text)
    return found


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
"""Over 20,000 in all."""


def is_refused(status: int, answer: str) -> bool:
    """Tell whether an answer is an error, also one after the headers of a success.

    Stock's streams can stop without their last event, after an error that it does not send.
    """
    is_stream = answer.startswith(("data: ", ": "))
    is_cut = not answer or (is_stream and "data: [DONE]" not in answer)
    return status != 200 or 'data: {"error": ' in answer or is_cut


class Asked:
    """Sends requests to a server, and refused requests also to stock."""

    def __init__(self, start: StartServer, model: Path) -> None:
        self._start, self._model = start, model
        self.server = start.with_plugin(model, "--max-tokens", "2")
        self._stock: ServerProcess | None = None
        self._compared: set[str] = set()
        one = {"id": "one", "system": "Be kind."}
        assert self.server.request("POST", AGENTS, one)[0] == 201

    def ask(self, path: str, body: Any) -> tuple[int, str]:
        """Return status and answer. Fails if no request can have such an answer."""
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
        """Fail if stock serves the refused request. Stock may die of it, or hang."""
        reason = path + re.sub(r"\d+", "0", answer)[:120]
        if reason in self._compared:
            return
        stock = self._stock = self._stock or self._start(self._model, "--max-tokens", "2")
        try:
            found = post(stock, path, body, timeout_s=20)
        except (OSError, HTTPException):
            found = (0, "")
        assert is_refused(*found), f"stock serves a request that is refused with {answer}"
        self._compared.add(reason)
        if not stock.healthy() or found[0] == 0:
            stock.restart(kill=True)

    def check(self) -> None:
        """Fail unless the server works as before."""
        status, _, _ = self.server.request("POST", CHAT_PATH, {**CHAT, "stream": False})
        assert status == 200 and "Traceback" not in self.server.log


def post(server: ServerProcess, path: str, body: Any, timeout_s: float = 60) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)
    try:
        # Python's own JSON has NaN and Infinity; the server reads them, too.
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def asked(started: StartServer, models_dir: Path) -> Asked:
    return Asked(started, make_thinking_model(models_dir / "brief", eos_bias=60.0))


@pytest.mark.parametrize("path", BODIES)
def test_what_is_right_is_served(asked: Asked, path: str) -> None:
    status, answer = asked.ask(path, BODIES[path])
    expected = 404 if path.startswith(SESSIONS) else 201 if path == AGENTS else 200
    assert status == expected, answer


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_some_mutated_requests(asked: Asked, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(list(BODIES)))
    asked.ask(path, data.draw(mutated(BODIES[path])))


def test_the_server_goes_on(asked: Asked) -> None:
    asked.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", BODIES)
def test_many_mutated_requests(asked: Asked, path: str) -> None:
    @settings(max_examples=N_MANY[path], deadline=None)
    @given(mutated(BODIES[path]))
    def one(body: dict[str, Any]) -> None:
        asked.ask(path, body)

    one()
    asked.check()
