"""The server's response generator: plugins see a request before and after it is tokenized.

While other sequences are served, a request for which a plugin fetches something is held aside until
that is there, so that nobody waits for it but its own client.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import manager
from .prompt import Prompt, RequestTokens

if TYPE_CHECKING:
    from mlx_lm.server import ResponseGenerator as Stock
else:
    Stock = object

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rendered:
    """What stock's tokenizing made of a request: its own tuple, and the prompt in it.

    There is no prompt where plugins must not change it.
    """

    request: Any
    tokenizer: Any
    stock: tuple[Any, ...]
    prompt: Prompt | None


@dataclass(eq=False)
class Held:
    """A request that was taken from the server's queue and not yet handed on.

    `rendered` is None until it was begun with, and an exception where tokenizing failed.
    """

    queued: Any
    """As it stood in the queue: (where the reply goes, request, args)."""
    rendered: Rendered | Exception | None = None
    is_fetched: Callable[[], bool] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it was begun with, and need not wait any more."""
        if self.rendered is None or self.is_fetched is None:
            return self.rendered is not None
        try:
            return self.is_fetched()
        except Exception:
            logger.exception("what hook fetch_ahead returned failed; the request is not held")
            self.is_fetched = None
            return True


class PluginResponseGenerator(Stock):  # type: ignore[misc]
    """Tokenizes as stock does, between two hooks. Generation thread."""

    _time_budget: Any
    _serving = False
    _model: Any = None
    """Of the request that was handed on last; while sequences are served, theirs."""
    _entering: Held | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._held: deque[Held] = deque()
        super().__init__(*args, **kwargs)

    # Requests.

    def _next_request(self, timeout: float | None = None) -> Any:
        """Return the next request that stock is to serve, None when there is none now.

        Stock gives no timeout while it serves a batch, and then nothing here waits. A request
        that must wait for what a plugin fetches lets others pass, but never one that would end the
        batch: another model's, or one that cannot be batched. A client has one request at a time,
        so its requests stay in order. With nothing being served, nobody is held up by anybody:
        the oldest enters.
        """
        self._set_serving(timeout is None)
        if self._is_distributed or not manager.is_implemented("fetch_ahead"):
            request = super()._next_request(timeout)
        elif timeout is None:
            request = self._enter(self._next_ready())
        elif self._held:
            request = self._enter(self._held.popleft())
        else:
            queued = super()._next_request(timeout)
            request = self._enter(Held(queued) if queued is not None else None)
        if request is not None:
            self._set_serving(True)
        return request

    def _set_serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            manager.ask_safely("serving_changed", serving=serving)

    def _enter(self, held: Held | None) -> Any:
        """Hand a request on; it is tokenized next, or its model loaded."""
        if held is None:
            return None
        self._entering = held
        self._model = held.queued[2].model
        return held.queued

    def _next_ready(self) -> Held | None:
        while (queued := super()._next_request(None)) is not None:
            self._held.append(Held(queued))
        for held in list(self._held):
            joins = self._joins(held)
            if not joins and held is not self._held[0]:
                break
            if joins and held.rendered is None:
                self._begin(held)
            if not joins or held.is_ready:
                self._held.remove(held)
                return held
        if self._held and not isinstance(self._time_budget, UntilReady):
            self._time_budget = UntilReady(self._time_budget, self._held)
        return None

    def _joins(self, held: Held) -> bool:
        """Say whether a request can enter the batch that is being served."""
        _, request, args = held.queued
        return args.model == self._model and self._is_batchable(args) and has_text_only(request)

    def _begin(self, held: Held) -> None:
        """Tokenize a request and let plugins fetch what it needs; a failure is its client's."""
        _, request, args = held.queued
        tokenizer = self.model_provider.tokenizer
        try:
            held.rendered = self._render(tokenizer, request, args)
        except Exception as error:
            held.rendered = error
            return
        if held.rendered.prompt is not None:
            held.is_fetched = manager.ask_safely(
                "fetch_ahead",
                request=request,
                args=args,
                tokenizer=tokenizer,
                prompt=held.rendered.prompt,
            )

    # Tokenizing.

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        """Return stock's tuple; its ids know their request.

        Stock reports what this raises to the client. So `prepare_messages`, which decides what
        the model is told, may refuse a request; `prepare_prompt` only makes it faster.
        """
        rendered = self._rendered_before(request, tokenizer)
        if rendered is None:
            rendered = self._render(tokenizer, request, args)
        if rendered.prompt is None:
            return rendered.stock
        prepared = prepare_prompt(request, args, tokenizer, rendered.prompt)
        return (
            RequestTokens(prepared.ids, request),
            list(prepared.segments),  # stock pops from these two
            list(prepared.segment_types),
            *rendered.stock[3:],
        )

    def _rendered_before(self, request: Any, tokenizer: Any) -> Rendered | None:
        """Return what was made of a request while it was held; raise what was raised then."""
        held, self._entering = self._entering, None
        if held is None or held.rendered is None or held.queued[1] is not request:
            return None
        if isinstance(held.rendered, Exception):
            raise held.rendered
        return held.rendered if held.rendered.tokenizer is tokenizer else None

    def _render(self, tokenizer: Any, request: Any, args: Any) -> Rendered:
        if request.request_type == "chat":
            manager.ask("prepare_messages", request=request, args=args, tokenizer=tokenizer)
        stock = super()._tokenize(tokenizer, request, args)
        ids, segments, segment_types, *rest = stock
        if not ids:
            # Nothing catches what the batch generator raises later, and its thread would die.
            raise ValueError("the prompt has no tokens")
        if not isinstance(ids[0], int):
            raise ValueError("the prompt must be a single string")
        # From 0.32.1 the images of a prompt come last; their positions count on these very ids.
        has_images = len(rest) > 1 and rest[1] is not None
        prompt = None if has_images else Prompt(ids, segments, segment_types)
        return Rendered(request, tokenizer, stock, prompt)


class UntilReady:
    """Stock's time budget for a batch, which ends earlier when a held request becomes ready."""

    def __init__(self, budget: Iterable[None], held: Iterable[Held]) -> None:
        self._budget = budget
        self._held = held

    def __iter__(self) -> Iterator[None]:
        for _ in self._budget:
            yield
            if any(held.is_ready for held in self._held):
                return


def has_text_only(request: Any) -> bool:
    """Tell whether no message of a request holds anything but text, such as an image."""
    contents = (message.get("content") for message in request.messages or ())
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, dict) and part.get("type") == "text" for part in parts)


def prepare_prompt(request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Prompt:
    """Return what the plugins make of a prompt: the prompt itself, if they fail or do not care."""
    prepared = manager.ask_safely(
        "prepare_prompt", request=request, args=args, tokenizer=tokenizer, prompt=prompt
    )
    if prepared is None or prepared is prompt:
        return prompt
    if not is_cut_well(prepared):
        logger.error(
            "hook prepare_prompt returned segments that are not its ids cut up; "
            "the rendered prompt is used"
        )
        return prompt
    assert isinstance(prepared, Prompt)
    return prepared


def is_cut_well(prompt: Prompt) -> bool:
    """Tell whether a prompt has ids and its segments, none empty, are these ids."""
    joined = [token for segment in prompt.segments for token in segment]
    return (
        len(prompt.segments) == len(prompt.segment_types)
        and all(prompt.segments)
        and bool(joined)
        and joined == prompt.ids
    )
