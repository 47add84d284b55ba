"""Shared by Messages and Responses: parts of chat completion requests, and parts of replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from ..apis import Event, joined, require, require_object, require_text, text_of

Message = dict[str, Any]
Part = dict[str, Any]
Kind = Literal["thinking", "text"]

_MAX_TOKENS = 2**31 - 1
_READABLE = "title source url context text refusal content stdout stderr".split()
"""Fields with the visible text of a content block, in reading order."""
_MAX_DEPTH = 6


def max_tokens(name: str, n: Any) -> int:
    """Return a client's limit of tokens, at least 1 and at most 2**31 - 1."""
    require(isinstance(n, int) and not isinstance(n, bool), name, n, "an integer")
    return min(max(int(n), 1), _MAX_TOKENS)


def is_stream(body: Mapping[str, Any]) -> bool:
    stream = body.get("stream")
    require(isinstance(stream, bool | None), "stream", stream, "a boolean")
    return bool(stream)


def function(place: str, name: str, tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """Return a tool in a chat completion's form; `parameters` names the field with the schema."""
    signature: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        signature["description"] = require_text(f"{place}.description", tool["description"])
    signature["parameters"] = require_object(f"{place}.{parameters}", tool.get(parameters))
    return {"type": "function", "function": signature}


def append(messages: list[tuple[str, Message]], place: str, message: Message) -> None:
    """Append a message, or join it to the last if both are the user's or both the assistant's.

    Anthropic's API reads consecutive messages of a role as one. Text after tool calls stays a
    separate message. A message with an image also stays separate: the server may refuse an old
    image in the newest message.
    """
    last = messages[-1][1] if messages else {}
    is_more = message["role"] in ("user", "assistant") and last.get("role") == message["role"]
    are_texts = all(isinstance(text_of(turn.get("content")), str) for turn in (last, message))
    is_behind_calls = "tool_calls" in last and bool(message["content"] or "reasoning" in message)
    if not (is_more and are_texts) or is_behind_calls:
        messages.append((place, message))
        return
    merged = {name: joined(last.get(name), message.get(name)) for name in ("content", "reasoning")}
    merged["tool_calls"] = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
    last |= {name: value for name, value in merged.items() if value}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return an assistant's tool call; `arguments` is JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_part(name: str, text: Any) -> Part:
    return {"type": "text", "text": require_text(name, text)}


def image_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def unread_part(kind: Any, media_type: Any = None, filename: Any = None) -> Part:
    """Return a part that no model reads; the server puts a line of text in its place."""
    named = {"file_data": f"data:{media_type};base64,", "filename": filename}
    return {"type": kind, "file": named}


def readable(value: Any, depth: int = 0) -> str:
    """Return the text in a content block of an unknown kind, or "".

    Clients may send back blocks from other servers. Such blocks are not errors.
    """
    if isinstance(value, str):
        return value
    if depth == _MAX_DEPTH:
        return ""
    if isinstance(value, dict):
        value = [value[name] for name in _READABLE if name in value]
    texts = (readable(inner, depth + 1) for inner in value) if isinstance(value, list) else ()
    return "\n".join(text for text in texts if text)


class ReplyParts(ABC):
    """One reply, converted to the events of an API other than mlx-lm's.

    White space alone is not sent as a part: a client would drop the part, and later send back
    a different reply.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """All parts so far, tool calls too, in the API's form. An open part is the last item."""
        self._kind: Kind | None = None
        self._pieces: list[str] = []
        """The text of the open part."""
        self._held: tuple[Kind, str] = ("text", "")
        """The kind and the white space of a part that has no other text yet."""
        self._texts: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def start_part(self, kind: Kind) -> Iterator[Event]:
        """Begin a part in `items`, and yield the events for it."""

    @abstractmethod
    def add_text(self, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events for new text of the open part."""

    @abstractmethod
    def end_part(self, kind: Kind, text: str) -> Iterator[Event]:
        """Yield the events that end the open part. `text` is its whole text."""

    @abstractmethod
    def add_call(self, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        """Add a whole tool call to `items`, and yield its events; `arguments` is JSON."""

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[Event]:
        events = [*self._add("thinking", reasoning), *self._add("text", text)]
        for call in tool_calls:
            events += self.close()
            self._held = ("text", "")
            function = call["function"]
            call_id = str(call["id"])  # the model may write a number
            events += self.add_call(call_id, function["name"], function["arguments"])
        return events

    def close(self) -> Iterator[Event]:
        if self._kind is not None:
            yield from self.end_part(self._kind, "".join(self._pieces))
            self._kind = None

    def _add(self, kind: Kind, text: str) -> Iterator[Event]:
        if not text:
            return
        if kind != self._kind:
            held_kind, held = self._held
            text = held + text if held_kind == kind else text
            if not text.strip():
                self._held = (kind, text)
                return
            yield from self.close()
            self._held = (kind, "")
            self._kind, self._pieces = kind, []
            yield from self.start_part(kind)
        self._pieces.append(text)
        if kind == "text":
            self._texts.append(text)
        yield from self.add_text(kind, text)
