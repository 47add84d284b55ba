"""The server's response generator: the hooks, the order of waiting requests, the end of its thread.

While other sequences are served, a request whose data a plugin prefetches waits until the data is
in RAM. Other requests may enter before it.
"""

from __future__ import annotations

import _thread
import copy
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ...errors import ClientGone, DeviceFailed, GenerationStopped, RequestRefused
from ...ranks import Ranks, ranks
from .. import manager
from ..attachments import fit_attachments
from ..history import PLACE, Templates, without
from ..hooks import REPLY, ClientRequest, Prompt, frozen, has_text_only
from ..http.request_checks import check_ids, check_prompt_ids
from ..manager import TakenTokens, take_request
from .batch_generator import LOOKS_FIRST
from .images import fed_images, named, with_images
from .waiting import ARRIVING, ASK_EVERY, QUIET_GAP_S, AdmissionQueue, Rendered, ReplyQueue, Waiting

if TYPE_CHECKING:
    from mlx_lm.server import ResponseGenerator as Stock
else:
    Stock = object

ARRIVING_S = 0.1
"""The longest time to wait for a request that is being read or tokenized."""
_N_BEFORE = 8
"""The tokens before a reply that are decoded together with its first tokens."""
LOOK_S = 0.005
"""The seconds between two checks whether a request is still being read."""
FAILED_S = 1.0
"""How long a server still answers with errors after its generation thread has failed."""

logger = logging.getLogger(__name__)


class RequestQueue(Queue[Any]):
    """The queue of requests. After the queue is closed, new and waiting requests are refused."""

    def __init__(self) -> None:
        super().__init__()
        self._reply_queues: WeakSet[Queue[Any]] = WeakSet()
        self._closing = threading.Lock()
        self.refusal: Exception | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._closing:
            if self.refusal is not None:
                raise self.refusal
            self._reply_queues.add(item[0])
            super().put(item, block, timeout)
        ARRIVING.pop(threading.get_ident(), None)

    def close(self, error: Exception) -> None:
        """Send `error` to all requests that are queued or being served, and refuse new requests."""
        with self._closing:
            self.refusal = error
            for reply_queue in self._reply_queues:
                reply_queue.put(error)


