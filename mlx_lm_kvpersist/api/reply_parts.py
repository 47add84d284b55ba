"""A reply's chunks, sorted into the parts that an API names: thinking, text, and calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Event = dict[str, Any]
Kind = Literal["thinking", "text"]


@dataclass
class Part:
    """Text of one kind, so far. `index` counts all parts of a reply, including calls."""

    kind: Kind
    index: int
    text: str = ""


class ReplyParts(ABC):
    """One reply, on its way from the chunks of a chat completion to another API's events.

    White space alone makes no part: clients drop such a part and would send back another reply.
    """

    def __init__(self) -> None:
        self._n_parts = 0
        self._open: Part | None = None
        self._held: tuple[Kind, str] = ("text", "")
        """White space that may begin a part."""
        self._texts: list[str] = []

    @property
    def content(self) -> str:
        """The text that the client was shown so far."""
        return "".join(self._texts)

    @abstractmethod
    def start_part(self, part: Part) -> Iterator[Event]:
        """Yield the events that begin a part."""

    @abstractmethod
    def add_text(self, part: Part, text: str) -> Iterator[Event]:
        """Yield the events for new text of a part. The part's `text` includes it already."""

    @abstractmethod
    def end_part(self, part: Part) -> Iterator[Event]:
        """Yield the events that end a part."""

    @abstractmethod
    def add_call(self, index: int, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        """Yield a whole call; `arguments` is JSON."""

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[Event]:
        """Return the events for a part of the reply."""
        events: list[Event] = []
        if reasoning:
            events += self._add("thinking", reasoning)
        if text:
            events += self._add("text", text)
        for call in tool_calls:
            events += self.close()
            self._held = ("text", "")
            function = call["function"]
            given = call["id"], function["name"], function["arguments"]
            events += self.add_call(self._next_index(), *given)
        return events

    def close(self) -> Iterator[Event]:
        """Yield the events that end the open part, if there is one."""
        if self._open is not None:
            part, self._open = self._open, None
            yield from self.end_part(part)

    def _add(self, kind: Kind, text: str) -> Iterator[Event]:
        part = self._open
        if part is None or part.kind != kind:
            held_kind, held = self._held
            text = held + text if held_kind == kind else text
            if not text.strip():
                self._held = (kind, text)
                return
            yield from self.close()
            self._held = (kind, "")
            part = self._open = Part(kind, self._next_index())
            yield from self.start_part(part)
        part.text += text
        if kind == "text":
            self._texts.append(text)
        yield from self.add_text(part, text)

    def _next_index(self) -> int:
        self._n_parts += 1
        return self._n_parts - 1
