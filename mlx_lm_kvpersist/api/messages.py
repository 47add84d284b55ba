"""Anthropic's Messages API: requests as chat completions, and replies from their parts.

https://platform.claude.com/docs/en/api/messages describes requests and replies, and
https://platform.claude.com/docs/en/build-with-claude/streaming the events and their order. Unknown
fields are ignored: new versions of clients send new fields.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from email.message import Message as Headers
from hashlib import blake2b
from typing import Any

from ..apis import (
    Event,
    Request,
    Usage,
    anthropic_error,
    placed_objects,
    refuse,
    require,
    require_object,
    require_text,
)
from . import chat
from .chat import Kind, Message, Part, ReplyParts
from .session_keys import is_kept

MESSAGES_PATH = "/v1/messages"
COUNT_PATH = "/v1/messages/count_tokens"
HELLO_PATHS = ("/", "/api/hello")
"""Claude Code sends HEAD to one of these paths to see whether a server answers."""

_PASSED_ON = ("model", "metadata", "temperature", "top_p", "top_k")
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAPI:
    """A tool with `defer_loading` is not in the list of tools.

    The tool's definition is in the tool result that refers to the tool.
    """

    refuses_in_stream = False

    def parse(self, body: dict[str, Any], headers: Headers) -> Request:
        tools = dict(_tools(body.get("tools")))
        listed = [tool for tool, is_deferred in tools.values() if not is_deferred]
        places, messages = zip(*_messages(body, tools), strict=True)
        fields: dict[str, Any] = {"messages": list(messages)}
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True
        if listed:
            fields["tools"] = listed
        fields |= {name: body[name] for name in _PASSED_ON if body.get(name) is not None}
        if body.get("max_tokens") is not None:
            fields["max_tokens"] = chat.max_tokens("max_tokens", body["max_tokens"])
        if words := body.get("stop_sequences"):
            require(isinstance(words, list), "stop_sequences", words, "a list of texts")
            fields["stop"] = [
                require_text(f"stop_sequences[{i}]", word) for i, word in enumerate(words)
            ]
            require(all(words), "stop_sequences", words, "texts that are not empty")
        thinking = body.get("thinking")
        if thinking is not None and require_object("thinking", thinking).get("type") == "disabled":
            fields["chat_template_kwargs"] = {"enable_thinking": False}
        choice = body.get("tool_choice")
        if isinstance(choice, dict) and choice.get("type") == "none":
            fields["tool_choice"] = "none"
        model = require_text("model", body.get("model", "default_model"))
        reply = MessagesReply(model, marks_cache=_marks_cache(body) and is_kept(headers))
        all_tools = [tool for tool, _ in tools.values()]
        callable_tools = None if "tool_choice" in fields else all_tools
        return Request(fields, chat.is_stream(body), reply, callable_tools, places)

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        return anthropic_error(status, message)


def _tools(tools: Any) -> Iterator[tuple[str, tuple[dict[str, Any], bool]]]:
    """Yield each tool's name, its form in a chat completion, and whether it is deferred."""
    for place, tool in placed_objects("tools", tools) if tools is not None else ():
        if "input_schema" not in tool and tool.get("type") not in (None, "custom"):
            continue  # only Anthropic's servers can run it
        name = require_text(f"{place}.name", tool.get("name"))
        function = chat.function(place, name, tool, "input_schema")
        yield name, (function, bool(tool.get("defer_loading")))


def _messages(body: Mapping[str, Any], tools: Mapping[str, Any]) -> list[tuple[str, Message]]:
    """Return the messages of a chat completion, with the place of each in the body."""
    placed: list[tuple[str, Message]] = []
    if body.get("system"):
        placed.append(("system", {"role": "system", "content": _texts("system", body["system"])}))
    messages = body.get("messages")
    require(messages != [], "messages", messages, "at least one message")
    for name, message in placed_objects("messages", messages):
        role, content = message.get("role"), message.get("content")
        if role == "system":
            placed.append((name, {"role": role, "content": _texts(f"{name}.content", content)}))
        elif role == "assistant":
            chat.append(placed, name, _assistant(f"{name}.content", content))
        elif role == "user":
            for user_message in _user(f"{name}.content", content, tools):
                chat.append(placed, name, user_message)
        else:
            refuse(f"{name}.role", role, '"user", "assistant" or "system"')
    return placed


