"""How much memory a chunk of a prompt takes while it is computed, known before it is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .probe import position_limit
from .slots import slots_of
from .spec import LayerGroup, ModelCacheSpec

MIN_CHUNK = 32
"""Tokens that are computed at once however little memory there is."""

PASSING_TOKENS = 2048
"""While a prompt is computed, a model that goes on from checkpoints only has one this often."""

_SHORTEST, _LONGEST = 16, 1024
_MEASURE_S, _CPU_MEASURE_S = 0.6, 0.05
"""When a model is loaded, chunks are measured, each twice as long as the one before, until one has
this length or took this long."""

_MIN_MEASURED = 512
_SCORE_BYTES = 160
"""Short chunks do not tell scores from other memory; these are those of 40 heads in 32 bits."""

_MOST_SCORE_BYTES = 512
"""No attention takes more: these are the scores of 64 heads twice in 32 bits. A device that is
given work ahead keeps memory for several layers at once, which is not told from scores."""


@dataclass(frozen=True)
class PrefillMemory:
    """Bytes that a chunk takes beside the model and the caches, and how many it may take.

    `token_bytes` a token are the activations of one layer. `score_bytes` a token and key are the
    scores of attention that is not fused. `key_bytes` a key, cached or new, are one layer's keys
    and values, dequantized for all of its heads.
    """

    token_bytes: float
    score_bytes: float
    key_bytes: float
    limit_bytes: int
    stops_every: int | None = None
    """Chunks end at the multiples of this, where a checkpoint is made; None without checkpoints."""

    def peak_bytes(self, n_tokens: int, position: int) -> int:
        """Return what a chunk after `position` cached tokens takes at most."""
        n_keys = position + n_tokens
        a_token = self.token_bytes + self.score_bytes * n_keys
        return int(n_tokens * a_token + n_keys * self.key_bytes)

    def most_tokens(self, position: int) -> int:
        """Return the longest chunk after `position` cached tokens that stays within the limit."""
        most = MIN_CHUNK
        while self.peak_bytes(2 * most, position) <= self.limit_bytes and most < 1 << 16:
            most *= 2
        step = most
        while step := step // 2:
            if self.peak_bytes(most + step, position) <= self.limit_bytes:
                most += step
        if self.stops_every is not None:
            most = min(most, self.stops_every - position % self.stops_every)
        return most


def measure_prefill(model: Any, spec: ModelCacheSpec, limit_bytes: int) -> PrefillMemory:
    """Compute pairs of short chunks, and tell from the memory they take what longer ones will.

    The second chunk of a pair is as long as the first and comes after it, so what it takes beyond
    the first is for the first one's keys.
    """
    key_bytes = max(map(_dequantized_bytes, spec.full), default=0)
    longest = min((position_limit(model) or 2 * _LONGEST) // 2, _LONGEST)
    most_s = _CPU_MEASURE_S if mx.default_device() == mx.Device(mx.cpu) else _MEASURE_S
    n_tokens = min(_SHORTEST, longest)
    while True:
        started = time.perf_counter()
        caches = spec.make_cache()
        first, second = (_peak(model, caches, n_tokens) for _ in range(2))
        seconds = time.perf_counter() - started
        if 2 * n_tokens > longest or seconds > most_s:
            break
        n_tokens *= 2
    score_bytes = (second - first) / n_tokens**2 - key_bytes / n_tokens
    score_bytes = min(max(0.0, score_bytes), _MOST_SCORE_BYTES)
    token_bytes = max(0.0, first / n_tokens - n_tokens * score_bytes - key_bytes)
    if n_tokens < _MIN_MEASURED:
        score_bytes = _SCORE_BYTES
    stops_every = None if spec.any_prefix else PASSING_TOKENS
    return PrefillMemory(token_bytes, score_bytes, key_bytes, limit_bytes, stops_every)


def _dequantized_bytes(group: LayerGroup) -> int:
    """Return the bytes of a token in one layer of a group, quantized or not, in full precision."""
    return group.full_precision_bytes // len(group.slots)


def _peak(model: Any, caches: list[Any], n_tokens: int) -> int:
    """Return the most memory that a chunk takes beside what is there before or after it."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model(mx.array([[1] * n_tokens]), cache=caches)
    mx.eval([slot.state for slot in slots_of(caches) if not slot.empty()])
    return max(0, mx.get_peak_memory() - max(before, mx.get_active_memory()))
