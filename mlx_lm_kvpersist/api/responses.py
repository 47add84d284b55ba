"""Requests to OpenAI's Responses API, as chat completions. Nothing is kept between requests.

https://platform.openai.com/docs/api-reference/responses has the form. Fields and kinds of tools
that are not known change nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message as Headers
from typing import Any

from ..error_forms import openai_error
from ..errors import RequestRefused
from ..fields import refuse, require, require_object, require_objects, require_text
from .responses_reply import REASONING_PREFIX, ResponsesReply
from .session_keys import is_kept

Message = dict[str, Any]

RESPONSES_PATH = "/v1/responses"

_MAX_TOKENS = 2**31 - 1
_USUAL_TOKENS = 32_768
"""For a request without a limit, as agents send them. Stock's 512 would cut off a file."""
_PASSED_ON = ("model", "temperature", "top_p", "prompt_cache_key", "metadata")
_STATEFUL = ("previous_response_id", "conversation", "background", "prompt")
_ROLES = ("user", "assistant", "system", "developer")


@dataclass(frozen=True)
class ResponsesRequest:
    """A request as a chat completion, and the reply that it will get."""

    chat_body: dict[str, Any]
    tools: list[dict[str, Any]]
    stream: bool
    reply: ResponsesReply


class ResponsesAPI:
    """Responses and chat completions, one in terms of the other."""

    refuses_in_stream = True  # Codex compacts for a code in `response.failed` only

    def translate(self, body: dict[str, Any], headers: Headers) -> ResponsesRequest:
        """Translate a request; raises RequestRefused for a field of a wrong form."""
        for name in _STATEFUL:
            if body.get(name):
                raise RequestRefused(
                    f"{name} is set, but nothing is kept between requests; send the whole input"
                )
        names: dict[str, tuple[str, str]] = {}
        tools = list(_tools("tools", body.get("tools"), "", names))
        chat: dict[str, Any] = {"messages": _messages(body, names)}
        if tools:
            chat["tools"] = tools
        chat |= {name: body[name] for name in _PASSED_ON if body.get(name) is not None}
        most = body.get("max_output_tokens")
        is_number = most is None or (isinstance(most, int) and not isinstance(most, bool))
        require(is_number, "max_output_tokens", most, "an integer")
        chat["max_tokens"] = _USUAL_TOKENS if most is None else min(max(most, 1), _MAX_TOKENS)
        stream = body.get("stream") or False
        require(isinstance(stream, bool), "stream", stream, "a boolean")
        require_text("model", body.get("model", "default_model"))
        reply = ResponsesReply(body, names, is_kept=is_kept(headers))
        return ResponsesRequest(chat, tools, stream, reply)

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return openai_error(status, message, code)


def _tools(
    place: str, tools: Any, namespace: str, names: dict[str, tuple[str, str]]
) -> Iterator[dict[str, Any]]:
    """Yield functions as chat completions have them; the tools of a namespace get its name.

    names: gets, by the name that the model reads, namespace and name that the client knows.
    """
    for i, tool in enumerate(require_objects(place, tools) if tools is not None else ()):
        name = f"{place}[{i}]"
        if tool.get("type") == "namespace" and not namespace:
            inner = require_text(f"{name}.name", tool.get("name"))
            yield from _tools(f"{name}.tools", tool.get("tools"), inner, names)
        elif tool.get("type") == "function":
            own = require_text(f"{name}.name", tool.get("name"))
            function: dict[str, Any] = {"name": _full_name(namespace, own)}
            names[function["name"]] = (namespace, own)
            if tool.get("description") is not None:
                function["description"] = require_text(f"{name}.description", tool["description"])
            parameters = tool.get("parameters")
            function["parameters"] = require_object(
                f"{name}.parameters", {} if parameters is None else parameters
            )
            yield {"type": "function", "function": function}


def _full_name(namespace: str, name: str) -> str:
    """Return the name under which the model knows a tool of a namespace."""
    if not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('__') else '__'}{name}"


