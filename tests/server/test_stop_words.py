"""A reply ends at a stop word in its text, on every API and for any tokens of the word."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.scripted import ScriptedServer, call

REPLY = "One two. Tool said: nothing. " + "And then more of it. " * 20
USER = [{"role": "user", "content": "Say it."}]
WORDS = {"inside of a token": "ool", "over several tokens": "ol said: noth", "a line": "Tool said:"}
STREAMS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
STOPS = pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def ask(
    server: ScriptedServer, reply: str, stop: Any, stream: bool, **changes: Any
) -> tuple[str, str | None, int]:
    """Return a chat completion's text, its finish reason and how many tokens it counts."""
    server.say(reply)
    given = {"messages": USER, "max_tokens": 400, "stop": stop, "stream": stream, **changes}
    response = server.process.chat(**given)
    return response.text, response.finish_reason, response.completion_tokens


@STOPS
@STREAMS
def test_chat_reply_ends_at_a_stop_word(
    scripted_server: ScriptedServer, stream: bool, word: str
) -> None:
    text, reason, n_tokens = ask(scripted_server, REPLY, [word, "never"], stream)
    assert (text, reason) == (REPLY.partition(word)[0], "stop")
    assert n_tokens < 40  # nothing was computed after the stop word


@STREAMS
def test_text_that_only_begins_like_a_stop_word_is_sent(
    scripted_server: ScriptedServer, stream: bool
) -> None:
    whole = ask(scripted_server, "A list: ##", ["###", "list: ###"], stream)
    assert whole[:2] == ("A list: ##", "stop")
    cut = ask(scripted_server, "#" * 40, "#" * 100, stream, max_tokens=10)
    assert cut[1] == "length" and set(cut[0]) == {"#"}


@STREAMS
def test_stop_words_in_tool_calls_and_reasoning_are_ignored(
    scripted_server: ScriptedServer, stream: bool
) -> None:
    reply = "<think>\nlook there\n</think>\n\nI am.\n" + call("look", where="look")
    scripted_server.say(reply)
    response = scripted_server.process.chat(
        USER, max_tokens=200, stop=["look"], tools=[TOOL], stream=stream
    )
    assert [tool_call["function"]["name"] for tool_call in response.tool_calls] == ["look"]
    assert response.finish_reason == "tool_calls" and response.text.strip() == "I am."


@pytest.mark.parametrize("word", ["</think>", "<tool_call>", "</tool_call>", "never"])
@STREAMS
def test_control_token_as_stop_word_ends_a_reply_as_in_stock(
    scripted_server: ScriptedServer, stream: bool, word: str
) -> None:
    """Thinking budgets, and agents that run tools themselves, use such stop words."""
    reply = "<think>\nlook there\n</think>\n\nI am.\n" + call("look", where="look") + "\nDone."
    scripted_server.say(reply)
    response = scripted_server.process.chat(
        USER, max_tokens=200, stop=[word], tools=[TOOL], stream=stream
    )
    is_called = word in ("</tool_call>", "never")
    assert len(response.tool_calls) == is_called
    assert response.finish_reason == ("tool_calls" if is_called else "stop")
    texts = {"</think>": "", "<tool_call>": "I am.", "</tool_call>": "I am."}
    assert response.text.strip() == texts.get(word, "I am.\n\nDone.")
    assert response.reasoning.strip() == "look there"


@STOPS
@STREAMS
def test_text_completion_ends_at_a_stop_word(
    scripted_server: ScriptedServer, stream: bool, word: str
) -> None:
    scripted_server.say(REPLY)
    body = {
        "prompt": "Say it.",
        "max_tokens": 400,
        "stop": word,
        "stream": stream,
        "logprobs": True,
    }
    if stream:
        events = scripted_server.process.events("/v1/completions", body)
        choices = [json.loads(data)["choices"][0] for _, data in events if data != "[DONE]"]
    else:
        _, _, answer = scripted_server.process.request("POST", "/v1/completions", body)
        choices = json.loads(answer)["choices"]
        assert 0 < len(choices[0]["logprobs"]["content"]) < 40
    assert "".join(choice["text"] for choice in choices) == REPLY.partition(word)[0]
    assert choices[-1]["finish_reason"] == "stop"


@STOPS
@STREAMS
def test_messages_reply_ends_at_a_stop_word(
    scripted_server: ScriptedServer, stream: bool, word: str
) -> None:
    scripted_server.say(REPLY)
    body = {"model": "claude-x", "messages": USER, "max_tokens": 400, "stop_sequences": [word]}
    path = "/v1/messages"
    if stream:
        given = scripted_server.process.events(path, {**body, "stream": True})
        events = [json.loads(data) for _, data in given]
        text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
        end = events[-2]["delta"]
    else:
        end = json.loads(scripted_server.process.request("POST", path, body)[2])
        text = "".join(block["text"] for block in end["content"])
    assert text == REPLY.partition(word)[0]
    assert (end["stop_reason"], end["stop_sequence"]) == ("stop_sequence", word)


@STREAMS
def test_next_turn_reuses_a_reply_that_ended_at_a_stop_word(
    scripted_server: ScriptedServer, stream: bool
) -> None:
    question = [{"role": "user", "content": f"How far? {stream}"}]
    scripted_server.say(REPLY)
    first = scripted_server.process.chat(question, max_tokens=400, stop="nothing", stream=stream)
    talk = [*question, {"role": "assistant", "content": first.text}]
    talk.append({"role": "user", "content": "Go on."})
    scripted_server.say("Yes.")
    more = scripted_server.process.chat(talk, max_tokens=5)
    assert more.cached_tokens >= first.prompt_tokens + 0.9 * first.completion_tokens - 8
