"""The forms of requests, replies and errors for all APIs, and checks of a request's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any, NamedTuple, NoReturn, Protocol

from .errors import RequestRefused

Event = dict[str, Any]
"""An event of a stream. `type` is the event's name, if it has a name."""

_MAX_QUOTED = 40
_KINDS = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a boolean"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Usage(NamedTuple):
    """Token counts: `n_cached` of `n_prompt` are reused; `n_reasoning` of `n_new` are reasoning."""

    n_prompt: int
    n_cached: int
    n_new: int
    n_reasoning: int


class ReplyFormat(Protocol):
    """Makes the events of an API from the parts of one reply.

    `wait` is called on the thread that watches all clients (`Clients`), other methods on the
    request's HTTP thread. No calls overlap.
    """

    @property
    def content(self) -> str:
        """The text that the client has got so far."""

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        """Return the first events; both counts are 0 if they are not known yet."""

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[Event]:
        """Return the events for a part of the reply; tool calls are as in a chat completion."""

    def end(self, finish_reason: str, stop_word: str | None, usage: Usage) -> list[Event]:
        """Return the last events. `finish_reason` is as in a chat completion."""

    def wait(self) -> list[Event]:
        """Return events that only show that the server is working."""

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        """Return the last events of a reply that ends early; see RequestRefused for `code`."""

    def whole(self) -> dict[str, Any]:
        """Return the reply as one object, for a client that does not stream."""


@dataclass(frozen=True)
class Request:
    """A request to generate, in the terms of chat templates and samplers.

    `fields` has the messages and the parameters, named as in Chat Completions. The model may call
    `tools`, even if the template does not see them in `fields`. If `tools` is None, calls are
    treated as text. `places` names each message in the client's body, such as "input[3]".
    """

    fields: dict[str, Any]
    stream: bool
    reply: ReplyFormat
    tools: list[dict[str, Any]] | None = None
    places: Sequence[str] = ()


class API(Protocol):
    """An API that mlx-lm does not have.

    refuses_in_stream: whether streaming clients expect an error with a code in the stream, and
    ignore the status.
    """

    refuses_in_stream: bool

    def parse(self, body: dict[str, Any], headers: Message) -> Request:
        """Return a client's request; raises RequestRefused with a sentence for the client."""

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return an error in the API's own form."""


def require(is_right: bool, name: str, value: Any, expected: str) -> None:
    if not is_right:
        refuse(name, value, expected)


def refuse(name: str, value: Any, expected: str) -> NoReturn:
    """Raise RequestRefused with the name of a field, the found value and the expected value."""
    shown = _KINDS.get(type(value))
    if isinstance(value, str) and len(value) <= _MAX_QUOTED:
        shown = json.dumps(value)
    elif shown is None:
        shown = "too large" if isinstance(value, int) and abs(value) > 10**20 else repr(value)
    raise RequestRefused(f"{name} is {shown}, expected {expected}")


def require_text(name: str, value: Any) -> str:
    """Return text; refuse other values, and text with half a surrogate pair."""
    require(isinstance(value, str), name, value, "text")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(f"{name} is not valid Unicode at character {error.start}") from None
    text: str = value
    return text


def require_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(name, value, "an object")
    return value


def placed_objects(name: str, value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a list's objects with their places ("messages[3]"); refuse any other value."""
    require(isinstance(value, list), name, value, "a list of objects")
    for i, item in enumerate(value):
        yield (place := f"{name}[{i}]"), require_object(place, item)


def without_null(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an object without null fields, which SDKs send for fields that are not set."""
    return {name: value for name, value in fields.items() if value is not None}


def joined(content: Any, more: Any, between: str = "\n\n") -> Any:
    if not content or not more:
        return content or more or ""
    if isinstance(content, list) or isinstance(more, list):
        return [*parts_of(content), *(parts_of(between) if between else ()), *parts_of(more)]
    return f"{content}{between}{more}"


def parts_of(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def text_of(content: Any) -> Any:
    """Join parts that are all texts, as the server does. None becomes ""; other content stays."""
    if not isinstance(content, list):
        return "" if content is None else content
    texts = [block.get("text") for block in content if block.get("type") == "text"]
    are_all = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if are_all else content


def readable(value: Any) -> Any:
    """Return JSON in which U+FFFD replaces each lone half of a surrogate pair.

    A client that cuts a text inside a pair sends such a half, which UTF-8 cannot encode.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    return value


def openai_error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form, which this package's own routes also use."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's form: the body of a reply, or an event in a stream."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def message_of(body: bytes) -> str:
    """Return the message of an error's body in any API's form; "" for any other body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""
