"""The model's own caches, made to round keys and values as the plugin's caches do.

Everything else stays mlx-lm's: windows, masks, offsets, the order of tokens. So both kinds of
caches must give the same results in every precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.cache.geometry.kinds import slots_of
from mlx_lm_kvpersist.cache.live.packed import GRID, as_it_came, prepared


def rounded(own: list[Any], ours: Sequence[Any]) -> list[Any]:
    """Make the model's `own` caches round keys and values as `ours` do, and return them.

    Raises ValueError if the two lists have different structures.
    """
    pairs = zip(slots_of(own), slots_of(ours), strict=True)
    for cache, our in pairs:
        precision = getattr(our, "precision", None)
        if precision is not None and hasattr(cache, "update_and_fetch"):
            _round_older(cache, precision)
    return own


def _round_older(cache: Any, precision: Any) -> None:
    """Make a KVCache return rounded blocks, except the last token's block."""
    # From mlx-lm 0.32.0 on, a fetch returns `keys_and_values`, and models call that method, too.
    name = "keys_and_values" if hasattr(cache, "keys_and_values") else "update_and_fetch"
    fetch = getattr(cache, name)

    def rounding(*args: Any) -> Any:
        sides = []
        for x, quantization in zip(fetch(*args), (precision.keys, precision.values), strict=True):
            line = (x.shape[2] - 1) // GRID * GRID
            older = _round(x[:, :, :line], quantization)
            sides.append(mx.concatenate([older, x[:, :, line:]], axis=2))
        return tuple(sides)

    setattr(cache, name, rounding)


def _round(x: mx.array, quantization: Any) -> mx.array:
    if 0 in x.shape:
        return x
    how = {"group_size": quantization.group_size, "bits": quantization.bits}
    weights, scales, biases = mx.quantize(prepared(x, quantization), **how)
    if x.dtype == mx.float32:
        scales, biases = (y.astype(mx.bfloat16).astype(mx.float32) for y in (scales, biases))
    return as_it_came(mx.dequantize(weights, scales, biases, **how), quantization)
