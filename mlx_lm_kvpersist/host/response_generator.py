"""The server's response generator: plugins see a request before and after it is tokenized.

While other sequences are served, a request whose data a plugin prefetches waits aside until the
data is in RAM. Other requests pass it, so only its own client waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import manager
from .prompt import Prompt, TakenTokens

if TYPE_CHECKING:
    from mlx_lm.server import ResponseGenerator as Stock
else:
    Stock = object

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendered:
    """What stock's tokenizing made of a request: its own tuple, and the prompt in it.

    `prompt` is None where plugins must not change it: it has images.
    """

    tokenizer: Any
    stock: tuple[Any, ...]
    prompt: Prompt | None


@dataclass(eq=False)
class Waiting:
    """A request that was taken from the server's queue and has not entered yet.

    `rendered` is None until the request was tokenized, and the exception where that failed.
    """

    queued: Any
    """As it stood in the queue: (where the reply goes, request, args)."""
    rendered: Rendered | Exception | None = None
    is_fetched: Callable[[], bool] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the request was tokenized and what a plugin prefetches for it is in RAM."""
        if self.rendered is None or self.is_fetched is None:
            return self.rendered is not None
        try:
            return self.is_fetched()
        except Exception:
            logger.exception("a plugin's prefetch failed; the request enters without it")
            self.is_fetched = None
            return True


class PluginResponseGenerator(Stock):  # type: ignore[misc]
    """Tokenizes as stock does, between the plugins' hooks. Generation thread.

    Stock calls `_next_request` where nothing catches an exception: nothing in it may raise.
    """

    _time_budget: Any
    _serving = False
    _model: Any = None
    """The model of the request that entered last; while sequences are served, theirs."""
    _entering: Waiting | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._waiting: deque[Waiting] = deque()
        super().__init__(*args, **kwargs)

    # Requests.

    def _next_request(self, timeout: float | None = None) -> Any:
        """Return the next request that stock is to serve, None when there is none now.

        Stock gives no timeout while it serves a batch, and then nothing here waits. A request
        whose data is being prefetched lets others pass, but never one that would end the batch:
        another model's, or one that cannot be batched. A client has one request at a time, so its
        requests stay in order. While nothing is served, the oldest request enters at once.
        """
        self._set_serving(timeout is None)
        if self._is_distributed or not manager.is_implemented("prefetch"):
            request = super()._next_request(timeout)
        elif timeout is None:
            request = self._enter(self._next_ready())
        elif self._waiting:
            request = self._enter(self._waiting.popleft())
        else:
            queued = super()._next_request(timeout)
            request = self._enter(Waiting(queued) if queued is not None else None)
        if request is not None:
            self._set_serving(True)
        return request

    def _set_serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            manager.ask_all("serving_changed", serving=serving)

    def _enter(self, waiting: Waiting | None) -> Any:
        """Hand a request on; stock tokenizes it next, or loads its model."""
        if waiting is None:
            return None
        self._entering = waiting
        self._model = waiting.queued[2].model
        return waiting.queued

    def _next_ready(self) -> Waiting | None:
        while (queued := super()._next_request(None)) is not None:
            self._waiting.append(Waiting(queued))
        for waiting in list(self._waiting):
            joins = self._joins(waiting)
            if not joins and waiting is not self._waiting[0]:
                break
            if joins and waiting.rendered is None:
                self._begin(waiting)
            if not joins or waiting.is_ready:
                self._waiting.remove(waiting)
                return waiting
        if self._waiting and not isinstance(self._time_budget, UntilReady):
            self._time_budget = UntilReady(self._time_budget, self._waiting)
        return None

    def _joins(self, waiting: Waiting) -> bool:
        """Say whether a request can enter the batch that is being served."""
        _, request, args = waiting.queued
        try:
            return args.model == self._model and self._is_batchable(args) and has_text_only(request)
        except Exception:
            return True  # tokenizing fails, too, and tells the client

    def _begin(self, waiting: Waiting) -> None:
        """Tokenize a request and let plugins prefetch what it needs; a failure is its client's."""
        _, request, args = waiting.queued
        tokenizer = self.model_provider.tokenizer
        try:
            waiting.rendered = self._render(tokenizer, request, args)
        except Exception as error:
            waiting.rendered = error
            return
        if waiting.rendered.prompt is not None:
            given = {"request": request, "args": args, "tokenizer": tokenizer}
            prompt = waiting.rendered.prompt
            waiting.is_fetched = manager.ask_first("prefetch", prompt=prompt, **given)

    # Tokenizing.

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        """Return stock's tuple; if a plugin takes the request, with that plugin's prompt.

        Stock reports what this raises to the client. So `prepare_messages`, which decides what
        the model is told, may refuse a request; `take_request` only makes it faster.
        """
        rendered = self._rendered_before(request, tokenizer)
        rendered = rendered or self._render(tokenizer, request, args)
        taken = None
        if rendered.prompt is not None:
            taken = manager.take_request(request, args, tokenizer, rendered.prompt)
        if taken is None:
            return rendered.stock
        return (
            TakenTokens(taken.prompt.ids, taken),
            list(taken.prompt.segments),  # stock pops from these two
            list(taken.prompt.segment_types),
            *rendered.stock[3:],
        )

    def _rendered_before(self, request: Any, tokenizer: Any) -> Rendered | None:
        """Return what was made of a request while it waited; raise what was raised then."""
        waiting, self._entering = self._entering, None
        if waiting is None or waiting.rendered is None or waiting.queued[1] is not request:
            return None
        if isinstance(waiting.rendered, Exception):
            raise waiting.rendered
        return waiting.rendered if waiting.rendered.tokenizer is tokenizer else None

    def _render(self, tokenizer: Any, request: Any, args: Any) -> Rendered:
        if request.request_type == "chat":
            manager.ask("prepare_messages", request=request, args=args, tokenizer=tokenizer)
        stock = super()._tokenize(tokenizer, request, args)
        ids, segments, segment_types, *rest = stock
        # From 0.32.1 the images of a prompt come last; their positions count on these very ids.
        has_images = len(rest) > 1 and rest[1] is not None
        prompt = None if has_images else Prompt(ids, segments, segment_types)
        return Rendered(tokenizer, stock, prompt)

    def _log_cache_stats(self) -> None:
        """Log stock's lines on its own prompt cache, unless plugins take the requests from it."""
        if len(self.prompt_cache) or not manager.is_implemented("take_request"):
            super()._log_cache_stats()


class UntilReady:
    """Stock's time budget for a batch, which ends earlier when a waiting request is ready."""

    def __init__(self, budget: Iterable[None], waiting: Iterable[Waiting]) -> None:
        self._budget = budget
        self._waiting = waiting

    def __iter__(self) -> Iterator[None]:
        for _ in self._budget:
            yield
            if any(waiting.is_ready for waiting in self._waiting):
                return


def has_text_only(request: Any) -> bool:
    """Tell whether no message of a request holds anything but text, such as an image."""
    contents = (message.get("content") for message in request.messages or ())
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)
