"""The quantized KV caches of one and of several sequences, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, create_attention_mask

from ..geometry.precision import KVPrecision
from . import packed as pk
from .attention import MAX_DEQUANTIZED_BYTES, STRATEGIES, Computed, PackedKV, Strategy
from .batch import Buffers, FullPrecisionBatchKVCache, PaddedBatch, ints
from .newest import Newest

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


class PackedCache(Buffers):
    """Packed keys and values, and the newest as they were computed; a plan says how they are read.

    mlx-lm asks `hasattr(cache, "bits")`, after each fetch, which attention to use. So `bits` and
    `group_size` exist only where fetches are packed. Without a plan they are arrays. All queries
    see the same ones, so they should all be of one block of the grid.

    What a query no longer sees as computed is forgotten before the next fetch: until then a draft's
    tokens can be taken back.
    """

    precision: KVPrecision
    newest: Newest
    plan: AttentionPlan | None = None
    _keys: Any = None  # `Packed`, or None in an empty cache
    _values: Any = None
    _n_waiting = 0
    """How many of the newest tokens of all rows are not packed yet."""

    @property
    def keys(self) -> Any:
        """The buffer of keys; whatever waits is packed first."""
        self._pack()
        return self._keys

    @keys.setter
    def keys(self, held: Any) -> None:
        self._pack()  # the other side keeps what it has
        self._keys = held

    @property
    def values(self) -> Any:
        """The buffer of values; whatever waits is packed first."""
        self._pack()
        return self._values

    @values.setter
    def values(self, held: Any) -> None:
        self._pack()
        self._values = held

    def empty(self) -> bool:
        return self._keys is None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys [B, H, n, Dk] and values [B, H, n, Dv]; return all of both.

        By the plan: arrays of the dtypes of what came in, [B, H, S, D], or two `PackedKV`. Rows of
        a batch have their padding in front.

        Raises:
            ValueError: several tokens, packed, for rows at different places of their blocks of the
                grid.
        """
        n_own = self.forget()
        n_held, n_new = self.newest.lengths, keys.shape[2]
        self.newest.append(keys, values)
        self._end_at(self.size() + n_new)
        self._n_waiting += n_new
        if n_new > 1 or not self._has_room():
            self._pack()
        plan = self.plan
        if plan is None or not plan.can_take_packed:
            all_keys, all_values = self.keys_and_values()
            return all_keys.astype(keys.dtype), all_values.astype(values.dtype)
        if n_new > 1 and len(set(zip(n_own, n_held, strict=True))) > 1:
            raise ValueError(f"{n_new} tokens for rows at different places; expected one each")
        sides = self.precision.sides
        width = keys.shape[3] + sides[0].padding + values.shape[3] + sides[1].padding
        token_bytes = keys.shape[1] * width * keys.dtype.size
        strategy = plan.choose(n_new, self.size(), keys.shape[0], token_bytes)
        is_own = self.newest.is_own()
        fetched_keys, fetched_values = (
            PackedKV.of(
                packed,
                quantization,
                self.size(),
                strategy,
                plan.tile_bytes,
                Computed(newest, max(n_own), max(n_held), is_own),
            )
            for packed, quantization, newest in zip(
                (self._keys, self._values), sides, self.newest.view(), strict=True
            )
        )
        if n_new > pk.GRID:
            self.forget()
        return fetched_keys, fetched_values

    @property
    def bits(self) -> int:
        """Bits of the keys; no attribute where fetches are arrays."""
        if self.plan is None or not self.plan.can_take_packed:
            raise AttributeError("bits")
        return self.precision.keys.bits

    @property
    def group_size(self) -> int:
        if not hasattr(self, "bits"):
            raise AttributeError("group_size")
        return self.precision.group_size

    def forget(self) -> list[int]:
        """Forget how the tokens were computed that the next query sees quantized.

        Return how many tokens each row has in the block of the grid where it goes on.
        """
        n_own = [n % pk.GRID for n in self.lengths]
        if any(map(gt, self.newest.lengths, n_own)):
            self._pack()
            self.newest.keep(n_own)
        return n_own

    def _pack(self) -> None:
        """Pack the tokens that wait, and make room for more.

        A query sees the tokens of its own block as they were computed. So they are packed when it
        is complete, or when somebody reads the buffers: one operation for many tokens.
        """
        n, self._n_waiting = self._n_waiting, 0
        if not n:
            return
        self._keys, self._values = (
            pk.append(packed, self.size() - n, pk.quantize(own, quantization))
            for packed, own, quantization in zip(
                (self._keys, self._values), self.newest.last(n), self.precision.sides, strict=True
            )
        )

    def _has_room(self) -> bool:
        """Return whether all tokens are within the buffers, packed or not."""
        held = (self._keys, self._values)
        return all(x is not None and x[0].shape[2] >= self.size() for x in held)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all; return how many. The buffers keep their size."""
        n = super().trim(n)
        self._n_waiting = max(0, self._n_waiting - n)
        return self.newest.trim(n)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding and spare room included; 0 when empty."""
        return pk.n_bytes(self._keys) + pk.n_bytes(self._values) + self.newest.nbytes

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays to evaluate, and the number of tokens."""
        return self._keys, self._values, self.size(), self.newest.keys, self.newest.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values dequantized, padding included; models read them here too.

        Raises:
            ValueError: the cache is empty; or its fetches are packed, and a model that reads both
                would see other keys here than there.
        """
        if self.empty() or hasattr(self, "bits"):
            raise ValueError("the cache is empty, or its fetches are packed")
        new_keys, new_values = self.newest.view() if self.newest.size() else (None, None)
        is_own = self.newest.is_own()
        keys, values = (
            pk.read(pk.view(packed, 0, self.size()), quantization, new, is_own)
            for packed, quantization, new in zip(
                (self.keys, self.values), self.precision.sides, (new_keys, new_values), strict=True
            )
        )
        return keys, values


