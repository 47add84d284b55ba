"""The KV caches of one sequence, and of several sequences that run as one batch.

A batch has the layout of mlx-lm's `BatchKVCache`: rows end at one common position and are padded on
the left. Python also stores the padding, so no step has to ask the device for it, and an unpadded
batch needs no array mask. An array mask would make prefill take several times as long.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import gt, sub
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ChunkedKVCache, KVCache, create_attention_mask

from ..geometry.precision import KVPrecision, Quantization
from . import packed as pk
from .attention import AttentionPlan, PackedKV

Batch = TypeVar("Batch", bound="PaddedBatch")
_Value = TypeVar("_Value")

_MOST_TAKEN_BACK = 32
"""The most tokens that a draft model computes ahead (host: `MOST_DRAFTED`)."""


class Buffers:
    """Keys and values [B, H, S, ...] of one layer: None, or arrays or `Packed` with spare room.

    Row i has its tokens in the columns from `_padding[i]` to `_idx`, where all rows end.
    """

    keys: Any = None
    values: Any = None
    _padding: Sequence[int] = (0,)
    _idx: int = 0

    def size(self) -> int:
        """Return the column at which all rows end; it counts the padding in front."""
        return self._idx

    @property
    def lengths(self) -> list[int]:
        return [self._idx - n for n in self._padding]

    def _end_at(self, n_tokens: int) -> None:
        self._idx = n_tokens

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens, at most all; return how many."""
        n = min(self.size(), n)
        self._end_at(self.size() - n)
        return n

    def is_trimmable(self) -> bool:
        return True

    def empty(self) -> bool:
        return self.keys is None

    def finalize(self) -> None:
        """Do nothing at the end of a prompt: buffers never have padding after the tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding and spare room included."""
        return pk.n_bytes(self.keys) + pk.n_bytes(self.values)

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.size()


