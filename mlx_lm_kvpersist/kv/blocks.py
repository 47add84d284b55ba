"""Cut caches into immutable blocks, and join blocks into caches, without leaving 4 bits.

A block holds up to `BLOCK_TOKENS` tokens of all layers: for each layer group six arrays with the
layers stacked, "0.k.weights" [L, H, T, Dk * bits / 32] uint32, "0.k.scales" and "0.k.biases"
[L, H, T, Dk / group size] in the model's dtype, and the same for "0.v". Generation thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import mlx.core as mx

from .packed import Packed
from .quantized import SequenceQuantizedKVCache
from .spec import LayerGroup, ModelCacheSpec

__all__ = ["BLOCK_TOKENS", "block_nbytes", "join_blocks", "split_blocks"]

BLOCK_TOKENS = 256

_PARTS = ("k", "v")
_FIELDS = ("weights", "scales", "biases")
_WINDOW_BYTES = 64 << 20
"""Bytes to evaluate at once: enough to keep a device busy, too little to matter in its memory."""


def split_blocks(
    spec: ModelCacheSpec,
    caches: Sequence[SequenceQuantizedKVCache],
    ranges: Sequence[tuple[int, int]],
) -> list[dict[str, mx.array]]:
    """Return one block per token range [start, stop), as evaluated arrays of their own.

    Raises:
        ValueError: the ranges overlap, are empty, out of order, longer than a block, or go beyond
            what a cache holds; or there is not one cache per layer.
    """
    _check_ranges(ranges)
    if len(caches) != spec.n_layers:
        raise ValueError(f"{len(caches)} caches for {spec.n_layers} layers")
    if not ranges:
        return []
    cuts = sorted({cut for span in ranges for cut in span} - {0})
    # Piece i ends at cuts[i] and begins at the cut before it.
    piece_ending_at = {cut: i for i, cut in enumerate(cuts)}
    pieces: dict[str, list[list[mx.array]]] = {}
    for group in spec.groups:
        for layer in group.layers:
            for part, packed in zip(_PARTS, caches[layer].packed(0, cuts[-1]), strict=True):
                for field, array in zip(_FIELDS, packed, strict=True):
                    name = f"{group.name}.{part}.{field}"
                    pieces.setdefault(name, []).append(_split(array, cuts[:-1], axis=2))
    blocks = []
    window: list[mx.array] = []
    window_bytes = 0
    for _, stop in ranges:
        piece = piece_ending_at[stop]
        block = {
            name: _joined([layer[piece] for layer in layers], axis=0)
            for name, layers in pieces.items()
        }
        blocks.append(block)
        window.extend(block.values())
        window_bytes += block_nbytes(block)
        if window_bytes >= _WINDOW_BYTES:
            mx.eval(window)
            window, window_bytes = [], 0
    mx.eval(window)
    return blocks


def join_blocks(
    spec: ModelCacheSpec,
    blocks: Sequence[tuple[Mapping[str, mx.array], int]],
    headroom: int,
) -> list[SequenceQuantizedKVCache]:
    """Return one cache per layer with the first `n_tokens` of each (arrays, n_tokens), in order.

    Every layer gets evaluated buffers of its own with `headroom` tokens to spare, so that its
    first update copies nothing. The blocks must fit the spec (`ModelCacheSpec.block_arrays_fit`).

    Raises:
        ValueError: a block is asked for more tokens than it has, or for none.
    """
    caches = spec.make_cache()
    if not blocks:
        return caches
    n_total = sum(n_tokens for _, n_tokens in blocks)
    window: list[mx.array] = []
    window_bytes = 0
    for group in spec.groups:
        keys = _layers_of(group, "k", blocks, headroom)
        values = _layers_of(group, "v", blocks, headroom)
        for layer, k, v in zip(group.layers, keys, values, strict=True):
            cache = SequenceQuantizedKVCache.from_packed(spec.precision, k, v, n_total)
            caches[layer] = cache
            window.extend((*k, *v))
            window_bytes += cache.nbytes
            if window_bytes >= _WINDOW_BYTES:
                mx.eval(window)
                window, window_bytes = [], 0
    mx.eval(window)
    return caches


def block_nbytes(arrays: Mapping[str, mx.array]) -> int:
    """Bytes of a block's arrays."""
    return sum(int(array.nbytes) for array in arrays.values())


def _layers_of(
    group: LayerGroup,
    part: str,
    blocks: Sequence[tuple[Mapping[str, mx.array], int]],
    headroom: int,
) -> list[Packed]:
    """Return the joined keys ("k") or values ("v") of each layer of a group, lazy."""
    n_layers = len(group.layers)
    fields: list[list[mx.array]] = []
    for field in _FIELDS:
        pieces = []
        for arrays, n_tokens in blocks:
            array = arrays[f"{group.name}.{part}.{field}"]
            if not 0 < n_tokens <= array.shape[2]:
                raise ValueError(f"{n_tokens} tokens of a block of {array.shape[2]}")
            if n_tokens < array.shape[2]:
                array = array[:, :, :n_tokens]
            pieces.append(_split(array, n_layers, axis=0))
        if headroom:
            first = pieces[0][0]
            room = mx.zeros((1, first.shape[1], headroom, first.shape[3]), first.dtype)
            pieces.append([room] * n_layers)
        fields.append([_joined(layer, axis=2) for layer in zip(*pieces, strict=True)])
    return list(zip(*fields, strict=True))


def _split(array: mx.array, at: int | list[int], axis: int) -> list[mx.array]:
    pieces: Any = mx.split(array, at, axis=axis)  # mlx's own annotation says one array
    return list(pieces)


def _joined(arrays: Sequence[mx.array], axis: int) -> mx.array:
    """Concatenate into memory of its own, also a single array (which mx.concatenate returns)."""
    if len(arrays) == 1:
        return mx.take(arrays[0], mx.array([0], mx.int32), axis=0)
    return mx.concatenate(list(arrays), axis=axis)


def _check_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    for start, stop in ranges:
        if not 0 <= start < stop <= start + BLOCK_TOKENS:
            raise ValueError(f"tokens {start} to {stop} are not a block")
    for (_, stop), (start, _) in zip(ranges, islice(ranges, 1, None), strict=False):
        if start < stop:
            raise ValueError(f"a block from token {start} overlaps the one up to token {stop}")
