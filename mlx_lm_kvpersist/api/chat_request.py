"""Parts that the translations of other APIs' requests to chat completions share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..fields import require, require_object, require_text
from .reply_parts import ReplyParts

Message = dict[str, Any]
Part = dict[str, Any]
Reply = TypeVar("Reply", bound=ReplyParts, covariant=True)

_MAX_TOKENS = 2**31 - 1
_READABLE = ("title", "source", "url", "context", "text", "content", "stdout", "stderr")
"""Fields that hold what a reader of a block sees, in the order in which they are read."""
_MAX_DEPTH = 6


@dataclass(frozen=True)
class ChatRequest(Generic[Reply]):
    """A request as a chat completion, and the reply that it will get.

    `tools` also has deferred tools, which may be called but are not in the chat completion's list.
    """

    chat_body: dict[str, Any]
    tools: list[dict[str, Any]]
    stream: bool
    reply: Reply


def max_tokens(name: str, n: Any) -> int:
    """Return a client's limit, brought into the range that stock takes."""
    require(isinstance(n, int) and not isinstance(n, bool), name, n, "an integer")
    return min(max(int(n), 1), _MAX_TOKENS)


def is_stream(body: Mapping[str, Any]) -> bool:
    """Tell whether a client wants its reply as a stream."""
    stream = body.get("stream") or False
    require(isinstance(stream, bool), "stream", stream, "a boolean")
    return bool(stream)


def function(place: str, name: str, tool: Mapping[str, Any], parameters: str) -> dict[str, Any]:
    """Return a tool as a chat completion has it; `parameters` names the field of its schema."""
    made: dict[str, Any] = {"name": name}
    if tool.get("description") is not None:
        made["description"] = require_text(f"{place}.description", tool["description"])
    made["parameters"] = require_object(f"{place}.{parameters}", tool.get(parameters))
    return {"type": "function", "function": made}


def text_part(name: str, text: Any) -> Part:
    return {"type": "text", "text": require_text(name, text)}


def image_part(url: str) -> Part:
    return {"type": "image_url", "image_url": {"url": url}}


def unread_part(kind: Any, media_type: Any = None, filename: Any = None) -> Part:
    """Return a part that no model reads; the server puts a line of text in its place."""
    named = {"file_data": f"data:{media_type};base64,", "filename": filename}
    return {"type": kind, "file": named}


def readable(value: Any, depth: int = 0) -> str:
    """Return the text in a block of a kind that is not known, "" if it has none.

    Clients send back blocks of any server. An unknown block must not end the conversation.
    """
    if isinstance(value, str):
        return value
    if depth == _MAX_DEPTH:
        return ""
    if isinstance(value, dict):
        value = [value[name] for name in _READABLE if name in value]
    texts = (readable(each, depth + 1) for each in value) if isinstance(value, list) else ()
    return "\n".join(text for text in texts if text)
