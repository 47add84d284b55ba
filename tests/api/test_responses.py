"""The Responses API translated to chat completions and back, without a server."""

from __future__ import annotations

import json
from email.message import Message as Headers
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.api.responses import ResponsesAPI, ResponsesReply
from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.attachments import fit_attachments

from .bodies import DELTAS, RESPONSES, SCHEMA, USAGE, Delta, call, mutated


def chat(**changes: Any) -> dict[str, Any]:
    return ResponsesAPI().parse({"input": "x", **changes}, Headers()).fields


def test_request_becomes_a_chat_completion_request() -> None:
    request = ResponsesAPI().parse(RESPONSES, Headers())
    look = {"name": "look", "description": "Look.", "parameters": SCHEMA}
    sail = {"name": "sea__sail", "parameters": {}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
    look_call = {"name": "look", "arguments": '{"n": 1}'}
    sail_call = {"name": "sea__sail", "arguments": "{}"}
    assert request.fields == {
        "model": "m",
        "max_tokens": 100,
        "prompt_cache_key": "s",
        "tools": [{"type": "function", "function": function} for function in (look, sail)],
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi."}]},
            {
                "role": "assistant",
                "content": "One",
                "reasoning": "Hm.",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": look_call},
                    {"id": "2", "type": "function", "function": sail_call},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "There."},
            {
                "role": "tool",
                "tool_call_id": "2",
                "content": [{"type": "text", "text": "Here."}, image],
            },
            {"role": "user", "content": "Go on."},
        ],
    }
    assert request.tools == request.fields["tools"] and request.stream


def test_max_tokens_has_a_large_default_and_is_clamped() -> None:
    assert chat()["max_tokens"] == 32_768
    assert chat(max_output_tokens=0)["max_tokens"] == 1
    assert chat(max_output_tokens=10**15)["max_tokens"] == 2**31 - 1


def test_namespace_that_ends_with_the_separator_gets_no_second_separator() -> None:
    tool = {"type": "function", "name": "f"}
    tools = chat(tools=[{"type": "namespace", "name": "mcp__x__", "tools": [tool]}])["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["mcp__x__f"]


FOREIGN_ITEMS: list[dict[str, Any]] = [
    {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done."},
    {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c2", "output": "a.txt"},
    {"type": "function_call", "call_id": "c3", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c3", "output": {"content": "x", "ok": True}},
    {"type": "function_call", "call_id": "c4", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c4", "output": None},
    {"type": "function_call_output", "call_id": "c5", "output": ["a", 1]},
    {"type": "function_call_output", "call_id": "c6", "output": [
        {"type": "input_file", "file_id": "f"}, {"type": "input_text", "text": "T."}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "of another server"},
    {"type": "web_search_call", "id": "w", "action": {"query": "sea"}},
    {"type": "compaction", "encrypted_content": "x"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "So "},
        {"type": "refusal", "refusal": "no."}, {"type": "hologram"}]},
]  # fmt: skip


def test_an_item_whose_type_is_null_is_a_message() -> None:
    talk = [("user", "Go."), ("assistant", "Gone."), ("user", "Back.")]
    items = [{"type": None, "role": role, "content": text} for role, text in talk]
    messages = chat(input=items)["messages"]
    assert [(message["role"], message["content"]) for message in messages] == talk


def test_items_of_other_servers_are_accepted() -> None:
    talk = chat(input=[{"role": "user", "content": "Go."}, *FOREIGN_ITEMS])["messages"]
    calls = [
        tool_call["function"] for message in talk for tool_call in message.get("tool_calls", ())
    ]
    assert calls == [
        {"name": "apply_patch", "arguments": '{"input": "*** Begin"}'},
        {"name": "local_shell", "arguments": '{"action": {"type": "exec", "command": ["ls"]}}'},
        *[{"name": "look", "arguments": "{}"}] * 2,
    ]
    outputs = [message["content"] for message in talk if message["role"] == "tool"]
    assert outputs[:5] == ["Done.", "a.txt", '{"content": "x", "ok": true}', "", '["a", 1]']
    assert [part["type"] for part in outputs[5]] == ["input_file", "text"]
    assert talk[-1] == {"role": "assistant", "content": "So no."}


def test_text_file_becomes_text() -> None:
    data = "data:text/plain;base64,SMOkZmVu"
    file = {"type": "input_file", "filename": "a.txt", "file_data": data}
    (message,) = chat(input=[{"role": "user", "content": [file]}])["messages"]
    assert message["content"] == [{"type": "text", "text": "a.txt\nHäfen"}]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "input_image", "file_id": "f"}, "image"),
        ({"type": "input_file", "file_id": "f", "filename": "a.txt"}, "a.txt, input_file"),
        (
            {"type": "input_file", "file_data": "data:application/pdf;base64,QQ=="},
            "application/pdf",
        ),
        ({"type": "input_file", "file_data": "data:text/plain;base64,/w=="}, "text/plain"),
        ({"type": "input_audio", "input_audio": {}}, "input_audio"),
    ],
)
def test_unreadable_part_is_named_in_a_refusal_or_a_line(part: dict[str, Any], name: str) -> None:
    question = {"role": "user", "content": [part]}
    output = {"type": "function_call_output", "call_id": "c", "output": [part]}
    for reads_images in (False, True):
        with pytest.raises(RequestRefused, match=f"has {name}, expected text"):
            fit_attachments(chat(input=[question])["messages"], reads_images)
        (message,) = fit_attachments(chat(input=[output])["messages"], reads_images)
        assert message["content"][0]["text"].startswith(f"[{name}, not shown: ")


