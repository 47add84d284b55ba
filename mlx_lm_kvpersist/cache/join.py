"""Build prompt caches from stored blocks, windows and states.

What is read from disk is placed a few pieces at a time while later files are still being read.
What is already in RAM is joined whole: the number of operations then depends on the number of
layers, and no longer on the number of blocks times layers. Generation thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .blocks import Arrays, concatenated, copied, prefers_few_copies
from .slots import refill, slots_of
from .spec import LayerGroup, ModelCacheSpec, forms_bytes

_PIECES_AT_ONCE = 16
"""Pieces placed together on a GPU while others are read: their arrays exist twice for a moment."""

_SPARE_SHARE = 16
"""Joining whole may take 1/16 of the cache's bytes on top of the cache itself."""


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of the arrays of a block or a window, counted from their first."""

    arrays: Arrays
    start: int
    stop: int


@dataclass(frozen=True)
class Pieces:
    """All that a prompt cache of `n_tokens` is made of.

    `blocks` hold its tokens from the first on, `windows` its last tokens by window, and `state` the
    states of the recurrent groups after the last token. A kind without groups is left empty.
    """

    n_tokens: int
    blocks: Sequence[Piece] = ()
    windows: Mapping[int, Sequence[Piece]] = field(default_factory=dict)
    state: Arrays = field(default_factory=dict)


class Joiner:
    """A prompt cache of `n_tokens` that is being filled.

    Every full slot gets buffers of its own with `headroom` tokens to spare: as many tokens are
    added without a copy. `windows` says, by window, how many of the last tokens will be added.
    Pieces must fit the spec (`arrays_fit`) and come in the order of their tokens. `whole` keeps
    all of them until `finish`, for pieces that are in RAM anyway.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        n_tokens: int,
        headroom: int,
        windows: Mapping[int, int] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        self._spec = spec
        self._n_tokens = n_tokens
        self._buffers: dict[int | None, _Buffers] = {}
        if spec.full:
            self._buffers[None] = _Buffers(spec.full, n_tokens, headroom, whole=whole)
        for window, n_cached in (windows or {}).items():
            self._buffers[window] = _Buffers(spec.sliding[window], n_cached, 0, whole=whole)
        self._state: Arrays = {}

    def add(self, piece: Piece, window: int | None = None) -> None:
        """Add the next tokens of the full groups, or of those with a window.

        Raises:
            ValueError: the piece's range is empty or goes beyond its arrays, or there is no room
                for its tokens.
        """
        buffers = self._buffers[window]
        for name in buffers.arrays:
            n_there = piece.arrays[name].shape[2]
            if not 0 <= piece.start < piece.stop <= n_there:
                raise ValueError(f"tokens {piece.start} to {piece.stop} of a block of {n_there}")
        buffers.n_added += piece.stop - piece.start
        if buffers.n_added > buffers.n_tokens:
            raise ValueError(f"{buffers.n_added} tokens where there should be {buffers.n_tokens}")
        buffers.waiting.append(piece)
        if not buffers.whole and len(buffers.waiting) >= buffers.n_at_once:
            buffers.place()

    def add_state(self, state: Arrays) -> None:
        """Add the states of the recurrent groups after the last token."""
        self._state = state

    def finish(self) -> list[Any]:
        """Return the prompt cache, evaluated.

        Raises:
            ValueError: tokens are missing.
        """
        caches = self._spec.make_cache()
        slots = slots_of(caches)
        for buffers in self._buffers.values():
            if buffers.n_added != buffers.n_tokens:
                raise ValueError(
                    f"{buffers.n_added} tokens where there should be {buffers.n_tokens}"
                )
            if buffers.waiting:
                buffers.join() if buffers.whole else buffers.place()
            start = self._n_tokens - buffers.n_tokens
            for group in buffers.groups if buffers.n_tokens else ():
                for place, slot in enumerate(group.slots):
                    keys, values = (
                        tuple(buffers.arrays[name][place] for name in names)
                        for names in group.array_names.values()
                    )
                    refill(slots[slot], keys, values, start, self._n_tokens)
        for group in self._spec.recurrent if self._state else ():
            for number, form in enumerate(group.states):
                if form is not None:
                    rows = mx.split(self._state[f"{group.name}.{number}"], len(group.slots))
                    for slot, row in zip(group.slots, rows, strict=True):
                        slots[slot].cache[number] = row
                    mx.eval(rows)
        return caches


