"""Prompts in pieces that end on the grid, for models whose attention reads arrays.

Such a model sees the same arrays in all queries of a call, and a query is to see its own block of
the grid as it was computed, older ones quantized. So no call may go beyond a block, whoever makes
it: the server's own batch, stock where it serves one request at a time, a command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..live.packed import GRID
from ..live.quantized import PackedCache
from .kinds import slots_of

_MARK = "ends_on_grid"
"""An attribute of the classes that are made here."""


def end_on_grid(model: Any, wanted: bool = True) -> None:
    """Have `model` compute a prompt of one row up to the end of a block of the grid at a time.

    If that is not wanted, it computes as before.
    """
    own: Any = model.__class__  # of what a proxy stands for
    if _MARK in vars(own):
        own = model.__class__ = own.__base__
    if not wanted:
        return

    def call(self: Any, inputs: mx.array, cache: Any = None, **others: Any) -> Any:
        n_rows, n_left = inputs.shape[:2]
        if n_left == 1 or n_rows > 1 or cache is None:
            return own.__call__(self, inputs, cache=cache, **others)
        start, stop, logits = 0, GRID - _position(cache) % GRID, []
        while start < n_left:
            at = slice(start, stop)
            # Images: what each token is embedded as.
            cut = {name: x if x is None else x[:, at] for name, x in others.items()}
            logits.append(own.__call__(self, inputs[:, at], cache=cache, **cut))
            start, stop = stop, stop + GRID
        return mx.concatenate(logits, axis=1) if logits[1:] else logits[0]

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, _MARK: True}
    model.__class__ = type(own.__name__, (own,), {"__call__": call, **named})


@contextmanager
def ending_on_grid(model: Any, wanted: bool) -> Iterator[None]:
    """Have a model end its prompts on the grid, or not, within a `with` block."""
    before: Any = model.__class__
    end_on_grid(model, wanted)
    try:
        yield
    finally:
        model.__class__ = before


def _position(cache: Sequence[Any]) -> int:
    """Return how many tokens a prompt cache of one row holds, be it quantized or not."""
    for slot in slots_of(cache):
        if isinstance(slot, PackedCache):
            return slot.lengths[0]
        if isinstance(offset := getattr(slot, "offset", None), int):
            return offset
    return 0
