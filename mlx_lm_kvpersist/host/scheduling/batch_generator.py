"""The server's batch generator: steps of the replies, and between them prompts that are computed.

Prompts come from stock's queue and are computed in turns (`prefill.py`). Replies that memory has no
room for are parked: they go back to that queue. So do prompts that failed in one call.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ClientGone
from ...ranks import ranks
from ..answers import PARKED, PREFILL, REPLY, BatchMemory, PrefillLimits, Prompt
from ..manager import Taken, TakenTokens
from .guesses import Guesses
from .model_provider import PluginCaches
from .prefill import Prefill, Prefills
from .reply import WEIGH_EVERY
from .step_failures import Step

if TYPE_CHECKING:
    from mlx_lm.generate import BatchGenerator as Stock
else:
    Stock = object

CLEAR_EVERY = 512
"""Steps of the replies after which freed memory is given back, as in stock."""

COUNTERS_OF_0_31 = {
    "prompt_tokens": "_prompt_tokens_counter",
    "prompt_time": "_prompt_time_counter",
    "generation_tokens": "_gen_tokens_counter",
    "generation_steps": "_steps_counter",
}
"""Where mlx-lm 0.31.3 counts what later versions have in `_counters`."""

logger = logging.getLogger(__name__)


class PluginBatchGenerator(Stock):  # type: ignore[misc]
    """Merges caches and computes prompts as plugins say, else as stock does. Generation thread.

    To merge one layer's caches of several sequences, mlx-lm asks the cache of the first sequence
    only: `caches[0][i].merge(...)`. So something that only merges stands for each of the first
    sequence's caches while the batch is made. `_make_batch` itself stays stock's.
    """

    _generation_batch: Any
    _prompt_batch: Any
    """`Prefills` where a plugin limits how prompts are computed."""
    _currently_processing: list[Any]

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._ranks = ranks()
        caches = getattr(model, "make_cache", None)
        self._caches = caches if isinstance(caches, PluginCaches) else None
        self._limits: PrefillLimits | None = self._caches.limits if self._caches else None
        self._response = type(self._prompt_batch).Response
        if self._caches is not None and self._limits is not None:
            self._prompt_batch = Prefills(model, self._caches, self._limits, self.prefill_step_size)
        self._guesses = Guesses(self._caches.most_taken_back) if self._caches is not None else None
        self._memory: BatchMemory = self._caches or BatchMemory()
        self._weighed: tuple[int, ...] = ()
        """What ran when its memory was looked at last."""
        self._parked: dict[int, Any] = {}
        """By uid: what went back to the queue without its caches, until its plugin lets it enter.

        Of a reply it has the row: stock's batch of this reply alone, without caches, with its next
        token, which is sampled already, its sampler and counters. Of a prompt it has None.
        """
        self._returning: dict[int, Any] = {}
        """The same, while its caches are made again. It is computed by itself."""
        self._n_steps = 0
        self._ended: list[Any] = []
        """What the step that runs has to say of prompts."""
        self._told: list[Any] = []
        """What the last step had to say of replies."""
        self._copied: list[int] = []
        """The replies whose rows make up the caches as they are evaluated."""

    def _make_batch(self, n: int) -> Any:
        if self._caches is not None:
            queue = self._unprocessed_sequences
            merge = self._caches.merge
            adapted = [SimpleNamespace(merge=partial(merge, cache)) for cache in queue[0][3]]
            queue[0] = (*queue[0][:3], adapted, *queue[0][4:])
        return super()._make_batch(n)

    # One step.

    def _next(self) -> tuple[list[Any], list[Any]]:
        """Make one step of the replies, then compute one chunk of one prompt, or of several.

        Returns stock's responses for prompts and for replies. A prompt's response says how far it
        is, and whether a segment has ended: then stock asks for its caches, and saves them.
        """
        if self._limits is None:
            stock: tuple[list[Any], list[Any]] = super()._next()
            return stock
        for told in self._told:
            told.prompt_cache = None  # it is saved; stock keeps the list for another step
        self._ended = []
        self._told, step_s = self._decode()
        self._drop_stopped()
        self._weigh()
        self._return_parked()
        self._admit()
        beside = len(self._generation_batch) > 0
        for group in self._prompt_batch.ready(self._returning, beside=beside):
            self._guarded(group, partial(self._begin_replies, group), "reply")
        if self._prompt_batch.unready:
            chunk = {self._prompt_batch.turn(): 0}
            self._guarded(chunk, partial(self._compute, chunk, step_s), "prompt")
        return self._ended, self._told

    def _decode(self) -> tuple[list[Any], float]:
        """Make one step of all replies; return their tokens, and how long it took."""
        assert self._caches is not None and self._limits is not None
        rows, batch, is_guessed = self._rows(), self._generation_batch, False
        self._n_steps += 1
        if self._n_steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        try:
            self._copy_rows()
            started = time.perf_counter()
            if self._guesses is None or len(self._prompt_batch):
                replies = batch.next()
            else:
                replies, is_guessed = self._guesses.next(batch)
                self._n_steps += len(replies) - 1 if is_guessed else 0
        except Exception as error:
            self._fail_replies(rows, error)
            replies, step_s = [], 0.0
        else:
            step_s = time.perf_counter() - started
            if replies:
                self._caches.failures.succeeded("reply")
                self._count(generation_steps=1, generation_tokens=len(replies), decode_time=step_s)
        is_alone = not (is_guessed or len(self._prompt_batch))
        self._limits.stepped(len(rows) if replies else 0, step_s if is_alone else None)
        return replies, step_s

    def _count(self, **amounts: float) -> None:
        """Add to stock's counters, from which `stats` is made."""
        counters = getattr(self, "_counters", None)
        for name, amount in amounts.items():
            if counters is not None:
                setattr(counters, name, getattr(counters, name) + amount)
            elif old := COUNTERS_OF_0_31.get(name):
                setattr(self, old, getattr(self, old) + amount)

    def _rows(self) -> list[tuple[int, Any]]:
        """Return the uid and the tokens of every reply."""
        return list(zip(self._generation_batch.uids, self._generation_batch.tokens, strict=True))

    def _drop_stopped(self) -> None:
        """Give up the prompts whose clients went away."""
        queue, prefills = self._unprocessed_sequences, self._prompt_batch.all
        if not (queue or prefills):
            return
        tokens = {one[0]: one[4] for one in queue} | {one.uid: one.tokens for one in prefills}
        replies = {uid: reply_of(its) for uid, its in tokens.items()}
        stopped = self._ranks.first(
            lambda: [uid for uid, reply in replies.items() if reply and reply.is_stopped],
            "whose clients have left",
        )
        for sequence in [one for one in queue if one[0] in stopped]:
            queue.remove(sequence)
            self._end(sequence[0], sequence[4], ClientGone())
        for prefill in [one for one in prefills if one.uid in stopped]:
            self._fail(prefill, ClientGone())

    # Memory.

    def _copy_rows(self) -> None:
        """Make the caches of the rows that came or stayed."""
        batch = self._generation_batch
        if batch.uids != self._copied:
            self._copied = list(batch.uids)
            self._eval_parts(batch.prompt_cache)

    def _eval_parts(self, caches: Sequence[Any]) -> None:
        """Make caches, some layers at a time.

        MLX would make those of all layers before it frees the old ones: twice the memory.
        """
        assert self._limits is not None
        n_bytes, layers = 0, list[Any]()
        for cache in caches:
            n_bytes += cache.nbytes
            layers.append(cache.state)
            if n_bytes > self._limits.max_unused_bytes // 2:
                mx.eval(layers)
                n_bytes, layers = 0, []

    def _weigh(self) -> None:
        """Tell the plugin what runs, where that has changed; park replies that it has no room for.

        Looking at every layer's cache takes a while, so not every step does.
        """
        queue, replies = self._unprocessed_sequences, self._generation_batch
        n_done = sum(n_done for _, n_done, _ in self._currently_processing)
        n_periods = self._n_steps // WEIGH_EVERY
        running = len(replies), len(self._prompt_batch), len(queue), n_done, n_periods
        if running == self._weighed:
            return
        self._weighed = running
        prompts = [len(one.tokens) + sum(map(len, one.segments)) for one in self._prompt_batch.all]
        prompts += [len(one[4]) + _n_left(one) for one in queue if one[0] not in self._parked]
        while not self._fits(prompts):
            youngest = max(range(len(replies)), key=lambda place: replies.uids[place], default=-1)
            if len(replies) + len(prompts) < 2 or not len(replies):
                return  # alone it always goes on
            if not isinstance(replies.tokens[youngest], TakenTokens):
                return
            self._park(youngest)

    def _fits(self, prompts: Sequence[int]) -> bool:
        tokens = self._generation_batch.tokens
        fits = self._memory.weigh(list(map(len, tokens)), prompts, self.prompt_cache_nbytes)
        return self._ranks.told(fits, "whether memory suffices")

    def _park(self, place: int) -> None:
        """Take a reply out of the batch; the plugin keeps its caches."""
        batch, tokens = self._generation_batch, self._generation_batch.tokens[place]
        row = copy.copy(batch)
        row.prompt_cache, row._current_tokens, row._current_logprobs = [], None, []
        row.filter([place])
        for name in ("samplers", "logits_processors"):  # 0.31.3 leaves lists without any as it is
            setattr(row, name, getattr(batch, name)[place : place + 1])
        mx.eval(row._next_tokens, row._next_logprobs)
        uid, ids = batch.uids[place], [*tokens, row._next_tokens.item()]
        tokens.taken.insert(tokens, batch.extract_cache(place), PARKED)
        batch.filter([i for i in range(len(batch)) if i != place])
        self._copy_rows()
        self._put_back(uid, ids, tokens.taken, row, row)
        logger.info("a reply of %d tokens waits for memory", len(tokens))

    def _put_back(self, uid: int, ids: list[int], taken: Taken, batch: Any, row: Any) -> None:
        """Let the first sequence of stock's `batch` enter once more, by its ids."""
        taken.resume(Prompt(ids, [ids], ["assistant"]))
        stops = getattr(batch, "stop_sequences", None) or batch.state_machines
        more = batch.samplers[0], batch.logits_processors[0], stops[0]
        held = TakenTokens([], taken)
        self._unprocessed_sequences.append((uid, [ids], batch.max_tokens[0], [], held, *more))
        self._parked[uid] = row

    def _return_parked(self) -> None:
        """Let the parked sequences that there is room for make their caches again."""
        queue = self._unprocessed_sequences
        for sequence in sorted(one for one in queue if one[0] in self._parked):
            uid, (ids,), n_most, _, tokens, *more = sequence
            is_alone = not (len(self._generation_batch) or len(self._prompt_batch))
            is_alone = is_alone and len(queue) == len(self._parked)
            taken = tokens.taken
            if not is_alone and not self._ranks.first(taken.advance, "whether a reply returns"):
                continue
            self._returning[uid] = self._parked.pop(uid)
            queue.remove(sequence)
            try:
                prompt, caches, n_cached = taken.enter(), taken.caches, taken.n_cached
            except ClientGone as error:
                self._end(uid, tokens, error)
                continue
            taken.caches = None
            if prompt is None or list(prompt.ids) != ids or caches is None:
                caches, n_cached = make_prompt_cache(self.model), 0
            segments = [ids[n_cached:-1], ids[-1:]] if ids[n_cached:-1] else [ids[-1:]]
            held = TakenTokens(ids[:n_cached], taken)
            queue.appendleft((uid, segments, n_most, list(caches), held, *more))

    def _admit(self) -> None:
        """Let prompts begin, as many at a time as the server's options allow."""
        queue = self._unprocessed_sequences
        n_running = len(self._generation_batch) + len(self._prompt_batch)
        n_free = min(
            self.prefill_batch_size - len(self._prompt_batch),
            self.completion_batch_size - n_running,
        )
        waiting = [one for one in queue if one[0] not in self._parked]
        if waiting and n_free <= 0 and n_running < self.completion_batch_size:
            shortest = min(waiting, key=_n_left)
            if all(_n_left(shortest) < one.n_left for one in self._prompt_batch.all):
                waiting, n_free = [shortest], 1  # it will not take long
        for sequence in waiting[: max(n_free, 0)]:
            uid, tokens = sequence[0], sequence[4]
            queue.remove(sequence)
            queue.appendleft(sequence)  # stock takes the first
            try:
                batch = self._make_batch(1)
            except Exception as error:
                del self._currently_processing[len(self._prompt_batch) :]
                self._end(uid, tokens, error)
                continue
            progress = self._currently_processing[-1]
            self._prompt_batch.all.append(Prefill(uid, batch, batch.tokens[0], progress))

    def _compute(self, chunk: dict[Prefill, int], step_s: float) -> list[Any]:
        """Compute the next tokens of the prompt in `chunk`, and of those that join it."""
        started = time.perf_counter()
        beside = len(self._generation_batch) > 0
        self._prompt_batch.compute(chunk, step_s if beside else None, self._returning)
        taken_s = time.perf_counter() - started
        self._count(prompt_tokens=sum(chunk.values()), prompt_time=taken_s)
        self._give_back()
        return [self._computed(prefill) for prefill in chunk]

    def _computed(self, prefill: Prefill) -> Any:
        """Return how far a prompt is; let what was computed so far be saved."""
        response = self._response(prefill.uid, tuple(prefill.progress[1:]), False, False)
        if not prefill.segments[0]:
            prefill.segments.pop(0)
            response.end_of_segment = True
        elif isinstance(prefill.tokens, TakenTokens):
            # The client may go, or the process die.
            caches = prefill.batch.extract_cache(0)
            prefill.tokens.taken.insert(prefill.tokens, caches, PREFILL)
        return response

    def _save_interrupted(self, uids: Collection[int]) -> None:
        """Let the plugin keep replies that are about to be removed, as those that have ended."""
        for place, (uid, tokens) in enumerate(self._rows()):
            if uid in uids and isinstance(tokens, TakenTokens):
                try:
                    tokens.taken.insert(tokens, self._generation_batch.extract_cache(place), REPLY)
                except Exception:  # nothing catches it in stock
                    logger.exception("an interrupted reply could not be saved")

    def _begin_replies(self, prefills: Sequence[Prefill]) -> list[Any]:
        """Let the last tokens of prompts join the replies."""
        rows, batch = self._rows(), self._prompt_batch.merged(prefills)
        begun = self._returning.pop(prefills[0].uid, None)
        if begun is None:
            self._eval_parts(batch.prompt_cache)
            begun = batch.generate([one.segments[0] for one in prefills])
        else:
            begun.prompt_cache = batch.prompt_cache
        self._drop(prefills)
        try:
            self._generation_batch.extend(begun)
        except Exception as error:
            self._fail_replies([*rows, *((one.uid, one.tokens) for one in prefills)], error)
            return []
        self._give_back()
        ended = [(one.uid, (one.progress[2],) * 2) for one in prefills]
        return [self._response(uid, progress, True, True) for uid, progress in ended]

    def _drop(self, prefills: Collection[Prefill]) -> None:
        """Forget prompts that are computed, or never will be."""
        keep = [i for i, one in enumerate(self._prompt_batch.all) if one not in prefills]
        self._prompt_batch.filter(keep)
        self._currently_processing = [self._currently_processing[i] for i in keep]

    def _give_back(self) -> None:
        """Give freed memory back where there is much of it."""
        assert self._limits is not None
        if mx.get_cache_memory() > self._limits.max_unused_bytes:
            mx.clear_cache()

    # Failures. Stock forgets a request after a response, when its context has been told to stop.

    def _guarded(
        self, prefills: Collection[Prefill], act: Callable[[], list[Any]], step: Step
    ) -> None:
        """Act on prompts. What that raises ends a single one's request.

        Several are put back, to be computed one by one: the one at fault ends alone, and where
        memory was short, one needs less. Their caches are lost, and what is stored is restored.
        """
        assert self._caches is not None
        try:
            self._ended += act()
            if step == "prompt":  # the first step of a reply is not evaluated yet
                self._caches.failures.succeeded(step)
        except Exception as error:
            together = list(prefills)
            for prefill in together:
                if len(together) == 1 or not isinstance(prefill.tokens, TakenTokens):
                    self._fail(prefill, error)
                    continue
                self._drop([prefill])
                ids = [*prefill.tokens, *chain.from_iterable(prefill.segments)]
                self._put_back(prefill.uid, ids, prefill.tokens.taken, prefill.batch, None)
            if len(together) > 1:
                logger.warning("prompts failed together and are tried by themselves: %r", error)
            self._caches.failures.failed(error, step)

    def _fail(self, prefill: Prefill, error: Exception) -> None:
        """End the request of a prompt that is being computed."""
        self._drop([prefill])
        self._end(prefill.uid, prefill.tokens, error)

    def _fail_replies(self, rows: list[tuple[int, Any]], error: Exception) -> None:
        """End all replies: after a step that failed half way, none can be computed on."""
        self._generation_batch = type(self._generation_batch).empty(self.model, self.sampler)
        for uid, tokens in rows:
            self._end(uid, tokens, error)
        if self._caches is not None:
            self._caches.failures.failed(error, "reply")

    def _end(self, uid: int, tokens: Any, error: Exception) -> None:
        """End a request with an error; raise it where no plugin took the request."""
        self._forget(uid)
        reply = reply_of(tokens)
        if reply is None:
            raise error
        if not isinstance(error, ClientGone):
            logger.error("a request failed", exc_info=error)
        reply.fail(error.with_traceback(None))  # its frames hold the caches
        self._ended.append(self._response(uid, (0, 0), False, False))

    # What stock asks of its generator.

    def remove(self, uids: Collection[int], return_prompt_caches: bool = False) -> Any:
        self._save_interrupted(uids)
        caches = super().remove(uids, return_prompt_caches)
        for uid in uids:
            self._forget(uid)
        return caches

    def _forget(self, uid: int) -> None:
        self._parked.pop(uid, None)
        self._returning.pop(uid, None)


def _n_left(sequence: Any) -> int:
    """Return how many tokens of a sequence in stock's queue are to be computed."""
    return sum(map(len, sequence[1]))


def reply_of(tokens: Any) -> Any:
    """Return where the tokens of a sequence go, None if no plugin took its request."""
    return tokens.taken.reply if isinstance(tokens, TakenTokens) else None
