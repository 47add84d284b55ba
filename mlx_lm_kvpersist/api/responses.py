"""OpenAI's Responses API: requests as chat completions, and replies from their parts.

No request may refer to an earlier reply. https://platform.openai.com/docs/api-reference/responses
describes requests and replies. https://platform.openai.com/docs/api-reference/responses-streaming
describes the events and their order. Unknown fields and kinds of tools are ignored.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Iterator, Mapping
from email.message import Message as Headers
from typing import Any

from ..apis import Event, Request, Usage, openai_error, placed_objects, require, require_text
from ..errors import RequestRefused
from . import chat
from .chat import Kind, Message, Part, ReplyParts
from .session_keys import is_kept

RESPONSES_PATH = "/v1/responses"

_USUAL_TOKENS = 32_768
"""The limit of a reply if the request sets none. mlx-lm's 512 tokens would cut off a file."""
_PASSED_ON = ("model", "temperature", "top_p", "prompt_cache_key", "metadata")
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")
_ROLES = ("user", "assistant", "system", "developer")
REASONING_PREFIX = "kvpersist:"
"""The beginning of `encrypted_content`, before the reasoning in base64."""
_ENCRYPTED = "reasoning.encrypted_content"
_TEXTS = {"thinking": "reasoning_text", "text": "output_text"}
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields that a reply repeats from its request, with their defaults."""


class ResponsesAPI:
    refuses_in_stream = True  # Codex compacts its context only if `response.failed` has a code

    def parse(self, body: dict[str, Any], headers: Headers) -> Request:
        if name := next(filter(body.get, _STATEFUL), None):
            why = "is set, but nothing is kept between requests; send the whole input"
            raise RequestRefused(f"{name} {why}")
        names: dict[str, tuple[str, str]] = {}
        tools = list(_tools("tools", body.get("tools"), "", names))
        places, messages = zip(*_messages(body), strict=True)
        fields: dict[str, Any] = {"messages": list(messages)}
        if tools:
            fields["tools"] = tools
        fields |= {name: body[name] for name in _PASSED_ON if body.get(name) is not None}
        most = body.get("max_output_tokens")
        most = _USUAL_TOKENS if most is None else most
        fields["max_tokens"] = chat.max_tokens("max_output_tokens", most)
        if body.get("tool_choice") == "none":
            fields["tool_choice"] = "none"
        require_text("model", body.get("model", "default_model"))
        reply = ResponsesReply(body, names, is_kept=is_kept(headers))
        callable_tools = None if "tool_choice" in fields else tools
        return Request(fields, chat.is_stream(body), reply, callable_tools, places)

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return openai_error(status, message, code)


def _tools(
    place: str, tools: Any, namespace: str, names: dict[str, tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield functions in a chat completion's form, and fill `names` (see `ResponsesReply`)."""
    for name, tool in placed_objects(place, tools) if tools is not None else ():
        if tool.get("type") == "namespace" and not namespace:
            inner = require_text(f"{name}.name", tool.get("name"))
            yield from _tools(f"{name}.tools", tool.get("tools"), inner, names)
        elif tool.get("type") == "function":
            own = require_text(f"{name}.name", tool.get("name"))
            full = _full_name(namespace, own)
            names[full] = (namespace, own)
            if tool.get("parameters") is None:
                tool = {**tool, "parameters": {}}
            yield chat.function(name, full, tool, "parameters")


def _full_name(namespace: str, name: str) -> str:
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def _messages(body: Mapping[str, Any]) -> list[tuple[str, Message]]:
    """Return messages with their places in the body.

    A reply is several items of this API (reasoning, text, calls), but one chat message.
    """
    messages: list[tuple[str, Message]] = []
    if body.get("instructions") is not None:
        text = require_text("instructions", body["instructions"])
        messages.append(("instructions", {"role": "system", "content": text}))
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, ("input", {"role": "user", "content": items})]
    require(isinstance(items, list), "input", items, "text, or a list of items")
    for place, item in placed_objects("input", items):
        kind = item.get("type") or "message"
        is_call = isinstance(kind, str) and kind.endswith("_call") and "call_id" in item
        if kind == "message" and item.get("role") != "assistant":
            role = item.get("role")
            require(role in _ROLES, f"{place}.role", role, " or ".join(f'"{r}"' for r in _ROLES))
            content = _content(f"{place}.content", item.get("content"))
            messages.append((place, {"role": role, "content": content}))
        elif isinstance(kind, str) and kind.endswith("_call_output"):
            messages.append((place, _output(place, item)))
        elif is_call or kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1][1]["role"] != "assistant":
                messages.append((place, {"role": "assistant", "content": ""}))
            _add_to_turn(messages[-1][1], place, item)
        elif kind == "item_reference":
            raise RequestRefused(f"{place} is a reference, expected the item: nothing is kept here")
    require(bool(messages), "input", items, "at least one message")
    return messages


