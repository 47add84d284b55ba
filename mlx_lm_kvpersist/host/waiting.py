"""Requests between the server's queue and the batch that serves them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .prompt import Prompt
from .reply import ReplyQueue

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendered:
    """The tuple that stock's `_tokenize` returned for a request, and the prompt in it.

    `prompt` is None if it has images: plugins must not change it.
    """

    tokenizer: Any
    stock: tuple[Any, ...]
    prompt: Prompt | None


@dataclass(eq=False)
class Waiting:
    """A request that was taken from the server's queue and has not entered yet.

    `has_begun`: it was tokenized, or could not be, with `error`.
    """

    queued: Any
    """As it stood in the queue, with `reply` as the first: (reply, request, args)."""
    reply: ReplyQueue
    has_begun: bool = False
    error: Exception | None = None
    is_fetched: Callable[[], bool] | None = None

    @classmethod
    def of(cls, queued: Any) -> Waiting:
        """Return what stands for an item of the server's queue."""
        queue, request, args = queued
        reply = ReplyQueue(queue, request)
        return cls((reply, request, args), reply)

    is_ready: bool = False
    """Whether the request was tokenized and what a plugin prefetches for it is in RAM."""

    def advance(self) -> float:
        """Ask the plugin whether all is there; return how long that took, for it may work on it."""
        started = time.perf_counter()
        if self.has_begun and not self.is_ready:
            try:
                self.is_ready = self.is_fetched is None or self.is_fetched()
            except Exception:
                logger.exception("a plugin's prefetch failed; the request enters without it")
                self.is_ready = True
        return time.perf_counter() - started


def has_text_only(request: Any) -> bool:
    """Tell whether no message of a request holds anything but text, such as an image."""
    contents = (message.get("content") for message in request.messages or ())
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
