"""The model's own caches, made to round keys and values as ours do.

They keep everything else that is mlx-lm's: windows, masks, offsets, the order of what they hold.
So our caches must give what these give, at whatever precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.cache.geometry.kinds import slots_of
from mlx_lm_kvpersist.cache.live.packed import rotate, rotate_back


def rounded(own: list[Any], ours: Sequence[Any]) -> list[Any]:
    """Return `own`, each cache rounding what it is given as the one of ours in its place does.

    Raises:
        ValueError: ours are not arranged as the model's own.
    """
    pairs = zip(slots_of(own), slots_of(ours), strict=True)
    for cache, our in pairs:
        precision = getattr(our, "precision", None)
        if precision is not None and hasattr(cache, "update_and_fetch"):
            _round_before(cache, precision)
    return own


def _round_before(cache: Any, precision: Any) -> None:
    update_and_fetch = cache.update_and_fetch

    def rounding(keys: mx.array, values: mx.array, *args: Any) -> Any:
        both = _round(keys, precision.keys), _round(values, precision.values)
        return update_and_fetch(*both, *args)

    cache.update_and_fetch = rounding


def _round(x: mx.array, quantization: Any) -> mx.array:
    if x.shape[-1] == 0 or quantization.is_full_precision:
        return x
    how = {"group_size": quantization.group_size, "bits": quantization.bits}
    if quantization.rotated:
        return rotate_back(mx.dequantize(*mx.quantize(rotate(x), **how), **how)).astype(x.dtype)
    return mx.dequantize(*mx.quantize(x, **how), **how).astype(x.dtype)
