"""A prompt that is longer than the model's context: clients get an error that they recognize."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic import BadRequestError as AnthropicRefused
from openai import BadRequestError as OpenAIRefused
from openai import OpenAI

from tests.support import synthetic_text
from tests.support.scripted import ScriptedServer

from .conftest import MAX_CONTEXT

LONG = synthetic_text(40_000, seed=91)
ASKED: Any = [{"role": "user", "content": LONG}]
TOO_LONG = re.compile(rf"prompt is too long: (\d+) tokens > {MAX_CONTEXT} maximum")
"""Claude Code reads both numbers."""


@pytest.fixture
def openai(scripted_server: ScriptedServer) -> OpenAI:
    return OpenAI(base_url=f"{scripted_server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [True, False])
def test_too_long_message_request_reports_its_token_count(
    scripted_server: ScriptedServer, stream: bool
) -> None:
    client = Anthropic(base_url=scripted_server.url, api_key="none", max_retries=0)
    counted = client.messages.count_tokens(model="claude-x", messages=ASKED).input_tokens
    assert counted > MAX_CONTEXT
    with pytest.raises(AnthropicRefused) as refused:
        client.messages.create(
            model="claude-x", max_tokens=5000, messages=ASKED, extra_body={"stream": stream}
        )
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    match = TOO_LONG.fullmatch(body["error"]["message"])
    assert match and int(match[1]) == counted


@pytest.mark.parametrize("stream", [True, False])
def test_too_long_completion_requests_get_context_length_exceeded(
    openai: OpenAI, stream: bool
) -> None:
    for create in (
        lambda: openai.chat.completions.create(
            model="default_model", messages=ASKED, stream=stream
        ),
        lambda: openai.completions.create(model="default_model", prompt=LONG, stream=stream),
    ):
        with pytest.raises(OpenAIRefused) as refused:
            create()
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.type == "invalid_request_error"
        assert TOO_LONG.search(refused.value.message)


def test_too_long_responses_request_gets_context_length_exceeded(openai: OpenAI) -> None:
    with pytest.raises(OpenAIRefused) as refused:
        openai.responses.create(model="default_model", input=LONG)
    assert refused.value.code == "context_length_exceeded"
    *_, last = openai.responses.create(model="default_model", input=LONG, stream=True)
    assert last.type == "response.failed"
    error = last.response.error
    assert error is not None and TOO_LONG.fullmatch(error.message)
    assert error.to_dict()["code"] == "context_length_exceeded"


def test_agent_with_a_too_long_system_prompt_is_refused(scripted_server: ScriptedServer) -> None:
    body = {"id": "long", "system": LONG}
    status, _, answer = scripted_server.process.request("POST", "/v1/agents", body)
    assert (status, json.loads(answer)["error"]["code"]) == (400, "context_length_exceeded")


def test_short_prompt_is_served_with_any_max_tokens(scripted_server: ScriptedServer) -> None:
    """As in stock, max_tokens may exceed the context: clients send 128,000."""
    scripted_server.say("Here.")
    reply = scripted_server.process.chat([{"role": "user", "content": "Where?"}], max_tokens=10**6)
    assert reply.text == "Here."


def test_model_list_shows_the_context_length(scripted_server: ScriptedServer) -> None:
    listed = json.loads(scripted_server.process.request("GET", "/v1/models")[2])["data"]
    assert [model["max_model_len"] for model in listed if "max_model_len" in model] == [MAX_CONTEXT]
