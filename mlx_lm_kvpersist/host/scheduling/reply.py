"""Replies on their way to their clients, and clients that went away before the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ClientGone, DeviceFailed
from ..hooks import ClientRequest

WEIGH_EVERY = 32
"""Tokens of replies after which memory is weighed, although no reply came or went."""
ASK_EVERY = 8
"""Steps of replies after which several ranks ask rank 0; they wait for the answer."""
ARRIVING: dict[int, float] = {}
"""The HTTP threads, by their numbers, that read or tokenize a request now, and since when."""


class ReplyQueue:
    """The queue of one request's tokens, in place of stock's queue. Generation thread.

    Stock puts the context of the reply first, then its progress and its tokens, then None or an
    exception. After the client has left, or the reply has failed, the context is told to stop, and
    no further item is passed on.
    """

    stops_stock = True
    """Whether stock is told at once to end the reply; otherwise its generator ends the reply."""

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
        """Whether nobody needs the rest of the reply: its client left, or got an error."""
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
        """End the reply after its next token. The HTTP thread calls this."""
        self._is_told_to_stop = True
        if self.stops_stock:
            self._stop_stock()

    def fail(self, error: Exception) -> None:
        """End the reply with an error."""
        if not self.is_over:
            self.is_over = True
            self._queue.put(error)
        self._stop()
