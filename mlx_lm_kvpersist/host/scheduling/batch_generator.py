"""The server's batch generator: which prompt is computed next, and how much of it at once.

Stock computes up to eight prompts as one padded batch, 2,048 tokens of each at a time, and all
replies wait meanwhile. Here every prompt is computed by itself, in chunks. A chunk beside replies
takes no longer than the plugin allows. If several prompts wait, the one with the least left goes
first, but the oldest one gets every fourth chunk.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ClientGone
from ..answers import PARKED, PREFILL, REPLY, BatchMemory, PrefillLimits, Prompt
from ..manager import TakenTokens
from .model_provider import PluginCaches
from .reply import WEIGH_EVERY

if TYPE_CHECKING:
    from mlx_lm.generate import BatchGenerator as Stock
else:
    Stock = object

CHUNKS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
"""Sizes of chunks: few, because devices compile or tune kernels for each."""

ROUND = 64
"""Long chunks end at multiples of this."""

IDLE_CHUNK_S = 0.3
"""How long a chunk may take while no replies run. A prompt that arrives meanwhile waits for it."""

IDLE_CHUNK = 512
"""The shortest chunk while no replies run: shorter ones are slower on any device."""

MOST_PASSED_OVER = 3
"""After this many chunks of other prompts, the oldest prompt runs."""

CLEAR_EVERY = 512
"""Steps of the replies after which freed memory is given back, as in stock."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Prefill:
    """A prompt that is being computed: a batch of stock's with one row.

    `tokens` are the ids that its caches hold; `segments` those that are left, as stock cut them:
    the last segment is one id.
    """

    uid: int
    batch: Any
    tokens: list[int]
    segments: list[list[int]]
    n_new: int
    """Ids that were to be computed when it began."""
    n_done: int = 0
    passed_over: int = 0

    @property
    def n_left(self) -> int:
        return self.n_new - self.n_done

    @property
    def is_ready(self) -> bool:
        """Whether only the last token is left, with which its reply begins."""
        return len(self.segments) == 1


@dataclass(eq=False)
class Parked:
    """A reply that was taken out of the batch, to make room.

    `row` is stock's batch of this reply alone, without caches: its next token, which is sampled
    already, its sampler, its counters. `ids` end with that token; the caches held all others.
    """

    uid: int
    row: Any
    ids: list[int]

    @property
    def tokens(self) -> Any:
        return self.row.tokens[0]


