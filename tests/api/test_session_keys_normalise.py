from __future__ import annotations

import copy
from typing import Any

import pytest

from mlx_lm_kvpersist.api.session_keys import normalise

LINE = "x-anthropic-billing-header: cc_version=2.1.128; cch=a3f12;"


def normalised(messages: list[dict[str, Any]], tools: list[Any] | None = None) -> Any:
    messages, tools = copy.deepcopy((messages, tools))
    normalise(messages, tools)
    return messages if tools is None else (messages, tools)


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def test_billing_line_of_the_system_message_is_removed() -> None:
    user = {"role": "user", "content": "hi"}
    as_string = {"role": "system", "content": f"{LINE}\nYou are a tool."}
    assert normalised([as_string, user])[0]["content"] == "You are a tool."
    as_parts = {"role": "system", "content": [text(LINE), text("You are"), text(" a tool.")]}
    assert normalised([as_parts, user])[0]["content"] == [text("You are"), text(" a tool.")]
    other = {"role": "system", "content": [text(LINE.replace("a3f12", "00000")), text("You are")]}
    assert normalised([other])[0]["content"] == "You are"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": f"{LINE}\nWhat is this line?"},
        {"role": "system", "content": f"Our logs say:\n{LINE}"},
        {"role": "system", "content": [text("Our logs:"), text(LINE)]},
        {"role": "system", "content": "cch=a3f12; is a checksum"},
        {"role": "system", "content": "Today is 2026-11-20.  \n cwd: /tmp "},
        {"role": "user", "content": "<system-reminder>be brief</system-reminder>  "},
        {"role": "user", "content": [text("a "), text(" b")]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{}"}}]},
    ],
)
def test_other_text_is_unchanged(message: dict[str, Any]) -> None:
    assert normalised([message]) == [message]
    # The text also stays after a system message.
    system = {"role": "system", "content": "s"}
    assert normalised([system, message]) == [system, message]


def test_cache_control_is_removed_except_in_schemas() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [text("a", **mark), text("b")]},
        {"role": "user", "content": "c", **mark},
    ]
    schema = {"properties": {"cache_control": {"type": "string"}}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": schema, **mark}, **mark},
        {"name": "g", "input_schema": schema, **mark},
    ]
    plain = [
        {"type": "function", "function": {"name": "f", "parameters": schema}},
        {"name": "g", "input_schema": schema},
    ]
    assert normalised(messages, tools) == (
        [{"role": "user", "content": [text("a"), text("b")]}, {"role": "user", "content": "c"}],
        plain,
    )


def test_single_text_part_becomes_a_string() -> None:
    assert normalised([{"role": "user", "content": [text(" a ")]}]) == [
        {"role": "user", "content": " a "}
    ]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    assert normalised([{"role": "user", "content": [image]}])[0]["content"] == [image]


@pytest.mark.parametrize("tools", [None, 0.5, "look", {"cache_control": 1}, [5, None]])
def test_malformed_tools_are_unchanged(tools: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x", "cache_control": 1}]
    before = copy.deepcopy(tools)
    normalise(messages, tools)
    assert messages == [{"role": "user", "content": "x"}] and tools == before
