"""The server's response generator: its plugins, its waiting requests, and the end of its thread.

Plugins see a request before and after it is tokenized. While other sequences are served, a request
whose data a plugin prefetches waits until the data is in RAM. Other requests pass it, so only its
own client waits. If the generation thread ends, the server ends.
"""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Queue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..errors import GenerationStopped, RequestRefused
from . import manager
from .context_length import check_length
from .prompt import Prompt, TakenTokens
from .request_checks import check_ids, check_prompt_ids

if TYPE_CHECKING:
    from mlx_lm.server import ResponseGenerator as Stock
else:
    Stock = object

LAST_ANSWERS_S = 1.0
"""How long the server still answers, with an error, before it ends."""

logger = logging.getLogger(__name__)


class RequestQueue(Queue[Any]):
    """The queue of requests. Once closed, it refuses new ones and answers those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self._reply_queues: WeakSet[Queue[Any]] = WeakSet()
        self._closing = threading.Lock()
        self._error: Exception | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._closing:
            if self._error is not None:
                raise self._error
            if item[0] is not None:
                self._reply_queues.add(item[0])
            super().put(item, block, timeout)

    def close(self, error: Exception) -> None:
        """Answer all requests that are queued or being served with `error`, and refuse new ones."""
        with self._closing:
            self._error = error
            for reply_queue in self._reply_queues:
                reply_queue.put(error)


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

    Stock calls `_next_request` where nothing catches an exception: nothing in it may raise. When
    the thread ends all the same, the server ends. Stock would go on without generating: up to
    0.31.3 every request then waits for ever, later it gets 404 for ever.
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
            rendered = self._render(tokenizer, request, args)
            self._check_length(rendered)
        except Exception as error:
            waiting.rendered = error
            return
        waiting.rendered = rendered
        if rendered.prompt is not None:
            given = {"request": request, "args": args, "tokenizer": tokenizer}
            prompt = rendered.prompt
            waiting.is_fetched = manager.ask_first("prefetch", prompt=prompt, **given)

    def generate(self, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, Iterator[Any]]:
        """Queue a request; return stock's context and an iterator of its tokens. HTTP thread."""
        queued_s = time.perf_counter()
        context, tokens = super().generate(request, *args, **kwargs)
        if context.tool_parser is not None:
            context.tool_parser = _checked(context.tool_parser)
        return context, _timed(request, tokens, queued_s)

    # Tokenizing.

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        """Return stock's tuple; if a plugin takes the request, with that plugin's prompt.

        Stock reports what this raises to the client. So `prepare_messages`, which decides what
        the model is told, may refuse a request; `take_request` only makes it faster.
        """
        rendered = self._rendered_before(request, tokenizer)
        rendered = rendered or self._render(tokenizer, request, args)
        self._check_length(rendered)
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

    def count_tokens(self, request: Any, args: Any) -> int:
        """Return how many tokens the prompt of a request would have now. HTTP thread.

        Only the tokenizer of the loaded model is used. It may encode in several threads: mlx-lm has
        encoded with it, so it changes no setting of its own any more.

        Raises:
            RequestRefused: the request's model is not loaded, or it has images, whose tokens only
                the model's processor knows.
        """
        provider, name = self.model_provider, args.model.model
        if not provider.is_ready or provider.model_key is None:
            raise RequestRefused("no model is loaded yet, try again in a moment", 503)
        loaded = provider.model_key[0]
        if provider._model_map.get(name, name) != loaded:
            raise RequestRefused(f"{name} is not loaded, expected {loaded}, the model that is")
        if not has_text_only(request):
            raise RequestRefused("the tokens of images cannot be counted, expected text only")
        args.sampling.top_k = 0  # to check it needs the model
        rendered = self._render(provider.tokenizer, request, args)
        given = {"request": request, "args": args, "tokenizer": provider.tokenizer}
        prompt: Prompt | None = manager.ask_first("spell_prompt", prompt=rendered.prompt, **given)
        return len(prompt.ids if prompt is not None else rendered.stock[0])

    def _rendered_before(self, request: Any, tokenizer: Any) -> Rendered | None:
        """Return what was made of a request while it waited; raise what was raised then."""
        waiting, self._entering = self._entering, None
        if waiting is None or waiting.rendered is None or waiting.queued[1] is not request:
            return None
        if isinstance(waiting.rendered, Exception):
            raise waiting.rendered
        return waiting.rendered if waiting.rendered.tokenizer is tokenizer else None

    def _check_length(self, rendered: Rendered) -> None:
        check_length(len(rendered.stock[0]), self.model_provider.max_context)

    def _render(self, tokenizer: Any, request: Any, args: Any) -> Rendered:
        if request.request_type == "chat":
            manager.ask("prepare_messages", request=request, args=args, tokenizer=tokenizer)
        # Here the model is loaded, and stock reports to the client what is raised.
        if args.logits.logit_bias or args.sampling.top_k > 0 or args.top_logprobs > 0:
            check_ids(args, self.model_provider.n_logits)
        try:
            stock = super()._tokenize(tokenizer, request, args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestRefused(f"no prompt can be made of this request ({reason})") from error
        check_prompt_ids(stock[0])
        ids, segments, segment_types, *rest = stock
        # From 0.32.1 the images of a prompt come last; their positions refer to these ids.
        has_images = len(rest) > 1 and rest[1] is not None
        prompt = None if has_images else Prompt(ids, segments, segment_types)
        return Rendered(tokenizer, stock, prompt)

    def _log_cache_stats(self) -> None:
        """Log stock's lines on its own prompt cache, unless plugins take the requests from it."""
        if len(self.prompt_cache) or not manager.is_implemented("take_request"):
            super()._log_cache_stats()

    # The thread.

    @property
    def requests(self) -> RequestQueue:
        return self._requests

    @requests.setter
    def requests(self, stock: Queue[Any]) -> None:
        # Stock sets its own queue before it starts the thread.
        self._requests = RequestQueue()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served now: the default model is loaded and the thread runs."""
        return bool(self.model_provider.is_ready and self._generation_thread.is_alive())

    def generation_available(self) -> bool:
        """Return True: stock asks before it queues a request, and the queue knows more."""
        return True

    def _generate(self) -> None:
        try:
            super()._generate()
        except BaseException as error:
            self._end_server(error)
        else:
            self.requests.close(GenerationStopped("the server ends"))

    def _end_server(self, error: BaseException) -> None:
        """Answer all clients, and interrupt the main thread: `run` reports `fatal_error`."""
        delay_s = 0.0
        stopped = GenerationStopped("the server ends: its model could not be loaded")
        if self.model_provider.is_ready:
            self.model_provider.is_ready = False
            logger.error("the generation thread ended", exc_info=error)
            delay_s = LAST_ANSWERS_S
            what = f"its generation thread was stopped by {type(error).__name__}: {error}"
            error = stopped = GenerationStopped(f"the server ends: {what}")
        self.model_provider.fatal_error = error
        self.requests.close(stopped)
        clock = threading.Timer(delay_s, _thread.interrupt_main, (signal.SIGTERM,))
        clock.daemon = True
        clock.start()


def _checked(parse: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return a parser of tool calls that raises ValueError for whatever is no call.

    That is what stock expects. Anything else ends the reply, and its client gets no end.
    """

    def parse_calls(text: str, tools: Any) -> Any:
        try:
            calls = parse(text, tools)
            for call in calls if isinstance(calls, list) else [calls]:
                if not isinstance(call["name"], str) or "arguments" not in call:
                    raise ValueError("a call needs a name and arguments")
        except Exception as error:
            raise ValueError(f"no tool call: {error!r}") from error
        return calls

    return parse_calls


def _timed(request: Any, tokens: Iterable[Any], queued_s: float) -> Iterator[Any]:
    """Yield a reply's tokens, and tell plugins when they came. HTTP thread."""
    times_s: list[float] = []
    try:
        for token in tokens:
            times_s.append(time.perf_counter() - queued_s)
            yield token
    finally:
        manager.ask_all("reply_timed", request=request, times_s=times_s)


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
