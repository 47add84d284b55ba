"""A reply's chunks, sorted into the parts that an API names: thinking, text, and calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Event = dict[str, Any]
Kind = Literal["thinking", "text"]

_KEYS: tuple[tuple[Kind, str], ...] = (("thinking", "reasoning"), ("text", "content"))


@dataclass
class Part:
    """Text of one kind, as far as it came. `index` counts all parts of a reply, calls too."""

    kind: Kind
    index: int
    text: str = ""


class ReplyParts(ABC):
    """One reply, on its way from the chunks of a chat completion to another API's events.

    White space alone makes no part: clients drop such a part, and would send back another reply
    than they were sent.
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
        """Yield what begins a part."""

    @abstractmethod
    def add_text(self, part: Part, text: str) -> Iterator[Event]:
        """Yield what continues a part. Its `text` has the new text already."""

    @abstractmethod
    def end_part(self, part: Part) -> Iterator[Event]:
        """Yield what ends a part."""

    @abstractmethod
    def add_call(self, index: int, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        """Yield a whole call; `arguments` is JSON."""

    def add(self, delta: Mapping[str, Any]) -> list[Event]:
        """Return the events for the `delta` of a chunk."""
        events: list[Event] = []
        for kind, key in _KEYS:
            if delta.get(key):
                events += self._add(kind, delta[key])
        for call in delta.get("tool_calls") or ():
            events += self.close()
            self._held = ("text", "")
            function = call["function"]
            given = call["id"], function["name"], function["arguments"]
            events += self.add_call(self._next_index(), *given)
        return events

    def close(self) -> Iterator[Event]:
        """Yield what ends the open part, if there is one."""
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
