"""Requests between the server's queue and the batch, and the queues of replies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import ClientGone, DeviceFailed, RequestRefused
from ..hooks import ClientRequest, Prompt
from ..manager import Taken

GAP_S = 0.05
"""How long plugins may work for new requests between two steps of the replies."""

QUIET_GAP_S = 0.25
"""The same limit while no reply has begun, so that prompts are computed together."""

WORK_S = 0.005
"""If `advance` takes longer, the plugin has worked for the request."""

LARGE_S = 0.25
"""If a plugin has worked longer for a request, other requests go first (`_in_turn`)."""

WEIGH_EVERY = 32
"""The number of reply tokens after which the memory account is updated again."""
ASK_EVERY = 8
"""The number of steps between two questions to rank 0: the other ranks wait for each answer."""
ARRIVING: dict[int, float] = {}
"""When each HTTP thread began to read or to tokenize a request, by the thread's number."""


class ReplyQueue:
    """The queue of one request's tokens, in place of mlx-lm's queue. Generation thread.

    mlx-lm puts the context of the reply first, then its progress and its tokens, then None or an
    exception. After the client has left, or the reply has failed, the context is told to stop, and
    no further item is passed on.
    """

    stops_stock = True
    """Whether mlx-lm is told immediately to end the reply; if not, the generator ends the reply."""

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
        return self._request.client_gone

    @property
    def is_stopped(self) -> bool:
        """Whether nobody needs the rest of the reply."""
        return self.is_gone or self._is_told_to_stop

    def put(self, item: Any) -> None:
        """Pass on one of mlx-lm's items. If it is a DeviceFailed, raise it, to end the server."""
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
        """End the reply after its next token. The HTTP thread calls this, too."""
        self._is_told_to_stop = True
        if self.stops_stock:
            self._stop_stock()

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self.is_over = True
            self._queue.put(error)
        self._stop()


@dataclass(frozen=True)
class Rendered:
    """The tuple that mlx-lm's `_tokenize` returned for a request, and the prompt in it."""

    request: ClientRequest
    tokenizer: Any
    stock: tuple[Any, ...]
    prompt: Prompt


@dataclass(eq=False)
class Waiting:
    """A request that was taken from the server's queue and has not entered yet."""

    queued: Any
    """The queue's item with `reply` as its first part: (reply, request, args)."""
    reply: ReplyQueue
    has_begun: bool = False
    """Whether the request was tokenized, perhaps with an error."""
    error: Exception | None = None
    rendered: Rendered | None = None
    taken: Taken | None = None
    """A plugin's answer to the `rendered` request."""
    is_ready: bool = False
    """Whether the request was tokenized, and its plugin, if any, lets the request enter."""
    spent_s: float = 0.0
    """How long the plugin has worked on the request between steps."""

    @classmethod
    def of(cls, queued: Any) -> Waiting:
        queue, request, args = queued
        reply = ReplyQueue(queue, ClientRequest.of(request))
        return cls((reply, request, args), reply)

    def advance(self) -> float:
        """Let the plugin work, and ask whether the request may enter; return the seconds taken."""
        started = time.perf_counter()
        if self.has_begun and not self.reply.is_gone:
            try:
                self.is_ready = self.taken is None or self.taken.advance()
            except RequestRefused as error:
                self.error, self.is_ready = error, True
        spent_s = time.perf_counter() - started
        self.spent_s += spent_s
        return spent_s


class AdmissionQueue(deque[Waiting]):
    """The requests that have not entered yet, in the order of arrival.

    Between two steps of the replies, a plugin works for one request, for about GAP_S. While no
    reply has begun, plugins work for all, for QUIET_GAP_S. At least one request makes progress.
    """

    _gap_began_s: float | None = None
    """When the current pause between two steps began."""
    _n_gaps = 0
    _has_moved = False
    """Whether a request has begun, worked or entered in this pause."""
    _is_behind = False
    """Whether some requests must wait until after the next step."""

    def step_ended(self) -> bool:
        """Let waiting requests progress; return whether to check again before the next step."""
        self._begin_gap()
        return self._is_behind or any(one.is_ready or one.reply.is_gone for one in self)

    def next_ready(
        self,
        joins: Callable[[Waiting], bool],
        begin: Callable[[Waiting], None] | None,
        *,
        quiet: bool = False,
    ) -> Waiting | None:
        """Remove the next request that may enter the batch now; None if a step comes first.

        A request that cannot join the batch blocks later requests. `begin` is called once for each
        request that joins; if None, requests enter immediately. quiet: whether no reply has begun.
        """
        gap_s, self._is_behind = QUIET_GAP_S if quiet else GAP_S, False
        for waiting in list(self):
            if self.left_s(gap_s) <= 0 and self._has_moved:
                self._is_behind = True
                break
            is_joining = joins(waiting)
            if not is_joining and waiting is not self[0]:
                break
            if is_joining and begin is not None and not waiting.has_begun:
                self._has_moved = True
                begin(waiting)
                waiting.advance()
            if not is_joining or begin is None or waiting.is_ready or waiting.reply.is_gone:
                self._has_moved = True
                self.remove(waiting)
                return waiting
        ready = self._finished(gap_s) if quiet else None
        if ready is None:
            self._gap_began_s = None
        return ready

    def _finished(self, gap_s: float) -> Waiting | None:
        """Advance each request until it waits for something; remove the first that is ready."""
        for waiting in self._in_turn():
            while not waiting.is_ready and self.left_s(gap_s) > 0:
                has_worked = waiting.advance() > WORK_S
                self._has_moved |= has_worked
                if waiting.is_ready:
                    self.remove(waiting)
                    return waiting
                if not has_worked:
                    break
        return None

    def begin_batch(self) -> None:
        """Let the next check begin a new pause. Called when a batch begins or has ended."""
        self._gap_began_s = None

    def left_s(self, gap_s: float) -> float:
        if self._gap_began_s is None:
            self._begin_gap()
        assert self._gap_began_s is not None
        return max(0.0, self._gap_began_s + gap_s - time.perf_counter())

    def _begin_gap(self) -> None:
        """Advance the requests in turn, until a request is ready or its plugin has worked."""
        self._gap_began_s, self._has_moved = time.perf_counter(), False
        self._n_gaps += 1
        for waiting in self._in_turn():
            if waiting.is_ready or waiting.advance() > WORK_S:
                return

    def _in_turn(self) -> list[Waiting]:
        """Return the requests in order; in two of three pauses, those with long work come last."""
        in_order = list(self)
        if self._n_gaps % 3:
            in_order.sort(key=lambda one: one.spent_s > LARGE_S)
        return in_order
