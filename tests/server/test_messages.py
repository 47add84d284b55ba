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
    """Return the tokens of a prompt: its three parts add up to it."""
    return int(
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )


def post(server: ScriptedServer, body: Any, path: str = MESSAGES) -> tuple[int, dict[str, Any]]:
    status, _, answer = server.process.request("POST", path, body)
    return status, json.loads(answer)


def test_a_round_trip_with_a_tool(server: ScriptedServer, client: Anthropic) -> None:
    """Streamed: every turn after the first reuses all but its new tokens."""
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


def test_whole_replies_and_their_ends(server: ScriptedServer, client: Anthropic) -> None:
    """Not streamed: end of turn, the limit, a stop sequence; nothing is marked with a cache."""
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


def test_sampled_replies_are_counted_and_reused_as_they_were_spelled(
    server: ScriptedServer, client: Anthropic
) -> None:
    """Their ids are seldom those of their tokenized text."""
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
def test_a_call_that_cannot_be_read_is_text(
    server: ScriptedServer, client: Anthropic, written: str
) -> None:
    """Stock drops it: the client would get an empty turn, or a stream without an end."""
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
def test_a_call_that_is_cut_off_is_text_as_the_model_wrote_it(
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


def test_a_tool_that_must_not_be_called_is_not_there(
    server: ScriptedServer, client: Anthropic
) -> None:
    """It is not in the prompt, and a call that the model still writes is text."""
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


def test_a_deferred_tool_stands_where_its_reference_stands(
    server: ScriptedServer, client: Anthropic
) -> None:
    """The list of tools comes before everything: a new tool in it changes the whole prompt."""
    search: Any = {**TOOL, "name": "search"}
    hidden: Any = {**TOOL, "name": "aaa", "description": "Comes first.", "defer_loading": True}
    start: list[Any] = [{"role": "user", "content": SYSTEM[:600]}]
    given: Any = {"model": MODEL, "max_tokens": 80}
    server.say(call("search", where="tools"))
    first = client.messages.create(messages=start, tools=[search, hidden], **given)
    (block,) = first.content
    assert block.type == "tool_use"
    found = {"type": "tool_reference", "tool_name": "aaa"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [found]}
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


def test_sessions_side_requests_and_the_billing_line(server: ScriptedServer) -> None:
    """As Claude Code sends it: the marks move, the first block of the system differs."""
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
    assert [each["session"] for each in json.loads(listed)].count("5e55-10") == 2


def test_what_is_not_kept_is_not_counted_as_written(server: ScriptedServer) -> None:
    body = {"model": MODEL, "max_tokens": 1, "cache_control": MARK}
    asked = {**body, "messages": [{"role": "user", "content": "Keep?"}]}
    keep = {"X-KVPersist-Keep": "no"}
    _, _, answer = server.process.request("POST", MESSAGES, asked, headers=keep)
    usage = json.loads(answer)["usage"]
    assert usage["input_tokens"] > 0 and usage["cache_creation_input_tokens"] == 0


def test_thinking_can_be_switched_off(server: ScriptedServer, client: Anthropic) -> None:
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Think?"}]}
    on = client.messages.count_tokens(**given).input_tokens
    off = client.messages.count_tokens(thinking={"type": "disabled"}, **given).input_tokens
    assert off > on  # the template writes an empty thought


def test_claude_code_says_hello(server: ScriptedServer) -> None:
    for path in ("/", "/api/hello"):
        status, _, body = server.process.request("HEAD", path)
        assert (status, body) == (200, b"")


def test_counting_waits_for_nobody(server: ScriptedServer) -> None:
    """25 at once while a reply is generated."""
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": SYSTEM}]}
    server.say("Yes. " * 20_000)
    body = {**given, "max_tokens": 40_000, "stream": True}
    with closing(server.process.events(MESSAGES, body)) as events, ThreadPoolExecutor(25) as pool:
        usage = json.loads(next(events)[1])["message"]["usage"]
        count = partial(post, server, given, "/v1/messages/count_tokens")
        counts = [each.result() for each in [pool.submit(count) for _ in range(25)]]
    assert [status for status, _ in counts] == [200] * 25
    n_read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert {answer["input_tokens"] for _, answer in counts} == {n_read}
    assert n_told(server) < 20_000, "the reply ended before all was counted"


def n_told(server: ScriptedServer) -> int:
    """Return how many tokens of replies were sent, after the first of each."""
    text = server.process.request("GET", "/metrics")[2].decode()
    counts = re.findall(r"^kvpersist_inter_token_seconds_count\S* (\S+)", text, re.MULTILINE)
    return int(sum(map(float, counts)))


@pytest.mark.parametrize("later", [True, False], ids=["later", "at once"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_reply(
    server: ScriptedServer, stream: bool, later: bool
) -> None:
    """Also a client that leaves before the reply's headers: stock stops a reply only after them."""
    server.say("Yes. " * 20_000)
    body: Any = {"messages": [{"role": "user", "content": "Long?"}], "max_tokens": 40_000}
    n_before, log_start = n_told(server), len(server.process.log)
    payload = json.dumps({**body, "model": MODEL, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.process.port or 0)) as connection:
        head = f"POST /v1/messages HTTP/1.1\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        if later:
            wait_until(lambda: "processing progress" in server.process.log[log_start:], "a reply")
            assert not stream or connection.recv(100)
    # A request with a seed is served alone: it waits for all others to end.
    server.process.chat(body["messages"], seed=1, max_tokens=1)
    assert n_told(server) < n_before + 20_000


@pytest.mark.parametrize(
    ("change", "says"),
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
def test_bad_bodies_get_a_sentence(
    server: ScriptedServer, change: dict[str, Any], says: str
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    for path in (MESSAGES, "/v1/messages/count_tokens"):
        status, answer = post(server, {**body, **change}, path)
        assert status == 400, answer
        assert answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"
        assert says in answer["error"]["message"]


def test_claude_code_finds_a_model_by_its_name(client: Anthropic) -> None:
    names = [model.id for model in client.models.list(limit=1000)]
    assert "claude-thinking-tools" in names
    found = client.models.retrieve("claude-thinking-tools")
    assert (found.type, found.display_name) == ("model", "thinking-tools")


def test_the_sdk_reads_our_errors(client: Anthropic) -> None:
    with pytest.raises(BadRequestError, match="temperature must be"):
        client.messages.create(
            model=MODEL,
            max_tokens=5,
            messages=[{"role": "user", "content": "x"}],
            extra_body={"temperature": "hot"},
        )
