"""The server's batch generator: steps of the replies and, between them, chunks of prompts.

A prompt waits in the queue, is computed in chunks (`prefill.py`), and joins the replies. If memory
is short, a reply is parked: its caches are saved, and it continues later.

Rank 0 makes the `Decision` of each step, and all ranks carry it out.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ClientGone
from ..hooks import PARKED, PREFILL, REPLY, Prompt
from ..manager import TakenTokens
from .logprobs import next_logprobs, set_logprobs
from .model_provider import PluginCaches, Step
from .prefill import Prefill, Prefills, give_back
from .prompt_lookup import PromptLookup
from .waiting import WEIGH_EVERY

if TYPE_CHECKING:
    from mlx_lm.generate import BatchGenerator as Stock
else:
    Stock = object

CLEAR_EVERY = 512
"""Freed memory goes back to the system after this number of reply steps, as in mlx-lm."""

LOOKS_FIRST: ContextVar[Callable[[], bool]] = ContextVar("looks_first", default=lambda: False)
"""A function that tells whether the server looks for requests before the generator's next step."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decision:
    """The actions of one step; each sequence is named by its uid."""

    stopped: Sequence[int]
    """The prompts whose replies nobody needs any more."""
    parks: bool
    """Whether the youngest reply is parked, because memory does not suffice."""
    returning: Sequence[int]
    begins: Sequence[Sequence[int]]
    """Groups of prompts whose replies begin together."""
    chunk: Mapping[int, int]
    """How many tokens of each prompt are computed in one call. The chosen prompt is first."""
    error: Exception | None
    """The error that a plugin raised while the chunk was chosen."""


def plugin_batch_generator(stock: type[Any]) -> Callable[..., Any]:
    """Return a factory of batch generators: ours if a plugin makes the model's caches."""
    ours = type(PluginBatchGenerator.__name__, (PluginBatchGenerator, stock), {})

    @wraps(stock, updated=())
    def make_batch_generator(model: Any, *args: Any, **kwargs: Any) -> Any:
        is_kept = isinstance(getattr(model, "make_cache", None), PluginCaches)
        return (ours if is_kept else stock)(model, *args, **kwargs)

    return make_batch_generator


