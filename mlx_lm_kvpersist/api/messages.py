"""Requests to Anthropic's Messages API, as chat completions.

https://platform.claude.com/docs/en/api/messages has the form. A field that is not known changes
nothing: clients send more with every version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message as Headers
from typing import Any

from ..error_forms import anthropic_error
from ..fields import refuse, require, require_object, require_objects, require_text
from .messages_reply import MessagesReply
from .session_keys import is_kept

Message = dict[str, Any]

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
HELLO_PATHS = ("/", "/api/hello")
"""Claude Code asks for the head of one of them to see whether a server is there."""

_MAX_TOKENS = 2**31 - 1
_SAMPLING = ("temperature", "top_p", "top_k")


@dataclass(frozen=True)
class MessagesRequest:
    """A request as a chat completion, and the reply that it will get.

    `tools` has those with `defer_loading`, too. They are not in the chat completion's list, which
    stands in front of all messages: a tool that is loaded is rendered where its reference stands.
    """

    chat_body: dict[str, Any]
    tools: list[dict[str, Any]]
    stream: bool
    reply: MessagesReply


class MessagesAPI:
    """Messages and chat completions, one in terms of the other."""

    refuses_in_stream = False

    def translate(self, body: dict[str, Any], headers: Headers) -> MessagesRequest:
        """Translate a request; raises RequestRefused for a field of a wrong form."""
        tools = dict(_tools(body.get("tools")))
        listed = [tool for tool, is_deferred in tools.values() if not is_deferred]
        chat: dict[str, Any] = {"messages": list(_messages(body, tools))}
        if listed:
            chat["tools"] = listed
        for name in ("model", "metadata", *_SAMPLING):
            if body.get(name) is not None:
                chat[name] = body[name]
        if body.get("max_tokens") is not None:
            n = body["max_tokens"]
            is_number = isinstance(n, int) and not isinstance(n, bool)
            require(is_number, "max_tokens", n, "an integer")
            chat["max_tokens"] = min(max(n, 1), _MAX_TOKENS)
        if body.get("stop_sequences"):
            words = body["stop_sequences"]
            require(isinstance(words, list), "stop_sequences", words, "a list of texts")
            chat["stop"] = [
                require_text(f"stop_sequences[{i}]", word) for i, word in enumerate(words)
            ]
            require(all(words), "stop_sequences", words, "texts that are not empty")
        thinking = body.get("thinking")
        if thinking is not None and require_object("thinking", thinking).get("type") == "disabled":
            chat["chat_template_kwargs"] = {"enable_thinking": False}
        stream = body.get("stream") or False
        require(isinstance(stream, bool), "stream", stream, "a boolean")
        model = require_text("model", body.get("model", "default_model"))
        reply = MessagesReply(model, marks_cache=_marks_cache(body) and is_kept(headers))
        return MessagesRequest(chat, [tool for tool, _ in tools.values()], stream, reply)

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return anthropic_error(status, message)


def empty_answer(handler: Any) -> None:
    """Answer a request with a status and nothing else."""
    handler.send_response(200)
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def _tools(tools: Any) -> Iterator[tuple[str, tuple[dict[str, Any], bool]]]:
    """Yield each tool by its name, as a chat completion has it, and whether it is deferred.

    Tools that the API's own servers would run have no schema, and are left out.
    """
    for i, tool in enumerate(require_objects("tools", tools) if tools is not None else ()):
        if "input_schema" not in tool and tool.get("type") not in (None, "custom"):
            continue
        name = require_text(f"tools[{i}].name", tool.get("name"))
        function: dict[str, Any] = {"name": name}
        if tool.get("description") is not None:
            function["description"] = require_text(f"tools[{i}].description", tool["description"])
        function["parameters"] = require_object(
            f"tools[{i}].input_schema", tool.get("input_schema")
        )
        yield name, ({"type": "function", "function": function}, bool(tool.get("defer_loading")))


def _messages(body: Mapping[str, Any], tools: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the messages of a chat completion."""
    if body.get("system"):
        yield {"role": "system", "content": _texts("system", body["system"])}
    messages = require_objects("messages", body.get("messages"))
    require(bool(messages), "messages", messages, "at least one message")
    for i, message in enumerate(messages):
        name, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if role == "system":
            yield {"role": "system", "content": _texts(f"{name}.content", content)}
        elif role == "assistant":
            yield _assistant(f"{name}.content", content)
        elif role == "user":
            yield from _user(f"{name}.content", content, tools)
        else:
            refuse(f"{name}.role", role, '"user", "assistant" or "system"')


