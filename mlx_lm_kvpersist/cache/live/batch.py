"""The KV caches of several sequences that run as one batch.

The layout equals mlx-lm's `BatchKVCache`: rows end at one common position and are padded on the
left. Python also stores the padding. So no step waits for the device to read it, and an unpadded
batch needs no array mask, with which prefill takes several times as long as with "causal".
Each prompt has separate caches until it is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, _BaseCache

from . import packed as pk

Batch = TypeVar("Batch", bound="PaddedBatch")


class Buffers(_BaseCache, ABC):  # type: ignore[misc]
    """Keys and values [B, H, S, ...] of one layer: None, or arrays or `Packed` with spare room."""

    keys: Any = None
    values: Any = None

    @abstractmethod
    def size(self) -> int:
        """Return how many tokens from the beginning of the buffers are cached."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """The number of tokens of each row."""

    @abstractmethod
    def _end_at(self, n_tokens: int) -> None:
        """Set `size`."""

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens, at most all; return how many. The buffers keep their size."""
        n = min(self.size(), n)
        self._end_at(self.size() - n)
        return n

    def is_trimmable(self) -> bool:
        return True

    def empty(self) -> bool:
        return self.keys is None

    def finalize(self) -> None:
        """Called at the end of a prompt. Buffers never have padding after the tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding and spare room included; 0 when empty."""
        return pk.n_bytes(self.keys) + pk.n_bytes(self.values)

    @property
    def state(self) -> tuple[Any, ...]:
        """The arrays to evaluate, and the number of tokens."""
        return self.keys, self.values, self.size()


class PaddedBatch(Buffers):
    """B sequences in buffers [B, H, S, ...]: all rows end at `_idx`, each begins at its padding.

    `left_padding` and `offset` (_idx - left_padding, for rotary embeddings) are int32 arrays [B],
    replaced and never written to.
    """

    extends_by_many = True
    """`extend` takes any number of batches; mlx-lm's takes one."""
    left_padding: mx.array
    offset: mx.array
    _padding: list[int]
    _idx: int

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask for the next N tokens, S = _idx + N tokens in all.

        None (N = 1) or "causal" if all rows are equally long and no window hides tokens; otherwise,
        and with `return_array`, a boolean array [B, 1, N, S].
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
        """Return a batch of one sequence's cache, which is not copied."""
        raise NotImplementedError

    @classmethod
    def merge(cls: type[Batch], caches: Sequence[Any]) -> Batch:
        """Return one batch for the caches of several sequences; a single cache is not copied.

        Raises TypeError for a cache of another class, and ValueError if caches differ in precision.
        """
        batch, *rows = map(cls._of_one, caches)
        batch.extend(*rows)
        return batch

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep only the given rows, in the given order. If no row moves, nothing is copied."""
        keep = ints(batch_indices)
        padding = [self._padding[i] for i in keep]
        surplus = min(padding, default=0)
        if keep == list(range(len(self._padding))) and not surplus:
            return
        if not keep:
            self.keys = self.values = None
            self._place([], 0)
            return
        if self.keys is not None:
            rows = mx.array(keep, mx.int32)
            # `take` copies even a single row: a slice would keep the whole batch in memory.
            self.keys, self.values = (
                pk.each(lambda x: mx.take(x[:, :, surplus:], rows, axis=0), buffers)
                for buffers in (self.keys, self.values)
            )
        self._place([n - surplus for n in padding], self._idx - surplus)

    def extend(self, *batches: Any) -> None:
        """Add the rows of batches of this class after our own rows, in one copy.

        Batches may be empty. If only one batch has rows, nothing is copied.
        """
        sides = [side for side in (self, *batches) if side._padding]
        if len(sides) < 2:
            for side in sides:
                if side.keys is not None:
                    self.keys, self.values = pk.share(side.keys), pk.share(side.values)
                self._place(list(side._padding), side._idx)
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
        """Return lazy views of one row's keys and values, without padding; None for an empty batch.

        While the views live, an update copies the buffers. A single row without padding keeps its
        spare room.
        """
        padding = self._padding[idx]
        if self.keys is None or padding >= self._idx:
            return None
        if self._padding == [0]:
            return pk.share(self.keys), pk.share(self.values)
        row, at = slice(idx, idx + 1), slice(padding, self._idx)
        return tuple(pk.each(lambda x: x[row, :, at], side) for side in (self.keys, self.values))

    @property
    def lengths(self) -> list[int]:
        return [self._idx - n for n in self._padding]

    def size(self) -> int:
        """Return the number of tokens of the longest row, padding included."""
        return self._idx

    def _adopt(self, cache: Any) -> None:
        """Take over one sequence: its buffers, with the spare room after its tokens."""
        self._place([0], cache.offset)
        if cache.offset:
            self.keys, self.values = pk.share(cache.keys), pk.share(cache.values)

    def _capacity(self, n_tokens: int) -> int:
        return n_tokens + pk.headroom(1)

    def _place(self, padding: list[int], idx: int) -> None:
        self._padding = padding
        self.left_padding = mx.array(padding, mx.int32)
        self._end_at(idx)

    def _end_at(self, n_tokens: int) -> None:
        self._idx = n_tokens
        self.offset = mx.array([n_tokens - n for n in self._padding], mx.int32)


class FullPrecisionBatchKVCache(PaddedBatch):
    """Replaces mlx-lm's BatchKVCache for layers that are not quantized."""

    def __init__(self, left_padding: Sequence[int]) -> None:
        self._place(ints(left_padding), 0)

    @classmethod
    def _of_one(cls, cache: Any) -> FullPrecisionBatchKVCache:
        if not isinstance(cache, KVCache):
            raise TypeError(f"cannot merge a {type(cache).__name__} into a batch of KVCache")
        row = cls([])
        row._adopt(cache)
        return row

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys [B, H, n, Dk] and values [B, H, n, Dv]; return all, padding in front."""
        self.keys = pk.append(self.keys, self._idx, keys)
        self.values = pk.append(self.values, self._idx, values)
        self._end_at(self._idx + keys.shape[2])
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values, padding included."""
        return pk.view(self.keys, 0, self._idx), pk.view(self.values, 0, self._idx)

    def extract(self, idx: int) -> KVCache:
        """Return row `idx` as a cache of its own (see `_row`)."""
        cache = KVCache()
        if (row := self._row(idx)) is not None:
            cache.keys, cache.values = row
            cache.offset = self._idx - self._padding[idx]
        return cache


