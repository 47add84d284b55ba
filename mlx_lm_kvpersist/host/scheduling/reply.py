"""Replies on their way to their clients, and clients that went away before the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ClientGone
from ...ranks import Ranks
from ..answers import ClientRequest

WEIGH_EVERY = 32
"""Tokens of replies after which their memory is looked at, though none came or went."""
ASK_EVERY = 8
"""Steps of replies after which several ranks ask what only rank 0 knows: they wait for that."""
ARRIVING: dict[int, float] = {}
"""The HTTP threads, by their numbers, that read or tokenize a request, and since when: it is queued
in a moment."""


class ReplyQueue:
    """Where one request's tokens go: takes the place of stock's queue. Generation thread.

    Stock puts the context of the reply first, then its progress and its tokens, then None or an
    exception. Once the client has gone, or the reply has failed, the context is told to stop, and
    nothing more is passed on.
    """

    stops_by_raising = False
    """Whether stock computes the prompt in one piece, and asks the context only afterwards."""
    weigh: Callable[[int], object] | None = None
    """Told how many tokens a sequence has that is served by itself, now and then."""
    ranks: Ranks | None = None
    """The ranks that compute a sequence that is served by itself."""
    n_cached: int | None = None
    """How many tokens of its prompt were cached, where stock was given those computed as such."""

    def __init__(self, queue: Any, request: ClientRequest) -> None:
        self._queue, self._request = queue, request
        self._context: Any = None
        self._n_put = 0
        self._n_tokens, self._is_told_to_stop = 0, False
        self.has_begun = False
        """Whether the reply has tokens."""
        self.is_over = False
        self.error: Exception | None = None
        """The error that ended the reply before its last token."""

    @property
    def is_gone(self) -> bool:
        """Whether the client went away."""
        return self._request.client_gone

    @property
    def is_stopped(self) -> bool:
        """Whether what is left of the reply is of no use: its client went, or was told an error."""
        stops = self._context is not None and self._context._should_stop
        return self.is_gone or bool(stops) or self._is_told_to_stop

    def put(self, item: Any) -> None:
        if self._context is None and not isinstance(item, Exception):
            self._context = item
        elif self.weigh is not None and self._context is not None:
            if self._n_put % WEIGH_EVERY == 0:
                self.weigh(len(self._context.prompt) + self._n_put)
            self._n_put += 1
        self.has_begun = self.has_begun or hasattr(item, "finish_reason")
        if self.n_cached is not None:
            self._context.prompt_cache_count = self.n_cached
        if self.ranks is not None and self.ranks.are_several:
            self._stop_together(self.ranks, item)
        if self.is_gone:
            self.fail(ClientGone())
            several = self.ranks is not None and self.ranks.are_several  # they are asked again
            if self.stops_by_raising and isinstance(item, tuple) and not several:
                raise ClientGone
        elif not self.is_over:
            self.is_over = item is None or isinstance(item, Exception)
            self.error = item if isinstance(item, Exception) else None
            self._queue.put(item)

    def _stop_together(self, several: Ranks, item: Any) -> None:
        """Raise ClientGone on all ranks where rank 0's client has left; it is asked now and then.

        Stock would end the reply on rank 0 alone, and the others would wait for it.
        """
        if item is self._context:
            item.stop = self._tell_to_stop
        is_token = hasattr(item, "finish_reason")
        self._n_tokens += is_token
        if isinstance(item, tuple) or (is_token and self._n_tokens % ASK_EVERY == 0):
            if several.first(lambda: self.is_stopped, "whether a client has left"):
                self.fail(ClientGone())
                raise ClientGone

    def _tell_to_stop(self) -> None:
        self._is_told_to_stop = True

    def fail(self, error: Exception) -> None:
        """End the reply with an error."""
        if not self.is_over:
            self.is_over = True
            self._queue.put(error)
        if self._context is not None:
            self._context.stop()


class UntilAsked:
    """Stock's time budget for a batch, which ends earlier when `is_asked`."""

    def __init__(self, budget: Any, is_asked: Callable[[], bool]) -> None:
        self._budget, self._is_asked = budget, is_asked

    def __iter__(self) -> Any:
        for _ in self._budget:
            yield
            if self._is_asked():
                return
