"""The quantized KV cache of one sequence, and the plan that says in what form it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache, create_attention_mask

from ..geometry.precision import KVPrecision
from . import packed as pk
from .attention import MAX_DEQUANTIZED_BYTES, STRATEGIES, PackedKV, Strategy

if TYPE_CHECKING:
    from .batch import BatchQuantizedKVCache


Held = Any
"""`Packed`, or an array in full precision."""

PHASES = ("prefill", "decode", "batch_decode")
_FEW_ROWS = 2


@dataclass(frozen=True)
class AttentionPlan:
    """The strategies of one group: for prefill, for decoding one or two sequences, and for more.

    If the model takes packed keys, at most `max_dequantized_bytes` are dequantized together: beyond
    that `dequantize` becomes `tiled`, unless the limit is None. A tile has `tile_bytes` of
    dequantized keys and values. `measured_ms` has one layer's time per phase and strategy.
    """

    prefill: Strategy = "dequantize"
    decode: Strategy = "dequantize"
    batch_decode: Strategy = "dequantize"
    can_take_packed: bool = False
    max_dequantized_bytes: int | None = MAX_DEQUANTIZED_BYTES
    tile_bytes: int = MAX_DEQUANTIZED_BYTES
    measured_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for phase in PHASES:
            if (strategy := getattr(self, phase)) not in STRATEGIES:
                raise ValueError(f"{phase} is {strategy!r}; expected one of {STRATEGIES}")
            if strategy != "dequantize" and not self.can_take_packed:
                raise ValueError(f"{phase} is {strategy!r}, but the model cannot take packed keys")

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionPlan:
        return self

    def choose(self, n_queries: int, n_keys: int, n_rows: int, token_bytes: int) -> Strategy:
        """Return the strategy for `n_queries` against `n_keys` of each of `n_rows` sequences.

        `token_bytes` are those of one token's key and value, dequantized, all heads of one layer.
        """
        if n_queries > 1:
            strategy = self.prefill
        elif n_rows <= _FEW_ROWS:
            strategy = self.decode
        else:
            strategy = self.batch_decode
        if (
            strategy == "dequantize"
            and self.can_take_packed
            and self.max_dequantized_bytes is not None
            and n_rows * n_keys * token_bytes > self.max_dequantized_bytes
        ):
            return "tiled"
        return strategy

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            **{
                phase: {
                    "strategy": getattr(self, phase),
                    "ms": dict(self.measured_ms.get(phase, {})),
                }
                for phase in PHASES
            },
            "can_take_packed": self.can_take_packed,
            "max_dequantized_bytes": self.max_dequantized_bytes,
            "tile_bytes": self.tile_bytes,
        }


def forced_plan(strategy: Strategy, can_take_packed: bool) -> AttentionPlan:
    """Return the plan that always takes `strategy` if the model can take packed keys."""
    if strategy == "dequantize" or not can_take_packed:
        return AttentionPlan(can_take_packed=can_take_packed, max_dequantized_bytes=None)
    return AttentionPlan(strategy, strategy, strategy, can_take_packed)


_NO_PLAN = AttentionPlan()
"""Dequantizes: arrays work for every model."""


class Buffers(_BaseCache, ABC):  # type: ignore[misc]
    """Keys and values [B, H, S, ...] of one layer, with spare room behind the last token.

    `keys` and `values` are None, arrays, or `Packed`.
    """

    keys: Any = None
    values: Any = None

    @abstractmethod
    def size(self) -> int:
        """Return how many tokens from the beginning of the buffers count as cached."""

    @abstractmethod
    def _end_at(self, n_tokens: int) -> None:
        """Count `n_tokens` from the beginning of the buffers as cached."""

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all; return how many. The buffers keep their size."""
        n = min(self.size(), n)
        self._end_at(self.size() - n)
        return n

    def is_trimmable(self) -> bool:
        return True

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding and spare room included; 0 when empty."""
        return pk.n_bytes(self.keys) + pk.n_bytes(self.values)

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays to evaluate, and the number of tokens."""
        return self.keys, self.values, self.size()