def ints(values: Sequence[int] | mx.array) -> list[int]:
    items: Any = values.tolist() if isinstance(values, mx.array) else values
    return [int(n) for n in items]


class Newest(PaddedBatch):
    """The last tokens of B rows of a quantized cache, [B, H, S, D], in full precision.

    A query sees the keys and values of its own block of `pk.GRID` positions in full precision, and
    all older blocks quantized. Only the position decides, so the chunks of a prompt do not matter.
    The newest tokens are packed when the next token begins another block. Padding is zeros.
    """

    def __init__(self, n_rows: int) -> None:
        self._place([0] * n_rows, 0)

    def extract(self, idx: int) -> Newest:
        """Return row `idx`."""
        row, newest = self._row(idx), Newest(1)
        if row is not None:
            newest.keys, newest.values = row
            newest._idx = self.lengths[idx]
        return newest

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the next tokens [B, H, n, W]."""
        start, stop = self._idx, self._idx + keys.shape[2]
        room = self._capacity(stop) - stop
        self.keys = pk.append(self.keys, start, keys, room)
        self.values = pk.append(self.values, start, values, room)
        self._idx = stop

    def keep(self, n_tokens: Sequence[int]) -> None:
        """Keep at most the last `n_tokens` of each row."""
        n_kept = list(map(min, n_tokens, self.lengths))
        if n_kept == self.lengths:
            return
        sides, width = self.only(n_kept), max(n_kept)
        self._place([width - n for n in n_kept], width)
        room = self._capacity(width) - width
        self.keys, self.values = (pk.append(None, 0, x, room) if width else None for x in sides)

    def only(self, n_tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return the last `n_tokens` of each row after zeros, [B, H, max(n_tokens), D]."""
        width = max(n_tokens)
        newest = self.last(width)
        if min(n_tokens) == width:
            return newest
        padding = mx.array([width - n for n in n_tokens])
        is_kept = (mx.arange(width) >= padding[:, None])[:, None, :, None]
        keys, values = (mx.where(is_kept, x, mx.zeros((), x.dtype)) for x in newest)
        return keys, values

    def trim(self, n: int) -> int:
        """Remove the last `n` tokens of each row, or all."""
        n_left = max(0, self._idx - n)
        self._place([min(padding, n_left) for padding in self._padding], n_left)
        return n

    def last(self, n: int) -> tuple[mx.array, mx.array]:
        """Return the last `n` tokens of all rows, as lazy views."""
        start, stop = self._idx - n, self._idx
        return pk.view(self.keys, start, stop), pk.view(self.values, start, stop)

    def view(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values, as lazy views."""
        return self.last(self._idx)

    def _capacity(self, n_tokens: int) -> int:
        return max(n_tokens, pk.GRID)

    def _place(self, padding: list[int], idx: int) -> None:
        self._padding, self._idx = padding, idx