class PluginResponseGenerator(Stock):  # type: ignore[misc]
    """Tokenizes as mlx-lm does, and calls the plugins' hooks before and after. Generation thread.

    mlx-lm catches no exception of `_next_request`, so this method must never raise. If the thread
    ends, the server ends; mlx-lm's server would continue without generating.
    """

    _serving = False
    _model: Any = None
    """The model of the request that entered last, and thus of the served sequences."""
    _entering: Waiting | None = None
    """The request that entered last, until mlx-lm tokenizes it."""
    _has_looked = False
    """Whether mlx-lm has looked for requests since the last step."""
    _has_stepped = False
    """Whether a step has run since the batch began."""
    _stops = _is_told_to_stop = False
    _n_steps = _n_messages = 0
    """With several ranks: the number of steps, and of messages up to the last step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._admission = AdmissionQueue()
        self._templates = Templates()
        self._replies: list[ReplyQueue] = []
        """The replies of requests that have entered and not ended."""
        self._has_ended = threading.Event()
        super().__init__(*args, **kwargs)

    @property
    def _ranks(self) -> Ranks:
        return ranks()

    def _next_request(self, timeout: float | None = None) -> Any:
        """Return the next request that mlx-lm is to serve, None if no request may enter.

        While mlx-lm serves a batch, it passes no timeout. This method then waits only before the
        batch's first step. A request that would end the batch overtakes no other request. While
        nothing is served, the oldest request enters immediately.
        """
        self._has_looked = True
        self._set_serving(timeout is None)
        entering: list[Waiting] = []
        find = partial(self._look, timeout, entering)
        look, are_told = self._ranks.first_and_all(find, self._is_told_to_stop, "a request")
        if self._ranks.are_several and any(are_told):
            # One rank was told to end, so all ranks end now.
            self._stops = self._ranks.is_ending = True
            if self._ranks.decides and not self._is_told_to_stop:
                _thread.interrupt_main(signal.SIGTERM)
            return None
        if not self._ranks.decides:
            for request, args, attributes in look.arrived:
                vars(ClientRequest.of(request)).update(attributes)
                self._admission.append(Waiting.of((Queue(), request, args)))
            if look.place is not None:
                entering.append(self._admission[look.place])
                del self._admission[look.place]
        if not entering:
            if timeout is not None:
                manager.ask("idle")
            return None
        (waiting,) = entering
        if look.is_gone:
            waiting.reply.fail(ClientGone())
            return None
        self._set_serving(True)
        self._entering = waiting
        self._replies = [reply for reply in self._replies if not reply.is_over]
        self._replies.append(waiting.reply)
        self._model = waiting.queued[2].model
        return waiting.queued

    def _look(self, timeout: float | None, entering: list[Waiting]) -> Look:
        """Take requests from the queue, and move the entering request to `entering`. Rank 0."""
        n_before = len(self._admission)
        if timeout is not None and not self._admission:
            self._take_queued(timeout)
        elif timeout is None:
            wait_s = self._wait_s()
            while self._take_queued(wait_s) or wait_s is not None:
                wait_s = self._wait_s()
        in_order = list(self._admission)
        arrived = in_order[n_before:] if self._ranks.are_several else []
        shared = [_shareable(waiting.queued) for waiting in arrived]
        if timeout is None:
            begin = self._begin if manager.is_implemented("take_request") else None
            quiet = not any(reply.has_begun for reply in self._replies)
            ready = self._admission.next_ready(self._joins, begin, quiet=quiet)
        else:
            ready = self._admission.popleft() if self._admission else None
        if ready is None:
            return Look(shared)
        entering.append(ready)
        return Look(shared, in_order.index(ready), ready.reply.is_gone)

    def _take_queued(self, timeout_s: float | None) -> bool:
        try:
            queued = self.requests.get(timeout_s is not None, timeout_s)
        except Empty:
            return False
        self._admission.append(Waiting.of(queued))
        return True

    def _set_serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving, self._has_stepped = serving, False
            self._admission.begin_batch()
            if not serving:
                manager.ask("idle")

    def _wait_s(self) -> float | None:
        """Return how long to wait for a request that is still being read or tokenized, or None.

        Requests that arrive together are then computed together.
        """
        if self._has_stepped or self._ranks.are_several:
            return None
        since_s = max(list(ARRIVING.values()), default=-math.inf)
        is_arriving = time.perf_counter() - since_s < ARRIVING_S
        return LOOK_S if is_arriving and self._admission.left_s(QUIET_GAP_S) > 0 else None

    def _looks_first(self) -> bool:
        """Whether mlx-lm looks for requests before the next step; never True twice in a row.

        If a batch ends for another model, mlx-lm does not look, and the steps must continue.
        """
        self._has_looked = not self._has_looked and self._is_asked_of_all()
        self._has_stepped |= not self._has_looked
        return self._has_looked

    def _is_asked_of_all(self) -> bool:
        """Whether all ranks look for requests now. Every rank calls this after each step."""
        if not self._ranks.are_several:
            return self._is_asked()
        # A question to rank 0 waits for the running step. So ranks ask after a step in which they
        # exchanged messages anyway, or after ASK_EVERY steps.
        self._n_steps += 1
        self._ranks.progressed()
        has_waited, is_asked = self._n_messages != self._ranks.n_messages, False
        if has_waited or self._n_steps % ASK_EVERY == 0:
            is_asked = self._ranks.first(self._is_asked, "whether a request has come")
        self._n_messages = self._ranks.n_messages
        return is_asked

    def _is_asked(self) -> bool:
        """Whether a request has arrived or is ready to enter, or a reply must stop."""
        is_asked = self._admission.step_ended() or not self.requests.empty()
        # Each stopped reply is reported once: stock then removes it between two steps.
        is_asked |= any(reply.is_stopped for reply in self._replies)
        replies = self._replies
        self._replies = [reply for reply in replies if not (reply.is_over or reply.is_stopped)]
        return is_asked

    @property
    def _stop(self) -> bool:
        """Whether the thread ends. All ranks end after the same request."""
        return self._stops

    @_stop.setter
    def _stop(self, stops: bool) -> None:
        self._is_told_to_stop = stops
        if not self._ranks.are_several:
            self._stops = stops

    def _share_object(self, obj: Any) -> Any:
        """Return rank 0's object. Unlike mlx-lm, detect a rank that expects another message."""
        return self._ranks.told(obj, "what stock shares")

    def _joins(self, waiting: Waiting) -> bool:
        _, request, args = waiting.queued
        try:
            return (
                args.model == self._model
                and self.model_provider.is_batchable
                and args.seed is None
                and has_text_only(request.messages)
            )
        except Exception:
            return True  # tokenizing will fail, too, and the client gets that error

    def _begin(self, waiting: Waiting) -> None:
        _, request, args = waiting.queued
        tokenizer = self.model_provider.tokenizer
        waiting.has_begun = True
        try:
            waiting.rendered = self._rendered(tokenizer, request, args)
        except Exception as error:
            waiting.error = error
        else:
            waiting.taken = take_request(waiting.rendered.request, waiting.rendered.prompt)

    def generate(
        self, request: Any, generation_args: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Iterator[Any]]:
        """Queue a request; return mlx-lm's context and an iterator of its tokens. HTTP thread."""
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
        timed = self._timed(request, tokens, queued_s)
        next(timed)  # starts it: else its `finally` would not run if the client left
        return context, timed

    def _render_ahead(self, request: Any, args: Any) -> None:
        """Tokenize a request for the loaded model, and let plugins wait for its data. HTTP thread.

        mlx-lm does the same work again after a failure, and reports the error.
        """
        try:
            is_loaded = self.model_provider.is_loaded(args.model.model)
            if is_loaded and has_text_only(request.messages):
                rendered = self._render(self.model_provider.tokenizer, request, args)
                manager.ask("prompt_rendered", request=rendered.request, prompt=rendered.prompt)
                ARRIVING[threading.get_ident()] = time.perf_counter()
        except Exception:
            logger.debug("kvpersist: a prompt could not be rendered ahead", exc_info=True)

    def reads_images(self, model: str) -> bool | None:
        """Whether a model reads images; None while it is not loaded. Any thread."""
        provider = self.model_provider
        return bool(provider.reads_images) if provider.is_loaded(model) else None

    def _timed(self, request: Any, tokens: Iterable[Any], queued_s: float) -> Iterator[Any]:
        """Yield None, then a reply's tokens; tell plugins the times of the tokens. HTTP thread."""
        times_s: list[float] = []
        try:
            yield None
            for token in tokens:
                times_s.append(time.perf_counter() - queued_s)
                yield token
        finally:
            self._ended(request, times_s)

    def _ended(self, request: Any, times_s: list[float]) -> None:
        manager.ask("reply_timed", request=ClientRequest.of(request), times_s=tuple(times_s))

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        """Return mlx-lm's tuple, with the plugin's prompt if a plugin takes the request.

        mlx-lm reports an exception to the client, so `prepare_messages` may refuse a request.
        """
        waiting, self._entering = self._entering, None
        rendered = self._rendered_once(tokenizer, request, args, waiting)
        request.rendered = None  # used only once: stock changes the rendered lists
        if waiting is not None and waiting.rendered is rendered:
            plugin_request = waiting.taken
        else:
            plugin_request = take_request(rendered.request, rendered.prompt)
        prompt, n_cached = None, -1
        if plugin_request is not None and (prompt := plugin_request.enter()) is not None:
            n_cached = plugin_request.n_cached
        self._ranks.note(n_cached)
        if plugin_request is None or prompt is None:
            return rendered.stock
        plugin_request.reply = waiting.reply if waiting is not None else None
        fed = TakenTokens(prompt.ids, plugin_request)
        # New lists, because stock removes the cached segments from them.
        segments, types = [list(ids) for ids in prompt.segments], list(prompt.segment_types)
        vision = vision_of(rendered.stock)
        if vision is None:
            return fed, segments, types, *rendered.stock[3:]
        plugin_request.images, fed_vision = fed_images(fed, rendered.stock[0], vision)
        read = TakenTokens(plugin_request.images, plugin_request)
        return read, segments, types, rendered.stock[3], fed_vision

    def _rendered_once(
        self, tokenizer: Any, request: Any, args: Any, waiting: Waiting | None
    ) -> Rendered:
        """Return rank 0's rendering: templates may show the time, and ranks' files may differ."""
        own: list[Rendered] = []

        def render() -> tuple[Any, Prompt] | None:
            if waiting is not None and waiting.error is not None:
                raise waiting.error
            own.append(rendered := self._rendered(tokenizer, request, args))
            has_images = vision_of(rendered.stock) is not None
            return None if has_images else (rendered.stock, replace(rendered.prompt, messages=()))

        shared = self._ranks.first(render, "what a request reads")
        if shared is not None and not own:
            return Rendered(ClientRequest.of(request), tokenizer, *shared)
        return own[0] if own else self._rendered(tokenizer, request, args)

    def count_tokens(self, request: Any, args: Any) -> int:
        """Return how many tokens the prompt of a request would have now. HTTP thread.

        Several threads may use the tokenizer: its settings do not change after mlx-lm's first call.

        Raises:
            RequestRefused: the model is not loaded, or the request has images, whose tokens only
                the model's processor knows.
        """
        provider, name = self.model_provider, args.model.model
        if not provider.is_ready or provider.is_loading:
            raise RequestRefused("the model is not loaded yet, try again in a moment", 503)
        if not provider.is_loaded(name):
            raise RequestRefused(f"{name} is not loaded; a request for a reply loads it")
        if not has_text_only(request.messages):
            raise RequestRefused("the tokens of images cannot be counted, expected text only")
        rendered = self._render(provider.tokenizer, request, args)
        taken = take_request(rendered.request, rendered.prompt)
        return len(rendered.stock[0] if taken is None else taken.request.prompt.ids)

    def _rendered(self, tokenizer: Any, request: Any, args: Any) -> Rendered:
        """Return a request's rendering by this tokenizer; make it if needed. Generation thread.

        Raises:
            RequestRefused: no prompt can be made, the prompt is too long, or an id is wrong.
        """
        # Not on an HTTP thread: mlx 0.31.2 aborts if `n_logits` builds a graph while another runs.
        if args.logits.logit_bias or args.sampling.top_k > 0 or args.top_logprobs > 0:
            check_ids(args, self.model_provider.n_logits)
        rendered: Rendered | None = getattr(request, "rendered", None)
        if rendered is None or rendered.tokenizer is not tokenizer:
            rendered = self._render(tokenizer, request, args)
        n_tokens, most = len(rendered.stock[0]), self.model_provider.max_context
        if most is not None and n_tokens > most:
            # The message is Anthropic's, the code is OpenAI's: clients recognise them and shorten
            # the conversation.
            message = f"prompt is too long: {n_tokens} tokens > {most} maximum"
            raise RequestRefused(message, code="context_length_exceeded")
        return rendered

    def _render(self, tokenizer: Any, request: Any, args: Any) -> Rendered:
        """Render a request, and store the result in it."""
        # Rendering changes messages, and mlx-lm 0.31.3 fails if they are rendered again.
        messages, tools = copy.deepcopy((request.messages, request.tools))
        client_request, template = ClientRequest.of(request), None
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
                messages = template.fit(sent, tools, continues=client_request.continues)
            messages = [without(message, PLACE) for message in messages]
            fitted = copy.copy(request)
            fitted.messages, fitted.tools = messages, tools
            source = Continuing(tokenizer) if client_request.continues else tokenizer
            stock = super()._tokenize(source, fitted, args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            place = None
            if template is not None:
                place = template.refused(sent, tools, continues=client_request.continues)
            if place is not None:
                name = client_request.place(place)
                reason += f"); {name} cannot be rendered (change it, or leave it out"
            raise RequestRefused(f"no prompt can be made of this request ({reason})") from error
        check_prompt_ids(stock[0])
        ids, segments, segment_types, *_ = stock
        if (vision := vision_of(stock)) is not None:
            ids = with_images(ids, vision)
            segments = [ids]
            messages = named(messages, ids)
        # Stock gives a prompt's last segment the type of a reply, for example after a tool result.
        segment_types = ["user" if kind == REPLY else kind for kind in segment_types]
        prompt = Prompt(ids, segments, segment_types, frozen(messages or []))
        request.rendered = rendered = Rendered(client_request, tokenizer, stock, prompt)
        return rendered

    def _log_cache_stats(self) -> None:
        if len(self.prompt_cache) or not manager.is_implemented("take_request"):
            super()._log_cache_stats()

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
        runs = self.model_provider.is_ready and not self._has_ended.is_set()
        return bool(runs and self.requests.refusal is None)

    def generation_available(self) -> bool:
        """Return True: mlx-lm asks before it queues a request, and the queue itself can refuse."""
        return True

    def _generate(self) -> None:
        LOOKS_FIRST.set(self._looks_first)
        try:
            super()._generate()
        except BaseException as error:
            self._end_server(error)
        else:
            self.requests.close(GenerationStopped("the server ends"))
        finally:
            self._has_ended.set()

    def join(self) -> None:
        """Wait for the end of the thread. Ranks without clients call this."""
        try:
            if self._ranks.are_several:
                self._has_ended.wait()  # after an interrupted Thread.join, a thread counts as ended
        except KeyboardInterrupt:
            self._stop = True
            self._has_ended.wait()
        super().join()

    def _end_server(self, error: BaseException) -> None:
        """Answer all clients, and interrupt the main thread: `run` reports `fatal_error`."""
        delay_s = FAILED_S
        # The provider in mlx-lm's tests has no `is_ready`.
        if not getattr(self.model_provider, "is_ready", True):
            delay_s = 0.0
            stopped = GenerationStopped("the server ends: its model could not be loaded")
        elif isinstance(error, DeviceFailed):
            stopped = error
        else:
            logger.error("kvpersist: the generation thread ended", exc_info=error)
            what = f"its generation thread was stopped by {type(error).__name__}: {error}"
            error = stopped = GenerationStopped(f"the server ends: {what}")
        self.model_provider.is_ready = False
        self.model_provider.fatal_error = error
        self.requests.close(stopped)
        clock = threading.Timer(delay_s, _thread.interrupt_main, (signal.SIGTERM,))
        clock.daemon = True
        clock.start()


def vision_of(tokenized: Sequence[Any]) -> Any:
    """Return the record of images in mlx-lm's `_tokenize` result; None if it has none."""
    return tokenized[4] if len(tokenized) > 4 else None


class Continuing:
    """A tokenizer of mlx-lm for a reply that continues the assistant's last message."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(
        self, messages: Any, *, add_generation_prompt: bool, **options: Any
    ) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, continue_final_message=True, **options
        )


def with_first_space(tokens: Iterable[Any], prompt: Sequence[int], tokenizer: Any) -> Iterator[Any]:
    """Yield mlx-lm's responses; the first text gets back the space that mlx-lm's detokenizer drops.

    The space must be dropped only at the beginning of a message. prompt: the ids before the reply.
    """
    before = list(prompt[-_N_BEFORE:])
    n_chars, ids = len(tokenizer.decode(before)), list[int]()
    is_begun = False
    for token in tokens:
        ids.append(token.token)
        if not is_begun and token.text:
            is_begun = True
            if tokenizer.decode([*before, *ids])[n_chars:].startswith(" " + token.text):
                token.text = " " + token.text
        yield token


@dataclass(frozen=True)
class Look:
    """Rank 0's answer when mlx-lm looks for a request."""

    arrived: Sequence[tuple[Any, Any, dict[str, Any]]] = ()
    """The new requests in the form of `_shareable`."""
    place: int | None = None
    """The index of the entering request among waiting requests."""
    is_gone: bool = False
    """Whether the client of the entering request has left."""


def _shareable(queued: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return a request, its arguments, and the attributes that plugins have set on it."""
    _, request, args = queued
    attributes = dict(vars(ClientRequest.of(request)))
    for name in ("kind", "prompt", "messages", "client_gone"):
        attributes.pop(name, None)
    return replace(request), args, attributes


def _checked(parse: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """Return a parser of tool calls that raises ValueError, as mlx-lm expects, for any error."""

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
