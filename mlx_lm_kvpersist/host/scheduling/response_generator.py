"""The server's response generator: its plugins, its waiting requests, and the end of its thread.

Plugins see a request before and after it is tokenized. While other sequences are served, a request
whose data a plugin prefetches waits until the data is in RAM. Other requests pass it, so only its
own client waits. If the generation thread ends, the server ends.
"""

from __future__ import annotations

import _thread
import copy
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from queue import Queue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ...errors import ClientGone, DeviceFailed, GenerationStopped, RequestRefused
from ...ranks import Ranks, ranks
from .. import manager
from ..answers import ClientRequest, Prompt, copied, has_text_only
from ..attachments import fit_attachments
from ..history import PLACE, Templates, without
from ..http.request_checks import check_ids, check_prompt_ids
from ..manager import TakenTokens
from .context_length import check_length
from .continuation import Continuing, with_first_space
from .images import Images, named, vision_of, with_images
from .model_provider import PluginCaches, account_of, loaded_name
from .reply import ARRIVING, ASK_EVERY, ReplyQueue, UntilAsked
from .single_prompt import MOST_DRAFTED, SinglePrompt
from .waiting import QUIET_GAP_S, Line, Rendered, Waiting

if TYPE_CHECKING:
    from mlx_lm.server import ResponseGenerator as Stock
else:
    Stock = object