class PaddedBatch(Buffers):
    """B sequences in buffers [B, H, S, ...].

    `left_padding` and `offset` (_idx - left_padding, for rotary embeddings) are int32 arrays [B].
    They are replaced, never written to.
    """

    extends_by_many = True
    """`extend` takes any number of batches; mlx-lm's takes one."""
    left_padding: mx.array
    offset: mx.array

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask of the next N tokens over all S = _idx + N columns.

        The mask is None (N = 1) or "causal" if no row is padded and no window hides tokens.
        Otherwise, and with `return_array`, it is a boolean array [B, 1, N, S].
        """
        windowed = window_size is not None and self._idx + N > window_size
        if not (return_array or windowed or any(self._padding)):
            return None if N == 1 else "causal"
        mask: mx.array = create_causal_mask(
            N, offset=self._idx, window_size=window_size, left_padding=self.left_padding
        )
        return mask

    @classmethod
    def _of_one(cls: type[Batch], cache: Any) -> Batch:
        """Return a batch of one sequence's cache, without a copy."""
        raise NotImplementedError

    @classmethod
    def merge(cls: type[Batch], caches: Sequence[Any]) -> Batch:
        """Return one batch for the caches of several sequences; a single cache is not copied.

        Raises TypeError for another class, and ValueError if caches differ in precision.
        """
        batch, *rows = map(cls._of_one, caches)
        batch.extend(*rows)
        return batch

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep only the given rows, in the given order."""
        keep = [int(i) for i in batch_indices]
        padding = [self._padding[i] for i in keep]
        surplus = min(padding, default=0)
        if keep == list(range(len(self._padding))) and not surplus:
            return
        if not keep:
            self.keys = self.values = None
            self._place([], 0)
            return
        if self.keys is not None:
            rows, stop = mx.array(keep, mx.int32), surplus + self._capacity(self._idx - surplus)
            # `take` copies even a single row: a slice would keep the whole batch in memory.
            self.keys, self.values = (
                pk.each(lambda x: mx.take(x[:, :, surplus:stop], rows, axis=0), buffers)
                for buffers in (self.keys, self.values)
            )
        self._place([n - surplus for n in padding], self._idx - surplus)

    def extend(self, *batches: Any) -> None:
        """Add the rows of batches of this class after our own rows, in one copy."""
        sides = [side for side in (self, *batches) if side._padding]
        if len(sides) < 2:
            for side in sides:
                if side.keys is not None:
                    self.keys, self.values = pk.share(side.keys), pk.share(side.values)
                self._place(side._padding, side._idx)
            return
        idx = max(side._idx for side in sides)
        padding = [n + idx - side._idx for side in sides for n in side._padding]
        firsts = accumulate((len(side._padding) for side in sides), initial=0)
        views = [
            (first, pk.view(side.keys, 0, side._idx), pk.view(side.values, 0, side._idx))
            for first, side in zip(firsts, sides, strict=False)
            if side.keys is not None
        ]

        def joined(*arrays: mx.array) -> mx.array:
            _, n_heads, _, dim = arrays[0].shape
            buffer = mx.zeros((len(padding), n_heads, self._capacity(idx), dim), arrays[0].dtype)
            for (first, *_), x in zip(views, arrays, strict=True):
                buffer[first : first + x.shape[0], :, idx - x.shape[2] : idx] = x
            return buffer

        self._place(padding, idx)
        if views:
            self.keys = pk.each(joined, *(keys for _, keys, _ in views))
            self.values = pk.each(joined, *(values for *_, values in views))

    def _row(self, idx: int) -> tuple[Any, ...] | None:
        """Return lazy views of one row's keys and values, without padding, or None if it is empty.

        While the views live, an update copies the buffers.
        """
        padding = self._padding[idx]
        if self.keys is None or padding >= self._idx:
            return None
        if len(self._padding) == 1 and not padding:
            return pk.share(self.keys), pk.share(self.values)
        row, at = slice(idx, idx + 1), slice(padding, self._idx)
        return tuple(pk.each(lambda x: x[row, :, at], side) for side in (self.keys, self.values))

    def _adopt(self, cache: Any) -> None:
        self._place([0], cache.offset)
        if cache.offset:
            self.keys, self.values = pk.share(cache.keys), pk.share(cache.values)

    def _capacity(self, n_tokens: int) -> int:
        return pk.capacity(n_tokens)

    def _place(self, padding: Sequence[int], idx: int) -> None:
        self._padding = padding
        self.left_padding = mx.array(list(padding), mx.int32)
        self._end_at(idx)

    def _end_at(self, n_tokens: int) -> None:
        super()._end_at(n_tokens)
        self.offset = mx.array([n_tokens - n for n in self._padding], mx.int32)


class FullPrecisionBatchKVCache(PaddedBatch):
    """Replaces mlx-lm's BatchKVCache for layers that are not quantized."""

    def __init__(self, left_padding: Sequence[int]) -> None:
        self._place(left_padding, 0)

    @classmethod
    def _of_one(cls, cache: Any) -> FullPrecisionBatchKVCache:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cannot merge a {type(cache).__name__} into a batch of KVCache")
        row = cls([])
        row._adopt(cache)
        return row

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys [B, H, n, Dk] and values [B, H, n, Dv]; return all, padding included."""
        self.keys = pk.append(self.keys, self._idx, keys)
        self.values = pk.append(self.values, self._idx, values)
        self._end_at(self._idx + keys.shape[2])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return pk.view(self.keys, 0, self._idx), pk.view(self.values, 0, self._idx)

    def extract(self, idx: int) -> KVCache:
        """Return row `idx` as a cache of lazy views (see `_row`)."""
        cache = KVCache()
        if (row := self._row(idx)) is not None:
            cache.keys, cache.values = row
            cache.offset = self.lengths[idx]
        return cache


class Newest(PaddedBatch):
    """The last tokens of B rows of a quantized cache, [B, H, S, D], in full precision.

    Queries in the same block of the grid see these tokens. Padding is zeros.
    """

    def __init__(self, n_rows: int) -> None:
        self._place([0] * n_rows, 0)

    @property
    def rows_differ(self) -> bool:
        return any(self._padding)

    def extract(self, idx: int) -> Newest:
        row, newest = self._row(idx), Newest(1)
        if row is not None:
            newest.keys, newest.values = row
            newest._idx = self.lengths[idx]
        return newest

    def append(self, keys: mx.array, values: mx.array) -> None:
        start, stop = self._idx, self._idx + keys.shape[2]
        room = self._capacity(stop) - stop
        self.keys = pk.append(self.keys, start, keys, room)
        self.values = pk.append(self.values, start, values, room)
        self._idx = stop

    def keep(self, n_tokens: Sequence[int]) -> None:
        sides, width = self.only(n_tokens), max(n_tokens)
        self._place([width - n for n in n_tokens], width)
        room = self._capacity(width) - width
        self.keys, self.values = (pk.append(None, 0, x, room) if width else None for x in sides)

    def only(self, n_tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return each row's last `n_tokens`, with zeros in front, [B, H, max(n_tokens), D]."""
        width = max(n_tokens)
        newest = self.last(width)
        if min(n_tokens) == width:
            return newest
        padding = mx.array([width - n for n in n_tokens])
        is_kept = (mx.arange(width) >= padding[:, None])[:, None, :, None]
        keys, values = (mx.where(is_kept, x, mx.zeros((), x.dtype)) for x in newest)
        return keys, values

    def trim(self, n: int) -> int:
        n_left = max(0, self._idx - n)
        self._place([min(padding, n_left) for padding in self._padding], n_left)
        return n

    def last(self, n: int) -> tuple[mx.array, mx.array]:
        start, stop = self._idx - n, self._idx
        return pk.view(self.keys, start, stop), pk.view(self.values, start, stop)

    def view(self) -> tuple[mx.array, mx.array]:
        return self.last(self._idx)

    def _capacity(self, n_tokens: int) -> int:
        return max(n_tokens, pk.GRID)

    def _place(self, padding: Sequence[int], idx: int) -> None:
        self._padding, self._idx = padding, idx


