"""Anthropic's SDK, and plain HTTP, against a real server: the Messages API end to end."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError

from tests.support import synthetic_text, wait_until
from tests.support.scripted import ScriptedServer, call

MESSAGES = "/v1/messages?beta=true"
MODEL = "claude-local"
SYSTEM = synthetic_text(700, seed=1)
TOOL: Any = {
    "name": "look",
    "description": "Look somewhere.",
    "input_schema": {"type": "object", "properties": {"where": {"type": "string"}}},
}
MARK = {"type": "ephemeral"}
HOT = {"temperature": 1.0}


@pytest.fixture
def server(scripted_server: ScriptedServer) -> ScriptedServer:
    return scripted_server


@pytest.fixture(scope="module")
def client(scripted_server: ScriptedServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=scripted_server.url, api_key="none", max_retries=0) as client:
        yield client


def n_prompt(usage: Any) -> int:
    """Return the tokens of a prompt: the sum of its three parts."""
    return int(
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )


def post(server: ScriptedServer, body: Any, path: str = MESSAGES) -> tuple[int, dict[str, Any]]:
    status, _, answer = server.process.request("POST", path, body)
    return status, json.loads(answer)


def test_streamed_tool_turns_reuse_all_earlier_tokens(
    server: ScriptedServer, client: Anthropic
) -> None:
    """Every turn after the first computes only its new tokens."""
    client = client.with_options(default_headers={"X-KVPersist-Namespace": "a round trip"})
    system: Any = [{"type": "text", "text": SYSTEM, "cache_control": MARK}]
    messages: list[Any] = [{"role": "user", "content": "What is in the harbour?"}]
    scripts = (
        "<think>\nI should look.\n</think>\n\n" + call("look", where="härbour", deep=[1, None]),
        "<think>\nTwo.\n</think>\n\n Two ships.\n" + call("look", where="pier") + "\n"
        + call("look", where="sea"),
        "Nothing else.",
    )  # fmt: skip
    blocks = (["thinking", "tool_use"], ["thinking", "text", "tool_use", "tool_use"], ["text"])
    n_before = 0
    for script, kinds in zip(scripts, blocks, strict=True):
        server.say(script)
        given: Any = {"model": MODEL, "system": system, "messages": messages, "tools": [TOOL]}
        counted = client.messages.count_tokens(**given).input_tokens
        with client.messages.stream(max_tokens=64000, **given) as stream:
            events = [event.type for event in stream]
            reply = stream.get_final_message()
        assert events[0] == "message_start" and events[-1] == "message_stop"
        assert [block.type for block in reply.content] == kinds
        assert reply.stop_reason == ("tool_use" if "tool_use" in kinds else "end_turn")
        assert reply.model == MODEL
        usage = reply.usage
        assert n_prompt(usage) == counted
        assert usage.input_tokens == 0 and usage.cache_creation_input_tokens
        # The end of the turn was computed with the reply, and the last token is computed again.
        assert usage.cache_read_input_tokens == n_before
        n_before = counted + usage.output_tokens
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": f"Ships at {block.input['where']}."}],
            }
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "And?"}]})
    first = messages[1]["content"]
    assert first[0].thinking.strip() == "I should look." and first[0].signature
    assert first[1].input == {"where": "härbour", "deep": [1, None]}


def test_replies_that_are_not_streamed_have_the_right_stop_reason(
    server: ScriptedServer, client: Anthropic
) -> None:
    """The replies end with the turn, at max_tokens or at a stop sequence, without cache marks."""
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Which ends?"}]}
    server.say("\n A whole one. \n")
    reply = client.messages.create(max_tokens=50, **given)
    assert reply.stop_reason == "end_turn" and reply.stop_sequence is None
    assert [block.text for block in reply.content if block.type == "text"] == ["\n A whole one. \n"]
    counted = client.messages.count_tokens(**given).input_tokens
    assert reply.usage.input_tokens == counted == n_prompt(reply.usage)
    server.say("A whole one.")
    cut = client.messages.create(max_tokens=2, **given)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    assert cut.usage.cache_read_input_tokens == counted - 1
    assert cut.id != reply.id and cut.id.startswith("msg_")
    server.say("One, two, three.")
    stopped = client.messages.create(max_tokens=50, stop_sequences=["zzz", ", three"], **given)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ", three")
    assert [block.text for block in stopped.content if block.type == "text"] == ["One, two"]
    server.say("Twice.")
    status, answer = post(server, {**given, "max_tokens": 10**12})
    assert (status, answer["stop_reason"]) == (200, "end_turn")
    status, answer = post(server, {**given, "max_tokens": 0})
    assert (status, answer["stop_reason"]) == (200, "max_tokens")


def test_sampled_replies_are_reused_with_their_generated_ids(
    server: ScriptedServer, client: Anthropic
) -> None:
    """Tokenizing the text of such a reply seldom gives its ids."""
    server.say()
    messages: list[Any] = []
    n_before = 0
    for n in range(3):
        messages.append({"role": "user", "content": f"What is {n}?"})
        given: Any = {"model": MODEL, "messages": messages}
        counted = client.messages.count_tokens(**given).input_tokens
        reply = client.messages.create(max_tokens=25, extra_body=HOT, **given)
        assert n_prompt(reply.usage) == counted
        assert n == 0 or reply.usage.cache_read_input_tokens == n_before
        n_before = counted + reply.usage.output_tokens
        messages.append({"role": "assistant", "content": reply.content})


@pytest.mark.parametrize("written", ['{"name": "look"}', '["look"]', "{look", '{"name": 1}'])
def test_invalid_tool_call_is_returned_as_text(
    server: ScriptedServer, client: Anthropic, written: str
) -> None:
    """Stock drops such a call: the client gets an empty turn, or a stream without an end."""
    given: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 90}
    asked: Any = [{"role": "user", "content": "Call it."}]
    text = f"<tool_call>\n{written}\n</tool_call>"
    server.say(text, text)
    reply = client.messages.create(messages=asked, **given)
    assert reply.stop_reason == "end_turn"
    assert [block.text for block in reply.content if block.type == "text"] == [text]
    chat = server.process.chat(asked, stream=True, max_tokens=90)
    assert (chat.text, chat.tool_calls) == ("", [])


@pytest.mark.parametrize("ends_itself", [False, True])
def test_truncated_tool_call_is_returned_as_text(
    server: ScriptedServer, client: Anthropic, ends_itself: bool
) -> None:
    written = call("look", where="there")
    cut = written[: written.index("there")]
    server.say(cut if ends_itself else written)
    asked: Any = [{"role": "user", "content": "Call it."}]
    reply = client.messages.create(
        model=MODEL, messages=asked, tools=[TOOL], max_tokens=90 if ends_itself else 25
    )
    (block,) = reply.content
    assert reply.stop_reason == ("end_turn" if ends_itself else "max_tokens")
    assert block.type == "text" and written.startswith(block.text)
    assert block.text == cut or not ends_itself


def test_tool_choice_none_removes_the_tools_from_the_prompt(
    server: ScriptedServer, client: Anthropic
) -> None:
    """If the model writes a call nevertheless, the call is returned as text."""
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Say it."}]}
    none: Any = {"type": "none"}
    plain = client.messages.count_tokens(**given).input_tokens
    given["tools"] = [TOOL]
    assert client.messages.count_tokens(tool_choice=none, **given).input_tokens == plain
    assert client.messages.count_tokens(tool_choice={"type": "any"}, **given).input_tokens > plain
    written = call("look", where="there")
    server.say(written)
    reply = client.messages.create(max_tokens=90, tool_choice=none, **given)
    assert reply.stop_reason == "end_turn"
    assert [block.text for block in reply.content if block.type == "text"] == [written]
    function = {"type": "function", "function": {"name": "look", "parameters": {}}}
    asked: Any = {"messages": given["messages"], "max_tokens": 1, "tools": [function]}
    chats = [server.process.chat(**asked, tool_choice=choice) for choice in ("none", "auto")]
    assert chats[0].prompt_tokens == plain < chats[1].prompt_tokens


def test_deferred_tool_is_rendered_at_its_reference(
    server: ScriptedServer, client: Anthropic
) -> None:
    """In the list of tools, before all messages, it would change the whole prompt."""
    search: Any = {**TOOL, "name": "search"}
    hidden: Any = {**TOOL, "name": "aaa", "description": "Comes first.", "defer_loading": True}
    start: list[Any] = [{"role": "user", "content": SYSTEM[:600]}]
    given: Any = {"model": MODEL, "max_tokens": 80}
    server.say(call("search", where="tools"))
    first = client.messages.create(messages=start, tools=[search, hidden], **given)
    (block,) = first.content
    assert block.type == "tool_use"
    reference = {"type": "tool_reference", "tool_name": "aaa"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [reference]}
    messages = [
        *start,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    server.say(call("aaa", where="there"))
    second = client.messages.create(messages=messages, tools=[hidden, search], **given)
    (block,) = second.content
    assert block.type == "tool_use" and block.name == "aaa"
    assert second.usage.cache_read_input_tokens == n_prompt(first.usage) + first.usage.output_tokens
    assert second.usage.input_tokens > 40  # the tool's description was read


def test_changing_billing_line_and_cache_marks_keep_session_and_reuse(
    server: ScriptedServer,
) -> None:
    """As Claude Code sends requests: cache marks move, and the first system block changes."""
    user = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "5e55-10"})

    def turn(n: int, messages: list[Any]) -> dict[str, Any]:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={n};"}
        system = [billing, {"type": "text", "text": SYSTEM + "two", "cache_control": MARK}]
        body = {"model": "claude-opus-4", "max_tokens": 32000, "system": system}
        more = {
            "metadata": {"user_id": user},
            "context_management": {"edits": []},
            "output_config": {"effort": "high"},
            "thinking": {"type": "adaptive", "display": "omitted"},
            "tools": [TOOL],
            "messages": messages,
        }
        status, answer = post(server, {**body, **more})
        assert status == 200, answer
        return answer

    environment: Any = {"role": "system", "content": [{"type": "text", "text": "# Environment"}]}
    asked: Any = {
        "role": "user",
        "content": [{"type": "text", "text": "Go.", "cache_control": MARK}],
    }
    server.say("Gone.")
    first = turn(1, [asked, environment])
    plain = [{"role": "user", "content": "Go."}, {"role": "system", "content": "# Environment"}]
    server.say("Back.")
    again: Any = {"role": "user", "content": "Come back."}
    second = turn(2, [*plain, {"role": "assistant", "content": first["content"]}, again])
    usage = first["usage"]
    read = second["usage"]["cache_read_input_tokens"]
    assert read == sum(usage.values())
    _, _, listed = server.process.request("GET", "/v1/kvpersist/requests")
    assert [record["session"] for record in json.loads(listed)].count("5e55-10") == 2


def test_unkept_request_reports_no_cache_creation_tokens(server: ScriptedServer) -> None:
    body = {"model": MODEL, "max_tokens": 1, "cache_control": MARK}
    asked = {**body, "messages": [{"role": "user", "content": "Keep?"}]}
    keep = {"X-KVPersist-Keep": "no"}
    _, _, answer = server.process.request("POST", MESSAGES, asked, headers=keep)
    usage = json.loads(answer)["usage"]
    assert usage["input_tokens"] > 0 and usage["cache_creation_input_tokens"] == 0


def test_thinking_can_be_disabled(server: ScriptedServer, client: Anthropic) -> None:
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Think?"}]}
    on = client.messages.count_tokens(**given).input_tokens
    off = client.messages.count_tokens(thinking={"type": "disabled"}, **given).input_tokens
    assert off > on  # the template adds an empty thinking block


def test_head_requests_of_claude_code_are_answered(server: ScriptedServer) -> None:
    for path in ("/", "/api/hello"):
        status, _, body = server.process.request("HEAD", path)
        assert (status, body) == (200, b"")


def test_token_counts_do_not_wait_for_a_running_reply(server: ScriptedServer) -> None:
    """25 requests for a count arrive while a reply is generated."""
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": SYSTEM}]}
    server.say("Yes. " * 20_000)
    body = {**given, "max_tokens": 40_000, "stream": True}
    with closing(server.process.events(MESSAGES, body)) as events, ThreadPoolExecutor(25) as pool:
        usage = json.loads(next(events)[1])["message"]["usage"]
        count = partial(post, server, given, "/v1/messages/count_tokens")
        counts = [future.result() for future in [pool.submit(count) for _ in range(25)]]
    assert [status for status, _ in counts] == [200] * 25
    n_read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert {answer["input_tokens"] for _, answer in counts} == {n_read}
    assert n_streamed(server) < 20_000, "the reply ended before all was counted"


def n_streamed(server: ScriptedServer) -> int:
    """Return how many reply tokens were sent, without the first token of each reply."""
    text = server.process.request("GET", "/metrics")[2].decode()
    counts = re.findall(r"^kvpersist_inter_token_seconds_count\S* (\S+)", text, re.MULTILINE)
    return int(sum(map(float, counts)))


@pytest.mark.parametrize("later", [True, False], ids=["later", "at once"])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_stops_the_reply(server: ScriptedServer, stream: bool, later: bool) -> None:
    """The client may disconnect before the headers: stock then continues the reply."""
    server.say("Yes. " * 20_000)
    body: Any = {"messages": [{"role": "user", "content": "Long?"}], "max_tokens": 40_000}
    n_before, log_start = n_streamed(server), len(server.process.log)
    payload = json.dumps({**body, "model": MODEL, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.process.port or 0)) as connection:
        head = f"POST /v1/messages HTTP/1.1\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        if later:
            wait_until(lambda: "processing progress" in server.process.log[log_start:], "a reply")
            assert not stream or connection.recv(100)
    # A request with a seed is served alone: it waits until all other requests have ended.
    server.process.chat(body["messages"], seed=1, max_tokens=1)
    assert n_streamed(server) < n_before + 20_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": 5}, "messages is 5, expected a list of objects"),
        ({"messages": []}, "messages is a list, expected at least one message"),
        ({"messages": [5]}, "messages[0] is 5, expected an object"),
        (
            {"messages": [{"role": "boss", "content": "x"}]},
            'messages[0].role is "boss", expected "user", "assistant" or "system"',
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "content[0].type is"),
        ({"stop_sequences": ["\ud800"]}, "stop_sequences[0] is not valid Unicode"),
        ({"system": 5}, "system is 5, expected text, or a list of blocks"),
        ({"tools": {"a": 1}}, "tools is an object, expected a list of objects"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name is null, expected text"),
        ({"max_tokens": "many"}, 'max_tokens is "many", expected an integer'),
        ({"stop_sequences": "x"}, 'stop_sequences is "x", expected a list of texts'),
        ({"temperature": "hot"}, "temperature must be"),
        ({"stream": "yes"}, 'stream is "yes", expected a boolean'),
        ({"model": 5}, "model is 5, expected text"),
    ],
)
def test_invalid_bodies_get_a_specific_error(
    server: ScriptedServer, change: dict[str, Any], message: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    for path in (MESSAGES, "/v1/messages/count_tokens"):
        status, answer = post(server, {**body, **change}, path)
        assert status == 400, answer
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        assert message in answer["error"]["message"]


def test_model_is_listed_and_retrieved_by_its_claude_name(client: Anthropic) -> None:
    names = [model.id for model in client.models.list(limit=1000)]
    assert "claude-thinking-tools" in names
    retrieved = client.models.retrieve("claude-thinking-tools")
    assert (retrieved.type, retrieved.display_name) == ("model", "thinking-tools")


def test_anthropic_sdk_parses_our_errors(client: Anthropic) -> None:
    with pytest.raises(BadRequestError, match="temperature must be"):
        client.messages.create(
            model=MODEL,
            max_tokens=5,
            messages=[{"role": "user", "content": "x"}],
            extra_body={"temperature": "hot"},
        )
