"""The canary: compute the last tokens of restored caches again, and see whether they agree.

It runs over each restore from disk.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx

from ..geometry.kinds import Fields, kind_of, slots_of
from ..geometry.spec import LayerGroup, ModelCacheSpec
from ..live import packed as pk
from ..live.packed import GRID
from .cut_join import concatenated

CANARY_TOKENS = 8
CANARY_TOLERANCE = 0.25
"""Most that recomputed KV may differ from stored KV, as a share of its norm.

Arithmetic noise moves a few values to the next of 16 steps: some percent. KV of other tokens, other
positions or another model differs by about its whole norm.
"""


def canary_difference(
    model: Any, spec: ModelCacheSpec, caches: Sequence[Any], ids: Sequence[int]
) -> float:
    """Run the last tokens of restored caches again; return how far their KV differs, 0 for equal.

    The caches hold the tokens `ids`. The result is the largest, over slots, keys and values, of
    the median over tokens of |new - old| / |old|. Afterwards the caches hold the stored values
    again, so a reply does not depend on the canary. The result is 0 if the caches cannot step back:
    states never can, windows cannot once they have dropped tokens. Where a block of the grid ends,
    its tokens see each other quantized now, so half the difference is returned. Only tokens after
    the last image are run: ids do not say what it looked like.
    """
    if spec.recurrent or any(len(ids) >= window for window in spec.sliding):
        return 0.0
    n_own = len(ids) % GRID if spec.quantized else len(ids)
    text = takewhile(lambda token_id: token_id >= 0, reversed(ids[-CANARY_TOKENS:]))
    n_tokens = min(len(list(text)), n_own or len(ids))
    if n_tokens == 0:
        return 0.0
    start, stop = len(ids) - n_tokens, len(ids)
    slots = slots_of(caches)
    used = [slots[number] for group in spec.groups for number in group.slots]
    stored = [_stacked(group, slots, start, stop) for group in spec.groups]
    mx.eval(stored)  # before the buffers change
    packed = [slots[number] for group in spec.quantized for number in group.slots]
    newest = [copy.deepcopy(slot.newest) for slot in packed]
    for slot in used:
        slot.trim(n_tokens)
    model(mx.array([list(ids[start:])]), cache=list(caches))
    differences = []
    for group, old in zip(spec.groups, stored, strict=True):
        new = _stacked(group, slots, start, stop)
        sides = group.precision.sides if group.precision else (None, None)
        for side, *both in zip(sides, old, new, strict=True):
            was, now = (
                fields[0].astype(mx.float32)
                if side is None
                else pk.dequantize(fields, side, mx.float32)
                for fields in both
            )
            error = mx.square(now - was).sum(axis=(1, 3))
            size = mx.square(was).sum(axis=(1, 3))
            ratio = mx.sort(mx.sqrt(error / (size + 1e-12)), axis=1)
            differences.append(ratio[:, n_tokens // 2])
    worst = float(mx.max(mx.concatenate(differences)))
    for group, old in zip(spec.groups, stored, strict=True):
        if group.precision and n_own:
            continue  # these were not packed
        for place, number in enumerate(group.slots):
            for held, fields in zip((slots[number].keys, slots[number].values), old, strict=True):
                for buffer, values in zip(pk.arrays_of(held), fields, strict=True):
                    buffer[:, :, start:stop] = values[place : place + 1]
    for slot, one in zip(packed, newest, strict=True):
        slot.newest = one
    mx.eval([(slot.keys, slot.values) for slot in used])
    return worst if n_own else worst / 2


def _stacked(group: LayerGroup, slots: Sequence[Any], start: int, stop: int) -> list[Fields]:
    """Return a group's keys and its values of tokens [start, stop), each [slots, H, n, D], lazy.

    All slots together: one by one would take a thousand operations.
    """
    caches = [slots[number] for number in group.slots]
    by_slot = [kind_of(cache).tokens(cache, start, stop) for cache in caches]
    return [
        tuple(concatenated(arrays, axis=0) for arrays in zip(*part, strict=True))
        for part in zip(*by_slot, strict=True)
    ]