def _messages(body: Mapping[str, Any], names: Mapping[str, tuple[str, str]]) -> list[Message]:
    """Return the messages of a chat completion.

    What the assistant thought, said and called in one turn are items here and one message there.
    """
    messages: list[Message] = []
    if body.get("instructions") is not None:
        text = require_text("instructions", body["instructions"])
        messages.append({"role": "system", "content": text})
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    require(isinstance(given, list), "input", given, "text, or a list of items")
    for i, item in enumerate(require_objects("input", given)):
        place, kind = f"input[{i}]", item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            role = item.get("role")
            require(role in _ROLES, f"{place}.role", role, " or ".join(f'"{r}"' for r in _ROLES))
            content = _content(f"{place}.content", item.get("content"))
            messages.append({"role": role, "content": content})
        elif kind == "function_call_output":
            messages += _output(place, item)
        elif kind in ("message", "reasoning", "function_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _add_to_turn(messages[-1], place, item)
        elif kind == "item_reference":
            raise RequestRefused(f"{place} is a reference, expected the item: nothing is kept here")
    require(bool(messages), "input", given, "at least one message")
    return messages


def _content(place: str, content: Any) -> str | list[dict[str, Any]]:
    """Return content of a message, or a call's output, in a chat message's form."""
    if isinstance(content, str):
        return content
    require(isinstance(content, list), place, content, "text, or a list of parts")
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(require_objects(place, content)):
        name, kind = f"{place}[{i}]", part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": require_text(f"{name}.text", part.get("text"))})
        elif kind == "refusal":
            text = require_text(f"{name}.refusal", part.get("refusal"))
            parts.append({"type": "text", "text": text})
        elif kind == "input_image":
            url = require_text(f"{name}.image_url", part.get("image_url"))
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            refuse(f"{name}.type", kind, '"input_text", "output_text" or "input_image"')
    return parts


def _text(place: str, content: Any) -> str:
    """Return content that has texts only, as one text."""
    parts = _content(place, content)
    if isinstance(parts, str):
        return parts
    for i, part in enumerate(parts):
        require(part["type"] == "text", f"{place}[{i}].type", part["type"], '"output_text"')
    return "".join(part["text"] for part in parts)


def _output(place: str, item: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the message of a call's output; images go into a user's message, as templates want."""
    content = _content(f"{place}.output", item.get("output"))
    call_id = require_text(f"{place}.call_id", item.get("call_id"))
    images = []
    if not isinstance(content, str):
        images = [part for part in content if part["type"] != "text"]
        content = [part for part in content if part["type"] == "text"]
    yield {"role": "tool", "tool_call_id": call_id, "content": content}
    if images:
        yield {"role": "user", "content": images}


def _add_to_turn(message: Message, place: str, item: Mapping[str, Any]) -> None:
    """Add one item of the assistant's turn to its message."""
    kind = item.get("type", "message")
    if kind == "message":
        message["content"] += _text(f"{place}.content", item.get("content"))
    elif kind == "reasoning":
        if thought := _reasoning(place, item):
            message["reasoning"] = message.get("reasoning", "") + thought
    else:
        name = require_text(f"{place}.name", item.get("name"))
        namespace = require_text(f"{place}.namespace", item.get("namespace") or "")
        arguments = require_text(f"{place}.arguments", item.get("arguments"))
        function = {"name": _full_name(namespace, name), "arguments": arguments}
        call_id = require_text(f"{place}.call_id", item.get("call_id"))
        message.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": function}
        )


def _reasoning(place: str, item: Mapping[str, Any]) -> str:
    """Return what an item says was thought; a summary is none.

    Clients that keep no content send back what they call encrypted: our own text, encoded.
    """
    content = item.get("content")
    if content:
        parts = require_objects(f"{place}.content", content)
        texts = (
            require_text(f"{place}.content[{i}].text", part.get("text"))
            for i, part in enumerate(parts)
        )
        return "".join(texts)
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(REASONING_PREFIX):
        try:
            return base64.b64decode(sealed.removeprefix(REASONING_PREFIX)).decode()
        except (binascii.Error, ValueError):
            return ""
    return ""