def _content(place: str, content: Any) -> str | list[Part]:
    if isinstance(content, str | None):
        return content or ""
    require(isinstance(content, list), place, content, "text, or a list of parts")
    return [_part(name, block) for name, block in placed_objects(place, content)]


def _part(name: str, block: Mapping[str, Any]) -> Part:
    kind = block.get("type")
    if kind in ("input_text", "output_text", "text"):
        return chat.text_part(f"{name}.text", block.get("text") or "")
    if kind == "input_image" and isinstance(block.get("image_url"), str):
        return chat.image_part(block["image_url"])
    if kind == "input_file":
        return _file(f"{name}.file_data", block)
    text = chat.readable(block) if kind != "input_image" else ""
    return chat.text_part(f"{name}.text", text) if text else chat.unread_part(kind)


def _file(name: str, block: Mapping[str, Any]) -> Part:
    """Return name and text of a text file that came as a data URL. Other files are not read."""
    data, filename = block.get("file_data"), block.get("filename")
    head, _, encoded = data.partition(",") if isinstance(data, str) else ("", "", "")
    media_type = head.removeprefix("data:").partition(";")[0]
    text = _decoded(encoded) if head.startswith("data:text/") else None
    if text is None:
        return chat.unread_part("input_file", media_type, filename)
    return chat.text_part(name, f"{filename or ''}\n{text}".removeprefix("\n"))


def _decoded(encoded: str) -> str | None:
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        return None


def _text(place: str, content: Any) -> str:
    """Return the assistant's text, and the visible text of other parts."""
    contents = content if isinstance(content, list) else [content]
    texts = (chat.readable(block) if isinstance(block, dict) else block for block in contents)
    return "".join(require_text(place, text) for text in texts if text is not None)


def _output(place: str, item: Mapping[str, Any]) -> Message:
    call_id = require_text(f"{place}.call_id", item.get("call_id"))
    output, name = item.get("output"), f"{place}.output"
    is_blocks = isinstance(output, list) and all(isinstance(block, dict) for block in output)
    if not is_blocks and not isinstance(output, str | None):
        output = json.dumps(output, ensure_ascii=False)
    return {"role": "tool", "tool_call_id": call_id, "content": _content(name, output)}