def _blocks(name: str, content: Any) -> list[dict[str, Any]]:
    """Return content as a list of blocks: a string is one text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    require(isinstance(content, list), name, content, "text, or a list of blocks")
    return require_objects(name, content)


def _texts(name: str, content: Any) -> str | list[dict[str, Any]]:
    """Return content that has texts only, in the form in which it came."""
    if isinstance(content, str):
        return content
    blocks = _blocks(name, content)
    for i, block in enumerate(blocks):
        require(block.get("type") == "text", f"{name}[{i}].type", block.get("type"), '"text"')
    return [_text_part(f"{name}[{i}]", block) for i, block in enumerate(blocks)]


def _text_part(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": require_text(f"{name}.text", block.get("text"))}


def _assistant(name: str, content: Any) -> Message:
    """Return the message that a chat client would send back for the same reply."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(_blocks(name, content)):
        place, kind = f"{name}[{i}]", block.get("type")
        if kind == "text":
            texts.append(require_text(f"{place}.text", block.get("text")))
        elif kind == "thinking":
            thoughts.append(require_text(f"{place}.thinking", block.get("thinking", "")))
        elif kind == "tool_use":
            function = {
                "name": require_text(f"{place}.name", block.get("name")),
                "arguments": json.dumps(
                    require_object(f"{place}.input", block.get("input")), ensure_ascii=False
                ),
            }
            call_id = require_text(f"{place}.id", block.get("id"))
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            refuse(f"{place}.type", kind, '"text", "thinking" or "tool_use"')
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _user(name: str, content: Any, tools: Mapping[str, Any]) -> Iterator[Message]:
    """Yield a message for each tool's result, and one for what stands between or behind them.

    Images of a result go into the user's message: chat templates look for them there.
    """
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    parts: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    blocks = _blocks(name, content)
    for i, block in enumerate(blocks):
        place = f"{name}[{i}]"
        if block.get("type") != "tool_result":
            parts.append(_part(place, block))
            continue
        if parts:
            yield {"role": "user", "content": parts}
            parts = []
        result = _result(f"{place}.content", block.get("content"), tools)
        images += (part for part in result if part["type"] != "text")
        texts = [part for part in result if part["type"] == "text"]
        call_id = require_text(f"{place}.tool_use_id", block.get("tool_use_id"))
        yield {"role": "tool", "tool_call_id": call_id, "content": texts}
    if parts or images or not blocks:
        yield {"role": "user", "content": images + parts}


def _result(name: str, content: Any, tools: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of a tool's result; a reference to a tool is the tool itself."""
    parts: list[dict[str, Any]] = []
    for i, block in enumerate(_blocks(name, content if content is not None else [])):
        if block.get("type") != "tool_reference":
            parts.append(_part(f"{name}[{i}]", block))
            continue
        tool_name = require_text(f"{name}[{i}].tool_name", block.get("tool_name"))
        require(tool_name in tools, f"{name}[{i}].tool_name", tool_name, "the name of a tool")
        tool = json.dumps(tools[tool_name][0], ensure_ascii=False)
        parts.append({"type": "text", "text": f"<tool>{tool}</tool>\n"})
    return parts


def _part(name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block of a user's message, or of a tool's result, as a part of a chat message."""
    kind = block.get("type")
    if kind == "text":
        return _text_part(name, block)
    if kind in ("image", "document"):
        source = require_object(f"{name}.source", block.get("source"))
        form = source.get("type")
        if kind == "document" and form == "text":
            return {"type": "text", "text": require_text(f"{name}.source.data", source.get("data"))}
        if kind == "image" and form == "url":
            url = require_text(f"{name}.source.url", source.get("url"))
            return {"type": "image_url", "image_url": {"url": url}}
        if kind == "image" and form == "base64":
            mime = require_text(f"{name}.source.media_type", source.get("media_type"))
            content = require_text(f"{name}.source.data", source.get("data"))
            return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{content}"}}
        expected = '"base64" or "url"' if kind == "image" else '"text"'
        refuse(f"{name}.source.type", form, expected)
    refuse(f"{name}.type", kind, '"text", "image", "document" or "tool_result"')


def _marks_cache(body: Mapping[str, Any]) -> bool:
    """Tell whether a client marks what it wants cached: it then expects to see what was written."""
    messages, system, tools = (body.get(name) for name in ("messages", "system", "tools"))
    contents = [message.get("content") for message in messages or ()]
    blocks = [block for each in (system, *contents) if isinstance(each, list) for block in each]
    return any("cache_control" in one for one in (body, *blocks, *(tools or ())))
