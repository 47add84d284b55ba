"""A request and its prompt as plugins are given them: nothing in them can be changed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from typing import Any, NoReturn

PREFILL = "prefill"
"""The cache type of a prompt that is still being computed; see `TakenRequest.insert`."""

REPLY = "assistant"
"""Stock's cache type at the end of a reply; the ends of earlier segments have others."""


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError("a plugin cannot change this, expected changes of a copy (copy.deepcopy)")


class FrozenDict(dict[str, Any]):
    """An object of a request. Copies can be changed."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = _refuse
    popitem = setdefault = update = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}


class FrozenList(list[Any]):
    """A list of a request. Copies can be changed."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = _refuse
    clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(value, memo) for value in self]


class FrozenHeaders(Message):
    """The headers of a request."""

    def __init__(self, headers: Mapping[str, str] | Message) -> None:
        super().__init__()
        for name, value in headers.items():
            super().__setitem__(name, value)

    __setitem__ = __delitem__ = add_header = replace_header = _refuse


def frozen(value: Any) -> Any:
    """Return a copy of what JSON can hold, in which nothing can be changed."""
    if isinstance(value, dict):
        return FrozenDict({name: frozen(inner) for name, inner in value.items()})
    if isinstance(value, list):
        return FrozenList([frozen(inner) for inner in value])
    return value


class ClientRequest:
    """A request as plugins see it, from its arrival to its end; the server's own is out of reach.

    `kind` is "chat" or "text". `messages` are those that the client sent, `prompt` is its text
    where `kind` is "text". Plugins may keep what they know of a request in attributes of it.
    """

    client_gone = False
    """Whether nobody waits for the reply any more."""

    def __init__(self, request: Any) -> None:
        self.kind: str = request.request_type
        self.prompt: str = request.prompt
        self.messages: Sequence[dict[str, Any]] = frozen(request.messages or [])

    @staticmethod
    def of(request: Any) -> ClientRequest:
        """Return what plugins see of a request of the server, always the same object."""
        seen: ClientRequest | None = getattr(request, "seen_by_plugins", None)
        if seen is None:
            seen = request.seen_by_plugins = ClientRequest(request)
        return seen


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt, cut into segments as `ResponseGenerator._tokenize` does.

    The segments joined are `ids`; `segment_types` names each as "system", "user" or "assistant".
    `messages` are those that it was rendered from. All sequences become tuples.
    """

    ids: Sequence[int]
    segments: Sequence[Sequence[int]]
    segment_types: Sequence[str]
    messages: Sequence[dict[str, Any]] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        object.__setattr__(self, "segments", tuple(map(tuple, self.segments)))
        object.__setattr__(self, "segment_types", tuple(self.segment_types))


def has_text_only(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether no message holds anything but text, such as an image."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(part.get("type") == "text" for part in parts)
