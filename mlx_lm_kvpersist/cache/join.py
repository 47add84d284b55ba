"""Make caches of blocks, windows and states again, while these are still being read.

The caches' buffers are made before the first piece is there, and each piece is copied to its place
when it comes: neither the copy nor the first touch of new memory waits for the last file.
Generation thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .blocks import Arrays, copied, n_bytes, prefers_few_copies
from .slots import refill, slots_of
from .spec import LayerGroup, ModelCacheSpec

__all__ = ["Joiner", "Piece", "Pieces", "join"]

_STRETCH_PIECES = 16
"""Placed at once on a GPU: enough to save copies, little enough to exist twice."""


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of the arrays of a block or a window, counted from their first."""

    arrays: Arrays
    start: int
    stop: int


@dataclass(frozen=True)
class Pieces:
    """All that a prompt cache of `n_tokens` is made of.

    `blocks` hold its tokens from the first on, `windows`, by window, its last ones, and `state`
    what the recurrent groups had behind them. What a spec has no groups for is left empty.
    """

    n_tokens: int
    blocks: Sequence[Piece] = ()
    windows: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        pieces = [*self.blocks, *(piece for window in self.windows.values() for piece in window)]
        return sum(n_bytes(piece.arrays) for piece in pieces) + n_bytes(self.state)


class Joiner:
    """A prompt cache of `n_tokens` that is being filled.

    Every full slot gets buffers of its own with `headroom` tokens to spare: as many tokens are
    added without a copy. `windows` says, by window, how many of the last tokens will be added.
    What is added must fit the spec (`arrays_fit`), and comes in the order of its tokens.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        n_tokens: int,
        headroom: int,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        self._spec = spec
        self._n_tokens = n_tokens
        self._buffers: dict[int | None, _Buffers] = {}
        if spec.full:
            self._buffers[None] = _Buffers(spec.full, n_tokens, headroom)
        for window, n_held in (windows or {}).items():
            self._buffers[window] = _Buffers(spec.sliding[window], n_held, 0)
        self._state: Arrays = {}

    def add(self, piece: Piece, window: int | None = None) -> None:
        """Add the next tokens of the full groups, or of those with a window.

        Raises:
            ValueError: the piece has not the tokens that are asked for, asks for none, or there
                is no room for them.
        """
        self._buffers[window].add(piece)

    def add_state(self, state: Arrays) -> None:
        """Add what the recurrent groups had behind the last token."""
        self._state = state

    def finish(self) -> list[Any]:
        """Return the prompt cache, evaluated.

        Raises:
            ValueError: tokens are missing.
        """
        caches = self._spec.make_cache()
        slots = slots_of(caches)
        for buffers in self._buffers.values():
            buffers.finish()
            start = self._n_tokens - buffers.n_tokens
            for group in buffers.groups if buffers.n_tokens else ():
                names = group.array_names("k"), group.array_names("v")
                for place, slot in enumerate(group.slots):
                    keys, values = (
                        tuple(buffers.arrays[name][place] for name in part) for part in names
                    )
                    refill(slots[slot], keys, values, start, self._n_tokens)
        states: list[mx.array] = []
        for group in self._spec.recurrent if self._state else ():
            for number, form in enumerate(group.states):
                if form is None:
                    continue
                stacked = self._state[f"{group.name}.{number}"]
                for place, slot in enumerate(group.slots):
                    slots[slot].cache[number] = stacked[place : place + 1]
                    states.append(slots[slot].cache[number])
        mx.eval(states)
        return caches


def join(spec: ModelCacheSpec, pieces: Pieces, headroom: int) -> list[Any]:
    """Return a prompt cache that holds what the pieces do; as `Joiner`, all at once."""
    windows = {
        window: sum(piece.stop - piece.start for piece in parts)
        for window, parts in pieces.windows.items()
    }
    joiner = Joiner(spec, pieces.n_tokens, headroom, windows)
    for piece in pieces.blocks:
        joiner.add(piece)
    for window, parts in pieces.windows.items():
        for piece in parts:
            joiner.add(piece, window)
    joiner.add_state(pieces.state)
    return joiner.finish()


class _Buffers:
    """The buffers [1, H, S, ...] of the slots of some groups, by array name, filled from 0 on."""

    def __init__(self, groups: Sequence[LayerGroup], n_tokens: int, headroom: int) -> None:
        self.groups = groups
        self.n_tokens = n_tokens
        self.arrays: dict[str, list[mx.array]] = {}
        for group in groups:
            for name, shape, dtype in group.token_arrays(n_tokens + headroom):
                n_slots, *rest = shape
                self.arrays[name] = [mx.zeros((1, *rest), dtype) for _ in range(n_slots)]
        mx.eval(self.arrays)
        self._waiting: list[Piece] = []
        self._n_placed = 0
        self._n_at_once = _STRETCH_PIECES if prefers_few_copies() else 1

    def add(self, piece: Piece) -> None:
        for name in self.arrays:
            n_there = piece.arrays[name].shape[2]
            if not 0 <= piece.start < piece.stop <= n_there:
                raise ValueError(f"tokens {piece.start} to {piece.stop} of a block of {n_there}")
        self._waiting.append(piece)
        if len(self._waiting) >= self._n_at_once:
            self._place()

    def finish(self) -> None:
        if self._waiting:
            self._place()
        if self._n_placed != self.n_tokens:
            raise ValueError(f"{self._n_placed} tokens where there should be {self.n_tokens}")

    def _place(self) -> None:
        pieces, self._waiting = self._waiting, []
        start = self._n_placed
        stop = self._n_placed = start + sum(piece.stop - piece.start for piece in pieces)
        if stop > self.n_tokens:
            raise ValueError(f"{stop} tokens where there should be {self.n_tokens}")
        for name, buffers in self.arrays.items():
            parts = [piece.arrays[name][:, :, piece.start : piece.stop] for piece in pieces]
            stacked = mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
            for place, buffer in enumerate(buffers):
                part = stacked[place : place + 1]
                if part.shape == buffer.shape:  # mlx would not copy, but share the piece's memory
                    buffers[place] = copied(part)
                else:
                    buffer[:, :, start:stop] = part
        mx.eval(self.arrays)
