"""The canary: compute the last tokens of restored caches again, and compare."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx

from ..geometry.kinds import Fields, kind_of, slots_of
from ..geometry.spec import LayerGroup, ModelCacheSpec
from ..live import packed as pk
from ..live.attention import least_rows
from ..live.packed import GRID
from .cut_join import concatenated

CANARY_TOKENS = 8
"""The length of a run of tokens whose median difference is judged."""
CANARY_TOLERANCE = 0.25
"""The largest accepted difference of recomputed and stored KV, as a share of the norm. Arithmetic
noise is some percent; KV of other tokens, positions or models differs by about the whole norm."""


def canary_difference(
    model: Any, spec: ModelCacheSpec, caches: Sequence[Any], ids: Sequence[int]
) -> float:
    """Compute the last tokens of restored caches again; return how far their KV differs.

    The caches hold the tokens `ids`, and afterwards the stored values again. The result is the
    largest, over slots, keys, values and runs of `CANARY_TOKENS` tokens, of the median over a run
    of |new - old| / |old|. It is 0 if tokens cannot be trimmed from the caches: never from states,
    and not from windows that have dropped tokens. At the end of a block of the grid, the recomputed
    tokens see their own block quantized, so half the difference is returned. Only tokens after the
    last image are computed: ids do not give an image's pixels.

    One call computes the tokens if they are `least_rows` or more. Otherwise they are computed one
    after another, because MLX may compile kernels for a call of a few rows.
    """
    slots = slots_of(caches)
    used = [slots[number] for group in spec.groups for number in group.slots]
    is_dropped = any(len(ids) >= window for window in spec.sliding)
    if is_dropped or not all(slot.is_trimmable() for slot in used):
        return 0.0
    n_own = len(ids) % GRID if spec.quantized else len(ids)
    rows = least_rows()
    n_wanted = max(CANARY_TOKENS, rows)
    text = takewhile(lambda token_id: token_id >= 0, reversed(ids[-n_wanted:]))
    n_tokens = min(len(list(text)), n_own or len(ids))
    if n_tokens < rows:
        n_tokens, rows = min(n_tokens, CANARY_TOKENS), 1
    else:
        rows = n_tokens
    if n_tokens == 0:
        return 0.0
    start, stop = len(ids) - n_tokens, len(ids)
    stored = [_stacked(group, slots, start, stop) for group in spec.groups]
    mx.eval(stored)  # copied before the buffers change
    quantized = [slots[number] for group in spec.quantized for number in group.slots]
    newest = [copy.deepcopy(slot.newest) for slot in quantized]
    for slot in used:
        slot.trim(n_tokens)
    for first in range(start, stop, rows):
        model(mx.array([list(ids[first : first + rows])]), cache=list(caches))
    computed = [_stacked(group, slots, start, stop) for group in spec.groups]
    ratios = (
        ratio
        for group, old, new in zip(spec.groups, stored, computed, strict=True)
        for ratio in _ratios(group, old, new)
    )
    worst = float(mx.max(mx.concatenate([_medians(ratio) for ratio in ratios])))
    for group, old in zip(spec.groups, stored, strict=True):
        if group.precision and n_own:
            continue  # these tokens are not packed
        for place, number in enumerate(group.slots):
            buffers = slots[number].keys, slots[number].values
            for buffer_fields, fields in zip(map(pk.arrays_of, buffers), old, strict=True):
                for buffer, values in zip(buffer_fields, fields, strict=True):
                    buffer[:, :, start:stop] = values[place : place + 1]
    for slot, tokens in zip(quantized, newest, strict=True):
        slot.newest = tokens
    mx.eval([(slot.keys, slot.values) for slot in used])
    return worst if n_own else worst / 2


def _ratios(group: LayerGroup, old: Sequence[Fields], new: Sequence[Fields]) -> Iterator[mx.array]:
    """Yield |new - old| / |old| of each token [slots, n], of a group's keys, then its values."""
    sides = group.precision.sides if group.precision else (None, None)
    for side, *old_and_new in zip(sides, old, new, strict=True):
        before, after = (
            fields[0].astype(mx.float32)
            if side is None
            else pk.dequantize(fields, side, mx.float32)
            for fields in old_and_new
        )
        error = mx.square(after - before).sum(axis=(1, 3))
        yield mx.sqrt(error / (mx.square(before).sum(axis=(1, 3)) + 1e-12))


def _medians(ratios: mx.array) -> mx.array:
    """Return the medians of runs of the last tokens, [slots * runs], of ratios [slots, n].

    If the first tokens are too few for a run, they are not compared.
    """
    n_run = min(CANARY_TOKENS, ratios.shape[1])
    runs = ratios[:, ratios.shape[1] % n_run :].reshape(-1, n_run)
    return mx.sort(runs, axis=1)[:, n_run // 2]


def _stacked(group: LayerGroup, slots: Sequence[Any], start: int, stop: int) -> list[Fields]:
    """Return a group's keys and its values of tokens [start, stop), each [slots, H, n, D], lazy.

    All slots are stacked at once: separate reads would take a thousand operations.
    """
    caches = [slots[number] for number in group.slots]
    by_slot = [kind_of(cache).tokens(cache, start, stop) for cache in caches]
    return [
        tuple(concatenated(arrays, axis=0) for arrays in zip(*fields, strict=True))
        for fields in zip(*by_slot, strict=True)
    ]
