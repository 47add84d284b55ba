"""Replies on their way to their clients, and clients that went away before the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ...errors import ClientGone, DeviceFailed
from ..answers import ClientRequest

LOOK_S = 0.1
"""How often the sockets of waiting clients are looked at."""
WEIGH_EVERY = 32
"""Tokens of replies after which their memory is looked at, though none came or went."""
ASK_EVERY = 8
"""Steps of replies after which several ranks ask what only rank 0 knows: they wait for that."""
ARRIVING: dict[int, float] = {}
"""The HTTP threads, by their numbers, that read or tokenize a request, and since when: it is queued
in a moment."""
LAST_BYTES_S = 0.2
"""How long after its last token a reply, or an error in its place, may take to be written."""


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


class OpenRequests:
    """The requests that clients wait for. While there are any, a thread looks for those that left.

    Without it a client that does not stream would be missed only when its reply is written.
    """

    def __init__(self) -> None:
        self._open: dict[Any, Any] = {}
        self._changed = threading.Condition()
        self._is_watched = False
        self._last_ended_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, request: Any) -> None:
        """A request is about to be queued; its `client` is a `ClientSocket`, if known."""
        with self._changed:
            self._open[id(request)] = request
            if not self._is_watched:
                self._is_watched = True
                threading.Thread(target=self._watch, name="clients", daemon=True).start()

    def end(self, request: Any) -> None:
        """The reply has ended. Any number of times."""
        with self._changed:
            self._open.pop(id(request), None)
            self._last_ended_s = time.monotonic()
            self._changed.notify_all()

    def wait_for_none(self, seconds: float) -> bool:
        """Wait until all replies have ended and are written; False if that takes longer."""
        with self._changed:
            are_over = self._changed.wait_for(lambda: not self._open, seconds)
        time.sleep(max(0.0, self._last_ended_s + LAST_BYTES_S - time.monotonic()))
        return are_over

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._changed:
                if not self._open:
                    self._is_watched = False
                    return
                requests = list(self._open.values())
            for request in requests:
                client = getattr(request, "client", None)
                if client is not None and client.has_left():
                    ClientRequest.of(request).client_gone = True
                    self.end(request)  # its thread may have ended without a word
