"""Arithmetic on keys or values, quantized or not: quantize, append in place, read back.

A `Packed` is what `mx.quantize` returns for an array [B, H, T, D]: weights uint32
[B, H, T, D * bits / 32], then scales and biases [B, H, T, D / group size] in the array's own
dtype. Zeros in all three stand for zeros, so zeroed buffers are finite padding.
Keys or values in full precision are one array; `each`, `view`, `share` and `append` take both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

from .precision import KVPrecision

Packed = tuple[mx.array, mx.array, mx.array]
Held = TypeVar("Held", mx.array, Packed)


def each(function: Callable[..., mx.array], held: Held, *others: Held) -> Held:
    """Apply `function` to the array, or to each of the three arrays."""
    if isinstance(held, mx.array):
        return function(held, *others)
    weights, scales, biases = map(function, held, *others)
    return weights, scales, biases


def headroom(n_new: int) -> int:
    """Return how many tokens to allocate beyond `n_new` that did not fit.

    Decoding, and a prompt's rest of up to 768 tokens, then find room for many steps. The chunks of
    a long prompt do not: each makes new buffers, as in mlx-lm's own cache. Room for the next chunk
    would stay empty behind the last one, in every sequence of a batch.
    """
    return min(max(n_new + 256, 512), 1024)


def quantize(x: mx.array, precision: KVPrecision) -> Packed:
    """Pack `x` [B, H, T, D] to `precision.bits`; scales and biases keep its dtype.

    For values give `precision.of_values`.
    """
    weights, scales, biases = mx.quantize(x, group_size=precision.group_size, bits=precision.bits)
    return weights, scales, biases


def read(packed: tuple[mx.array, ...], precision: KVPrecision) -> mx.array:
    """Return all tokens dequantized: [B, H, T, D] in the dtype of the scales.

    For values give `precision.of_values`.
    """
    weights, scales, biases = packed
    return mx.dequantize(
        weights, scales, biases, group_size=precision.group_size, bits=precision.bits
    )


def view(held: Held, start: int, stop: int) -> Held:
    """Return tokens [start, stop) as lazy views; a later write to `held` does not change them."""
    return each(
        lambda x: copy.copy(x) if (start, stop) == (0, x.shape[2]) else x[:, :, start:stop], held
    )


def share(held: Held) -> Held:
    """Return the same buffers as new arrays; a write to one does not change the other."""
    return each(copy.copy, held)


def append(held: Held | None, start: int, new: Held) -> Held:
    """Write `new` behind the first `start` tokens of `held` and return the result.

    The buffers are written in place while they have room (and nothing else refers to them), else
    copied into buffers with `headroom` to spare. What `held` had from `start` on is lost.
    """
    if held is None:
        return each(lambda x: _grown([x]), new)
    return each(lambda buffer, x: _appended(buffer, start, x), held, new)


def _appended(buffer: mx.array, start: int, new: mx.array) -> mx.array:
    stop = start + new.shape[2]
    if stop <= buffer.shape[2]:
        buffer[:, :, start:stop] = new
        return buffer
    # astype: concatenate would promote, and scales of a wider dtype widen the activations.
    return _grown([buffer[:, :, :start], new.astype(buffer.dtype)] if start else [new])


def _grown(parts: list[mx.array]) -> mx.array:
    n_rows, n_heads, n_new, dim = parts[-1].shape
    room = mx.zeros((n_rows, n_heads, headroom(n_new), dim), parts[-1].dtype)
    return mx.concatenate([*parts, room], axis=2)


def n_bytes(held: Packed | mx.array | None) -> int:
    """Bytes of the buffers, spare room included."""
    arrays = [held] if isinstance(held, mx.array) else held or ()
    return sum(int(x.nbytes) for x in arrays)
