"""mlx-lm's batch of plain caches, for layers that stay in their own precision, with fewer masks.

Stock's makes an array mask for every step, and waits for the device to learn how rows are padded.
Here the padding is also known to Python: without any, prefill runs against "causal" and a decode
step against no mask at all, as it does for a single sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

__all__ = ["PlainBatchKVCache"]


class PlainBatchKVCache(BatchKVCache):  # type: ignore[misc]
    """Takes the place of a BatchKVCache, and gives and takes the same caches."""

    keys: mx.array | None
    values: mx.array | None
    offset: mx.array
    left_padding: mx.array
    _idx: int
    _right_padding: mx.array | None

    def __init__(self, left_padding: Sequence[int]) -> None:
        super().__init__(list(left_padding))
        self._padding = [int(n) for n in left_padding]
        self._announced: list[int] = []

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> PlainBatchKVCache:
        """Return one batch for the caches of several sequences; a single one is not copied.

        Raises:
            TypeError: a cache is of another class than KVCache.
        """
        for cache in caches:
            if not isinstance(cache, KVCache):
                raise TypeError(f"cannot merge a {type(cache).__name__} into a plain batch")
        if len(caches) == 1 and caches[0].keys is not None:
            batch = cls([0])
            batch.keys, batch.values = copy.copy(caches[0].keys), copy.copy(caches[0].values)
            batch._idx = caches[0].offset
            batch.offset = mx.array([batch._idx])
            return batch
        merged = super().merge(caches)
        # Stock returns one of its own where all are empty.
        return merged if isinstance(merged, cls) else cls([0] * len(caches))

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """Return the mask for the next N tokens, S = _idx + N tokens in all.

        None (N = 1) or "causal" where no row is padded and no window cuts anything off, else, and
        with `return_array`, a boolean array [B, 1, N, S].
        """
        windowed = window_size is not None and self._idx + N > window_size
        if not (return_array or windowed or any(self._padding)):
            return None if N == 1 else "causal"
        mask: mx.array = super().make_mask(N, return_array, window_size=window_size)
        return mask

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce how the next tokens are padded."""
        super().prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)
        if left_padding is not None:
            self._padding = [a + b for a, b in zip(self._padding, left_padding, strict=True)]
        if right_padding is not None and max(right_padding) > 0:
            self._announced = [int(n) for n in right_padding]

    def finalize(self) -> None:
        """Move the announced right padding to the left of each row."""
        if self._right_padding is not None:
            self._padding = [a + b for a, b in zip(self._padding, self._announced, strict=True)]
        super().finalize()

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keep the rows of these indices, in this order. Keeping all as they are copies nothing."""
        keep = _ints(batch_indices)
        padding = [self._padding[i] for i in keep]
        surplus = min(padding, default=0)
        if keep == list(range(len(self._padding))) and not surplus:
            return
        rows = mx.array(keep, mx.int32)
        if self.keys is not None and self.values is not None:
            # take copies, also a single row: a slice would keep the whole batch in memory.
            self.keys = mx.take(self.keys[:, :, surplus:], rows, axis=0)
            self.values = mx.take(self.values[:, :, surplus:], rows, axis=0)
        if self._right_padding is not None:
            self._announced = [self._announced[i] for i in keep]
            self._right_padding = mx.array(self._announced)
        self._idx -= surplus
        self._padding = [n - surplus for n in padding]
        self.left_padding = mx.array(self._padding, mx.int32)
        self.offset = mx.take(self.offset, rows)

    def extend(self, other: BatchKVCache) -> None:
        """Add the rows of `other`, ours or stock's, behind our own."""
        theirs = (
            other._padding if isinstance(other, PlainBatchKVCache) else _ints(other.left_padding)
        )
        idx = max(self._idx, other._idx)
        padding = [n + idx - self._idx for n in self._padding]
        padding += [n + idx - other._idx for n in theirs]
        super().extend(other)
        self._padding = padding

    def extract(self, idx: int) -> KVCache:
        """Return row `idx` as a cache of its own, without its padding.

        The only row, when it has none, shares its buffers; the next to write to them copies.
        """
        cache = KVCache()
        if self.keys is None or self.values is None:
            return cache
        if self._padding == [0]:
            cache.keys, cache.values = copy.copy(self.keys), copy.copy(self.values)
            cache.offset = self._idx
            return cache
        at = slice(self._padding[idx], self._idx)
        cache.keys = mx.contiguous(self.keys[idx : idx + 1, :, at])
        cache.values = mx.contiguous(self.values[idx : idx + 1, :, at])
        cache.offset = cache.keys.shape[2]
        return cache

    @property
    def state(self) -> Any:
        """What stock's has."""
        return BatchKVCache.state.fget(self)

    @state.setter
    def state(self, state: Any) -> None:
        BatchKVCache.state.fset(self, state)
        self._right_padding, self._announced = None, []
        self._padding = _ints(self.left_padding)


def _ints(values: Sequence[int] | mx.array) -> list[int]:
    items: Any = values.tolist() if isinstance(values, mx.array) else values
    return [int(n) for n in items]
