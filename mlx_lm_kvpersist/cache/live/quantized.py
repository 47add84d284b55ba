"""The quantized KV caches of one and of several sequences, and how they are read."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from operator import gt, sub
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, KVCache, create_attention_mask

from ..geometry.precision import KVPrecision, Quantization
from . import packed as pk
from .attention import AttentionPlan, PackedKV
from .batch import Buffers, FullPrecisionBatchKVCache, Newest, PaddedBatch, ints

_Value = TypeVar("_Value")

_MOST_TAKEN_BACK = 32
"""The most tokens that a draft model computes ahead (host: `MOST_DRAFTED`)."""


class PackedCache(Buffers):
    """Packed keys and values, and the newest in full precision; a plan says how they are read.

    mlx-lm asks `hasattr(cache, "bits")`, after each fetch, which attention to use. So `bits` and
    `group_size` exist only if fetches are packed. Otherwise fetches are arrays that all queries
    see, so all queries should be in one block of the grid.

    Tokens that later queries see quantized are packed before the next fetch. The packed buffers
    hold zeros for tokens that are not packed.
    """

    precision: KVPrecision
    newest: Newest
    plan: AttentionPlan | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys [B, H, n, Dk] and values [B, H, n, Dv]; return all of both.

        The plan decides the form: arrays [B, H, S, D] in the dtypes of the arguments, with padding
        in front, or two `PackedKV`. Raises ValueError for several tokens in packed form if rows are
        at different positions in their blocks of the grid.
        """
        n_own, n_new = self.forget(), keys.shape[2]
        first = self.n_packed if n_new > 1 else []
        self.newest.append(keys, values)
        self._end_at(self.size() + n_new)
        self._make_room(keys, values)
        if n_new > 1:
            self._pack(first, self.n_packed)
        plan = self.plan
        if plan is None or not plan.can_take_packed:
            all_keys, all_values = self.keys_and_values()
            return all_keys.astype(keys.dtype), all_values.astype(values.dtype)
        if n_new > 1 and len(set(zip(n_own, self.newest.lengths, strict=True))) > 1:
            raise ValueError(f"{n_new} tokens for rows at different positions; expected one")
        key_side, value_side = self.precision.sides
        width = keys.shape[3] + key_side.padding + values.shape[3] + value_side.padding
        token_bytes = keys.shape[1] * width * keys.dtype.size
        strategy = plan.choose(n_new, self.size(), keys.shape[0], token_bytes)
        fetched_keys, fetched_values = (
            PackedKV.of(packed, side, self.size(), strategy, plan.tile_bytes, newest, max(n_own))
            for (packed, _, side), newest in zip(self._sides, self.newest.view(), strict=True)
        )
        if self.newest.lengths == self.lengths and self.newest.size() == self.size() <= pk.GRID:
            fetched_keys.is_computed = True
        if n_new > pk.GRID:
            self.forget()
        return fetched_keys, fetched_values

    @property
    def _sides(self) -> tuple[tuple[pk.Packed, mx.array, Quantization], ...]:
        """The buffers, the newest tokens and the quantization of keys, then of values."""
        keys, values = self.precision.sides
        return (self.keys, self.newest.keys, keys), (self.values, self.newest.values, values)

    @property
    def bits(self) -> int:
        """Bits of the keys; the attribute does not exist if fetches are arrays."""
        if self.plan is None or not self.plan.can_take_packed:
            raise AttributeError("bits")
        return self.precision.keys.bits

    @property
    def group_size(self) -> int:
        if not hasattr(self, "bits"):
            raise AttributeError("group_size")
        return self.precision.group_size

    def forget(self) -> list[int]:
        """Pack tokens that the next query sees quantized; return row lengths modulo `GRID`."""
        n_own = [n % pk.GRID for n in self.lengths]
        n_held = self.newest.lengths
        if any(map(gt, n_held, n_own)):
            n_kept = list(map(min, n_own, n_held))
            self._pack(self.n_packed, list(map(sub, self.lengths, n_kept)))
            self.newest.keep(n_kept)
        return n_own

    @property
    def n_packed(self) -> list[int]:
        """How many of the first tokens of each row are packed: all before its last block, and all
        that are no longer held in full precision."""
        return [
            max(n - n_held, (n - 1) // pk.GRID * pk.GRID)
            for n, n_held in zip(self.lengths, self.newest.lengths, strict=True)
        ]

    def _pack(self, first: Sequence[int], last: Sequence[int]) -> None:
        """Pack tokens [first, last) of each row."""
        if first == last:
            return
        # Rows end at the same column, here and in `newest`.
        ranges = [(n - a, n - b) for n, a, b in zip(self.lengths, first, last, strict=True)]
        for row, (start, stop) in _by_rows(ranges):
            if start > stop:
                at, own = (slice(x.size() - start, x.size() - stop) for x in (self, self.newest))
                for packed, computed, quantization in self._sides:
                    new = pk.quantize(computed[row, :, own], quantization)
                    for buffer, x in zip(packed, new, strict=True):
                        buffer[row, :, at] = x

    def _make_room(self, *new: mx.array) -> None:
        """Make the buffers long enough, with zeros, for all tokens, of which `new` are the last."""
        if self.keys is None or self.keys[0].shape[2] < self.size():
            start = self.size() - new[0].shape[2]
            self.keys, self.values = (
                pk.append(packed, start, pk.zeros(x, quantization))
                for (packed, _, quantization), x in zip(self._sides, new, strict=True)
            )

    def _clear(self, stop: int) -> None:
        """Write zeros over tokens that are not packed, up to token `stop` of the buffers."""
        firsts = [self.size() - n + m for n, m in zip(self.lengths, self.n_packed, strict=True)]
        for row, first in _by_rows(firsts):
            for buffer in (*self.keys, *self.values) if first < stop else ():
                buffer[row, :, first:stop] = 0

    def trim(self, n: int) -> int:
        n_packed, stop = self.n_packed, self.size()
        n = super().trim(n)
        self.newest.trim(n)
        if self.n_packed != n_packed:
            self._clear(stop)
        return n

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.newest.nbytes

    @property
    def state(self) -> tuple[Any, ...]:
        return *super().state, self.newest.keys, self.newest.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values dequantized, padding included; some models read them here.

        Raises ValueError if the cache is empty, or if its fetches are packed: a model would see
        different keys here than in its fetches.
        """
        if self.empty() or hasattr(self, "bits"):
            raise ValueError("the cache is empty, or its fetches are packed")
        # The scales of a float32 model have 16 bits.
        dtype = (self.keys[1] if self.newest.keys is None else self.newest.keys).dtype
        keys, values = (
            pk.read(pk.view(packed, 0, self.size()), quantization, dtype)
            for packed, _, quantization in self._sides
        )
        n_own = list(map(sub, self.lengths, self.n_packed))
        if any(n_own):
            for x, own in zip((keys, values), self.newest.only(n_own), strict=True):
                x[:, :, self.size() - max(n_own) :] += own
        return keys, values


def _by_rows(values: Sequence[_Value]) -> Iterator[tuple[slice, _Value]]:
    """Yield the rows with their values: all rows at once if the values are equal."""
    if len(set(values)) == 1:
        yield slice(None), values[0]
        return
    for i, value in enumerate(values):
        yield slice(i, i + 1), value


class SequenceQuantizedKVCache(PackedCache):
    """Keys and values of one layer and one sequence, `offset` tokens long.

    `keys` and `values` are None or buffers [1, H, S, ...], S >= `offset` (see `packed.Packed`).
    Owned by the thread that runs the model.
    """

    def __init__(self, precision: KVPrecision, plan: AttentionPlan | None = None) -> None:
        self.precision, self.plan = precision, plan
        self.offset = 0
        self.newest = Newest(1)
        self._before: tuple[int, Newest] | None = None
        """The last block's end, and its tokens in full precision, while the next block is short."""

    @property
    def lengths(self) -> list[int]:
        return [self.offset]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Return the mask for the next N tokens: None, "causal" or a boolean array [N, S].

        An array only if the caller requests it, or if the window hides tokens.
        """
        if window_size is not None and self.offset + N <= window_size:
            window_size = None
        mask: mx.array | str | None = create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )
        return mask

    def packed(self, start: int, stop: int) -> tuple[pk.Packed, pk.Packed]:
        """Return keys and values of tokens [start, stop), lazy and packed."""
        # Tokens that are not packed yet are packed for this result only: packing them in buffers
        # that a batch shares would copy the buffers.
        (n_packed,), first = self.n_packed, self.offset - self.newest.size()
        middle = min(max(start, n_packed), stop)
        keys, values = (
            pk.each(
                lambda x, y: mx.concatenate([x, y], axis=2) if start < middle else y,
                pk.view(packed, start, middle),
                pk.quantize(computed[:, :, middle - first : stop - first], side),
            )
            if middle < stop
            else pk.view(packed, start, stop)
            for packed, computed, side in self._sides
        )
        return keys, values

    def forget(self) -> list[int]:
        n_own = self.offset % pk.GRID
        if n_own == 0 and self.newest.size() == pk.GRID:
            self._before = self.offset, copy.copy(self.newest)
        elif n_own >= _MOST_TAKEN_BACK:
            self._before = None
        return super().forget()

    def trim(self, n: int) -> int:
        """Like `Buffers.trim`. A block that loses tokens is in full precision again."""
        if self._before is None or self.offset - n >= self._before[0]:
            return super().trim(n)
        (end, newest), self._before = self._before, None
        n_after = super().trim(self.offset - end)
        self.newest = newest
        self._clear(end)
        return n_after + super().trim(n - n_after)

    def recall(self, keys: mx.array, values: mx.array) -> None:
        """Replace the last packed tokens by keys and values [1, H, n, D] in full precision."""
        self.newest.append(keys, values)
        self._clear(self.offset)

    def size(self) -> int:
        return self.offset

    def as_computed(self) -> ChunkedKVCache:
        """Return the newest tokens, at least one, as lazy views of the buffers."""
        cache = ChunkedKVCache(pk.GRID)
        cache.start_position, cache.offset = self.offset - self.newest.size(), self.offset
        cache.keys, cache.values = self.newest.view()
        return cache

    def _end_at(self, n_tokens: int) -> None:
        self.offset = n_tokens

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        return BatchQuantizedKVCache.merge(caches)


class BatchQuantizedKVCache(PackedCache, PaddedBatch):
    """Quantized keys and values of one layer for B sequences."""

    def __init__(
        self, left_padding: Sequence[int], precision: KVPrecision, plan: AttentionPlan | None = None
    ) -> None:
        self.precision, self.plan = precision, plan
        self._place(ints(left_padding), 0)
        self.newest = Newest(len(self._padding))

    @classmethod
    def _of_one(cls, cache: Any) -> BatchQuantizedKVCache:
        if not isinstance(cache, SequenceQuantizedKVCache):
            raise TypeError(f"cannot merge a {type(cache).__name__} into a quantized batch")
        row = cls([], cache.precision, cache.plan)
        row._adopt(cache)
        row.newest.extend(cache.newest)
        return row

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(batch_indices)
        self.newest.filter(batch_indices)

    def extend(self, *batches: Any) -> None:
        """Raises TypeError for another class, and ValueError for another precision."""
        for batch in batches:
            if not isinstance(batch, BatchQuantizedKVCache):
                raise TypeError(f"cannot extend a quantized batch by a {type(batch).__name__}")
            if batch.precision != self.precision:
                raise ValueError(f"cannot extend a batch of {self.precision} by {batch.precision}")
            self.plan = self.plan or batch.plan
        super().extend(*batches)
        self.newest.extend(*(batch.newest for batch in batches))

    def extract(self, idx: int) -> SequenceQuantizedKVCache:
        """Return row `idx` as a cache of its own (see `_row`)."""
        cache = SequenceQuantizedKVCache(self.precision, self.plan)
        if (row := self._row(idx)) is not None:
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