def _blocks(name: str, content: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    if isinstance(content, str):
        return [(f"{name}[0]", {"type": "text", "text": content})]
    content = [] if content is None else content
    require(isinstance(content, list), name, content, "text, or a list of blocks")
    return placed_objects(name, content)


def _texts(name: str, content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    texts = []
    for place, block in _blocks(name, content):
        require(block.get("type") == "text", f"{place}.type", block.get("type"), '"text"')
        texts.append(chat.text_part(f"{place}.text", block.get("text") or ""))
    return texts


def _assistant(name: str, content: Any) -> Message:
    """Return the message as a chat completions client sends it."""
    message: Message = {"role": "assistant", "content": ""}
    for place, block in _blocks(name, content):
        kind = block.get("type")
        if kind == "thinking":
            thought = require_text(f"{place}.thinking", block.get("thinking") or "")
            message["reasoning"] = message.get("reasoning", "") + thought
        elif kind == "tool_use":
            arguments = {} if block.get("input") is None else block["input"]
            call_id = require_text(f"{place}.id", block.get("id"))
            called = require_text(f"{place}.name", block.get("name"))
            call = chat.call(call_id, called, json.dumps(arguments, ensure_ascii=False))
            message.setdefault("tool_calls", []).append(call)
        else:
            text = (block.get("text") or "") if kind == "text" else chat.readable(block)
            message["content"] += require_text(f"{place}.text", text)
    return message


def _user(name: str, content: Any, tools: Mapping[str, Any]) -> Iterator[Message]:
    """Yield a message for each tool's result, and messages for the content around results."""
    if isinstance(content, str):
        yield {"role": "user", "content": content}
        return
    read: list[Part] = []
    for place, block in _blocks(name, content):
        if block.get("type") != "tool_result":
            read += _parts(place, block)
            continue
        if read:
            yield {"role": "user", "content": read}
            read = []
        result = _result(f"{place}.content", block.get("content"), tools)
        call_id = require_text(f"{place}.tool_use_id", block.get("tool_use_id"))
        yield {"role": "tool", "tool_call_id": call_id, "content": result}
    if read or not content:
        yield {"role": "user", "content": read}


def _result(name: str, content: Any, tools: Mapping[str, Any]) -> list[Part]:
    read: list[Part] = []
    for place, block in _blocks(name, content):
        if block.get("type") == "tool_reference":
            tool_name = require_text(f"{place}.tool_name", block.get("tool_name"))
            if tool_name in tools:  # otherwise the tool has been removed
                tool = json.dumps(tools[tool_name][0], ensure_ascii=False)
                read.append({"type": "text", "text": f"<tool>{tool}</tool>\n"})
        else:
            read += _parts(place, block)
    return read


def _parts(name: str, block: Mapping[str, Any]) -> list[Part]:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return [chat.text_part(f"{name}.text", block.get("text") or "")]
    if kind == "image":
        return [_image(source if isinstance(source, dict) else {})]
    if kind == "document":
        return _document(name, block, source if isinstance(source, dict) else {})
    text = chat.readable(block)
    return [chat.text_part(f"{name}.text", text) if text else chat.unread_part(kind)]


def _image(source: Mapping[str, Any]) -> Part:
    form, url, data = (source.get(field) for field in ("type", "url", "data"))
    if form == "url" and isinstance(url, str):
        return chat.image_part(url)
    if form == "base64" and isinstance(data, str):
        return chat.image_part(f"data:{source.get('media_type')};base64,{data}")
    return chat.unread_part("image")


def _document(name: str, block: Mapping[str, Any], source: Mapping[str, Any]) -> list[Part]:
    blocks = [
        chat.text_part(f"{name}.{head}", require_text(f"{name}.{head}", block[head]) + "\n")
        for head in ("title", "context")
        if block.get(head) is not None
    ]
    form = source.get("type")
    if form == "text":
        return [*blocks, chat.text_part(f"{name}.source.data", source.get("data"))]
    if form != "content":
        return [*blocks, chat.unread_part("document", source.get("media_type"))]
    for place, inner in _blocks(f"{name}.source.content", source.get("content")):
        is_nested = inner.get("type") == "document"  # no document may be in a document
        blocks += [chat.unread_part("document")] if is_nested else _parts(place, inner)
    return blocks


def _marks_cache(body: Mapping[str, Any]) -> bool:
    """Tell whether a client uses `cache_control`, and so expects stored tokens in `usage`."""
    messages, system, tools = (body.get(name) for name in ("messages", "system", "tools"))
    contents = [message.get("content") for message in messages or ()]
    blocks = [
        block for content in (system, *contents) if isinstance(content, list) for block in content
    ]
    return any("cache_control" in holder for holder in (body, *blocks, *(tools or ())))


class MessagesReply(ReplyParts):
    def __init__(self, model: str, *, marks_cache: bool) -> None:
        super().__init__()
        self._marks_cache = marks_cache
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self.items,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        message = {**self._message, "content": [], "usage": self._usage(n_prompt, n_cached, 0)}
        return [{"type": "message_start", "message": message}, *self.wait()]

    def end(self, finish_reason: str, stop_word: str | None, usage: Usage) -> list[Event]:
        reason = _STOP_REASONS.get(finish_reason, "end_turn")
        if reason == "tool_use" and all(block["type"] != "tool_use" for block in self.items):
            reason = "end_turn"  # no call could be parsed
        elif reason == "end_turn" and stop_word is not None:
            reason = "stop_sequence"
        stopped = {
            "stop_reason": reason,
            "stop_sequence": stop_word if reason == "stop_sequence" else None,
        }
        counts = self._usage(usage.n_prompt, usage.n_cached, usage.n_new)
        self._message |= {**stopped, "usage": counts}
        delta = {"type": "message_delta", "delta": stopped, "usage": counts}
        return [*self.close(), delta, {"type": "message_stop"}]

    def wait(self) -> list[Event]:
        return [{"type": "ping"}]

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        return [anthropic_error(status, message)]

    def whole(self) -> dict[str, Any]:
        return self._message

    def _usage(self, n_prompt: int, n_cached: int, n_new: int) -> dict[str, int]:
        """The three counts of prompt tokens add up to `n_prompt`."""
        n_computed = n_prompt - n_cached
        return {
            "input_tokens": 0 if self._marks_cache else n_computed,
            "cache_creation_input_tokens": n_computed if self._marks_cache else 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_new,
        }

    def start_part(self, kind: Kind) -> Iterator[Event]:
        signature = {"signature": ""} if kind == "thinking" else {}
        yield self._start({"type": kind, kind: "", **signature})

    def add_text(self, kind: Kind, text: str) -> Iterator[Event]:
        yield self._of_block("delta", delta={"type": f"{kind}_delta", kind: text})

    def end_part(self, kind: Kind, text: str) -> Iterator[Event]:
        """End a block. Thinking gets a signature: clients send back only signed thinking."""
        self.items[-1][kind] = text
        if kind == "thinking":
            digest = blake2b(text.encode("utf-8", "replace"), digest_size=16)
            signature = self.items[-1]["signature"] = digest.hexdigest()
            delta = {"type": "signature_delta", "signature": signature}
            yield self._of_block("delta", delta=delta)
        yield self._of_block("stop")

    def add_call(self, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        yield self._start({"type": "tool_use", "id": call_id, "name": name, "input": {}})
        self.items[-1]["input"] = _arguments(arguments)
        partial = json.dumps(self.items[-1]["input"], ensure_ascii=False)
        delta = {"type": "input_json_delta", "partial_json": partial}
        yield self._of_block("delta", delta=delta)
        yield self._of_block("stop")

    def _start(self, block: dict[str, Any]) -> Event:
        self.items.append(block)
        return self._of_block("start", content_block=dict(block))

    def _of_block(self, event: str, **fields: Any) -> Event:
        return {"type": f"content_block_{event}", "index": len(self.items) - 1, **fields}


def _arguments(text: str) -> dict[str, Any]:
    """The API wants an object, but a model may write other JSON, and NaN, which is not JSON."""
    arguments = json.loads(text, parse_constant=str)
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments, parse_constant=str)
    if isinstance(arguments, dict):
        return arguments
    return {} if arguments is None else {"arguments": arguments}
