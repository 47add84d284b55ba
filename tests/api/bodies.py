"""Request bodies, valid and mutated, and pieces of chat completions."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

from mlx_lm_kvpersist.apis import Usage

SCHEMA = {"type": "object", "properties": {"where": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look.", "input_schema": SCHEMA}
LATER = {"name": "later", "input_schema": SCHEMA, "defer_loading": True}
MESSAGES: dict[str, Any] = {
    "model": "claude-x",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "Be kind."}],
    "stop_sequences": ["end"],
    "thinking": {"type": "disabled"},
    "temperature": 0.5,
    "stream": True,
    "tools": [LOOK, LATER, {"type": "web_search_20250305", "name": "web_search"}],
    "messages": [
        {"role": "user", "content": "Hi."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm."},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "One"},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"where": "hä", "n": 1}},
                {"type": "text", "text": " two"},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [
                        {"type": "text", "text": "There."},
                        {"type": "tool_reference", "tool_name": "later"},
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="},
                        },
                    ],
                },
                {"type": "text", "text": "And", "cache_control": {"type": "ephemeral"}},
                {"type": "document", "source": {"type": "text", "data": " this"}},
                {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}},
            ],
        },
        {"role": "system", "content": "Be brief."},
    ],
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be kind.",
    "max_output_tokens": 100,
    "prompt_cache_key": "s",
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "high", "summary": "auto"},
    "tools": [
        {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA},
        {"type": "custom", "name": "apply_patch"},
        {
            "type": "namespace",
            "name": "sea",
            "tools": [{"type": "function", "name": "sail", "parameters": None}],
        },
    ],
    "input": [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "No."}],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "One", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{\"n\": 1}"},
        {"type": "function_call", "call_id": "2", "name": "sail", "namespace": "sea",
         "arguments": "{}"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "1", "output": "There."},
        {"type": "function_call_output", "call_id": "2", "output": [
            {"type": "input_text", "text": "Here."},
            {"type": "input_image", "image_url": "data:image/png;base64,QQ=="}]},
        {"role": "user", "content": "Go on."},
    ],
}  # fmt: skip


def call(name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": "1", "type": "function", "function": function}


USAGE = Usage(10, 7, 5, 2)
"""Numbers of tokens: of the prompt, cached, of the reply, and of its reasoning."""
Delta = tuple[str, str, list[dict[str, Any]]]
"""The text, reasoning and calls of one piece."""
DELTAS: st.SearchStrategy[list[Delta]] = st.lists(
    st.tuples(
        st.sampled_from(["", " ", "\n\n", "a", " b ", "c\n"]),
        st.sampled_from(["", "\n", "r", " s"]),
        st.lists(st.sampled_from([call("f", {"x": [1]}), call("g", {})]), max_size=2),
    ),
    max_size=8,
)

ODD: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.just(10**30)
    | st.floats()
    | st.sampled_from(["", "x", "text", "user", "tool_use", "\ud800", "{}", "null"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "role", "content", "name", "id"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value in a body."""
    paths = [path] if path else []
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        paths += paths_of(inner, (*path, key))
    return paths


@st.composite
def mutated(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a body, with one to three values replaced or removed."""
    body = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths_of(body)))
        holder: Any = body
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.booleans()) and isinstance(holder, dict):
            del holder[path[-1]]
        else:
            holder[path[-1]] = draw(ODD)
        if not body:
            break
    return body
