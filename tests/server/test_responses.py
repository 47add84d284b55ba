"""OpenAI's SDK, and plain HTTP, against a real server: the Responses API end to end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.support import synthetic_text
from tests.support.scripted import ScriptedServer, call

SYSTEM = synthetic_text(700, seed=2)
PARAMETERS = {"type": "object", "properties": {"where": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False},
    {"type": "web_search"},
    {
        "type": "namespace",
        "name": "mcp__sea__",
        "description": "At sea.",
        "tools": [{"type": "function", "name": "sail", "parameters": PARAMETERS}],
    },
]


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


@pytest.fixture(scope="module")
def client(scripted_server: ScriptedServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{scripted_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(server: ScriptedServer, body: Any) -> tuple[int, dict[str, Any]]:
    status, _, answer = server.process.request("POST", "/v1/responses", body)
    return status, json.loads(answer)


@pytest.mark.parametrize("kept", ["content", "encrypted_content"])
def test_streamed_tool_turns_reuse_all_earlier_tokens(
    server: ScriptedServer, client: OpenAI, kept: str
) -> None:
    """As Codex sends requests: developer messages, and the whole input in each turn."""
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": f"{kept}. {SYSTEM}"},
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
    ]
    scripts = (
        "<think>\nI should look.\n</think>\n\n" + call("look", where="härbour", deep=[1, None]),
        "<think>\nTwo.\n</think>\n\n Two ships.\n" + call("look", where="pier") + "\n"
        + call("mcp__sea__sail", where="sea"),
        "Nothing else.",
    )  # fmt: skip
    kinds = (
        ["reasoning", "function_call"],
        ["reasoning", "message", "function_call", "function_call"],
        ["message"],
    )
    n_before = 0
    for n_turn, (script, expected) in enumerate(zip(scripts, kinds, strict=True)):
        server.say(script)
        with client.responses.stream(
            model="default_model",
            input=items,
            tools=TOOLS,
            store=False,
            include=["reasoning.encrypted_content"],
            prompt_cache_key=f"codex-{kept}",
            extra_headers={"originator": "codex_cli_rs"},
        ) as stream:
            events = list(stream)
            reply = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        assert [item.type for item in reply.output] == expected
        assert reply.status == "completed"
        assert reply.output_text == ("", "\n\n Two ships.\n", "Nothing else.")[n_turn]
        usage = reply.usage
        assert usage is not None
        if n_turn:
            assert usage.input_tokens_details.cached_tokens == n_before, server.process.log
        assert (usage.output_tokens_details.reasoning_tokens > 0) == (n_turn < 2)
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        n_before = usage.total_tokens
        echoed = [item.to_dict() for item in reply.output]
        for item in echoed:
            item.pop("id")  # Codex drops the id
            if item["type"] == "reasoning" and kept == "encrypted_content":
                item["content"] = []
        items += echoed
        items += [
            {
                "type": "function_call_output",
                "call_id": item.call_id,
                "output": f"Ships: {json.loads(item.arguments)['where']}",
            }
            for item in reply.output
            if item.type == "function_call"
        ]
    calls = [item for item in items if item["type"] == "function_call"]
    assert [(item["name"], item.get("namespace")) for item in calls] == [
        ("look", None),
        ("look", None),
        ("sail", "mcp__sea__"),
    ]
    assert json.loads(calls[0]["arguments"]) == {"where": "härbour", "deep": [1, None]}
    _, _, listed = server.process.request("GET", "/v1/kvpersist/requests")
    sessions = [record["session"] for record in json.loads(listed)]
    assert sessions.count(f"codex-{kept}") == 3


def test_complete_and_truncated_replies_have_the_right_status(
    server: ScriptedServer, client: OpenAI
) -> None:
    server.say("<think>\nHm.\n</think>\n\nA whole one.")
    reply = client.responses.create(
        model="claude-x", input="Which ends?", instructions="Be brief.", temperature=0.0
    )
    assert (reply.status, reply.output_text, reply.model) == (
        "completed",
        "\n\nA whole one.",
        "claude-x",
    )
    assert reply.instructions == "Be brief." and reply.id.startswith("resp_")
    server.say("A whole one.")
    cut = client.responses.create(
        model="default_model", input="Which ends?", instructions="Be brief.", max_output_tokens=2
    )
    assert cut.status == "incomplete"
    assert cut.incomplete_details and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage and cut.usage.output_tokens == 2
    assert cut.usage.input_tokens_details.cached_tokens == cut.usage.input_tokens - 1
    assert cut.id != reply.id


def test_conversation_is_reused_across_apis(server: ScriptedServer) -> None:
    """Chat completions, Messages and Responses render the same prompt."""
    question, answer = "Is it one?", "It is one."
    server.say(answer, "And here.", "And there.")
    talk: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    chat = server.process.chat(talk, max_tokens=30)
    assert chat.text == answer
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Where?"}]
    items = [{**talk[0], "role": "developer"}, *talk[1:]]  # a role that this template lacks
    status, reply = post(server, {"input": items, "max_output_tokens": 30})
    assert status == 200
    n_before = chat.prompt_tokens + chat.completion_tokens
    assert reply["usage"]["input_tokens_details"]["cached_tokens"] == n_before
    body = {"system": SYSTEM, "messages": talk[1:], "max_tokens": 30}
    _, _, answered = server.process.request("POST", "/v1/messages", body)
    usage = json.loads(answered)["usage"]
    assert usage["cache_read_input_tokens"] == reply["usage"]["input_tokens"] - 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is kept between requests"),
        ({"conversation": "conv_1"}, "nothing is kept between requests"),
        ({"input": 5}, "input is 5, expected text, or a list of items"),
        ({"input": []}, "input is a list, expected at least one message"),
        ({"input": [5]}, "input[0] is 5, expected an object"),
        ({"input": [{"role": "boss", "content": "x"}]}, 'input[0].role is "boss", expected'),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "expected the item"),
        ({"tools": {}}, "tools is an object, expected a list of objects"),
        ({"max_output_tokens": "x"}, 'max_output_tokens is "x", expected an integer'),
        ({"temperature": "hot"}, "temperature must be"),
        ({"stream": 1}, "stream is 1, expected a boolean"),
    ],
)
def test_invalid_bodies_get_a_specific_error(
    server: ScriptedServer, change: dict[str, Any], message: str
) -> None:
    status, answer = post(server, {"input": "x", "max_output_tokens": 5, **change})
    assert status == 400, answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"]


def test_openai_sdk_parses_our_errors(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="nothing is kept between requests"):
        client.responses.create(model="m", input="x", previous_response_id="resp_1")
