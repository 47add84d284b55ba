"""How much memory the next chunk of a prompt will take, from chunks that are measured once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ...ranks import ranks
from ..geometry.kinds import slots_of
from ..geometry.probe import position_limit
from ..geometry.spec import ModelCacheSpec
from ..live.packed import GRID
from ..steps import Steps

MIN_CHUNK = 32
"""Tokens that are computed at once however little memory there is."""

CHECKPOINT_EVERY = 2048
"""While a prompt is computed, a model with windows or states gets a checkpoint every so many
tokens."""

_MOST_TOKENS = 1 << 16
_SHORTEST, _LONGEST = 16, 1024
_MEASURE_S, _CPU_MEASURE_S = 0.6, 0.05
"""Chunks of doubling length are measured, until one has the longest length or took this long."""

_MIN_MEASURED = 512
_SCORE_BYTES = 160
"""The scores of 40 heads in 32 bits: short chunks do not tell scores from other memory."""

_MOST_SCORE_BYTES = 512
"""The scores of 64 heads, twice, in 32 bits: no attention takes more. A device that is given work
ahead keeps memory for several layers at once, and the measurement takes that for scores."""


@dataclass(frozen=True)
class PrefillMemory:
    """Bytes that a chunk takes beside the model and the caches, and the limit for them.

    `token_bytes` are one layer's activations, for each token. `score_bytes` are the scores of
    attention that is not fused, for each pair of token and key. `key_bytes` are one layer's
    dequantized keys and values, for each key, cached or new.
    """

    token_bytes: float
    score_bytes: float
    key_bytes: float
    limit_bytes: int
    stops_every: int | None = None
    """Chunks end at the multiples of this, where a checkpoint is made; None without checkpoints."""

    @classmethod
    def of(
        cls, spec: ModelCacheSpec, limit_bytes: int, measured: Sequence[float] = ()
    ) -> PrefillMemory:
        """Return that of a model whose bytes of a token and of a score were measured.

        Until they are, a chunk has half of stock's tokens at most.
        """
        token_bytes, score_bytes = measured[:2] or (limit_bytes / _LONGEST, float(_SCORE_BYTES))
        stops_every = None if spec.any_prefix else CHECKPOINT_EVERY
        return cls(token_bytes, score_bytes, _key_bytes(spec), limit_bytes, stops_every)

    def peak_bytes(self, n_tokens: int, position: int) -> int:
        """Return the most bytes that a chunk after `position` cached tokens takes."""
        n_keys = position + n_tokens
        a_token = self.token_bytes + self.score_bytes * n_keys
        return int(n_tokens * a_token + n_keys * self.key_bytes)

    def most_tokens(self, position: int) -> int:
        """Return the longest chunk after `position` cached tokens that stays within the limit."""
        # The larger root n of peak_bytes(n, position) = limit_bytes, without a division by 0.
        token_bytes = self.token_bytes + self.score_bytes * position + self.key_bytes
        room = max(0.0, self.limit_bytes - position * self.key_bytes)
        root = math.sqrt(token_bytes**2 + 4 * self.score_bytes * room)
        most = max(MIN_CHUNK, int(min(2 * room / max(token_bytes + root, 1e-9), _MOST_TOKENS)))
        if self.stops_every is not None:
            most = min(most, self.stops_every - position % self.stops_every)
        return most


def measuring_prefill(model: Any, spec: ModelCacheSpec) -> Steps[tuple[float, float, float]]:
    """Compute pairs of short chunks; find the bytes of a token and of a score: see `PrefillMemory`.

    The second chunk of a pair follows the first and has its length. It takes more memory than the
    first only for the keys of the first. Its seconds for each token are the third result.
    """
    key_bytes = _key_bytes(spec)
    longest = min((position_limit(model) or 2 * _LONGEST) // 2, _LONGEST)
    most_s = _CPU_MEASURE_S if mx.default_device() == mx.Device(mx.cpu) else _MEASURE_S
    n_tokens = min(_SHORTEST, longest)
    while True:
        caches, peaks, seconds = spec.make_cache(), list[int](), list[float]()
        while len(peaks) < 2:
            started = time.perf_counter()
            peaks.append(_peak(model, caches, n_tokens))
            seconds.append(time.perf_counter() - started)
            yield
        first, second = peaks
        if 2 * n_tokens > longest or ranks().told(sum(seconds), "its time") > most_s:
            break
        n_tokens *= 2
    score_bytes = (second - first) / n_tokens**2 - key_bytes / n_tokens
    score_bytes = min(max(0.0, score_bytes), _MOST_SCORE_BYTES)
    token_bytes = max(0.0, first / n_tokens - n_tokens * score_bytes - key_bytes)
    if n_tokens < _MIN_MEASURED:
        score_bytes = _SCORE_BYTES
    if spec.quantized and mx.default_device() != mx.Device(mx.cpu):
        # A GPU copies the dequantized keys and values for each block of the grid that a chunk ends
        # in, since the attention before may still read them. Short chunks reuse the memory.
        score_bytes = max(score_bytes, key_bytes / GRID)
    return token_bytes, score_bytes, seconds[-1] / n_tokens


def _key_bytes(spec: ModelCacheSpec) -> int:
    """Return the bytes of a token in one layer, quantized or not, in full precision."""
    return max((one.full_precision_bytes // len(one.slots) for one in spec.full), default=0)


def _peak(model: Any, caches: list[Any], n_tokens: int) -> int:
    """Return the most memory that a chunk takes beside what is there before or after it."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model(mx.array([[1] * n_tokens]), cache=caches)
    mx.eval([slot.state for slot in slots_of(caches) if not slot.empty()])
    return max(0, mx.get_peak_memory() - max(before, mx.get_active_memory()))
