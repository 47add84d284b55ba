"""The newest tokens of a quantized cache, in full precision.

A query sees the keys and values of its own block of `pk.GRID` positions in full precision, and all
older blocks quantized. Position alone decides, so it does not matter how a prompt is cut. The
newest tokens are packed when the next token begins another block.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from . import packed as pk
from .batch import PaddedBatch


class Newest(PaddedBatch):
    """Keys and values of the last tokens of B rows, [B, H, S, D]; a row's padding is zeros."""

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
        """Forget the last `n` tokens of each row, or all."""
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
