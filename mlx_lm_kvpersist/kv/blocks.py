"""Cut caches into immutable blocks, windows and states, and make caches of them again.

A block holds up to `BLOCK_TOKENS` tokens of the full groups. Each group is six arrays with its
slots stacked, "0.k.weights" [L, H, T, Dk * bits / 32] uint32, "0.k.scales" and "0.k.biases"
[L, H, T, Dk / group size] in the model's dtype, and the same for "0.v"; in its own precision it is
two, "0.k" and "0.v" [L, H, T, D]. A window holds the last tokens of a block of the sliding groups
of one window, in the same form. A state holds what the recurrent groups have at the end of a block,
"2.0" [L, ...] being the first array of group 2. Generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import mlx.core as mx

from .slots import Fields, held, refill, slots_of, tokens
from .spec import FIELDS, LayerGroup, ModelCacheSpec, arrays_fit

__all__ = [
    "BLOCK_TOKENS",
    "Piece",
    "Pieces",
    "copy_state",
    "held_tokens",
    "join",
    "n_bytes",
    "split_blocks",
    "split_windows",
]

BLOCK_TOKENS = 256

Arrays = Mapping[str, mx.array]

_STRETCH_BLOCKS, _STRETCH_SLOTS = 16, 8
"""Of what is stacked at once on a GPU: enough to save copies, little enough to exist twice."""

_WINDOW_BYTES = 64 << 20
"""Bytes to evaluate at once: enough to keep a device busy, too little to matter in its memory."""


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


def held_tokens(spec: ModelCacheSpec, caches: Sequence[Any]) -> int | None:
    """Return how many tokens all caches have seen; None when no cache counts them.

    Raises:
        ValueError: a cache is in use that the model left empty when it was probed; or, in a
            model with restore points, caches disagree.
    """
    slots = slots_of(caches)
    used = {number for group in spec.groups for number in group.slots}
    for number, slot in enumerate(slots):
        if number not in used and not slot.empty():
            raise ValueError(f"cache {number}, which the model did not use, holds something")
    groups = [*spec.full, *(group for groups in spec.sliding.values() for group in groups)]
    counts = {held(slots[number])[1] for group in groups for number in group.slots}
    if len(counts) > 1 and not spec.is_plain:
        raise ValueError(f"caches of one sequence have seen {sorted(counts)} tokens")
    return min(counts, default=None)


def split_blocks(
    spec: ModelCacheSpec, caches: Sequence[Any], ranges: Sequence[tuple[int, int]]
) -> list[dict[str, mx.array]]:
    """Return one block per token range [start, stop), as evaluated arrays of their own.

    Raises:
        ValueError: the ranges overlap, are empty, out of order, longer than a block, or go beyond
            what a cache holds; or there are not as many caches as the model has.
    """
    return _split(spec, spec.full, caches, ranges)


def split_windows(
    spec: ModelCacheSpec, window: int, caches: Sequence[Any], ranges: Sequence[tuple[int, int]]
) -> list[dict[str, mx.array]]:
    """Return the keys and values of the groups with this window, as `split_blocks` does."""
    return _split(spec, spec.sliding[window], caches, ranges)


def copy_state(spec: ModelCacheSpec, caches: Sequence[Any]) -> dict[str, mx.array]:
    """Return what the recurrent groups hold, as evaluated arrays of their own.

    Raises:
        ValueError: it is not what the model was found to keep.
    """
    slots = slots_of(caches)
    state: dict[str, mx.array] = {}
    for group in spec.recurrent:
        for number, form in enumerate(group.states):
            arrays = [slots[slot].cache[number] for slot in group.slots]
            if any((array is None) != (form is None) for array in arrays):
                raise ValueError(f"array {number} of group {group.name} is there, or missing")
            if form is not None:
                state[f"{group.name}.{number}"] = _joined(arrays, axis=0)
    mx.eval(state)
    if misfit := arrays_fit(spec.state_arrays(), state):
        raise ValueError(f"the model keeps something else than it did when it was probed: {misfit}")
    return state


def join(spec: ModelCacheSpec, pieces: Pieces, headroom: int) -> list[Any]:
    """Return a prompt cache that holds what the pieces do.

    Every full slot gets evaluated buffers of its own with `headroom` tokens to spare, so that its
    first update copies nothing. The pieces must fit the spec (`arrays_fit`).

    Raises:
        ValueError: a piece has not the tokens that are asked for, or asks for none.
    """
    caches = spec.make_cache()
    slots = slots_of(caches)
    evaluator = _Evaluator()
    n_tokens = pieces.n_tokens
    if pieces.blocks:
        for group in spec.full:
            _fill(group, slots, pieces.blocks, 0, n_tokens, headroom, evaluator)
    for window, groups in spec.sliding.items():
        parts = pieces.windows.get(window, ())
        n_held = sum(piece.stop - piece.start for piece in parts)
        for group in groups if parts else ():
            _fill(group, slots, parts, n_tokens - n_held, n_tokens, 0, evaluator)
    for group in spec.recurrent if pieces.state else ():
        for number, form in enumerate(group.states):
            if form is None:
                continue
            stacked = pieces.state[f"{group.name}.{number}"]
            for slot, array in zip(group.slots, _cut(stacked, len(group.slots), 0), strict=True):
                slots[slot].cache[number] = array
                evaluator.add([array])
    evaluator.finish()
    return caches


def n_bytes(arrays: Arrays) -> int:
    """Bytes of arrays by name."""
    return sum(int(array.nbytes) for array in arrays.values())


class _Evaluator:
    """Evaluates arrays some at a time."""

    def __init__(self) -> None:
        self._arrays: list[mx.array] = []
        self._n_bytes = 0

    def add(self, arrays: Iterable[mx.array]) -> None:
        for array in arrays:
            self._arrays.append(array)
            self._n_bytes += int(array.nbytes)
        if self._n_bytes >= _WINDOW_BYTES:
            self.finish()

    def finish(self) -> None:
        mx.eval(self._arrays)
        self._arrays, self._n_bytes = [], 0


def _split(
    spec: ModelCacheSpec,
    groups: Sequence[LayerGroup],
    caches: Sequence[Any],
    ranges: Sequence[tuple[int, int]],
) -> list[dict[str, mx.array]]:
    _check_ranges(ranges)
    if len(caches) != len(spec.template):
        raise ValueError(f"{len(caches)} caches for {len(spec.template)} layers")
    if not ranges:
        return []
    if _prefers_few_copies() and len(ranges) > _STRETCH_BLOCKS:
        # What is stacked first exists twice for a while: so not the whole conversation at once.
        head, tail = ranges[:_STRETCH_BLOCKS], ranges[_STRETCH_BLOCKS:]
        return [*_split(spec, groups, caches, head), *_split(spec, groups, caches, tail)]
    slots = slots_of(caches)
    first = ranges[0][0]
    cuts = sorted({cut for span in ranges for cut in span} - {first})
    # Piece i ends at cuts[i] and begins at the cut before it.
    piece_ending_at = {cut: i for i, cut in enumerate(cuts)}
    at = [cut - first for cut in cuts[:-1]]
    whole: dict[str, list[mx.array]] = {}
    for group in groups:
        for slot in group.slots:
            both = tokens(slots[slot], first, cuts[-1])
            for part, fields in zip(("k", "v"), both, strict=True):
                for name, array in zip(_names(group, part), fields, strict=True):
                    whole.setdefault(name, []).append(array)
    if _prefers_few_copies():
        whole = {name: [_joined(arrays, axis=0)] for name, arrays in whole.items()}
    pieces = {name: [_cut(x, at, axis=2) for x in arrays] for name, arrays in whole.items()}
    blocks = []
    evaluator = _Evaluator()
    for _, stop in ranges:
        piece = piece_ending_at[stop]
        block = {
            name: _joined([array[piece] for array in arrays], axis=0)
            for name, arrays in pieces.items()
        }
        blocks.append(block)
        evaluator.add(block.values())
    evaluator.finish()
    return blocks


def _fill(
    group: LayerGroup,
    slots: Sequence[Any],
    pieces: Sequence[Piece],
    start: int,
    stop: int,
    headroom: int,
    evaluator: _Evaluator,
) -> None:
    """Put the pieces of positions [start, stop) into the slots of a group."""
    n_slots = len(group.slots)
    step = _STRETCH_SLOTS if _prefers_few_copies() else n_slots
    for first in range(0, n_slots, step):
        part = slice(first, min(first + step, n_slots))
        keys = _slots_of_group(group, "k", pieces, headroom, part)
        values = _slots_of_group(group, "v", pieces, headroom, part)
        for slot, k, v in zip(group.slots[part], keys, values, strict=True):
            refill(slots[slot], k, v, start, stop)
            evaluator.add((*k, *v))


def _slots_of_group(
    group: LayerGroup, part: str, pieces: Sequence[Piece], headroom: int, slots: slice
) -> list[Fields]:
    """Return the joined keys ("k") or values ("v") of some slots of a group, lazy."""
    n_slots = slots.stop - slots.start
    fields: list[list[mx.array]] = []
    for name in _names(group, part):
        parts = []
        for piece in pieces:
            array = piece.arrays[name]
            if not 0 <= piece.start < piece.stop <= array.shape[2]:
                raise ValueError(
                    f"tokens {piece.start} to {piece.stop} of a block of {array.shape[2]}"
                )
            if piece.stop - piece.start < array.shape[2]:
                array = array[:, :, piece.start : piece.stop]
            parts.append(array if n_slots == len(group.slots) else array[slots])
        if headroom:
            _, n_heads, _, dim = parts[0].shape
            parts.append(mx.zeros((n_slots, n_heads, headroom, dim), parts[0].dtype))
        if _prefers_few_copies():
            parts = [_joined(parts, axis=2)]
        by_slot = zip(*(_cut(array, n_slots, axis=0) for array in parts), strict=True)
        fields.append([_joined(slot, axis=2) for slot in by_slot])
    return list(zip(*fields, strict=True))


def _names(group: LayerGroup, part: str) -> list[str]:
    name = f"{group.name}.{part}"
    return [name] if group.precision is None else [f"{name}.{field}" for field in FIELDS]


def _cut(array: mx.array, at: int | list[int], axis: int) -> list[mx.array]:
    pieces: Any = mx.split(array, at, axis=axis)  # mlx's own annotation says one array
    return list(pieces)


def _prefers_few_copies() -> bool:
    """Whether to copy everything twice, but in a few large pieces.

    Blocks times slots make ten thousand small copies of a long conversation. A GPU spends more
    time on starting them than on copying; a CPU does not.
    """
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def _joined(arrays: Sequence[mx.array], axis: int) -> mx.array:
    """Concatenate into memory of its own, also a single array (which mx.concatenate returns)."""
    if len(arrays) == 1:
        return mx.take(arrays[0], mx.arange(arrays[0].shape[0]), axis=0)
    return mx.concatenate(list(arrays), axis=axis)


def _check_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    for start, stop in ranges:
        if not 0 <= start < stop <= start + BLOCK_TOKENS:
            raise ValueError(f"tokens {start} to {stop} are not a block")
    for (_, stop), (start, _) in zip(ranges, islice(ranges, 1, None), strict=False):
        if start < stop:
            raise ValueError(f"a block from token {start} overlaps the one up to token {stop}")