class PackedCache(Buffers):
    """A cache whose plan decides, fetch by fetch, in what form its keys and values are read.

    mlx-lm asks `hasattr(cache, "bits")`, after each fetch, which attention to use. So `bits` and
    `group_size` exist only while the last fetch was packed. Fetches are dequantized without a plan,
    and always if keys or values are in full precision.
    """

    precision: KVPrecision
    plan: AttentionPlan | None = None
    bits: int
    group_size: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys [B, H, n, Dk] and values [B, H, n, Dv]; return all of both.

        By the plan: arrays of the dtypes of what came in, [B, H, S, D], or two `PackedKV`. Rows of
        a batch have their padding in front.
        """
        start, n_new = self.size(), keys.shape[2]
        precision = self.precision
        self.keys = pk.append(self.keys, start, pk.hold(keys, precision.keys))
        self.values = pk.append(self.values, start, pk.hold(values, precision.values))
        self._end_at(start + n_new)
        plan = self.plan or _NO_PLAN
        n_rows, n_heads, _, k_dim = keys.shape
        token_bytes = n_heads * (k_dim + values.shape[3]) * keys.dtype.size
        strategy = plan.choose(n_new, start + n_new, n_rows, token_bytes)
        # Rotating a few queries costs less than rotating all keys back.
        is_rotated = precision.keys.rotated or precision.values.rotated
        as_arrays = strategy == "dequantize" and not (is_rotated and plan.can_take_packed)
        if as_arrays or not precision.is_packed:
            self.__dict__.pop("bits", None)
            self.__dict__.pop("group_size", None)
            all_keys, all_values = self.keys_and_values()
            return all_keys.astype(keys.dtype), all_values.astype(values.dtype)
        self.bits, self.group_size = precision.keys.bits, precision.group_size
        tile_bytes = plan.tile_bytes
        return (
            PackedKV.of(self.keys, precision.keys, start + n_new, strategy, tile_bytes),
            PackedKV.of(self.values, precision.values, start + n_new, strategy, tile_bytes),
        )

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values dequantized, padding included; models read them here too.

        Raises:
            ValueError: the cache is empty.
        """
        keys, values = self.packed(0, self.size())
        return pk.read(keys, self.precision.keys), pk.read(values, self.precision.values)

    def packed(self, start: int, stop: int) -> tuple[Held, Held]:
        """Return keys and values of tokens [start, stop) as lazy views of the buffers.

        Each is `Packed`, or an array in full precision. Drop them before the next update: a live
        view makes it copy the whole buffer.

        Raises:
            ValueError: the cache is empty or does not hold these tokens.
        """
        if self.empty():
            raise ValueError("the cache is empty")
        if not 0 <= start <= stop <= self.size():
            raise ValueError(f"tokens {start} to {stop} of a cache of {self.size()}")
        return pk.view(self.keys, start, stop), pk.view(self.values, start, stop)


class SequenceQuantizedKVCache(PackedCache):
    """Keys and values of one layer and one sequence, `offset` tokens long.

    `keys` and `values` are None or buffers [1, H, S, ...], S >= `offset` (see `packed.Packed`); an
    array where the precision leaves one of them as it is. Owned by the thread that runs the model.
    """

    def __init__(self, precision: KVPrecision, plan: AttentionPlan | None = None) -> None:
        self.precision = precision
        self.plan = plan
        self.offset = 0

    @classmethod
    def from_packed(
        cls,
        precision: KVPrecision,
        keys: Held,
        values: Held,
        offset: int,
        plan: AttentionPlan | None = None,
    ) -> SequenceQuantizedKVCache:
        """Return a cache that owns these buffers, of which the first `offset` tokens are real."""
        cache = cls(precision, plan)
        cache.keys, cache.values, cache.offset = keys, values, offset
        return cache

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Return the mask for the next N tokens: None, "causal" or a boolean array [N, S].

        An array only where it is asked for, or where the window cuts something off.
        """
        if window_size is not None and self.offset + N <= window_size:
            window_size = None
        mask: mx.array | str | None = create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )
        return mask

    def size(self) -> int:
        """Return the number of cached tokens."""
        return self.offset

    def _end_at(self, n_tokens: int) -> None:
        self.offset = n_tokens

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        """Return one batch cache for the caches of several sequences."""
        from .batch import BatchQuantizedKVCache

        return BatchQuantizedKVCache.merge(caches)