class PackedCache(Buffers):
    """Packed keys and values, and the newest tokens' keys and values in full precision.

    `plan` says how attention reads both. After each update, mlx-lm chooses the attention by
    `hasattr(cache, "bits")`. So `bits` and `group_size` exist only if updates return packed keys
    and values. If updates return arrays, the queries of a call should be in one block of the grid
    (see `end_on_grid`).

    Each update packs the tokens that its queries see quantized. The packed buffers hold zeros for
    tokens that are not packed.
    """

    precision: KVPrecision
    newest: Newest
    plan: AttentionPlan | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys [B, H, n, Dk] and values [B, H, n, Dv]; return all keys and all values.

        The results are two `PackedKV` if the model takes packed keys, otherwise arrays [B, H, S, D]
        in the dtypes of the arguments. With `PackedKV`, n > 1 raises ValueError if rows are at
        different positions in their blocks of the grid.
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
        key_side, value_side = self.precision
        width = keys.shape[3] + key_side.padding + values.shape[3] + value_side.padding
        token_bytes = keys.shape[1] * width * keys.dtype.size
        n_tokens = self.size()
        newest = self.newest
        how: dict[str, Any] = {
            "n_newest": newest.size(),
            "n_own": max(n_own),
            "strategy": plan.choose(n_new, n_tokens, keys.shape[0], token_bytes),
            "tile_bytes": plan.max_dequantized_bytes,
            "is_computed": n_tokens <= pk.GRID and newest.lengths == self.lengths,
            "rows_differ": newest.rows_differ,
        }
        fetched_keys = PackedKV(self.keys, key_side, n_tokens, newest.keys, **how)
        fetched_values = PackedKV(self.values, value_side, n_tokens, newest.values, **how)
        if n_new > pk.GRID:
            self.forget()
        return fetched_keys, fetched_values

    @property
    def _sides(self) -> tuple[tuple[pk.Packed, mx.array, Quantization], ...]:
        keys, values = self.precision
        return (self.keys, self.newest.keys, keys), (self.values, self.newest.values, values)

    @property
    def bits(self) -> int:
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
        """How many tokens at each row's start are packed: all tokens before the row's last block,
        and the last block's tokens that `newest` does not hold."""
        return [
            max(n - n_held, (n - 1) // pk.GRID * pk.GRID)
            for n, n_held in zip(self.lengths, self.newest.lengths, strict=True)
        ]

    def _pack(self, first: Sequence[int], last: Sequence[int]) -> None:
        if first == last:
            return
        # Ranges count from the end, because rows end at one column, here and in `newest`.
        ranges = [(n - a, n - b) for n, a, b in zip(self.lengths, first, last, strict=True)]
        for row, (start, stop) in _by_rows(ranges):
            if start > stop:
                at, own = (slice(x.size() - start, x.size() - stop) for x in (self, self.newest))
                for packed, computed, quantization in self._sides:
                    new = pk.quantize(computed[row, :, own], quantization)
                    for buffer, x in zip(packed, new, strict=True):
                        buffer[row, :, at] = x

    def _make_room(self, *new: mx.array) -> None:
        """Extend the buffers by zeros until they have room for all tokens; `new` are the last."""
        if self.keys is None or self.keys[0].shape[2] < self.size():
            start = self.size() - new[0].shape[2]
            n_zeros = pk.capacity(self.size()) - start
            self.keys, self.values = (
                pk.append(packed, start, pk.zeros(x, n_zeros, quantization), room=0)
                for (packed, _, quantization), x in zip(self._sides, new, strict=True)
            )

    def _clear(self, stop: int) -> None:
        """Write zeros over the tokens that `n_packed` does not count, up to token `stop`."""
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

        Raises ValueError if the cache is empty, or if updates return packed keys, because a model
        would see different keys here than in attention.
        """
        if self.empty() or hasattr(self, "bits"):
            raise ValueError("the cache is empty, or its fetches are packed")
        # The newest tokens have the model's dtype, but scales have 16 bits in a float32 model.
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
    """Yield the rows with their values: all rows together if the values are equal."""
    if len(set(values)) == 1:
        yield slice(None), values[0]
        return
    for i, value in enumerate(values):
        yield slice(i, i + 1), value


class SequenceQuantizedKVCache(PackedCache):
    """Quantized keys and values [1, H, S, ...] of one layer and one sequence.

    Owned by the thread that runs the model.
    """

    def __init__(self, precision: KVPrecision, plan: AttentionPlan | None = None) -> None:
        self.precision, self.plan = precision, plan
        self.newest = Newest(1)
        self._before: tuple[int, Newest] | None = None
        """For `trim`: the previous block's end and tokens, while the current block is short."""

    @property
    def offset(self) -> int:
        return self._idx

    @offset.setter
    def offset(self, n_tokens: int) -> None:
        self._idx = n_tokens

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Return the mask for the next N tokens: None, "causal" or a boolean array [N, S]."""
        if window_size is not None and self.offset + N <= window_size:
            window_size = None
        mask: mx.array | str | None = create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )
        return mask

    def packed(self, start: int, stop: int) -> tuple[pk.Packed, pk.Packed]:
        """Return keys and values of tokens [start, stop), lazy and packed."""
        # The newest tokens are packed for this result only: packing them in buffers that a batch
        # shares would copy the buffers.
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
        """Like `Buffers.trim`. If the end is then in the block of `_before`, the block's remaining
        tokens are in full precision again."""
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

    def as_computed(self) -> ChunkedKVCache:
        """Return a cache of lazy views of the newest tokens; there must be at least one."""
        cache = ChunkedKVCache(pk.GRID)
        cache.start_position, cache.offset = self.offset - self.newest.size(), self.offset
        cache.keys, cache.values = self.newest.view()
        return cache

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        return BatchQuantizedKVCache.merge(caches)


class BatchQuantizedKVCache(PackedCache, PaddedBatch):
    """Quantized keys and values of one layer for B sequences."""

    def __init__(
        self, left_padding: Sequence[int], precision: KVPrecision, plan: AttentionPlan | None = None
    ) -> None:
        self.precision, self.plan = precision, plan
        self._place(left_padding, 0)
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
        """Add the rows of other quantized batches, as in `PaddedBatch.extend`.

        Raises TypeError for a batch of another class, and ValueError for another precision.
        """
        for batch in batches:
            if not isinstance(batch, BatchQuantizedKVCache):
                raise TypeError(f"cannot extend a quantized batch by a {type(batch).__name__}")
            if batch.precision != self.precision:
                raise ValueError(f"cannot extend a batch of {self.precision} by {batch.precision}")
            self.plan = self.plan or batch.plan
        super().extend(*batches)
        self.newest.extend(*(batch.newest for batch in batches))

    def extract(self, idx: int) -> SequenceQuantizedKVCache:
        """Return row `idx` as a cache of lazy views (see `_row`)."""
        cache = SequenceQuantizedKVCache(self.precision, self.plan)
        if (row := self._row(idx)) is not None:
            cache.keys, cache.values = row
            cache.offset = self._idx - self._padding[idx]
            cache.newest = self.newest.extract(idx)
        return cache


def batch_of(caches: Sequence[Any]) -> Any | None:
    """Return our batch of several sequences' caches of one layer, None for other classes."""
    if any(isinstance(cache, SequenceQuantizedKVCache) for cache in caches):
        return BatchQuantizedKVCache.merge(caches)
    if all(type(cache) is KVCache for cache in caches):
        return FullPrecisionBatchKVCache.merge(caches)
    return None
