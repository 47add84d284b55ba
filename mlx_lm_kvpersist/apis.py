"""A parsed request, whatever API it came by, and the parser and reply format that an API has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any, Protocol

Event = dict[str, Any]
"""An event of a stream, with its name as `type` if it has one."""


class ReplyFormat(Protocol):
    """Makes the events of an API from the parts of one reply.

    Events are made on the HTTP thread, and by `wait` on that of the clients, one at a time.
    """

    @property
    def content(self) -> str:
        """The text that the client was shown so far."""

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        """Return the first events; both counts are 0 if they are not known yet."""

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[Event]:
        """Return the events for a part of the reply; the calls are those of a chat completion."""

    def end(
        self, finish_reason: str, stop_word: str | None, n_prompt: int, n_cached: int, n_new: int
    ) -> list[Event]:
        """Return the last events. `finish_reason` is a chat completion's."""

    def wait(self) -> list[Event]:
        """Return events that only show that the server is at work."""

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        """Return the last events of a reply that ends early; `code` is RequestRefused's."""

    def whole(self) -> dict[str, Any]:
        """Return the reply as one object, for a client that does not stream."""


@dataclass(frozen=True)
class Request:
    """A request that generates, in the terms of chat templates and samplers.

    `fields` has the messages and the parameters, named as in Chat Completions. `stream` says
    whether the client wants events. `tools` are all that may be called, also those that `fields`
    does not show to the template; with None every call is a text. `places` names each message in
    the client's body, such as "input[3]".
    """

    fields: dict[str, Any]
    stream: bool
    reply: ReplyFormat
    tools: list[dict[str, Any]] | None = None
    places: Sequence[str] = ()


class API(Protocol):
    """Another API than stock's.

    refuses_in_stream: whether clients that stream look for an error with a code in the stream, and
    heed no status.
    """

    refuses_in_stream: bool

    def parse(self, body: dict[str, Any], headers: Message) -> Request:
        """Return a client's request; raises RequestRefused with a sentence for the client."""

    def error(self, status: int, message: str, code: str | None) -> dict[str, Any]:
        """Return an error in the API's own form."""
