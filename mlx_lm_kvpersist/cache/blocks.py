"""Cut caches into immutable blocks, windows and states; `join` turns these into caches again.

A block holds up to `BLOCK_TOKENS` tokens of the full groups. Each group is six arrays with its
slots stacked: "0.k.weights" [L, H, T, Dk * bits / 32] uint32, "0.k.scales" and "0.k.biases"
[L, H, T, Dk / group size] in the model's dtype, and the same for "0.v"; in its own precision it is
two, "0.k" and "0.v" [L, H, T, D]. A window holds a block's last tokens of the sliding groups that
have this window, in the same form. A state holds the recurrent groups' states at the end of a
block: "2.0" [L, ...] is the first array of group 2. Generation thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import mlx.core as mx

from .slots import cached_positions, slots_of, tokens
from .spec import LayerGroup, ModelCacheSpec, arrays_fit

BLOCK_TOKENS = 256

Arrays = Mapping[str, mx.array]

_STRETCH_BLOCKS = 16
"""Blocks cut together on a GPU: their arrays exist twice for a moment."""

_WINDOW_BYTES = 64 << 20
"""Bytes to evaluate together: enough to keep a device busy, little beside its memory."""


def n_cached_tokens(spec: ModelCacheSpec, caches: Sequence[Any]) -> int | None:
    """Return how many tokens all caches have seen; None when no cache counts them.

    Raises:
        ValueError: a cache is in use that the model left empty when it was probed; or caches
            disagree in a model with windows or states.
    """
    slots = slots_of(caches)
    used = {number for group in spec.groups for number in group.slots}
    for number, slot in enumerate(slots):
        if number not in used and not slot.empty():
            raise ValueError(f"cache {number}, which the model did not use, holds something")
    groups = [*spec.full, *(group for groups in spec.sliding.values() for group in groups)]
    counts = {cached_positions(slots[number])[1] for group in groups for number in group.slots}
    if len(counts) > 1 and not spec.any_prefix:
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
    """Return the recurrent groups' states, as evaluated arrays of their own.

    Raises:
        ValueError: they have other shapes or dtypes than when the model was probed.
    """
    slots = slots_of(caches)
    state: dict[str, mx.array] = {}
    for group in spec.recurrent:
        for number, form in enumerate(group.states):
            arrays = [slots[slot].cache[number] for slot in group.slots]
            if any((array is None) != (form is None) for array in arrays):
                raise ValueError(f"group {group.name} has array {number} in some layers only")
            if form is not None:
                state[f"{group.name}.{number}"] = concatenated(arrays, axis=0)
    mx.eval(state)
    if misfit := arrays_fit(spec.state_arrays(), state):
        raise ValueError(f"the model's states differ from those it was probed with: {misfit}")
    return state


def n_bytes(arrays: Arrays) -> int:
    """Bytes of arrays by name."""
    return sum(int(array.nbytes) for array in arrays.values())


def _split(
    spec: ModelCacheSpec,
    groups: Sequence[LayerGroup],
    caches: Sequence[Any],
    ranges: Sequence[tuple[int, int]],
) -> list[dict[str, mx.array]]:
    for start, stop in ranges:
        if not 0 <= start < stop <= start + BLOCK_TOKENS:
            raise ValueError(f"tokens {start} to {stop} are not a block")
    for (_, stop), (start, _) in zip(ranges, islice(ranges, 1, None), strict=False):
        if start < stop:
            raise ValueError(f"a block from token {start} overlaps the one up to token {stop}")
    if len(caches) != len(spec.template):
        raise ValueError(f"{len(caches)} caches for {len(spec.template)} layers")
    if not ranges:
        return []
    if prefers_few_copies() and len(ranges) > _STRETCH_BLOCKS:
        # Stacking makes a second copy for a moment: so not of the whole conversation.
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
                for name, array in zip(group.array_names[part], fields, strict=True):
                    whole.setdefault(name, []).append(array)
    if prefers_few_copies():
        whole = {name: [concatenated(arrays, axis=0)] for name, arrays in whole.items()}
    pieces: Any = {
        name: [mx.split(x, at, axis=2) for x in arrays] for name, arrays in whole.items()
    }
    blocks: list[dict[str, mx.array]] = []
    waiting_bytes = 0
    for _, stop in ranges:
        piece = piece_ending_at[stop]
        block = {
            name: concatenated([array[piece] for array in arrays], axis=0)
            for name, arrays in pieces.items()
        }
        blocks.append(block)
        waiting_bytes += n_bytes(block)
        if waiting_bytes >= _WINDOW_BYTES or stop == cuts[-1]:
            mx.eval(blocks)
            waiting_bytes = 0
    return blocks


def prefers_few_copies() -> bool:
    """Whether it is quicker to copy everything twice in few large pieces than once in many small.

    Blocks times slots are ten thousand small copies for a long conversation. A GPU spends more
    time on starting them than on copying; a CPU does not.
    """
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def copied(array: mx.array) -> mx.array:
    """Return a lazy copy in memory of its own; a slice shares the memory of its whole."""
    return mx.take(array, mx.arange(array.shape[0]), axis=0)


def concatenated(arrays: Sequence[mx.array], axis: int) -> mx.array:
    """Concatenate into memory of its own, also a single array, which mx.concatenate returns."""
    return copied(arrays[0]) if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)
