"""A request that a plugin has taken, as the server carries it through stock's code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ClientGone
from . import manager
from .answers import TakenRequest, check_prepared
from .prompt import ClientRequest, Prompt


class Taken:
    """A plugin's `TakenRequest`. What it raises is logged, and reaches nobody."""

    def __init__(self, plugin: str, request: TakenRequest) -> None:
        self.plugin, self.request = plugin, request
        self.caches: Sequence[Any] | None = None
        self.n_cached = 0
        self.reply: Any = None
        """Where its tokens go (`reply.ReplyQueue`)."""

    def advance(self) -> bool:
        """Tell whether the request can enter; a plugin that fails is not waited for."""
        ready = manager.safely(self.plugin, "take_request", self.request.advance)
        return ready is None or bool(ready)

    def enter(self) -> Prompt | None:
        """Return the prompt to feed; None where stock serves the request. Raises ClientGone."""
        prepared = manager.safely(
            self.plugin,
            "take_request",
            self.request.enter,
            check=check_prepared,
            passed_on=(ClientGone,),
        )
        if prepared is None:
            return None
        self.caches, self.n_cached = prepared.caches, prepared.n_cached
        prompt: Prompt = prepared.prompt
        return prompt

    def insert(self, tokens: Iterable[int], caches: Iterable[Any], cache_type: str) -> None:
        given = tuple(tokens), list(caches), cache_type
        manager.safely(self.plugin, "take_request", self.request.insert, *given)


def take_request(request: Any, prompt: Prompt) -> Taken | None:
    """Return the request as the first plugin takes it that wants it; None leaves it to stock."""
    seen = ClientRequest.of(request)
    for plugin, answer in manager.ask_each("take_request", request=seen, prompt=prompt):
        return Taken(plugin, answer)
    return None


class TakenTokens(list[int]):
    """Token ids of a request that a plugin took.

    The stock server passes a prompt's ids, and slices of them, through the batch generator and back
    to the prompt cache. It passes nothing else of the request. Slices and in-place appends keep
    `taken`.
    """

    def __init__(self, ids: Iterable[int], taken: Taken) -> None:
        super().__init__(ids)
        self.taken = taken

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return TakenTokens(found, self.taken) if isinstance(index, slice) else found