class PluginBatchGenerator(Stock):  # type: ignore[misc]
    """Computes prompts within the plugin's limits, and replies like mlx-lm. Generation thread.

    Each prompt is a `PromptProcessingBatch` of one row, and the replies are one `GenerationBatch`.
    """

    _unprocessed_sequences: deque[Any]

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._looks_first = LOOKS_FIRST.get()
        self._caches: PluginCaches = model.make_cache
        self._ranks = self._caches.ranks
        self._limits = self._caches.limits
        self.queue: deque[Prefill] = deque()
        self.prefills = Prefills(model, self._caches, self.prefill_step_size)
        self.replies: Any = GenerationBatch.empty(model, self.sampler)
        self.parked: list[Prefill] = []
        """The sequences without caches that wait until their plugin lets them enter."""
        self._lookup = PromptLookup(self._caches.most_taken_back)
        self._weighed: tuple[int, ...] = ()
        """The result of `_running` when the memory account was last updated."""
        self._is_short = False
        """Whether the last decision parked a reply; if so, no queued prompt begins."""
        self._n_steps = 0
        self._step_s = 0.0
        """How long the last step took that ran without prompts."""
        self._progress: list[Any] = []
        """The responses for prompts in the running step."""
        self._tokens: list[Any] = []
        """The responses for replies in the last step."""
        self._copied: list[int] = []
        """The uids of the replies when their caches were last evaluated."""

    def insert_segments(self, segments: Any, *args: Any, **kwargs: Any) -> Any:
        """Queue sequences; mlx-lm checks them, and assigns uids."""
        uids = super().insert_segments(segments, *args, **kwargs)
        while self._unprocessed_sequences:
            self.queue.append(Prefill(*self._unprocessed_sequences.popleft()))
        return uids

    def next(self) -> tuple[list[Any], list[Any]]:
        """Make one step of the replies, then compute one chunk of one or more prompts.

        Returns mlx-lm's responses for prompts and for replies. If both lists are empty, mlx-lm
        looks for requests.
        """
        if self._looks_first():
            return [], []
        with mx.stream(self.stream):
            for response in self._tokens:
                response.prompt_cache = None  # already saved, but stock keeps the response
            self._progress = []
            self._tokens, step_s = self._decode()
            if not self._is_short:
                self._admit()
            running = self._running()
            if self.prefills.all or self.queue or self.parked or running != self._weighed:
                decide = partial(self._decide, running, step_s)
                self._apply(self._ranks.first(decide, "a step"), running)
            return self._progress, self._tokens

    def next_generated(self) -> list[Any]:
        """Make steps until a step has responses for replies, or none; return those for replies.

        The server calls `next` only; programs and mlx-lm's own tests call this method.
        """
        while True:
            prompts, replies = self.next()
            if replies or not prompts:
                return replies

    def extract_cache(self, uids: Collection[int]) -> dict[int, tuple[Any, Any]]:
        """Return the caches and the tokens of sequences, by uid."""
        sequences: dict[int, tuple[Any, Any]] = {
            waiting.uid: (waiting.caches, waiting.tokens)
            for waiting in chain(self.queue, self.parked)
        }
        sequences |= {
            prefill.uid: (prefill.batch.extract_cache(0), prefill.tokens)
            for prefill in self.prefills.all
            if prefill.uid in uids
        }
        for place, (uid, tokens) in enumerate(self._rows()):
            if uid in uids:
                sequences[uid] = self.replies.extract_cache(place), tokens
        return {uid: sequences[uid] for uid in uids if uid in sequences}

    def remove(self, uids: Collection[int], return_prompt_caches: bool = False) -> Any:
        """Remove sequences. The plugin saves an interrupted reply like a reply that has ended."""
        for place, (uid, tokens) in enumerate(self._rows()):
            if uid in uids and isinstance(tokens, TakenTokens):
                try:
                    tokens.taken.insert(tokens, self.replies.extract_cache(place), REPLY)
                except Exception:  # stock would not catch the exception
                    logger.exception("kvpersist: an interrupted reply could not be saved")
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        self.queue = deque(waiting for waiting in self.queue if waiting.uid not in uids)
        self.parked = [parked for parked in self.parked if parked.uid not in uids]
        self.prefills.drop([prefill for prefill in self.prefills.all if prefill.uid in uids])
        keep = [place for place, uid in enumerate(self.replies.uids) if uid not in uids]
        if len(keep) < len(self.replies):
            self.replies.filter(keep)
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        waiting = chain.from_iterable(prefill.caches for prefill in self.queue)
        computed = chain.from_iterable(prefill.batch.prompt_cache for prefill in self.prefills.all)
        return sum(cache.nbytes for cache in chain(waiting, computed, self.replies.prompt_cache))

    def _decode(self) -> tuple[list[Any], float]:
        rows, is_drafted = self._rows(), False
        self._n_steps += 1
        if self._n_steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        try:
            self._copy_rows()
            logprobs = next_logprobs(self.replies)
            started = time.perf_counter()
            if self.prefills.all:
                responses = self.replies.next()
            else:
                responses, is_drafted = self._lookup.next(self.replies)
                self._n_steps += len(responses) - 1 if is_drafted else 0
            set_logprobs(responses, logprobs)
        except Exception as error:
            self._fail_replies(rows, error)
            responses, step_s = [], 0.0
        else:
            step_s = time.perf_counter() - started
            if responses:
                self._caches.failures.succeeded("reply")
        is_alone = not (is_drafted or self.prefills.all)
        if responses and is_alone:
            self._step_s = step_s
        self._limits.stepped(len(rows) if responses else 0, step_s if is_alone else None)
        return responses, step_s

    def _rows(self) -> list[tuple[int, Any]]:
        return list(zip(self.replies.uids, self.replies.tokens, strict=True))

    def _running(self) -> tuple[int, ...]:
        """Return numbers about the running sequences; if one changes, `_weigh` asks the plugin."""
        n_left = sum(prefill.n_left for prefill in self.prefills.all)
        n_periods = self._n_steps // WEIGH_EVERY
        return len(self.replies), len(self.prefills.all), len(self.queue), n_left, n_periods

    def _decide(self, running: tuple[int, ...], step_s: float) -> Decision:
        """Only rank 0 calls this."""
        prompts = [*self.queue, *self.prefills.all, *self.parked]
        replies = {prompt.uid: reply_of(prompt.tokens) for prompt in prompts}
        stopped = [uid for uid, reply in replies.items() if reply and reply.is_stopped]
        parks = self._weigh(running, stopped)
        returning = list[int]()
        for parked in sorted(self.parked, key=lambda parked: parked.uid):
            is_alone = not (len(self.replies) or self.prefills.all or self.queue or returning)
            if parked.uid not in stopped and (is_alone or parked.tokens.taken.advance()):
                returning.append(parked.uid)
        n_replies = len(self.replies) - parks
        prefills = self.prefills.decide(stopped, step_s, beside=n_replies > 0)
        return Decision(stopped, parks, returning, *prefills)

    def _apply(self, decision: Decision, running: tuple[int, ...]) -> None:
        if not self._ranks.decides:
            self._weigh(running, decision.stopped)
        for prompt in [*self.queue, *self.prefills.all, *self.parked]:
            if prompt.uid in decision.stopped:
                self._fail(prompt, ClientGone())
        self._is_short = decision.parks
        if decision.parks:
            self._park(self._youngest())
        for parked in [parked for parked in self.parked if parked.uid in decision.returning]:
            self._return(parked)
        by_uid = {prefill.uid: prefill for prefill in self.prefills.all}
        for uids in decision.begins:
            group = [by_uid[uid] for uid in uids]
            self._guarded(group, partial(self._begin_replies, group), "reply")
        if decision.chunk:
            chunk = {by_uid[uid]: n_tokens for uid, n_tokens in decision.chunk.items()}
            self._guarded(chunk, partial(self._compute, chunk, decision.error), "prompt")

    def _weigh(self, running: tuple[int, ...], stopped: Collection[int]) -> bool:
        """Tell the plugin which sequences run, if they changed; return whether to park a reply."""
        if running == self._weighed:
            return False
        self._weighed = running
        computed = [*self.prefills.all, *self.queue]
        prompts = [
            len(prompt.tokens) + prompt.n_left for prompt in computed if prompt.uid not in stopped
        ]
        replies = list(map(len, self.replies.tokens))
        if self._caches.weigh(replies, prompts, self.prompt_cache_nbytes):
            return False
        # A sequence that is alone always continues.
        is_alone = len(replies) + len(prompts) < 2 or not replies
        return not is_alone and isinstance(self.replies.tokens[self._youngest()], TakenTokens)

    def _youngest(self) -> int:
        return max(range(len(self.replies)), key=lambda place: self.replies.uids[place])

    def _park(self, place: int) -> None:
        batch, tokens = self.replies, self.replies.tokens[place]
        row = row_of(batch, place)
        ids = [*tokens, row._next_tokens.item()]
        tokens.taken.insert(tokens, batch.extract_cache(place), PARKED)
        batch.filter([row_place for row_place in range(len(batch)) if row_place != place])
        self._copy_rows()
        own = row.samplers[0], row.logits_processors[0], stops_of(row)[0]
        parked = Prefill(row.uids[0], [], row.max_tokens[0], [], tokens, *own, row=row)
        self._wait_again(parked, ids)
        logger.info("kvpersist: a reply of %d tokens waits for memory", len(tokens))

    def _wait_again(self, prompt: Prefill, ids: list[int]) -> None:
        """Let a sequence wait without caches until its plugin lets it enter again with `ids`."""
        request = prompt.tokens.taken
        request.resume(Prompt(ids, [ids], ["user"]))
        self.parked.append(prompt.again([ids], TakenTokens([], request), []))

    def _return(self, parked: Prefill) -> None:
        self.parked.remove(parked)
        (ids,), request = parked.segments, parked.tokens.taken
        try:
            prompt, caches, n_cached = request.enter(), request.caches, request.n_cached
        except ClientGone as error:
            self._end(parked.uid, parked.tokens, error)
            return
        request.caches = None
        self._ranks.note(-1 if prompt is None else n_cached)
        if prompt is None or list(prompt.ids) != ids or caches is None:
            caches, n_cached = make_prompt_cache(self.model), 0
        segments = [ids[n_cached:-1], ids[-1:]] if ids[n_cached:-1] else [ids[-1:]]
        tokens = TakenTokens(ids[:n_cached], request)
        self.queue.appendleft(parked.again(segments, tokens, list(caches)))

    def _admit(self) -> None:
        n_prefills = len(self.prefills.all)
        n_running = len(self.replies) + n_prefills
        n_free = min(self.prefill_batch_size - n_prefills, self.completion_batch_size - n_running)
        waiting = list(self.queue)
        if waiting and n_free <= 0 and n_running < self.completion_batch_size:
            shortest = min(waiting, key=lambda prompt: prompt.n_left)
            if all(shortest.n_left < prefill.n_left for prefill in self.prefills.all):
                waiting, n_free = [shortest], 1  # short prompts end soon
        for prompt in waiting[: max(n_free, 0)]:
            self.queue.remove(prompt)
            try:
                prompt.batch = self._batch_of(prompt)
            except Exception as error:
                self._end(prompt.uid, prompt.tokens, error)
                continue
            self.prefills.all.append(prompt)

    def _batch_of(self, prompt: Prefill) -> Any:
        batch = PromptProcessingBatch(
            model=self.model,
            uids=[prompt.uid],
            caches=[[]],
            tokens=[prompt.tokens],
            prefill_step_size=self.prefill_step_size,
            samplers=[prompt.sampler],
            fallback_sampler=self.sampler,
            logits_processors=[prompt.processors],
            max_tokens=[prompt.max_tokens],
        )
        batch.prompt_cache = [self._caches.merge(cache) for cache in prompt.caches]
        stops_of(batch)[:] = [prompt.stops]
        prompt.caches = []
        return batch

    def _compute(self, chunk: dict[Prefill, int], error: Exception | None) -> None:
        if error is not None:
            raise error
        step = self.replies._next_tokens if len(self.replies) else None
        self.prefills.compute(chunk, step, self._step_s)
        for prefill in chunk:
            response = self._response(prefill)
            if not prefill.segments[0]:
                prefill.segments.pop(0)
                response.end_of_segment = True
            elif isinstance(prefill.tokens, TakenTokens):
                # Saved now: the client may leave, or the process may be killed.
                caches = prefill.batch.extract_cache(0)
                prefill.tokens.taken.insert(prefill.tokens, caches, PREFILL)
            self._progress.append(response)

    def _begin_replies(self, prefills: Sequence[Prefill]) -> None:
        rows, batch, row = self._rows(), self.prefills.merged(prefills), prefills[0].row
        if row is None:
            self._eval_parts(batch.prompt_cache)
            row = batch.generate([prefill.segments[0] for prefill in prefills])
        else:
            row.prompt_cache = batch.prompt_cache
        self.prefills.drop(prefills)
        try:
            self.replies.extend(row)
        except Exception as error:
            rows += ((prompt.uid, prompt.tokens) for prompt in prefills)
            self._fail_replies(rows, error)
            return
        give_back(self._limits)
        self._progress += [self._response(prefill, is_end=True) for prefill in prefills]

    def _response(self, prompt: Prefill, *, is_end: bool = False) -> Any:
        n_done = prompt.n_tokens - (0 if is_end else prompt.n_left)
        return PromptProcessingBatch.Response(prompt.uid, (n_done, prompt.n_tokens), is_end, is_end)

    def _copy_rows(self) -> None:
        """Evaluate the replies' caches if replies were added or removed."""
        if self.replies.uids != self._copied:
            self._copied = list(self.replies.uids)
            self._eval_parts(self.replies.prompt_cache)

    def _eval_parts(self, caches: Sequence[Any]) -> None:
        """Evaluate caches some layers at a time: MLX frees old arrays only after an evaluation."""
        n_bytes, layers = 0, list[Any]()
        for cache in caches:
            n_bytes += cache.nbytes
            layers.append(cache.state)
            if n_bytes > self._limits.max_unused_bytes // 2:
                mx.eval(layers)
                n_bytes, layers = 0, []

    # Failures. Stock removes a failed request only after one more response, which `_end` adds.

    def _guarded(self, prefills: Collection[Prefill], act: Callable[[], None], step: Step) -> None:
        """Call `act`. If several prompts fail together, each is computed again alone.

        Only the faulty prompt fails then, and a single prompt needs less memory.
        """
        try:
            act()
            if step == "prompt":  # the first step of a reply has not been evaluated yet
                self._caches.failures.succeeded(step)
        except Exception as error:
            together = list(prefills)
            for prefill in together:
                if len(together) == 1 or not isinstance(prefill.tokens, TakenTokens):
                    self._fail(prefill, error)
                    continue
                self.prefills.drop([prefill])
                self._wait_again(prefill, [*prefill.tokens, *chain.from_iterable(prefill.segments)])
            if len(together) > 1:
                logger.warning(
                    "kvpersist: prompts failed together and are tried one at a time: %r", error
                )
            self._caches.failures.failed(error, step)

    def _fail(self, prompt: Prefill, error: Exception) -> None:
        for sequences in (self.queue, self.prefills.all, self.parked):
            if prompt in sequences:
                sequences.remove(prompt)
        self._end(prompt.uid, prompt.tokens, error)

    def _fail_replies(self, rows: list[tuple[int, Any]], error: Exception) -> None:
        """End all replies: after a failed step no reply can continue."""
        self.replies = GenerationBatch.empty(self.model, self.sampler)
        for uid, tokens in rows:
            self._end(uid, tokens, error)
        self._caches.failures.failed(error, "reply")

    def _end(self, uid: int, tokens: Any, error: Exception) -> None:
        """End a request with an error; raise the error if no plugin took the request."""
        reply = reply_of(tokens)
        if reply is None:
            raise error
        if not isinstance(error, ClientGone):
            logger.error("kvpersist: a request failed", exc_info=error)
        reply.fail(error.with_traceback(None))  # the exception's frames refer to the caches
        self._progress.append(PromptProcessingBatch.Response(uid, (0, 0), False, False))


def row_of(batch: Any, place: int) -> Any:
    """Return one row of a batch of replies as a batch, without caches. `batch` does not change."""
    row = copy.copy(batch)
    row.prompt_cache = []
    row.filter([place])
    for name in ("samplers", "logits_processors"):  # mlx-lm 0.31.3 cannot filter lists of None
        setattr(row, name, getattr(batch, name)[place : place + 1])
    return row


def stops_of(batch: Any) -> Any:
    """Return the stop sequences of a batch's rows; mlx-lm 0.31.3 has state machines instead."""
    return batch.stop_sequences if hasattr(batch, "stop_sequences") else batch.state_machines


def reply_of(tokens: Any) -> Any:
    return tokens.taken.reply if isinstance(tokens, TakenTokens) else None
