"""The canary: compute the last tokens of restored caches again, and see whether they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from .packed import Packed
from .quantized import SequenceQuantizedKVCache
from .spec import ModelCacheSpec

__all__ = ["CANARY_TOKENS", "CANARY_TOLERANCE", "canary_difference"]

CANARY_TOKENS = 8
CANARY_TOLERANCE = 0.25
"""Most that recomputed KV may differ from stored, as a share of its size.

Arithmetic noise moves few values to the next of 16 steps: some percent. KV of other tokens, other
positions or another model differs by its whole size.
"""

_FIELDS = ("weights", "scales", "biases")
_Part = tuple[Mapping[str, mx.array], int]


def canary_difference(
    model: Any,
    spec: ModelCacheSpec,
    caches: Sequence[SequenceQuantizedKVCache],
    parts: Sequence[_Part],
    ids: Sequence[int],
) -> float:
    """Run the last tokens of restored caches again; return how far their KV is off, 0 for not.

    `parts` are the blocks that the caches were joined from, `ids` all their tokens. The result is
    the largest, over layers, keys and values, of the median over tokens of |new - old| / |old|.
    The caches hold the stored values again afterwards: nothing depends on there being a canary.
    """
    n_tokens = min(CANARY_TOKENS, len(ids))
    start, stop = len(ids) - n_tokens, len(ids)
    stored = _tail(parts, n_tokens)
    for cache in caches:
        cache.trim(n_tokens)
    model(mx.array([list(ids[start:])]), cache=list(caches))
    differences = []
    for group in spec.groups:
        for place, layer in enumerate(group.layers):
            for part, new in zip("kv", caches[layer].packed(start, stop), strict=True):
                old = _layer(stored, f"{group.name}.{part}", place)
                differences.append(_difference(old, new, spec))
    worst = float(mx.max(mx.stack(differences)))
    for group in spec.groups:
        for place, layer in enumerate(group.layers):
            cache = caches[layer]
            for part, buffers in (("k", cache.keys), ("v", cache.values)):
                assert buffers is not None
                old = _layer(stored, f"{group.name}.{part}", place)
                for buffer, value in zip(buffers, old, strict=True):
                    buffer[:, :, start:stop] = value
    mx.eval([cache.state for cache in caches])
    return worst


def _layer(stored: Mapping[str, mx.array], name: str, place: int) -> Packed:
    """Return one layer of stacked arrays, each [1, H, n, ...]."""
    weights, scales, biases = (stored[f"{name}.{field}"][place : place + 1] for field in _FIELDS)
    return weights, scales, biases


def _difference(old: Packed, new: Packed, spec: ModelCacheSpec) -> mx.array:
    """Return the median over tokens of |new - old| / |old|; both are packed, [1, H, n, D]."""
    plain = []
    for weights, scales, biases in (old, new):
        values = mx.dequantize(
            weights,
            scales,
            biases,
            group_size=spec.precision.group_size,
            bits=spec.precision.bits,
        )
        plain.append(values.astype(mx.float32))
    error = mx.square(plain[1] - plain[0]).sum(axis=(0, 1, 3))
    size = mx.square(plain[0]).sum(axis=(0, 1, 3))
    ratio = mx.sqrt(error / (size + 1e-12))
    return mx.sort(ratio)[ratio.shape[0] // 2]


def _tail(parts: Sequence[_Part], n_tokens: int) -> dict[str, mx.array]:
    """Return the last `n_tokens` of joined blocks, [L, H, n_tokens, ...] by array name."""
    pieces: list[tuple[Mapping[str, mx.array], int, int]] = []
    for arrays, n_used in reversed(parts):
        n_taken = min(n_used, n_tokens)
        pieces.insert(0, (arrays, n_used - n_taken, n_used))
        n_tokens -= n_taken
        if n_tokens == 0:
            break
    return {
        name: mx.concatenate([arrays[name][:, :, a:b] for arrays, a, b in pieces], axis=2)
        for name in pieces[0][0]
    }
