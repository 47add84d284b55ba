"""Arithmetic on quantized keys and values: rotate, quantize, append, read.

A `Packed` has the three arrays that `mx.quantize` returns for an array [B, H, T, W]: weights uint32
[B, H, T, W * bits / 32], then scales and biases [B, H, T, W / group size], converted to
`scale_dtype`. Zeros in all three stand for zeros. W is the size of a head, D, plus the padding to
whole groups. `each` and the functions that use it also accept one array in full precision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal, TypeVar

import mlx.core as mx

from ..geometry.precision import Quantization

GRID = 256
"""A query at position p sees the keys and values of its block, number p // GRID, in full precision,
and older keys and values quantized."""

Packed = tuple[mx.array, mx.array, mx.array]
Held = TypeVar("Held", mx.array, Packed)
Backend = Literal["cpu", "cuda", "metal"]


def backend() -> Backend:
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def each(function: Callable[..., mx.array], stored: Held, *more: Held) -> Held:
    """Return the results of `function` for the arrays of `stored` and `more`, in the same form.

    `function` is called once for arrays in full precision. For `Packed`, it is called for the
    weights, for the scales, and for the biases.
    """
    if isinstance(stored, mx.array):
        return function(stored, *more)
    weights, scales, biases = map(function, stored, *more)
    return weights, scales, biases


def capacity(n_tokens: int) -> int:
    """Return for how many tokens to make new buffers: at least 256 more than `n_tokens`.

    Capacities are multiples of 256, of 512 from 16K tokens on, of 1,024 from 32K tokens on, etc. So
    sequences of similar lengths have buffers of the same size, and MLX reuses freed buffers. On an
    H200, making new buffers for 8K tokens took half of the time of a restore.
    """
    least = n_tokens + 256
    step = max(256, 1 << least.bit_length() - 6)
    return -(-least // step) * step


@lru_cache(maxsize=32)
def rotation(dim: int, width: int, dtype: mx.Dtype) -> mx.array:
    """Return the matrix [dim, width] to multiply keys and values by; the transpose rotates back.

    The matrix spreads a large channel over all channels: https://arxiv.org/abs/2404.00456. Its rows
    are the first `dim` rows of a Hadamard matrix if MLX has one for `width` (2**k times 1, 12, 20
    or 28). Otherwise, they are the first `dim` rows of the Kronecker product of a cosine transform,
    for the odd factor of `width`, and a Hadamard matrix.
    """
    power = width & -width
    odd = width // power
    if odd == 1 or (odd in (3, 5, 7) and power >= 4):
        matrix = mx.hadamard_transform(mx.eye(width))
    else:  # MLX 0.32 crashes on these sizes
        at = mx.arange(odd)
        cosines = mx.cos(math.pi / odd * (at[:, None] + 0.5) * at)
        cosines = cosines / mx.sqrt(mx.square(cosines).sum(axis=0))
        matrix = mx.kron(cosines, mx.hadamard_transform(mx.eye(power)))
    matrix = mx.contiguous(matrix[:dim].astype(dtype))
    mx.eval(matrix)  # evaluated, because any thread may use it
    return matrix


def prepared(x: mx.array, quantization: Quantization) -> mx.array:
    """Return `x` [..., D] rotated and padded, [..., W].

    Rotating into W dimensions makes numbers and errors smaller than padding after a rotation would.
    """
    dim, padding = x.shape[-1], quantization.padding
    if quantization.rotated:
        is_fast = _is_transform(dim, padding, x.dtype)
        return mx.hadamard_transform(x) if is_fast else x @ rotation(dim, dim + padding, x.dtype)
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def as_it_came(x: mx.array, quantization: Quantization) -> mx.array:
    """Return the array [..., D] from which `prepared` made `x` [..., W]."""
    width, padding = x.shape[-1], quantization.padding
    dim = width - padding
    if quantization.rotated:
        is_fast = _is_transform(dim, padding, x.dtype)
        return mx.hadamard_transform(x) if is_fast else x @ rotation(dim, width, x.dtype).T
    return x[..., :-padding] if padding else x


def _is_transform(dim: int, padding: int, dtype: mx.Dtype) -> bool:
    """Whether to rotate by MLX's Hadamard kernel.

    On an H100, a step's attention in 32 layers over 4,000 tokens takes 6.0 ms with the kernel, and
    9.2 ms with matrix products. But the kernel rounds to `dtype` between its stages: seven times on
    a CPU, two or three times on a GPU. It does not scale a stage's sums, so they overflow float16.
    """
    is_close = dtype == mx.float32
    if dtype == mx.bfloat16:
        is_close = mx.default_device().type == mx.DeviceType.gpu
    return is_close and not padding and dim & (dim - 1) == 0


def scale_dtype(dtype: mx.Dtype) -> mx.Dtype:
    """Return the 16-bit dtype of the scales and biases for numbers of `dtype`.

    bfloat16 has the range of float32, so nothing overflows. SmolLM2 in float32, with keys of 6 bits
    and values of 4, has the same divergence with scales in bfloat16 as in float32 (0.00068 nats).
    """
    return mx.bfloat16 if dtype == mx.float32 else dtype


def with_scales(packed: tuple[mx.array, ...], dtype: mx.Dtype) -> Packed:
    weights, scales, biases = packed
    return weights, scales.astype(dtype), biases.astype(dtype)


def quantize(x: mx.array, quantization: Quantization) -> Packed:
    """Pack `x` [B, H, T, D]."""
    group_size, bits = quantization.group_size, quantization.bits
    packed = mx.quantize(prepared(x, quantization), group_size=group_size, bits=bits)
    return with_scales(packed, scale_dtype(x.dtype))


def arrays_of(stored: Packed | mx.array) -> tuple[mx.array, ...]:
    return (stored,) if isinstance(stored, mx.array) else stored


def dequantize(
    packed: tuple[mx.array, ...], quantization: Quantization, dtype: mx.Dtype
) -> mx.array:
    """Return all tokens [B, H, T, W], still rotated and padded."""
    return mx.dequantize(
        *with_scales(packed, dtype), group_size=quantization.group_size, bits=quantization.bits
    )


def matmul(x: mx.array, packed: Packed, quantization: Quantization, *, transpose: bool) -> mx.array:
    """Multiply `x` [B, H, n, ...] by packed tokens, or by their transpose, without dequantizing.

    `packed` may be views, except on CUDA.
    """
    group_size, bits = quantization.group_size, quantization.bits
    product: Callable[..., mx.array] = mx.quantized_matmul
    if backend() == "cpu":  # its quantized_matmul would copy views
        heads = mx.arange(x.shape[0] * x.shape[1], dtype=mx.uint32).reshape(x.shape[:2])
        product = partial(mx.gather_qmm, lhs_indices=heads, rhs_indices=heads)
    return product(x, *packed, transpose=transpose, group_size=group_size, bits=bits)


def read(packed: Packed, quantization: Quantization, dtype: mx.Dtype) -> mx.array:
    """Return all tokens [B, H, T, D], rotated back."""
    return as_it_came(dequantize(packed, quantization, dtype), quantization)


def zeros(x: mx.array, n_tokens: int, quantization: Quantization) -> Packed:
    """Return packed zeros for `n_tokens` tokens of the heads of `x` [B, H, T, D]."""
    width, shape = x.shape[3] + quantization.padding, (*x.shape[:2], n_tokens)
    weights = mx.zeros((*shape, width * quantization.bits // 32), mx.uint32)
    scales = mx.zeros((*shape, width // quantization.group_size), scale_dtype(x.dtype))
    return weights, scales, mx.zeros_like(scales)


def view(stored: Held, start: int, stop: int) -> Held:
    """Return tokens [start, stop) as lazy views; a later write does not change them."""
    return each(
        lambda x: copy.copy(x) if (start, stop) == (0, x.shape[2]) else x[:, :, start:stop], stored
    )


def share(stored: Held) -> Held:
    """Return new arrays that share the buffers of `stored` until either is written."""
    return each(copy.copy, stored)


def append(stored: Held | None, start: int, new: Held, room: int | None = None) -> Held:
    """Return buffers with the first `start` tokens of `stored`, followed by `new`.

    Buffers with room are written in place, or copied if something else refers to them. Buffers
    without room are replaced by buffers with `room` spare tokens (None: see `capacity`).
    """

    def grown(arrays: list[mx.array]) -> mx.array:
        n_rows, n_heads, _, dim = arrays[-1].shape
        n_all = sum(x.shape[2] for x in arrays)
        n_more = capacity(n_all) - n_all if room is None else room
        if n_more:
            arrays = [*arrays, mx.zeros((n_rows, n_heads, n_more, dim), arrays[-1].dtype)]
        if len(arrays) == 1:  # copied if it is a part of a larger array, which would stay in memory
            return mx.contiguous(arrays[0])
        return mx.concatenate(arrays, axis=2)

    if stored is None:
        return each(lambda x: grown([x]), new)

    def appended(buffer: mx.array, x: mx.array) -> mx.array:
        stop = start + x.shape[2]
        if stop <= buffer.shape[2]:
            buffer[:, :, start:stop] = x
            return buffer
        # astype: concatenate would promote the dtype, and wider scales would widen the activations.
        return grown([buffer[:, :, :start], x.astype(buffer.dtype)] if start else [x])

    return each(appended, stored, new)


def n_bytes(stored: Packed | mx.array | None) -> int:
    """Bytes of the buffers, spare room included."""
    return 0 if stored is None else sum(int(x.nbytes) for x in arrays_of(stored))