def _add_to_turn(message: Message, place: str, item: Mapping[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        message["content"] += _text(f"{place}.content", item.get("content"))
    elif kind == "reasoning":
        if thought := _reasoning(place, item):
            message["reasoning"] = message.get("reasoning", "") + thought
    else:
        name = require_text(f"{place}.name", item.get("name", kind.removesuffix("_call")))
        namespace = require_text(f"{place}.namespace", item.get("namespace") or "")
        call_id = require_text(f"{place}.call_id", item.get("call_id"))
        arguments = item.get("arguments") or ""
        if kind != "function_call":
            fields = {field: item[field] for field in ("input", "action") if field in item}
            arguments = json.dumps(fields, ensure_ascii=False)
        require_text(f"{place}.arguments", arguments)
        call = chat.call(call_id, _full_name(namespace, name), arguments)
        message.setdefault("tool_calls", []).append(call)


def _reasoning(place: str, item: Mapping[str, Any]) -> str:
    """Return an item's reasoning, without its summary.

    Some clients send back only `encrypted_content`, which is the text in base64.
    """
    content = item.get("content")
    if content:
        return "".join(
            require_text(f"{name}.text", block.get("text"))
            for name, block in placed_objects(f"{place}.content", content)
        )
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(REASONING_PREFIX):
        return _decoded(sealed.removeprefix(REASONING_PREFIX)) or ""
    return ""


class ResponsesReply(ReplyParts):
    """names: maps the tool name that the model reads to the client's namespace and name."""

    def __init__(
        self, body: Mapping[str, Any], names: Mapping[str, tuple[str, str]], *, is_kept: bool
    ) -> None:
        super().__init__()
        self._names, self._is_kept = names, is_kept
        include = body.get("include")
        self._encrypts = isinstance(include, list) and _ENCRYPTED in include
        self._n_events = 0
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": body.get("model", "default_model"),
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **(_ECHOED | {name: body[name] for name in _ECHOED if body.get(name) is not None}),
        }

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def end(self, finish_reason: str, stop_word: str | None, usage: Usage) -> list[Event]:
        events = list(self.close())
        self._response["usage"] = {
            "input_tokens": usage.n_prompt,
            "input_tokens_details": {
                "cached_tokens": usage.n_cached,
                "cache_write_tokens": usage.n_prompt - usage.n_cached if self._is_kept else 0,
            },
            "output_tokens": usage.n_new,
            "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
            "total_tokens": usage.n_prompt + usage.n_new,
        }
        status = "incomplete" if finish_reason == "length" else "completed"
        self._response["status"] = status
        if status == "incomplete":
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._lifecycle(status)]

    def wait(self) -> list[Event]:
        return [self._lifecycle("in_progress")]

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        code = code or ("server_error" if status >= 500 else "invalid_prompt")
        self._response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [self._lifecycle("failed")]

    def whole(self) -> dict[str, Any]:
        return {**self._response, "output": self.items}

    def start_part(self, kind: Kind) -> Iterator[Event]:
        if kind == "thinking":
            item: dict[str, Any] = {"id": _id("rs"), "type": "reasoning", "summary": []}
        else:
            item = {"id": _id("msg"), "type": "message", "role": "assistant"}
        self.items.append({**item, "status": "in_progress", "content": []})
        yield self._item_event("added")
        yield self._of_part("content_part.added", part=_content_of(kind, ""))

    def add_text(self, kind: Kind, text: str) -> Iterator[Event]:
        yield self._of_part(f"{_TEXTS[kind]}.delta", delta=text, **_logprobs(kind))

    def end_part(self, kind: Kind, text: str) -> Iterator[Event]:
        content = _content_of(kind, text)
        yield self._of_part(f"{_TEXTS[kind]}.done", text=text, **_logprobs(kind))
        yield self._of_part("content_part.done", part=content)
        self.items[-1] |= {"status": "completed", "content": [content]}
        if kind == "thinking" and self._encrypts:
            encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
            self.items[-1]["encrypted_content"] = REASONING_PREFIX + encoded
        yield self._item_event("done")

    def add_call(self, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        namespace, own = self._names.get(name, ("", name))
        item: dict[str, Any] = {"id": _id("fc"), "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call_id, "name": own, "arguments": ""}
        if namespace:
            item["namespace"] = namespace
        self.items.append(item)
        yield self._item_event("added")
        yield self._of_item("function_call_arguments.delta", delta=arguments)
        yield self._of_item("function_call_arguments.done", arguments=arguments, name=own)
        item |= {"status": "completed", "arguments": arguments}
        yield self._item_event("done")

    def _event(self, event: str, /, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": f"response.{event}", "sequence_number": self._n_events - 1, **fields}

    def _lifecycle(self, name: str) -> Event:
        done = [item for item in self.items if item["status"] == "completed"]
        return self._event(name, response={**self._response, "output": done})

    def _item_event(self, name: str) -> Event:
        index, item = len(self.items) - 1, dict(self.items[-1])
        return self._event(f"output_item.{name}", output_index=index, item=item)

    def _of_item(self, event: str, /, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return self._event(event, **place, **fields)

    def _of_part(self, event: str, /, **fields: Any) -> Event:
        return self._of_item(event, content_index=0, **fields)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _logprobs(kind: Kind) -> dict[str, Any]:
    return {} if kind == "thinking" else {"logprobs": []}


def _content_of(kind: str, text: str) -> dict[str, Any]:
    content = {"type": _TEXTS[kind], "text": text}
    return content if kind == "thinking" else {**content, "annotations": []}
