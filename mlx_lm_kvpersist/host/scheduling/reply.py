"""Replies on their way to their clients, and clients that went away before the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ClientGone, DeviceFailed
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

    stops_stock = True
    """Whether stock is told at once that the reply is to end; else its generator ends it."""

    def __init__(self, queue: Any, request: ClientRequest) -> None:
        self._queue, self._request = queue, request
        self._context: Any = None
        self._stop_stock: Callable[[], None] = lambda: None
        self._is_told_to_stop = False
        self.has_begun = False
        """Whether the reply has tokens."""
        self.is_over = False

    @property
    def is_gone(self) -> bool:
        """Whether the client went away."""
        return self._request.client_gone

    @property
    def is_stopped(self) -> bool:
        """Whether the rest of the reply is of no use: its client went, or was told an error."""
        return self.is_gone or self._is_told_to_stop

    def put(self, item: Any) -> None:
        """Pass on an item of stock's. Raises DeviceFailed, which ends the server, from `item`."""
        if self._context is None and not isinstance(item, Exception):
            self._context, self._stop_stock = item, item.stop
            item.stop = self._stop
        self.has_begun = self.has_begun or hasattr(item, "finish_reason")
        if self.is_gone:
            self.fail(ClientGone())
        elif not self.is_over:
            self.is_over = item is None or isinstance(item, Exception)
            self._queue.put(item)
        if isinstance(item, DeviceFailed):
            raise item

    def _stop(self) -> None:
        """Have the reply end after its next token; what the HTTP thread calls."""
        self._is_told_to_stop = True
        if self.stops_stock:
            self._stop_stock()

    def fail(self, error: Exception) -> None:
        """End the reply with an error."""
        if not self.is_over:
            self.is_over = True
            self._queue.put(error)
        self._stop()