class PluginBatchGenerator(Stock):  # type: ignore[misc]
    """Merges caches and computes prompts as plugins say, else as stock does. Generation thread.

    To merge one layer's caches of several sequences, mlx-lm asks the cache of the first sequence
    only: `caches[0][i].merge(...)`. So something that only merges stands for each of the first
    sequence's caches while the batch is made. `_make_batch` itself stays stock's.
    """

    _generation_batch: Any

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        caches = getattr(model, "make_cache", None)
        self._caches = caches if isinstance(caches, PluginCaches) else None
        self._limits: PrefillLimits | None = self._caches.limits if self._caches else None
        self._memory = self._caches.memory if self._caches else BatchMemory()
        self._weighed: tuple[int, ...] = ()
        """What ran when its memory was looked at last."""
        self._prefills: list[Prefill] = []
        self._parked: list[Parked] = []
        """The oldest first."""
        self._returning: dict[int, Any] = {}
        """The rows of parked replies whose caches are being made again, by uid."""
        self._waited_s = 0.0
        """How long the last chunk waited for the device to end a step of the replies."""
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
        """Make one step of the replies, then compute one chunk of one prompt.

        Returns stock's responses for prompts and for replies. A prompt's response says how far it
        is, and whether a segment has ended: then stock asks for its caches, and saves them.
        """
        if self._limits is None:
            stock: tuple[list[Any], list[Any]] = super()._next()
            return stock
        for told in self._told:
            told.prompt_cache = None  # it is saved; stock keeps the list for another step
        self._ended = []
        self._copy_rows()
        self._told, step_s = self._decode()
        self._drop_stopped()
        self._weigh()
        self._return_parked()
        self._admit()
        for prefill in [one for one in self._prefills if one.is_ready]:
            self._guarded(prefill, self._begin_reply)
        if self._prefills:
            self._guarded(self._turn(), lambda one: self._compute(one, self._chunk(one, step_s)))
        return self._ended, self._told

    def _decode(self) -> tuple[list[Any], float]:
        """Make one step of all replies; return their tokens, and how long it took."""
        rows = self._rows()
        self._n_steps += 1
        if self._n_steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        started = time.perf_counter()
        try:
            return self._generation_batch.next(), time.perf_counter() - started
        except Exception as error:
            self._fail_replies(rows, error)
            return [], 0.0

    def _rows(self) -> list[tuple[int, Any]]:
        """Return the uid and the tokens of every reply."""
        return list(zip(self._generation_batch.uids, self._generation_batch.tokens, strict=True))

    def _drop_stopped(self) -> None:
        """Give up the prompts whose clients went away."""
        for sequence in list(self._unprocessed_sequences):
            reply = reply_of(sequence[4])
            if reply is not None and reply.is_stopped:
                self._unprocessed_sequences.remove(sequence)
                self._end(sequence[0], sequence[4], ClientGone())
        for prefill in list(self._prefills):
            reply = reply_of(prefill.tokens)
            if reply is not None and reply.is_stopped:
                self._fail(prefill, ClientGone())
        for parked in list(self._parked):
            if reply_of(parked.tokens).is_stopped:
                self._parked.remove(parked)
                self._end(parked.uid, parked.tokens, ClientGone())

    # Memory.

    def _copy_rows(self) -> None:
        """Make the caches of the rows that came or stayed, some layers at a time.

        MLX would make those of all layers before it frees the old ones: twice the memory.
        """
        batch = self._generation_batch
        if self._limits is None or batch.uids == self._copied:
            return
        self._copied = list(batch.uids)
        n_bytes, layers = 0, list[Any]()
        for cache in batch.prompt_cache:
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
        n_done = sum(one.n_done for one in self._prefills)
        n_periods = self._n_steps // WEIGH_EVERY
        running = len(replies), len(self._prefills), len(queue), n_done, n_periods
        if running == self._weighed:
            return
        self._weighed = running
        prompts = [len(one.tokens) + sum(map(len, one.segments)) for one in self._prefills]
        prompts += [len(one[4]) + _n_left(one) for one in queue]
        while not self._memory.weigh(
            list(map(len, replies.tokens)), prompts, self.prompt_cache_nbytes
        ):
            youngest = max(range(len(replies)), key=lambda place: replies.uids[place], default=-1)
            if len(replies) + len(prompts) < 2 or not len(replies):
                return  # alone it always goes on
            if not isinstance(replies.tokens[youngest], TakenTokens):
                return
            self._park(youngest)

    def _park(self, place: int) -> None:
        """Take a reply out of the batch; the plugin keeps its caches."""
        batch, tokens = self._generation_batch, self._generation_batch.tokens[place]
        row = copy.copy(batch)
        row.prompt_cache, row._current_tokens, row._current_logprobs = [], None, []
        row.filter([place])
        for name in ("samplers", "logits_processors"):  # 0.31.3 leaves lists without any as it is
            setattr(row, name, getattr(batch, name)[place : place + 1])
        mx.eval(row._next_tokens, row._next_logprobs)
        ids = [*tokens, row._next_tokens.item()]
        parked = Parked(batch.uids[place], row, ids)
        tokens.taken.insert(tokens, batch.extract_cache(place), PARKED)
        batch.filter([i for i in range(len(batch)) if i != place])
        self._copy_rows()
        tokens.taken.resume(Prompt(ids, [ids], ["assistant"]))
        self._parked.append(parked)
        self._parked.sort(key=lambda one: one.uid)
        logger.info("a reply of %d tokens waits for memory", len(tokens))

    def _return_parked(self) -> None:
        """Let the parked replies that there is room for make their caches again."""
        for parked in list(self._parked):
            queue = self._unprocessed_sequences
            is_alone = not (len(self._generation_batch) or self._prefills or queue)
            taken = parked.tokens.taken
            if not is_alone and not taken.advance():
                continue
            self._parked.remove(parked)
            try:
                prompt, caches, n_cached = taken.enter(), taken.caches, taken.n_cached
            except ClientGone as error:
                self._end(parked.uid, parked.tokens, error)
                continue
            taken.caches, ids = None, parked.ids
            if prompt is None or list(prompt.ids) != ids or caches is None:
                caches, n_cached = make_prompt_cache(self.model), 0
            segments = [ids[n_cached:-1], ids[-1:]] if ids[n_cached:-1] else [ids[-1:]]
            held, row = TakenTokens(ids[:n_cached], taken), parked.row
            self._returning[parked.uid] = row
            stops = getattr(row, "stop_sequences", None) or row.state_machines
            more = row.samplers[0], row.logits_processors[0], stops[0]
            queue.appendleft((parked.uid, segments, row.max_tokens[0], list(caches), held, *more))

    def _admit(self) -> None:
        """Let prompts begin, as many at a time as the server's options allow."""
        queue = self._unprocessed_sequences
        n_running = len(self._generation_batch) + len(self._prefills)
        n_free = min(
            self.prefill_batch_size - len(self._prefills), self.completion_batch_size - n_running
        )
        if queue and n_free <= 0 and n_running < self.completion_batch_size:
            shortest = min(queue, key=_n_left)
            if all(_n_left(shortest) < one.n_left for one in self._prefills):
                queue.remove(shortest)  # it will not take long
                queue.appendleft(shortest)
                n_free = 1
        for _ in range(min(n_free, len(queue))):
            uid, tokens = queue[0][0], queue[0][4]
            try:
                batch = self._make_batch(1)
            except Exception as error:
                self._currently_processing.clear()
                self._end(uid, tokens, error)
                continue
            segments, _, n_new = self._currently_processing.pop()
            self._prefills.append(Prefill(uid, batch, batch.tokens[0], segments, n_new))

    def _turn(self) -> Prefill:
        """Return the prompt to go on with: the one with the least left, or in its turn the oldest.

        If all of them aged, short prompts would wait beside many long ones.
        """
        turn = self._prefills[0]
        if turn.passed_over < MOST_PASSED_OVER:
            turn = min(self._prefills, key=lambda one: one.n_left)
        for other in self._prefills:
            other.passed_over = 0 if other is turn else other.passed_over + 1
        return turn

    def _chunk(self, prefill: Prefill, step_s: float) -> int:
        """Return how many tokens of a prompt to compute now; the step of the replies took `step_s`.

        The device may have gone on with that step until the last chunk began.
        """
        assert self._limits is not None
        position, pace = len(prefill.tokens), self._limits.pace
        most = min(self.prefill_step_size, self._limits.most_tokens(position))
        if len(self._generation_batch):
            stall_s = self._limits.max_stall_s
            in_time = pace.tokens(position, max(stall_s - step_s - self._waited_s, stall_s / 4))
        else:
            in_time = max(IDLE_CHUNK, pace.tokens(position, IDLE_CHUNK_S))
        most = min(most, max(in_time, CHUNKS[0]))
        size = max((size for size in CHUNKS if size <= most), default=max(most, 1))
        # Chunks that end at round places have the shapes of those before them.
        over = position % min(ROUND, size)
        return min(size - over, len(prefill.segments[0]))

    def _compute(self, prefill: Prefill, n_tokens: int) -> Any:
        """Compute the next tokens of a prompt. The logits are never evaluated."""
        assert self._limits is not None
        batch, segments = prefill.batch, prefill.segments
        ids, segments[0] = segments[0][:n_tokens], segments[0][n_tokens:]
        position = len(prefill.tokens)
        prefill.tokens += ids
        started = time.perf_counter()
        self.model(mx.array([ids]), cache=batch.prompt_cache)
        built = time.perf_counter()
        mx.synchronize()  # a step of the replies may still run, and is no part of the pace
        begun = time.perf_counter()
        mx.eval([cache.state for cache in batch.prompt_cache])
        self._waited_s = begun - built
        seconds = time.perf_counter() - started - self._waited_s
        self._limits.pace.learn(position, len(ids), seconds)
        if mx.get_cache_memory() > self._limits.max_unused_bytes:
            mx.clear_cache()
        prefill.n_done += len(ids)
        response = self._response(prefill.uid, (prefill.n_done, prefill.n_new))
        if not segments[0]:
            segments.pop(0)
            response.end_of_segment = True
        elif isinstance(prefill.tokens, TakenTokens):
            # What was computed so far is saved: the client may go, or the process die.
            prefill.tokens.taken.insert(prefill.tokens, batch.extract_cache(0), PREFILL)
        return response

    def _save_interrupted(self, uids: Collection[int]) -> None:
        """Let the plugin keep replies that are about to be removed, as those that have ended."""
        for place, (uid, tokens) in enumerate(self._rows()):
            if uid in uids and isinstance(tokens, TakenTokens):
                try:
                    tokens.taken.insert(tokens, self._generation_batch.extract_cache(place), REPLY)
                except Exception:  # nothing catches it in stock
                    logger.exception("an interrupted reply could not be saved")

    def _begin_reply(self, prefill: Prefill) -> Any:
        """Let a prompt's last token join the replies."""
        rows, begun = self._rows(), self._returning.pop(prefill.uid, None)
        if begun is None:
            begun = prefill.batch.generate([prefill.segments[0]])
        else:
            begun.prompt_cache = prefill.batch.prompt_cache
        try:
            self._generation_batch.extend(begun)
        except Exception as error:
            self._fail_replies(rows, error)
            raise
        self._prefills.remove(prefill)
        mx.clear_cache()
        response = self._response(prefill.uid, (prefill.n_new, prefill.n_new))
        response.end_of_segment = response.end_of_prompt = True
        return response

    # Failures. Stock forgets a request after a response, when its context has been told to stop.

    def _guarded(self, prefill: Prefill, act: Callable[[Prefill], Any]) -> None:
        """Act on a prompt. What that raises ends this request alone."""
        try:
            self._ended.append(act(prefill))
        except Exception as error:
            self._fail(prefill, error)

    def _fail(self, prefill: Prefill, error: Exception) -> None:
        """End the request of a prompt that is being computed."""
        self._prefills.remove(prefill)
        self._end(prefill.uid, prefill.tokens, error)

    def _fail_replies(self, rows: list[tuple[int, Any]], error: Exception) -> None:
        """End all replies: after a step that failed half way, none can be computed on."""
        self._generation_batch = type(self._generation_batch).empty(self.model, self.sampler)
        for uid, tokens in rows:
            self._end(uid, tokens, error)

    def _end(self, uid: int, tokens: Any, error: Exception) -> None:
        """End a request with an error; raise it where no plugin took the request."""
        self._returning.pop(uid, None)
        reply = reply_of(tokens)
        if reply is None:
            raise error
        if not isinstance(error, ClientGone):
            logger.error("a request failed", exc_info=error)
        reply.fail(error.with_traceback(None))  # its frames hold the caches
        self._ended.append(self._response(uid, (0, 0)))

    def _response(self, uid: int, progress: tuple[int, int]) -> Any:
        return type(self._prompt_batch).Response(uid, progress, False, False)

    # What stock asks of its generator.

    def extract_cache(self, uids: Collection[int]) -> dict[int, Any]:
        found = {
            one.uid: (one.batch.extract_cache(0), one.tokens)
            for one in self._prefills
            if one.uid in uids
        }
        others: dict[int, Any] = super().extract_cache([uid for uid in uids if uid not in found])
        return {**others, **found}

    def remove(self, uids: Collection[int], return_prompt_caches: bool = False) -> Any:
        self._save_interrupted(uids)
        caches = super().remove(uids, return_prompt_caches)
        self._prefills = [one for one in self._prefills if one.uid not in uids]
        self._parked = [one for one in self._parked if one.uid not in uids]
        for uid in uids:
            self._returning.pop(uid, None)
        return caches

    @property
    def prompt_cache_nbytes(self) -> int:
        caches = [cache for one in self._prefills for cache in one.batch.prompt_cache]
        return int(super().prompt_cache_nbytes) + sum(int(cache.nbytes) for cache in caches)


def _n_left(sequence: Any) -> int:
    """Return how many tokens of a sequence in stock's queue are to be computed."""
    return sum(map(len, sequence[1]))


def reply_of(tokens: Any) -> Any:
    """Return where the tokens of a sequence go, None if no plugin took its request."""
    return tokens.taken.reply if isinstance(tokens, TakenTokens) else None
