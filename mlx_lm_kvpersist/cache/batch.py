"""The quantized KV cache of several sequences that run as one batch.

The layout is that of mlx-lm's `BatchKVCache`: rows end at one common position and are padded on
the left. Unlike there, the padding is also known to Python, so that no step waits for the device
to learn it, and an unpadded batch needs no array mask (a chunk of prefill against a boolean mask
takes several times as long as against "causal").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache

from . import packed as pk
from .attention_plan import AttentionPlan
from .fetch import PackedCache
from .packed import Packed
from .precision import KVPrecision
from .quantized import SequenceQuantizedKVCache

__all__ = ["BatchQuantizedKVCache"]

_STOCK = (KVCache, QuantizedKVCache)


class BatchQuantizedKVCache(PackedCache):
    """Keys and values of one layer for B sequences.

    `keys` and `values` are None or packed buffers [B, H, S, ...]; all rows end at `_idx`, row i
    begins at its padding. `left_padding` and `offset` (tokens held, for rotary embeddings) are
    int32 arrays [B], replaced and never written to; always offset = _idx - left_padding.
    """

    left_padding: mx.array
    offset: mx.array

    def __init__(
        self,
        left_padding: Sequence[int],
        precision: KVPrecision,
        plan: AttentionPlan | None = None,
    ) -> None:
        self.precision = precision
        self.plan = plan
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self._right_padding: list[int] | None = None
        self._place(_ints(left_padding), 0)

    @classmethod
    def merge(
        cls, caches: Sequence[Any], precision: KVPrecision | None = None
    ) -> BatchQuantizedKVCache:
        """Return one batch for the caches of several sequences, in their order.

        Takes our own caches and mlx-lm's KVCache and QuantizedKVCache, which are quantized on the
        way in. A single filled cache of ours is adopted, not copied. Without `precision`, that of
        the first cache of ours holds, else the default; so does the first plan.

        Raises:
            TypeError: a cache is of another class.
            ValueError: there are no caches, or ours differ in precision.
        """
        if not caches:
            raise ValueError("nothing to merge")
        ours = [cache for cache in caches if isinstance(cache, SequenceQuantizedKVCache)]
        if precision is None:
            precision = ours[0].precision if ours else KVPrecision()
        plan = next((cache.plan for cache in ours if cache.plan is not None), None)
        rows = [_packed_row(cache, precision) for cache in caches]
        lengths = [0 if row is None else row[0][0].shape[2] for row in rows]
        n_tokens = max(lengths)
        batch = cls([n_tokens - n for n in lengths], precision, plan)
        if n_tokens == 0:
            return batch
        batch._place(batch._padding, n_tokens)
        if len(caches) == 1:
            cache = caches[0]
            if isinstance(cache, SequenceQuantizedKVCache):
                assert cache.keys is not None and cache.values is not None
                batch.keys, batch.values = pk.share(cache.keys), pk.share(cache.values)
            else:
                assert rows[0] is not None
                batch.keys, batch.values = rows[0]
            return batch
        like = next(row for row in rows if row is not None)
        capacity = n_tokens + pk.headroom(1)
        batch.keys = pk.zeros_like(like[0], len(rows), capacity)
        batch.values = pk.zeros_like(like[1], len(rows), capacity)
        for i, row in enumerate(rows):
            if row is not None:
                at = slice(batch._padding[i], n_tokens)
                _write(batch.keys, slice(i, i + 1), at, row[0])
                _write(batch.values, slice(i, i + 1), at, row[1])
        return batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys [B, H, n, Dk] and values [B, H, n, Dv]; return all of both, padding in front.

        By the plan: arrays of the dtype of what came in, [B, H, _idx, D], or two `PackedKV`.
        """
        n_new = keys.shape[2]
        precision = self.precision
        self.keys = pk.append(self.keys, self._idx, pk.quantize(keys, precision))
        self.values = pk.append(self.values, self._idx, pk.quantize(values, precision.of_values))
        self._idx += n_new
        self.offset = _offsets(self._padding, self._idx)
        return self._fetch((self.keys, self.values), self._idx, (keys, values))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values, plain, padding included.

        Raises:
            ValueError: the cache is empty.
        """
        if self.keys is None or self.values is None:
            raise ValueError("the cache is empty")
        return (
            pk.read(self.keys, self.precision, self._idx),
            pk.read(self.values, self.precision.of_values, self._idx),
        )

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask for the next N tokens, S = _idx + N tokens in all.

        None (N = 1) or "causal" where all rows are equally long and no window cuts anything off,
        else, and with `return_array`, a boolean array [B, 1, N, S]. Right padding needs no mask:
        it comes after every real token of its row until `finalize` moves it.
        """
        windowed = window_size is not None and self._idx + N > window_size
        if not (return_array or windowed or any(self._padding)):
            return None if N == 1 else "causal"
        mask: mx.array = create_causal_mask(
            N, offset=self._idx, window_size=window_size, left_padding=self.left_padding
        )
        return mask

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce how the next tokens are padded; `lengths` is implied by the padding.

        Raises:
            ValueError: left padding for a batch that holds tokens already.
        """
        if left_padding is not None:
            if self.keys is not None:
                raise ValueError("left padding can only be added to an empty batch")
            added = _ints(left_padding)
            self._place([a + b for a, b in zip(self._padding, added, strict=True)], self._idx)
        if right_padding is not None:
            padding = _ints(right_padding)
            self._right_padding = padding if max(padding) > 0 else None

    def finalize(self) -> None:
        """Move the announced right padding to the left of each row."""
        right, self._right_padding = self._right_padding, None
        if right is None or self.keys is None or self.values is None:
            return
        padding = [a + b for a, b in zip(self._padding, right, strict=True)]
        # All rows may be padded by now; then they move left instead and the batch gets shorter.
        surplus = min(padding)
        shifts = mx.array([n - surplus for n in right], mx.int32)[:, None, None, None]
        capacity = self.keys[0].shape[2]
        source = (mx.arange(capacity)[None, None, :, None] - shifts) % capacity
        self.keys, self.values = (
            pk.each(lambda x: mx.take_along_axis(x, source, axis=2), packed)
            for packed in (self.keys, self.values)
        )
        self._place([n - surplus for n in padding], self._idx - surplus)

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep the rows of these indices, in this order. Keeping all as they are copies nothing."""
        keep = _ints(batch_indices)
        if keep == list(range(len(self._padding))):
            return
        if not keep:
            self.keys = self.values = self._right_padding = None
            self._place([], 0)
            return
        padding = [self._padding[i] for i in keep]
        surplus = min(padding)
        if self.keys is not None and self.values is not None:
            rows = mx.array(keep, mx.int32)
            self.keys, self.values = (
                # take copies, also a single row: a slice would keep the whole batch in memory.
                pk.each(lambda x: mx.take(x[:, :, surplus:], rows, axis=0), packed)
                for packed in (self.keys, self.values)
            )
        if self._right_padding is not None:
            self._right_padding = [self._right_padding[i] for i in keep]
        self._place([n - surplus for n in padding], self._idx - surplus)

    def extend(self, other: BatchQuantizedKVCache | BatchKVCache) -> None:
        """Add the rows of `other` behind our own. Either batch may be empty.

        mlx-lm's own BatchKVCache is quantized on the way in (this waits for its padding).

        Raises:
            TypeError: `other` is of another class.
            ValueError: `other` has another precision.
        """
        if isinstance(other, BatchKVCache):
            other = _from_stock_batch(other, self.precision)
        if not isinstance(other, BatchQuantizedKVCache):
            raise TypeError(f"cannot extend a quantized batch by a {type(other).__name__}")
        if other.precision != self.precision:
            raise ValueError(f"cannot extend a batch of {self.precision} by {other.precision}")
        self.plan = self.plan or other.plan
        if not self._padding:
            if other.keys is not None and other.values is not None:
                self.keys, self.values = pk.share(other.keys), pk.share(other.values)
            self._right_padding = other._right_padding
            self._place(other._padding, other._idx)
            return
        sides = (self, other)
        idx = max(self._idx, other._idx)
        padding = [n + idx - side._idx for side in sides for n in side._padding]
        if self._right_padding or other._right_padding:
            self._right_padding = [
                n for side in sides for n in side._right_padding or [0] * len(side._padding)
            ]
        filled = [
            (side, side.keys, side.values)
            for side in sides
            if side.keys is not None and side.values is not None
        ]
        if filled:
            capacity = idx + pk.headroom(1)
            _, like_keys, like_values = filled[0]
            new_keys = pk.zeros_like(like_keys, len(padding), capacity)
            new_values = pk.zeros_like(like_values, len(padding), capacity)
            for side, keys, values in filled:
                first = 0 if side is self else len(self._padding)
                rows = slice(first, first + len(side._padding))
                at = slice(idx - side._idx, idx)
                _write(new_keys, rows, at, pk.view(keys, 0, side._idx))
                _write(new_values, rows, at, pk.view(values, 0, side._idx))
            self.keys, self.values = new_keys, new_values
        self._place(padding, idx)

    def extract(self, idx: int) -> SequenceQuantizedKVCache:
        """Return row `idx` as a cache of lazy views, without its padding.

        The only row, when it has none, keeps the room behind it too. Take what you need from it
        and drop it: a live view makes our next update copy everything.
        """
        padding = self._padding[idx]
        if self.keys is None or self.values is None or padding >= self._idx:
            return SequenceQuantizedKVCache(self.precision, self.plan)
        if self._padding == [0]:
            return SequenceQuantizedKVCache.from_packed(
                self.precision, pk.share(self.keys), pk.share(self.values), self._idx, self.plan
            )
        row = slice(idx, idx + 1)
        at = slice(padding, self._idx)
        keys = pk.each(lambda x: x[row, :, at], self.keys)
        values = pk.each(lambda x: x[row, :, at], self.values)
        return SequenceQuantizedKVCache.from_packed(
            self.precision, keys, values, self._idx - padding, self.plan
        )

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row; return how many."""
        n = min(self._idx, n)
        self._place(self._padding, self._idx - n)
        return n

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        """Tokens of the longest row, padding included."""
        return self._idx

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding and spare room included; 0 when empty."""
        return pk.n_bytes(self.keys) + pk.n_bytes(self.values)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything the batch holds: buffers, where each row is, bits, group size, value bits."""
        return (
            self.keys,
            self.values,
            self.offset,
            self.left_padding,
            self._idx,
            self.precision.bits,
            self.precision.group_size,
            self.precision.value_bits,
        )

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, _, left_padding, idx, *precision = state
        self.precision = KVPrecision(*precision)
        self._right_padding = None
        self._place(_ints(left_padding), idx)

    def _place(self, padding: list[int], idx: int) -> None:
        """Set where each row begins and where all end."""
        self._padding = padding
        self._idx = idx
        self.left_padding = mx.array(padding, mx.int32)
        self.offset = _offsets(padding, idx)


def _offsets(padding: list[int], idx: int) -> mx.array:
    return mx.array([idx - n for n in padding], mx.int32)


def _ints(values: Sequence[int] | mx.array) -> list[int]:
    items: Any = values.tolist() if isinstance(values, mx.array) else values
    return [int(n) for n in items]


def _write(buffers: Packed, rows: slice, at: slice, new: Packed) -> None:
    for buffer, part in zip(buffers, new, strict=True):
        buffer[rows, :, at] = part


def _packed_row(cache: Any, precision: KVPrecision) -> tuple[Packed, Packed] | None:
    """Return the tokens of one sequence's cache, packed, or None when it holds none."""
    if not isinstance(cache, SequenceQuantizedKVCache) and type(cache) not in _STOCK:
        raise TypeError(f"cannot merge a {type(cache).__name__} into a quantized batch")
    if isinstance(cache, SequenceQuantizedKVCache) and cache.precision != precision:
        raise ValueError(f"cannot merge a cache of {cache.precision} into {precision}")
    if cache.keys is None or not cache.offset:
        return None
    if isinstance(cache, SequenceQuantizedKVCache):
        return cache.packed(0, cache.offset)
    return (
        _packed_part(cache, cache.keys, precision),
        _packed_part(cache, cache.values, precision.of_values),
    )


def _packed_part(cache: Any, held: Any, precision: KVPrecision) -> Packed:
    """Return the keys or the values of a stock cache in `precision`."""
    if type(cache) is KVCache:
        return pk.quantize(held[:, :, : cache.offset], precision)
    part: Packed = tuple(held)
    theirs = KVPrecision(cache.bits, cache.group_size)
    if (theirs.bits, theirs.group_size) == (precision.bits, precision.group_size):
        return pk.view(part, 0, cache.offset)
    return pk.quantize(pk.read(part, theirs, cache.offset), precision)


def _from_stock_batch(stock: BatchKVCache, precision: KVPrecision) -> BatchQuantizedKVCache:
    batch = BatchQuantizedKVCache([], precision)
    if stock.keys is not None:
        batch.keys = pk.quantize(stock.keys[:, :, : stock._idx], precision)
        batch.values = pk.quantize(stock.values[:, :, : stock._idx], precision.of_values)
    if stock._right_padding is not None:
        batch._right_padding = _ints(stock._right_padding)
    batch._place(_ints(stock.left_padding), stock._idx)
    return batch