ARRIVING_S = 0.1
"""What is read or tokenized for longer is not waited for."""
LOOK_S = 0.005
"""How often to look whether it still is."""
FAILED_S = 1.0
"""How long a server whose generation thread has failed still answers, with an error."""

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
            self._reply_queues.add(item[0])
            super().put(item, block, timeout)
        ARRIVING.pop(threading.get_ident(), None)

    @property
    def is_closed(self) -> bool:
        """Whether new requests are refused."""
        return self._error is not None

    def refuse(self, error: Exception) -> None:
        """Refuse new requests from now on."""
        self._error = error

    def close(self, error: Exception) -> None:
        """Answer all requests that are queued or being served with `error`, and refuse new ones."""
        with self._closing:
            self._error = error
            for reply_queue in self._reply_queues:
                reply_queue.put(error)


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
    """The request that entered last."""
    _has_stepped = False
    """Whether anything was computed since requests are served."""
    _stops = _is_told_to_stop = False
    _n_steps = _n_messages = 0
    """Of several ranks: steps of batches, and messages when the last was asked about."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._line = Line()
        self._templates = Templates()
        self._replies: list[ReplyQueue] = []
        """Those of the requests that have entered and not ended."""
        self._has_ended = threading.Event()
        super().__init__(*args, **kwargs)

    @property
    def _ranks(self) -> Ranks:
        return ranks()

    # Requests.

    def _next_request(self, timeout: float | None = None) -> Any:
        """Return the next request that stock is to serve, None when there is none now.

        Stock gives no timeout while it serves a batch, and then nothing here waits. A request
        whose data is being prefetched lets others pass, but never one that would end the batch:
        another model's, or one that cannot be batched. A client has one request at a time, so its
        requests stay in order. While nothing is served, the oldest request enters at once.
        """
        if self._ranks.are_several and self._is_stopping():
            return None
        self._set_serving(timeout is None)
        if timeout is None:
            request = self._enter(self._next_ready())
        elif self._line:
            request = self._enter(self._line.popleft())
        else:
            queued = super()._next_request(timeout)
            request = self._enter(Waiting.of(queued) if queued is not None else None)
            if queued is None:
                manager.ask("idle")
        if request is not None:
            self._set_serving(True)
        return request

    def _set_serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving, self._has_stepped = serving, False
            self._line.begin_batch()
            manager.ask("serving_changed", serving=serving)

    def _enter(self, waiting: Waiting | None) -> Any:
        """Hand a request on; stock tokenizes it next, or loads its model."""
        if waiting is None:
            return None
        if self._ranks.told(waiting.reply.is_gone, "whether a client has left"):
            waiting.reply.fail(ClientGone())
            return None
        self._entering = waiting
        self._replies = [one for one in self._replies if not one.is_over]
        self._replies.append(waiting.reply)
        self._model = waiting.queued[2].model
        return waiting.queued

    def _next_ready(self) -> Waiting | None:
        wait_s = self._wait_s()
        while (queued := super()._next_request(wait_s)) is not None or wait_s is not None:
            if queued is not None:
                self._line.append(Waiting.of(queued))
            wait_s = self._wait_s()
        begin = self._begin if manager.is_implemented("take_request") else None
        quiet = not any(one.has_begun for one in self._replies)
        in_line = list(self._line)

        def place() -> int | None:
            ready = self._line.next_ready(self._joins, begin, quiet=quiet)
            return None if ready is None else in_line.index(ready)

        found = self._ranks.first(place, "which request enters")
        ready = None if found is None else in_line[found]
        if ready is not None and not self._ranks.decides:
            self._line.remove(ready)
        if ready is None and not isinstance(self._time_budget, UntilAsked):
            several = self._ranks.are_several
            is_asked = self._is_asked_of_several if several else self._is_asked
            self._time_budget = UntilAsked(self._time_budget, is_asked)
        return ready

    def _wait_s(self) -> float | None:
        """Return how long to wait for a request: for one that came with the first of a batch.

        Its thread reads or tokenizes it now, or fails to. The first would be computed without it.
        """
        if self._has_stepped or self._ranks.are_several:
            return None
        since_s = max(list(ARRIVING.values()), default=-math.inf)
        is_one_coming = time.perf_counter() - since_s < ARRIVING_S
        return LOOK_S if is_one_coming and self._line.left_s(QUIET_GAP_S) > 0 else None

    def _is_asked(self) -> bool:
        """Tell whether a request has come, is ready to enter, or is of no use any more."""
        self._has_stepped = True
        is_asked = self._line.step_ended() or not self.requests.empty()
        # Each reply that was stopped is told once: then stock removes it.
        n_stopped = sum(reply.is_stopped for reply in self._replies)
        self._replies = [one for one in self._replies if not (one.is_over or one.is_stopped)]
        return is_asked or n_stopped > 0

    def _is_asked_of_several(self) -> bool:
        """Ask rank 0, in a step in which all ranks have waited for each other anyway.

        Else now and then: to ask, a rank waits until the step of the replies that runs has ended.
        """
        self._n_steps += 1
        self._ranks.progressed()
        has_waited, self._n_messages = self._n_messages != self._ranks.n_messages, 0
        is_asked = False
        if has_waited or self._n_steps % ASK_EVERY == 0:
            is_asked = self._ranks.first(self._is_asked, "whether a request has come")
        self._n_messages = self._ranks.n_messages
        return is_asked

    def _is_stopping(self) -> bool:
        """Tell whether one of several ranks was told to end: then all end now."""
        self._stops = any(self._ranks.all_of(self._is_told_to_stop, "whether to end"))
        self._ranks.is_ending = self._stops
        if self._stops and self._ranks.decides and not self._is_told_to_stop:
            _thread.interrupt_main(signal.SIGTERM)
        return self._stops

    @property
    def _stop(self) -> bool:
        """Whether the thread ends. Several ranks do so between the same two requests."""
        return self._stops

    @_stop.setter
    def _stop(self, stops: bool) -> None:
        self._is_told_to_stop = stops
        if not self._ranks.are_several:
            self._stops = stops

    def _share_object(self, obj: Any) -> Any:
        """Return what rank 0 has; a rank that is elsewhere is noticed, which it is not in stock."""
        return self._ranks.told(obj, "what stock shares")

    def _share_request(self, request: Any) -> Any:
        """Return rank 0's next request, if any, with what plugins know of it."""
        if not self._ranks.are_several:
            return request
        if not self._ranks.told(request is not None, "whether there is a request"):
            return None
        told = self._ranks.first(lambda: _shareable(request), "a request")
        if request is not None:
            return request
        made, args, known = told
        vars(ClientRequest.of(made)).update(known)
        return Queue(), made, args

    def _joins(self, waiting: Waiting) -> bool:
        """Say whether a request can enter the batch that is being served."""
        _, request, args = waiting.queued
        try:
            return (
                args.model == self._model
                and self._is_batchable(args)
                and has_text_only(request.messages)
            )
        except Exception:
            return True  # tokenizing fails, too, and tells the client

    def _begin(self, waiting: Waiting) -> None:
        """Tokenize a request and let plugins prefetch what it needs; a failure is its client's."""
        _, request, args = waiting.queued
        tokenizer = self.model_provider.tokenizer
        waiting.has_begun = True
        try:
            waiting.rendered = self._rendered(tokenizer, request, args)
        except Exception as error:
            waiting.error = error
        else:
            waiting.taken = waiting.rendered.take()

    def generate(
        self, request: Any, generation_args: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Iterator[Any]]:
        """Queue a request; return stock's context and an iterator of its tokens. HTTP thread."""
        queued_s = time.perf_counter()
        try:
            ARRIVING[threading.get_ident()] = queued_s
            self._render_ahead(request, generation_args)
            context, tokens = super().generate(request, generation_args, *args, **kwargs)
        except BaseException:
            self._ended(request, [])
            raise
        if context.tool_parser is not None:
            context.tool_parser = _checked(context.tool_parser)
        if ClientRequest.of(request).continues:
            tokens = with_first_space(tokens, context.prompt, self.model_provider.tokenizer)
        return context, self._timed(request, tokens, queued_s)

    def _render_ahead(self, request: Any, args: Any) -> None:
        """Tokenize a request for the loaded model here: replies go on meanwhile. HTTP thread.

        Plugins may wait here for what they need of it.

        What fails is done, and reported, where stock does it.
        """
        try:
            if self._is_loaded(args.model.model) and has_text_only(request.messages):
                made = self._render(self.model_provider.tokenizer, request, args)
                ARRIVING.pop(threading.get_ident(), None)  # plugins may wait
                manager.ask("prompt_rendered", request=made.request, prompt=made.prompt)
                ARRIVING[threading.get_ident()] = time.perf_counter()
        except Exception:
            logger.debug("a prompt could not be made ahead", exc_info=True)

    def reads_images(self, model: str) -> bool | None:
        """Tell whether a model reads images; None while it is not loaded. Any thread."""
        reads_images: bool = self.model_provider.reads_images
        return reads_images if self._is_loaded(model) else None

    def _is_loaded(self, name: str) -> bool:
        """Tell whether this is the model that is loaded."""
        provider = self.model_provider
        loaded = loaded_name(provider) if provider.is_ready and not provider.is_loading else None
        return loaded is not None and provider._model_map.get(name, name) == loaded

    def _timed(self, request: Any, tokens: Iterable[Any], queued_s: float) -> Iterator[Any]:
        """Yield a reply's tokens, and tell plugins when they came. HTTP thread."""
        times_s: list[float] = []
        try:
            for token in tokens:
                times_s.append(time.perf_counter() - queued_s)
                yield token
        finally:
            self._ended(request, times_s)

    def _ended(self, request: Any, times_s: list[float]) -> None:
        manager.ask("reply_timed", request=ClientRequest.of(request), times_s=tuple(times_s))

    def _serve_single(self, request: Any, *args: Any) -> None:
        reply, memory = request[0], account_of(self.model_provider)
        if isinstance(reply, ReplyQueue):
            reply.stops_by_raising = True
            reply.ranks = self._ranks
            reply.weigh = lambda n_tokens: memory.weigh((), (n_tokens,), None)
            step_size = self.cli_args.prefill_step_size
            models = self.model_provider.model, self.model_provider.draft_model
            self.prompt_cache.single = single = SinglePrompt(models, reply, step_size)
            request[2].single = single
            request[2].num_draft_tokens = min(request[2].num_draft_tokens, MOST_DRAFTED)
        super()._serve_single(request, *args)
        self.prompt_cache.single = None
        if isinstance(reply, ReplyQueue) and isinstance(memory, PluginCaches):
            if reply.error is not None:
                memory.failures.failed(reply.error, "reply" if reply.has_begun else "prompt")
            elif reply.has_begun:
                memory.failures.succeeded("reply")

    # Tokenizing.

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        """Return stock's tuple; if a plugin takes the request, with that plugin's prompt.

        Stock reports what this raises to the client. So `prepare_messages`, which decides what
        the model is told, may refuse a request; `take_request` only makes it faster.
        """
        waiting, self._entering = self._entering, None
        rendered = self._rendered_once(tokenizer, request, args, waiting)
        request.rendered = None  # stock changes what it is given
        if waiting is not None and waiting.rendered is rendered:
            taken = waiting.taken
        else:
            taken = rendered.take()
        prompt = taken.enter() if taken is not None else None
        n_cached = taken.n_cached if taken is not None and prompt is not None else -1
        is_alike = len(set(self._ranks.all_of(n_cached, "how a request enters"))) == 1
        if taken is None or prompt is None or not is_alike:
            return rendered.stock
        taken.reply = waiting.reply if waiting is not None else None
        fed = TakenTokens(prompt.ids, taken)
        # Stock changes these lists.
        segments, types = [list(ids) for ids in prompt.segments], list(prompt.segment_types)
        vision = vision_of(rendered.stock)
        if vision is None:
            return fed, segments, types, *rendered.stock[3:]
        taken.images = images = Images.of(fed, rendered.stock[0], vision)
        return images.read, segments, types, rendered.stock[3], images.vision

    def _rendered_once(
        self, tokenizer: Any, request: Any, args: Any, waiting: Waiting | None
    ) -> Rendered:
        """Return what rank 0 makes of a request: a template may tell the time, and a file differ.

        Images are read by each rank for itself.
        """

        def rendered() -> Rendered:
            if waiting is not None and waiting.error is not None:
                raise waiting.error
            return self._rendered(tokenizer, request, args)

        if not self._ranks.are_several:
            return rendered()
        made: list[Rendered] = []

        def shareable() -> tuple[Any, Prompt] | None:
            made.append(rendered())
            stock, prompt = made[0].stock, made[0].prompt
            return None if vision_of(stock) is not None else (stock, replace(prompt, messages=()))

        shared = self._ranks.first(shareable, "what a request reads")
        if made:
            return made[0]
        if shared is None:
            return self._rendered(tokenizer, request, args)
        return Rendered(ClientRequest.of(request), tokenizer, *shared)

    def count_tokens(self, request: Any, args: Any) -> int:
        """Return how many tokens the prompt of a request would have now. HTTP thread.

        Only the tokenizer of the loaded model is used. It may encode in several threads: mlx-lm has
        encoded with it, so it changes no setting of its own any more.

        Raises:
            RequestRefused: the request's model is not loaded, or it has images, whose tokens only
                the model's processor knows.
        """
        provider = self.model_provider
        loaded = loaded_name(provider)
        if not provider.is_ready or provider.is_loading or loaded is None:
            raise RequestRefused("no model is loaded yet, try again in a moment", 503)
        if not self._is_loaded(args.model.model):
            asked = args.model.model
            raise RequestRefused(f"{asked} is not loaded, expected {loaded}, the model that is")
        if not has_text_only(request.messages):
            raise RequestRefused("the tokens of images cannot be counted, expected text only")
        rendered = self._render(provider.tokenizer, request, args)
        taken = rendered.take()
        return len(taken.request.prompt.ids if taken is not None else rendered.stock[0])

    def _rendered(self, tokenizer: Any, request: Any, args: Any) -> Rendered:
        """Return what was made of a request with this tokenizer, else make it. Generation thread.

        Raises:
            RequestRefused: no prompt can be made, it is too long, or an id is not the model's.
        """
        # To know the model's ids its graph is built: beside one that runs, mlx 0.31.2 aborts.
        if args.logits.logit_bias or args.sampling.top_k > 0 or args.top_logprobs > 0:
            check_ids(args, self.model_provider.n_logits)
        rendered: Rendered | None = getattr(request, "rendered", None)
        if rendered is None or rendered.tokenizer is not tokenizer:
            rendered = self._render(tokenizer, request, args)
        check_length(len(rendered.stock[0]), self.model_provider.max_context)
        return rendered

    def _render(self, tokenizer: Any, request: Any, args: Any) -> Rendered:
        """Render a request and keep the result with it; the request's messages stay as they are.

        Rendering changes messages, and mlx-lm 0.31.3 fails where they are rendered again.
        """
        given = request.messages, request.tools
        messages, tools = copy.deepcopy(given)
        seen, template = ClientRequest.of(request), None
        if request.request_type == "chat":
            messages = [{**message, PLACE: i} for i, message in enumerate(messages)]
            messages = fit_attachments(messages, self.model_provider.reads_images)
            manager.prepare_messages(messages, tools)
            if getattr(tokenizer, "has_chat_template", False):
                given_args = self.cli_args.chat_template_args, args.chat_template_kwargs or {}
                template = self._templates.of(tokenizer, given_args[0] | given_args[1], tools)
        sent = messages
        try:
            if template is not None:
                messages = template.fit(sent, tools, continues=seen.continues)
            messages = [without(message, PLACE) for message in messages]
            request.messages, request.tools = messages, tools
            source = Continuing(tokenizer) if seen.continues else tokenizer
            stock = super()._tokenize(source, request, args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            place = template.refused(sent, tools, continues=seen.continues) if template else None
            if place is not None:
                reason += f"); {seen.place(place)} cannot be rendered (change it, or leave it out"
            raise RequestRefused(f"no prompt can be made of this request ({reason})") from error
        finally:
            request.messages, request.tools = given
        check_prompt_ids(stock[0])
        ids, segments, segment_types, *_ = stock
        if (vision := vision_of(stock)) is not None:
            ids = with_images(ids, vision)
            segments, segment_types = [ids], ["user"]
            messages = named(messages, ids)
        prompt = Prompt(ids, segments, segment_types, copied(messages or []))
        request.rendered = made = Rendered(ClientRequest.of(request), tokenizer, stock, prompt)
        return made

    def _log_cache_stats(self) -> None:
        """Log stock's lines on its own prompt cache, unless plugins take the requests from it.

        Stock calls this for each request that enters, before it looks there.
        """
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
        runs = self.model_provider.is_ready and self._generation_thread.is_alive()
        return bool(runs and not self.requests.is_closed)

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
        finally:
            self._has_ended.set()

    def join(self) -> None:
        """Wait for the end of the thread: what ranks without clients do."""
        try:
            if self._ranks.are_several:
                self._has_ended.wait()  # an interrupted Thread.join takes the thread for ended
        except KeyboardInterrupt:
            self._stop = True
            self._has_ended.wait()
        super().join()

    def _end_server(self, error: BaseException) -> None:
        """Answer all clients, and interrupt the main thread: `run` reports `fatal_error`."""
        delay_s = 0.0
        stopped = GenerationStopped("the server ends: its model could not be loaded")
        # A provider that is not ours, such as one of mlx-lm's tests, does not say so.
        if getattr(self.model_provider, "is_ready", True):
            self.model_provider.is_ready = False
            delay_s = FAILED_S
            if isinstance(error, DeviceFailed):
                stopped = error
            else:
                logger.error("the generation thread ended", exc_info=error)
                what = f"its generation thread was stopped by {type(error).__name__}: {error}"
                error = stopped = GenerationStopped(f"the server ends: {what}")
        self.model_provider.fatal_error = error
        self.requests.close(stopped)
        clock = threading.Timer(delay_s, _thread.interrupt_main, (signal.SIGTERM,))
        clock.daemon = True
        clock.start()


def _shareable(queued: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return a request as it came, its arguments, and what plugins know of it by attribute."""
    _, request, args = queued
    known = dict(vars(ClientRequest.of(request)))
    for name in ("kind", "prompt", "messages", "client_gone"):
        known.pop(name, None)
    own = {one.name: getattr(request, one.name) for one in fields(request)}
    return type(request)(**own), args, known


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
