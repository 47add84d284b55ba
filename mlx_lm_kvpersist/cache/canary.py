"""The canary: compute the last tokens of restored caches again, and see whether they agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from . import packed as pk
from .join import Piece, Pieces
from .slots import Fields, slots_of, tokens
from .spec import LayerGroup, ModelCacheSpec

CANARY_TOKENS = 8
CANARY_TOLERANCE = 0.25
"""Most that recomputed KV may differ from stored KV, as a share of its norm.

Arithmetic noise moves a few values to the next of 16 steps: some percent. KV of other tokens, other
positions or another model differs by about its whole norm.
"""


def canary_difference(
    model: Any,
    spec: ModelCacheSpec,
    caches: Sequence[Any],
    pieces: Pieces,
    ids: Sequence[int],
) -> float:
    """Run the last tokens of restored caches again; return how far their KV differs, 0 for equal.

    The caches were joined from `pieces` (the `trailing` ones suffice) and hold the tokens `ids`.
    The result is the largest, over slots, keys and values, of the median over
    tokens of |new - old| / |old|. Afterwards the caches hold the stored values again, so that a
    reply does not depend on whether there was a canary. 0 also where the caches cannot forget
    tokens, to compute them again: a state cannot, nor a window that has dropped those before it.
    """
    if spec.recurrent or any(len(ids) >= window for window in spec.sliding):
        return 0.0
    n_tokens = min(CANARY_TOKENS, len(ids))
    start, stop = len(ids) - n_tokens, len(ids)
    slots = slots_of(caches)
    sources = [(group, pieces.blocks) for group in spec.full]
    for window, groups in spec.sliding.items():
        sources += [(group, pieces.windows[window]) for group in groups]
    used = [slots[number] for group, _ in sources for number in group.slots]
    for slot in used:
        slot.trim(n_tokens)
    model(mx.array([list(ids[start:])]), cache=list(caches))
    differences, stored = [], []
    for group, source in sources:
        for part in ("k", "v"):
            old, difference = _compared(group, part, source, slots, start, stop)
            differences.append(difference)
            stored.append((group, part, old))
    worst = float(mx.max(mx.concatenate(differences)))
    for group, part, old in stored:
        for place, number in enumerate(group.slots):
            buffers = slots[number].keys if part == "k" else slots[number].values
            buffers = [buffers] if isinstance(buffers, mx.array) else buffers
            for buffer, values in zip(buffers, old, strict=True):
                buffer[:, :, start:stop] = values[place : place + 1]
    mx.eval([(slot.keys, slot.values) for slot in used])
    return worst


def _compared(
    group: LayerGroup,
    part: str,
    pieces: Sequence[Piece],
    slots: Sequence[Any],
    start: int,
    stop: int,
) -> tuple[Fields, mx.array]:
    """Return a group's stored keys or values of tokens [start, stop), [slots, H, n, D].

    And, for each slot, the median over tokens of |new - old| / |old|, [slots]. All slots together:
    one by one would take a thousand operations.
    """
    last = trailing(pieces)
    n_more = sum(piece.stop - piece.start for piece in last) - (stop - start)
    old = tuple(
        mx.concatenate([piece.arrays[name][:, :, piece.start : piece.stop] for piece in last], 2)[
            :, :, n_more:
        ]
        for name in group.array_names[part]
    )
    by_slot = [tokens(slots[slot], start, stop)[part == "v"] for slot in group.slots]
    new = tuple(mx.concatenate(list(arrays), axis=0) for arrays in zip(*by_slot, strict=True))
    precision = group.precision.of_values if group.precision and part == "v" else group.precision
    was, now = (
        (fields[0] if precision is None else pk.read(fields, precision)).astype(mx.float32)
        for fields in (old, new)
    )
    error = mx.square(now - was).sum(axis=(1, 3))
    size = mx.square(was).sum(axis=(1, 3))
    ratio = mx.sort(mx.sqrt(error / (size + 1e-12)), axis=1)
    return old, ratio[:, (stop - start) // 2]


def trailing(pieces: Sequence[Piece]) -> list[Piece]:
    """Return the last pieces, which hold the tokens that the canary recomputes."""
    last: list[Piece] = []
    n_missing = CANARY_TOKENS
    for piece in reversed(pieces):
        if n_missing <= 0:
            break
        last.insert(0, piece)
        n_missing -= piece.stop - piece.start
    return last
