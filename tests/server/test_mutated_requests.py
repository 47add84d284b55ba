"""Requests of which parts are wrong: an error with a sentence, and a server that goes on."""

from __future__ import annotations

import copy
import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api import test_messages, test_responses
from tests.api.bodies import mutated
from tests.support import ServerProcess, StartServer
from tests.support.scripted import make_thinking_model

PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/chat/completions")


def without_images(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose images are texts: every request with one is refused by a text model."""
    text = json.dumps(body).replace('"type": "image"', '"type": "text", "text": "An image."')
    text = text.replace('"type": "input_image"', '"type": "input_text", "text": "An image."')
    found: dict[str, Any] = json.loads(text)
    return found


MESSAGES = without_images(test_messages.FULL)
RESPONSES = without_images(test_responses.FULL)
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
    "xtc_probability": 0.1,
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
BODIES = dict(zip(PATHS, (MESSAGES, MESSAGES, RESPONSES, CHAT), strict=True))


@pytest.fixture(scope="module")
def server(started: StartServer, models_dir: Path) -> ServerProcess:
    model = make_thinking_model(models_dir / "brief", eos_bias=60.0)
    return started.with_plugin(model, "--max-tokens", "2")


def ask(server: ServerProcess, path: str, body: dict[str, Any]) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    # Python's own JSON has NaN and Infinity; the server reads them, too.
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read().decode()
    connection.close()
    assert response.status < 500, answer
    if response.status != 200:
        error = json.loads(answer)["error"]
        message = error if isinstance(error, str) else error["message"]
        assert len(message) > 10, answer
        assert isinstance(error, str) == (path == "/v1/chat/completions"), answer


def is_served(server: ServerProcess) -> bool:
    chat = copy.deepcopy(CHAT) | {"stream": False}
    status, _, _ = server.request("POST", "/v1/chat/completions", chat)
    return status == 200 and "Traceback" not in server.log


@pytest.mark.parametrize("path", PATHS)
def test_what_is_right_is_served(server: ServerProcess, path: str) -> None:
    status, _, answer = server.request("POST", path, {**BODIES[path], "model": "default_model"})
    assert status == 200, answer


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_some_mutated_requests(server: ServerProcess, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(PATHS))
    ask(server, path, data.draw(mutated({**BODIES[path], "model": "default_model"})))


def test_the_server_goes_on(server: ServerProcess) -> None:
    assert is_served(server)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", PATHS)
def test_many_mutated_requests(server: ServerProcess, path: str) -> None:
    @settings(max_examples=5000, deadline=None)
    @given(mutated({**BODIES[path], "model": "default_model"}))
    def one(body: dict[str, Any]) -> None:
        ask(server, path, body)

    one()
    assert is_served(server)
