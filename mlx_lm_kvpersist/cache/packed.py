"""Arithmetic on packed keys or values: quantize, append in place, read back.

A `Packed` is what `mx.quantize` returns for an array [B, H, T, D]: weights uint32
[B, H, T, D * bits / 32], then scales and biases [B, H, T, D / group size] in the array's own
dtype. Zeros in all three stand for zeros, so a zeroed buffer is a finite pad.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import mlx.core as mx

from .precision import KVPrecision

__all__ = [
    "Packed",
    "append",
    "each",
    "headroom",
    "n_bytes",
    "quantize",
    "read",
    "share",
    "view",
    "zeros_like",
]

Packed = tuple[mx.array, mx.array, mx.array]


def each(function: Callable[[mx.array], mx.array], packed: Packed) -> Packed:
    """Apply `function` to the three arrays."""
    weights, scales, biases = packed
    return function(weights), function(scales), function(biases)


def headroom(n_new: int) -> int:
    """Tokens to allocate beyond what is needed when `n_new` tokens did not fit.

    Decoding, and a prompt's rest of up to 768 tokens, then find room for many steps. A long
    prompt's chunks do not: each makes new buffers, as in mlx-lm's own cache, since room for the
    next would stay empty behind the last, in every sequence of a batch.
    """
    return min(max(n_new + 256, 512), 1024)


def quantize(x: mx.array, precision: KVPrecision) -> Packed:
    """Pack `x` [B, H, T, D] to `precision.bits`; scales and biases keep its dtype.

    For values give `precision.of_values`.
    """
    weights, scales, biases = mx.quantize(x, group_size=precision.group_size, bits=precision.bits)
    return weights, scales, biases


def read(packed: Packed, precision: KVPrecision, n_tokens: int) -> mx.array:
    """Return the first `n_tokens` plain: [B, H, n_tokens, D] in the dtype of the scales.

    For values give `precision.of_values`.
    """
    weights, scales, biases = view(packed, 0, n_tokens)
    return mx.dequantize(
        weights, scales, biases, group_size=precision.group_size, bits=precision.bits
    )


def view(packed: Packed, start: int, stop: int) -> Packed:
    """Return tokens [start, stop) as lazy views; a later write to `packed` is not seen in them."""
    if start == 0 and stop == packed[0].shape[2]:
        return share(packed)
    return each(lambda x: x[:, :, start:stop], packed)


def share(packed: Packed) -> Packed:
    """Return the same buffers under handles of their own: a write through one is not seen here."""
    return each(copy.copy, packed)


def append(packed: Packed | None, start: int, new: Packed) -> Packed:
    """Write `new` behind the first `start` tokens of `packed` and return the result.

    The buffers are written in place while they have room (and nobody else holds them), else
    copied into buffers with `headroom` to spare. What `packed` held from `start` on is lost.
    """
    n_new = new[0].shape[2]
    stop = start + n_new
    if packed is not None and stop <= packed[0].shape[2]:
        for buffer, part in zip(packed, new, strict=True):
            buffer[:, :, start:stop] = part
        return packed
    room = zeros_like(new, new[0].shape[0], headroom(n_new))
    if packed is None or start == 0:
        return _concatenate((new, room))
    return _concatenate((view(packed, 0, start), new, room))


def zeros_like(packed: Packed, n_rows: int, n_tokens: int) -> Packed:
    """Return zeros for `n_rows` sequences of `n_tokens` with the heads and dtypes of `packed`."""
    return each(
        lambda x: mx.zeros((n_rows, x.shape[1], n_tokens, x.shape[3]), x.dtype),
        packed,
    )


def n_bytes(packed: Packed | None) -> int:
    """Bytes of the buffers, spare room included."""
    return 0 if packed is None else sum(int(x.nbytes) for x in packed)


def _concatenate(parts: Sequence[Packed]) -> Packed:
    dtypes = [x.dtype for x in parts[0]]
    weights, scales, biases = (
        # astype: concatenate would promote, and scales of a wider dtype widen the activations.
        mx.concatenate([x.astype(dtype) for x in arrays], axis=2)
        for dtype, arrays in zip(dtypes, zip(*parts, strict=True), strict=True)
    )
    return weights, scales, biases