class SequenceQuantizedKVCache(PackedCache):
    """Keys and values of one layer and one sequence, `offset` tokens long.

    `keys` and `values` are None or buffers [1, H, S, ...], S >= `offset` (see `packed.Packed`).
    Owned by the thread that runs the model.
    """

    def __init__(self, precision: KVPrecision, plan: AttentionPlan | None = None) -> None:
        self.precision = precision
        self.plan = plan
        self.offset = 0
        self.newest = Newest(1)

    @property
    def lengths(self) -> list[int]:
        return [self.offset]

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

    def as_computed(self) -> ChunkedKVCache:
        """Return the newest tokens, of which there must be some, as lazy views of the buffers."""
        cache = ChunkedKVCache(pk.GRID)
        cache.start_position, cache.offset = self.offset - self.newest.size(), self.offset
        cache.keys, cache.values = self.newest.view()
        return cache

    def _end_at(self, n_tokens: int) -> None:
        self.offset = n_tokens

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        """Return one batch cache for the caches of several sequences."""
        return BatchQuantizedKVCache.merge(caches)


class BatchQuantizedKVCache(PackedCache, PaddedBatch):
    """Quantized keys and values of one layer for B sequences."""

    def __init__(
        self,
        left_padding: Sequence[int],
        precision: KVPrecision,
        plan: AttentionPlan | None = None,
    ) -> None:
        self.precision = precision
        self.plan = plan
        self._place(ints(left_padding), 0)
        self.newest = Newest(len(self._padding))

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        """Return one batch for the caches of several sequences, in their order.

        A single cache is not copied. The batch takes the first plan that one has.

        Raises:
            TypeError: a cache is of another class.
            ValueError: they differ in precision.
        """
        batch = cls([], caches[0].precision)
        for cache in caches:
            if not isinstance(cache, SequenceQuantizedKVCache):
                raise TypeError(f"cannot merge a {type(cache).__name__} into a quantized batch")
            one = cls([], cache.precision, cache.plan)
            one._adopt(cache)
            one.newest = cache.newest
            batch.extend(one)
        return batch

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(batch_indices)
        self.newest.filter(batch_indices)

    def extend(self, other: Any) -> None:
        """Add the rows of `other` behind our own. Either batch may be empty.

        Raises:
            TypeError: `other` is of another class.
            ValueError: `other` has another precision.
        """
        if not isinstance(other, BatchQuantizedKVCache):
            raise TypeError(f"cannot extend a quantized batch by a {type(other).__name__}")
        if other.precision != self.precision:
            raise ValueError(f"cannot extend a batch of {self.precision} by {other.precision}")
        self.plan = self.plan or other.plan
        for batch in (self, other):
            batch.forget()
        super().extend(other)
        self.newest.extend(other.newest)

    def extract(self, idx: int) -> SequenceQuantizedKVCache:
        """Return row `idx` as a cache of its own (see `_row`)."""
        row, cache = self._row(idx), SequenceQuantizedKVCache(self.precision, self.plan)
        if row is not None:
            cache.keys, cache.values = row
            cache.offset = self._idx - self._padding[idx]
            cache.newest = self.newest.extract(idx)
        return cache


def batch_of(caches: Sequence[Any]) -> Any | None:
    """Return a batch of ours for one layer's caches of sequences, None for other classes."""
    if any(isinstance(cache, SequenceQuantizedKVCache) for cache in caches):
        return BatchQuantizedKVCache.merge(caches)
    if all(type(cache) is KVCache for cache in caches):
        return FullPrecisionBatchKVCache.merge(caches)
    return None
