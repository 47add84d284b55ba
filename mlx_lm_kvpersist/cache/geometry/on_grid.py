"""Prompts in pieces that end on the grid, for caches that give attention arrays.

All queries of a call see the same arrays, and a query must see its own block of the grid in full
precision and older blocks quantized. So no call may cross the end of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ..live.attention import least_rows
from ..live.packed import GRID
from ..live.quantized import PackedCache
from .kinds import slots_of

_MARK = "ends_on_grid"


def end_on_grid(model: Any) -> None:
    """Make `model` compute a prompt of one row in calls that end with a block of the grid.

    Caches whose fetches are packed, or in full precision, change nothing.
    """
    own: Any = model.__class__  # the class behind a proxy
    if _MARK in vars(own):
        return

    @wraps(own.__call__)  # mlx-lm reads its parameters
    def call(self: Any, inputs: mx.array, cache: Any = None, **embedded: Any) -> Any:
        n_rows, n_tokens = inputs.shape[:2]
        is_cut = n_tokens > 1 and n_rows == 1 and cache is not None
        of_arrays = _of_arrays(cache) if is_cut else None
        if of_arrays is None:
            return own.__call__(self, inputs, cache=cache, **embedded)
        logits = []
        for piece in _pieces(of_arrays.lengths[0] % GRID, n_tokens):
            # For images: the embedding of each token.
            cut = {name: x if x is None else x[:, piece] for name, x in embedded.items()}
            logits.append(own.__call__(self, inputs[:, piece], cache=cache, **cut))
        return mx.concatenate(logits, axis=1) if logits[1:] else logits[0]

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, _MARK: True}
    model.__class__ = type(own.__name__, (own,), {"__call__": call, **named})


def _pieces(n_own: int, n_tokens: int) -> Iterator[slice]:
    """Cut the next tokens at the ends of blocks; the first block has `n_own` tokens already.

    MLX may compile kernels for a call of a few rows, so a short piece becomes calls of one token.
    """
    for start, stop in pairwise([0, *range(GRID - n_own, n_tokens, GRID), n_tokens]):
        is_short = stop - start < min(n_tokens, least_rows())
        step = 1 if is_short else stop - start
        yield from (slice(first, first + step) for first in range(start, stop, step))


def _of_arrays(cache: Any) -> PackedCache | None:
    """Return the first quantized slot of a prompt cache whose fetches are arrays."""
    packed = (slot for slot in slots_of(cache) if isinstance(slot, PackedCache))
    return next((slot for slot in packed if not hasattr(slot, "bits")), None)
