"""One layer's caches of several prompts, while a chunk of each prompt is computed in one call.

Each prompt has its own cache, a batch of one row, so caches need no merging and splitting. Chunks
are padded on the right to the longest chunk, and padding is never cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache

from .attention import Mask, PackedKV
from .caches import BatchQuantizedKVCache, FullPrecisionBatchKVCache

_LITTLE_PADDING = 4096
"""Copying up to this number of padding tokens, for all rows, takes no noticeable time."""


class _Rows:
    kind = "full"
    """Layers of one kind share a mask, so their rows must be of one class."""

    def __init__(self, caches: Sequence[Any], n_tokens: Sequence[int]) -> None:
        self._caches, self._n_tokens = caches, n_tokens

    @property
    def offset(self) -> mx.array:
        """The number of tokens of each row, int32 [B], for rotary embeddings."""
        return mx.array([cache.size() for cache in self._caches], mx.int32)

    @property
    def keys(self) -> Any:
        """The first row's keys. A model over several ranks makes them depend on data it sends."""
        return self._caches[0].keys

    @keys.setter
    def keys(self, keys: Any) -> None:
        self._caches[0].keys = keys

    def _fetched(self, keys: mx.array, values: mx.array) -> list[tuple[Any, Any]]:
        """Append keys [B, H, n, Dk] and values to the rows' caches, without padding."""
        return [
            self._append(cache, keys[i : i + 1, :, :n], values[i : i + 1, :, :n])
            for i, (cache, n) in enumerate(zip(self._caches, self._n_tokens, strict=True))
        ]

    def _append(self, cache: Any, keys: mx.array, values: mx.array) -> Any:
        return cache.update_and_fetch(keys, values)


class PackedRows(_Rows):
    """Rows of quantized caches whose model takes packed keys."""

    @property
    def bits(self) -> int:
        """Bits of the keys. If this exists, mlx-lm calls attention over packed keys."""
        return int(self._caches[0].bits)

    @property
    def group_size(self) -> int:
        return int(self._caches[0].group_size)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> list[Mask] | str:
        """Return "causal", or each row's mask for its own tokens."""
        masks = [
            cache.make_mask(n, return_array=return_array, window_size=window_size)
            for cache, n in zip(self._caches, self._n_tokens, strict=True)
        ]
        return masks if any(isinstance(mask, mx.array) for mask in masks) else "causal"

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RowsKV, RowsKV]:
        all_keys, all_values = zip(*self._fetched(keys, values), strict=True)
        return RowsKV(all_keys, self._n_tokens), RowsKV(all_values, self._n_tokens)


@dataclass(frozen=True)
class RowsKV:
    """Packed keys, or values, of each row; the last `n_tokens` are new."""

    rows: Sequence[PackedKV]
    n_tokens: Sequence[int]

    def attend(
        self, queries: mx.array, values: RowsKV, scale: float, mask: list[Mask] | Mask
    ) -> mx.array:
        """Return each row's attention [B, Hq, N, Dv], with zeros where its queries are padding."""
        masks = mask if isinstance(mask, list) else [mask] * len(self.rows)
        out = []
        for i, n in enumerate(self.n_tokens):
            row = queries[i : i + 1, :, :n]
            result = self.rows[i].attend(row, values.rows[i], scale, masks[i])
            if n < queries.shape[2]:
                result = mx.pad(result, [(0, 0), (0, 0), (0, queries.shape[2] - n), (0, 0)])
            out.append(result)
        return mx.concatenate(out)


class ArrayRows(_Rows):
    """Rows of caches in full precision: attention gets them in the form of mlx-lm's batches.

    The new tokens of all rows begin at the same column, with padding in front of shorter rows.
    """

    @property
    def _lengths(self) -> list[int]:
        return [cache.size() for cache in self._caches]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return a boolean array [B, 1, N, S]."""
        lengths = self._lengths
        start = max(lengths)
        padding = mx.array([start - n for n in lengths], mx.int32)
        mask: mx.array = create_causal_mask(
            N, offset=start, window_size=window_size, left_padding=padding
        )
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        n_new, lengths = keys.shape[2], self._lengths
        start = max(lengths)
        rows = [
            [mx.pad(x, [(0, 0), (0, 0), (start - n_old, n_new - n), (0, 0)]) for x in fetched]
            for fetched, n_old, n in zip(
                self._fetched(keys, values), lengths, self._n_tokens, strict=True
            )
        ]
        all_keys, all_values = (mx.concatenate(list(side)) for side in zip(*rows, strict=True))
        return all_keys, all_values


class WindowRows(ArrayRows):
    """Rows of mlx-lm's BatchRotatingKVCache, without padding."""

    kind = "window"

    @property
    def offset(self) -> mx.array:
        return mx.concatenate([cache.offset for cache in self._caches])

    @property
    def _lengths(self) -> list[int]:
        return [min(cache.size(), cache.max_size - 1) for cache in self._caches]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        return super().make_mask(N, return_array, window_size or self._caches[0].max_size)

    def _append(self, cache: Any, keys: mx.array, values: mx.array) -> Any:
        return cache._update_concat(keys, values)  # keeps positions in order, also for one token


class StateRows(ArraysCache):  # type: ignore[misc]
    """Rows of recurrent states. Models read `lengths`, and skip the padding after each row."""

    kind = "state"

    def __init__(self, caches: Sequence[Any], n_tokens: Sequence[int]) -> None:
        super().__init__(len(caches[0].cache))
        self._rows = caches
        self.cache = [_joined(states) for states in zip(*(c.cache for c in caches), strict=True)]
        self.prepare(lengths=list(n_tokens))  # also for equal lengths: all rows may be padded

    def __setitem__(self, idx: int, value: mx.array) -> None:
        super().__setitem__(idx, value)
        for i, row in enumerate(self._rows):
            row[idx] = value[i : i + 1]


def _joined(states: Sequence[mx.array | None]) -> mx.array | None:
    # Before a row's first token its state is None, which stands for zeros.
    begun = [state for state in states if state is not None]
    if not begun:
        return None
    return mx.concatenate([mx.zeros_like(begun[0]) if x is None else x for x in states])


def rows_of(caches: Sequence[Any], n_tokens: Sequence[int]) -> _Rows | StateRows | None:
    """Join a layer's one-row batches into one cache; return None if they cannot be joined.

    n_tokens: the number of next tokens of each row.
    """
    if all(type(cache) is FullPrecisionBatchKVCache for cache in caches):
        lengths = [cache.size() for cache in caches]
        n_padding = max(lengths) * len(lengths) - sum(lengths)
        if n_padding > max(sum(lengths), _LITTLE_PADDING):
            return None  # joined, each short row would be copied and read at the longest length
        return ArrayRows(caches, n_tokens)
    if all(isinstance(cache, BatchQuantizedKVCache) and hasattr(cache, "bits") for cache in caches):
        return PackedRows(caches, n_tokens)
    if all(type(cache) is BatchRotatingKVCache for cache in caches):
        return WindowRows(caches, n_tokens)
    if all(type(cache) is ArraysCache for cache in caches):
        return StateRows(caches, n_tokens)
    return None