def join(spec: ModelCacheSpec, pieces: Pieces, headroom: int, *, whole: bool = True) -> list[Any]:
    """Return a prompt cache that holds what the pieces do (see `Joiner`)."""
    windows = {
        window: sum(piece.stop - piece.start for piece in parts)
        for window, parts in pieces.windows.items()
    }
    joiner = Joiner(spec, pieces.n_tokens, headroom, windows, whole=whole)
    for piece in pieces.blocks:
        joiner.add(piece)
    for window, parts in pieces.windows.items():
        for piece in parts:
            joiner.add(piece, window)
    joiner.add_state(pieces.state)
    return joiner.finish()


class _Buffers:
    """The buffers [1, H, S, ...] of some groups' slots, by array name, filled from token 0 on."""

    def __init__(
        self, groups: Sequence[LayerGroup], n_tokens: int, headroom: int, *, whole: bool
    ) -> None:
        self.groups = groups
        self.n_tokens = n_tokens
        self._headroom = headroom
        self.whole = whole
        self._forms = [form for g in groups for form in g.token_arrays(n_tokens + headroom)]
        self.arrays: dict[str, list[mx.array]] = {
            name: [] if whole else [mx.zeros((1, *rest), dtype) for _ in range(n_slots)]
            for name, (n_slots, *rest), dtype in self._forms
        }
        mx.eval(self.arrays)
        self.waiting: list[Piece] = []
        self.n_added = 0
        self.n_at_once = _PIECES_AT_ONCE if prefers_few_copies() else 1

    def place(self) -> None:
        """Copy the waiting pieces behind those that were placed before."""
        pieces, self.waiting = self.waiting, []
        start = self.n_added - sum(piece.stop - piece.start for piece in pieces)
        for name, buffers in self.arrays.items():
            stacked = mx.concatenate(
                [piece.arrays[name][:, :, piece.start : piece.stop] for piece in pieces], axis=2
            )
            for place, buffer in enumerate(buffers):
                part = stacked[place : place + 1]
                if part.shape == buffer.shape:  # MLX would share the piece's memory here
                    buffers[place] = copied(part)
                else:
                    buffer[:, :, start : self.n_added] = part
        mx.eval(self.arrays)

    def join(self) -> None:
        """Make every buffer of all pieces at once.

        Starting a copy costs more than copying. So as many slots as memory allows are joined while
        they are still stacked, which takes one copy per piece and array, and are then taken apart.
        """
        pieces, self.waiting = self.waiting, []
        total = forms_bytes(self._forms)
        left = total + total // _SPARE_SHARE
        for form in self._forms:
            name, (n_slots, n_heads, _, dim), dtype = form
            buffers = self.arrays[name]
            spare = [mx.zeros((1, n_heads, self._headroom, dim), dtype)]
            slot_bytes = forms_bytes([form]) // n_slots
            while (first := len(buffers)) < n_slots:
                n_at_once = max(1, left // (2 * slot_bytes))
                at = slice(first, first + n_at_once)
                stacked = mx.concatenate(
                    [one.arrays[name][at, :, one.start : one.stop] for one in pieces], axis=2
                )
                made = [
                    concatenated([slot, *spare] if self._headroom else [slot], axis=2)
                    for slot in mx.split(stacked, stacked.shape[0])
                ]
                mx.eval(made)
                buffers += made
                left -= slot_bytes * len(made)
                del stacked, made  # before the next are stacked
