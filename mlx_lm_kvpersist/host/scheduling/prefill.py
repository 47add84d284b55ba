"""The prompts that are being computed: whose turn it is, how much of it, and with which others.

Stock computes up to eight prompts as one padded batch, 2,048 tokens of each at a time, and all
replies wait meanwhile. Here prompts are computed in chunks. A chunk beside replies takes no longer
than the plugin allows. If several prompts wait, the one with the least left goes first, but the
oldest one gets every fourth chunk. Where the rest of a prompt leaves room in a chunk, those of
others are computed with it. Generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...ranks import ranks
from ..answers import PrefillLimits
from .model_provider import PluginCaches

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


def chunk_size(position: int, most: int) -> int:
    """Return how many of `most` tokens are computed at once after `position` cached ones.

    Long chunks that end at round places have the shapes of those before them.
    """
    size = max((size for size in CHUNKS if size <= most), default=max(most, 1))
    return size - position % ROUND if size >= ROUND else size


class PeakMemory:
    """Counts the peak from now on, without the memory that is in use now or at the end.

    It resets MLX's counter. Some models evaluate within their call, so it begins before that.
    """

    def __init__(self) -> None:
        self._before = mx.get_active_memory()
        mx.reset_peak_memory()

    @property
    def n_bytes(self) -> int:
        return int(max(0, mx.get_peak_memory() - max(self._before, mx.get_active_memory())))


@dataclass(eq=False)
class Prefill:
    """A prompt that is being computed: a batch of stock's with one row.

    `tokens` are the ids that its caches hold. `progress` is stock's: the segments that are left, of
    which the last is one id, how many ids are computed, and how many were to be.
    """

    uid: int
    batch: Any
    tokens: list[int]
    progress: list[Any]
    passed_over: int = 0
    has_waited: bool = False
    """Whether it was ready before and others were computed first."""

    @property
    def segments(self) -> list[list[int]]:
        segments: list[list[int]] = self.progress[0]
        return segments

    @property
    def n_left(self) -> int:
        return int(self.progress[2] - self.progress[1])

    @property
    def is_ready(self) -> bool:
        """Whether only the last token is left, with which its reply begins."""
        return len(self.segments) == 1


class Prefills:
    """Takes the place of stock's prompt batch, of which it has what stock asks a batch for."""

    def __init__(
        self, model: Any, caches: PluginCaches, limits: PrefillLimits, step_size: int
    ) -> None:
        self._model, self._caches, self._limits = model, caches, limits
        self._step_size = step_size
        self._waited_s = 0.0
        """How long the last chunk waited for the device to end a step of the replies."""
        self.all: list[Prefill] = []

    def __len__(self) -> int:
        return len(self.all)

    @property
    def unready(self) -> list[Prefill]:
        """The prompts with more than one token left."""
        return [one for one in self.all if not one.is_ready]

    @property
    def uids(self) -> list[int]:
        return [one.uid for one in self.all]

    @property
    def tokens(self) -> list[list[int]]:
        return [one.tokens for one in self.all]

    @property
    def prompt_cache(self) -> list[Any]:
        """The caches of all prompts, one after another."""
        return [cache for one in self.all for cache in one.batch.prompt_cache]

    def extract_cache(self, idx: int) -> list[Any]:
        caches: list[Any] = self.all[idx].batch.extract_cache(0)
        return caches

    def filter(self, keep: Collection[int]) -> None:
        self.all = [one for i, one in enumerate(self.all) if i in keep]

    # One chunk.

    def turn(self) -> Prefill:
        """Return the prompt to go on with: the one with the least left, or in its turn the oldest.

        If all of them aged, short prompts would wait beside many long ones.
        """
        oldest = (unready := self.unready)[0]
        if oldest.passed_over < MOST_PASSED_OVER:
            return min(unready, key=lambda one: one.n_left)
        return oldest

    def compute(
        self, chunk: dict[Prefill, int], step_s: float | None, alone: Collection[int] = ()
    ) -> None:
        """Compute the next tokens of the prompt in `chunk`, and of those that join it.

        `chunk` then says how many of which. The last step of the replies took `step_s`, None where
        none run. Those of uids `alone` join no others. The logits are never evaluated.
        """
        caches, width = self._joined(chunk, step_s, alone)
        for one in self.all:
            one.passed_over = 0 if one in chunk else one.passed_over + 1
        position = max(len(one.tokens) for one in chunk)
        inputs = []
        for one, n_tokens in chunk.items():
            ids, one.segments[0] = one.segments[0][:n_tokens], one.segments[0][n_tokens:]
            one.tokens += ids
            inputs.append(ids + [0] * (width - n_tokens))
        started, peak = time.perf_counter(), PeakMemory()
        self._model(mx.array(inputs), cache=caches)
        built = time.perf_counter()
        mx.synchronize()  # a step of the replies may still run, and is no part of the pace
        begun = time.perf_counter()
        mx.eval([cache.state for one in chunk for cache in one.batch.prompt_cache])
        self._waited_s = begun - built
        seconds = time.perf_counter() - started - self._waited_s
        self._limits.pace.learn(position, width * len(chunk), seconds)
        if step_s is None:  # else a step of the replies may cause the peak
            self._limits.took(width * len(chunk), position, peak.n_bytes)
        for one, n_tokens in chunk.items():
            one.progress[1] += n_tokens

    def _joined(
        self, chunk: dict[Prefill, int], step_s: float | None, alone: Collection[int]
    ) -> tuple[list[Any], int]:
        """Say in `chunk` how many tokens of which prompts to compute.

        If the segment of the prompt whose turn it is ends now, those whose segments do join it, as
        long as all together, padded, are no more than a chunk. Return a cache for each layer, and
        how many tokens each prompt has in the call, padding included.
        """
        (turn,) = chunk
        sizes = ranks().first(lambda: self._sizes(turn, step_s, alone), "a chunk")
        chunk[turn] = sizes[turn.uid]
        by_uid = {one.uid: one for one in self.all}
        joined = {by_uid[uid]: n_tokens for uid, n_tokens in sizes.items()}
        width, furthest = max(sizes.values()), max(len(prefill.tokens) for prefill in joined)
        if furthest + self._limits.least_width <= self._limits.n_positions:
            width = max(width, self._limits.least_width)
        if len(sizes) > 1 or width > sizes[turn.uid]:
            layers = zip(*(one.batch.prompt_cache for one in joined), strict=True)
            n_tokens = tuple(joined.values())
            caches = [self._caches.together(layer, n_tokens) for layer in layers]
            # A model makes one mask for all layers of a kind: their caches have to agree about it.
            classes = {getattr(cache, "kind", None): type(cache) for cache in caches}
            is_one_mask = None not in caches and set(classes.values()) == set(map(type, caches))
            if ranks().agree(is_one_mask, "whether prompts join"):
                chunk.update(joined)
                return caches, width
        return turn.batch.prompt_cache, chunk[turn]

    def _sizes(self, turn: Prefill, step_s: float | None, alone: Collection[int]) -> dict[int, int]:
        """Return how many tokens of which prompts are computed now, by uid."""
        most, widest = self._most_tokens(turn, step_s), len(turn.segments[0])
        sizes = {turn.uid: self._size(turn, most)}
        furthest = len(turn.tokens)
        others = [one for one in self.unready if one is not turn and one.uid not in alone]
        if turn.uid in alone or sizes[turn.uid] < widest:
            others = []
        for other in sorted(others, key=lambda one: len(one.segments[0])):
            most = min(most, self._most_tokens(other, step_s))
            widest = max(widest, len(other.segments[0]))
            furthest = max(furthest, len(other.tokens))
            # The padding of a prompt must not go beyond the end of a table of positions.
            if widest * (len(sizes) + 1) > most or furthest + widest > self._limits.n_positions:
                break
            sizes[other.uid] = len(other.segments[0])
        return sizes

    def _most_tokens(self, prefill: Prefill, step_s: float | None) -> int:
        """Return how many tokens may be computed now, by memory and time, where a prompt is.

        The device may have gone on with the step of the replies until the last chunk began.
        """
        position, pace = len(prefill.tokens), self._limits.pace
        most = min(self._step_size, self._limits.most_tokens(position))
        if step_s is not None:
            stall_s = self._limits.max_stall_s
            in_time = pace.tokens(position, max(stall_s - step_s - self._waited_s, stall_s / 4))
        else:
            in_time = max(IDLE_CHUNK, pace.tokens(position, IDLE_CHUNK_S))
        return int(min(most, max(in_time, CHUNKS[0])))

    def _size(self, prefill: Prefill, most: int) -> int:
        """Return how many of `most` tokens of a prompt to compute now."""
        return min(chunk_size(len(prefill.tokens), most), len(prefill.segments[0]))

    # The end.

    def ready(self, alone: Collection[int], *, beside: bool) -> list[list[Prefill]]:
        """Return the prompts with one token left, in groups that begin to reply together.

        What a request brings along may fail: it begins by itself, and so do those of uids `alone`.
        If no replies run `beside` them, they wait for one chunk of others that have little left.
        Those would have short chunks only once replies run.
        """
        ready = [one for one in self.all if one.is_ready]
        is_one_short = any(one.n_left <= IDLE_CHUNK for one in self.unready)
        if is_one_short and not (beside or any(one.has_waited for one in ready)):
            for one in ready:
                one.has_waited = True
            return []
        single = [one for one in ready if one.uid in alone or any(one.batch.logits_processors)]
        together = [one for one in ready if one not in single]
        return [*([together] if together else []), *([one] for one in single)]

    def merged(self, prefills: Sequence[Prefill]) -> Any:
        """Return one batch of stock's for these prompts; caches that can be are copied once."""
        first, *others = prefills
        batch = first.batch
        if others:
            for cache, *more in zip(*(one.batch.prompt_cache for one in prefills), strict=True):
                parts = [more] if getattr(cache, "extends_by_many", False) else [[x] for x in more]
                for part in parts:
                    cache.extend(*part)
            for other in others:
                other.batch.prompt_cache = []
                batch.extend(other.batch)
        return batch