def test_only_tool_choice_none_is_passed_on() -> None:
    assert chat(tool_choice="none")["tool_choice"] == "none"
    for choice in ("auto", "required", {"type": "function", "name": "look"}, None):
        assert "tool_choice" not in chat(tool_choice=choice)


@given(mutated(RESPONSES))
def test_mutated_body_is_parsed_or_refused_with_an_explanation(body: dict[str, Any]) -> None:
    try:
        request = ResponsesAPI().parse(body, Headers())
    except RequestRefused as error:
        assert any(word in str(error) for word in ("expected", "not valid Unicode", "nothing is"))
    else:
        assert isinstance(request.fields["messages"], list)


def reply_to(**body: Any) -> ResponsesReply:
    return ResponsesReply(body, {"sea__sail": ("sea", "sail")}, is_kept=True)


@given(DELTAS, st.booleans())
def test_stream_events_add_up_to_the_whole_reply(deltas: list[Delta], encrypts: bool) -> None:
    include = ["reasoning.encrypted_content"] if encrypts else None
    reply = reply_to(include=include)
    events = reply.begin(10, 7)
    for delta in deltas:
        events += reply.add(*delta) + reply.wait()
    events += reply.end("stop", None, USAGE)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind.endswith(".delta"):
            index = event["output_index"]
            assert index == len(items) - 1 and items[-1]["status"] == "in_progress"
            texts[index] = texts.get(index, "") + event["delta"]
        elif kind == "output_item.done":
            assert items[-1]["id"] == event["item"]["id"]
            items[-1] = event["item"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"] == reply.whole()
    assert reply.whole()["output"] == items
    for index, item in enumerate(items):
        assert item["status"] == "completed"
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert text == texts[index] and text.strip()
        assert ("encrypted_content" in item) == (encrypts and item["type"] == "reasoning")
    message_texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
    assert reply.content == "".join(message_texts)


@given(DELTAS)
def test_output_sent_back_as_input_becomes_the_replys_message(deltas: list[Delta]) -> None:
    """Reasoning as text and reasoning as "encrypted" content give the same message."""
    reply = reply_to(include=["reasoning.encrypted_content"])
    for delta in deltas:
        reply.add(*delta)
    reply.end("stop", None, USAGE)
    output = json.loads(json.dumps(reply.whole()["output"]))
    if not output:
        return
    talk = ResponsesAPI().parse({"input": output}, Headers()).fields["messages"]
    for item in output:
        if item["type"] == "reasoning":
            item["content"] = None
    assert ResponsesAPI().parse({"input": output}, Headers()).fields["messages"] == talk
    (message,) = talk
    assert message["content"] == reply.content
    calls = [tool_call for delta in deltas for tool_call in delta[2]]
    assert message.get("tool_calls", []) == calls


def test_call_in_a_namespace_has_the_clients_names() -> None:
    reply = reply_to()
    reply.add("", "", [call("sea__sail", {})])
    item = reply.whole()["output"][0]
    assert (item["namespace"], item["name"], item["call_id"]) == ("sea", "sail", "1")


def test_last_event_reports_truncation_usage_or_failure() -> None:
    reply = reply_to()
    assert reply.end("length", None, USAGE)[-1]["type"] == "response.incomplete"
    assert reply.whole()["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply.whole()["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 7, "cache_write_tokens": 3},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 15,
    }
    (failed,) = reply_to().fail(503, "The server ends.", None)
    assert failed["type"] == "response.failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "The server ends."}


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (503, "server_error")]
)
def test_error_type_follows_from_the_status(status: int, kind: str) -> None:
    error = ResponsesAPI().error(status, "Why.", None)["error"]
    assert error == {"message": "Why.", "type": kind, "param": None, "code": None}
