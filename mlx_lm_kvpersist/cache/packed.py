"""The precision of keys and values, and the arithmetic on them: rotate, quantize, append, read.

A `Packed` is what `mx.quantize` returns for an array [B, H, T, D]: weights uint32
[B, H, T, D * bits / 32], then scales and biases [B, H, T, D / group size] in the array's own
dtype. Zeros in all three stand for zeros, so zeroed buffers are finite padding.
Keys or values in full precision are one array; `each`, `view`, `share` and `append` take both.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import mlx.core as mx

Packed = tuple[mx.array, mx.array, mx.array]
Held = TypeVar("Held", mx.array, Packed)


GROUP_SIZES = (64, 32, 128)
"""The group sizes that MLX has kernels for, in the order in which they are tried."""

OWN_BITS = 16
"""Stands for full precision: the dtype that the model computes in."""

_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Quantization:
    """How keys, or values, are quantized: MLX affine, `bits` per number.

    `group_size` numbers share a scale and a bias. With `rotated` they are multiplied by `rotation`
    before: a channel far larger than the others would leave these few of the steps.

    Raises:
        ValueError: MLX has no kernel for these bits or this group size.
    """

    bits: int = 4
    group_size: int = 64
    rotated: bool = False

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits is {self.bits}; MLX quantizes to {_BITS}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"group size is {self.group_size}; MLX quantizes in groups of {sorted(GROUP_SIZES)}"
            )

    def __str__(self) -> str:
        return f"{self.bits}{'r' if self.rotated else ''}"

    def fits(self, dim: int) -> bool:
        """Return whether a last dimension of `dim` numbers can be quantized."""
        return dim > 0 and dim % self.group_size == 0


@dataclass(frozen=True)
class KVPrecision:
    """How the keys and the values of a layer are quantized; both in groups of the same size.

    Raises:
        ValueError: the group sizes differ.
    """

    keys: Quantization = Quantization()
    values: Quantization = Quantization()

    def __post_init__(self) -> None:
        if self.keys.group_size != self.values.group_size:
            raise ValueError("keys and values have different group sizes")

    @classmethod
    def of(
        cls,
        key_bits: int = 4,
        group_size: int = 64,
        value_bits: int | None = None,
        *,
        rotated: tuple[bool, bool] = (False, False),
    ) -> KVPrecision:
        """Return a precision; without `value_bits` values have the bits of keys."""
        keys = Quantization(key_bits, group_size, rotated[0])
        values = Quantization(value_bits or key_bits, group_size, rotated[1])
        return cls(keys, values)

    @property
    def group_size(self) -> int:
        return self.keys.group_size

    def __str__(self) -> str:
        bits = str(self.keys)
        if self.values != self.keys:
            bits = f"k{self.keys}v{self.values}"
        return f"{bits}b{self.group_size}"


def parse_precision(name: str) -> KVPrecision | None:
    """Return the precision of this name; None for "own". Raises ValueError for anything else."""
    if name == "own":
        return None
    match = re.fullmatch(r"(?:k(\d)(r?)v(\d)(r?)|(\d)(r?))b(\d+)", name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a precision")
    key_bits, keys_turned, value_bits, values_turned, bits, turned, size = match.groups()
    rotated = bool(keys_turned or turned), bool(values_turned or turned)
    return KVPrecision.of(
        int(key_bits or bits), int(size), int(value_bits or bits), rotated=rotated
    )


@dataclass(frozen=True)
class PrecisionChoice:
    """The requested bits of keys and of values; `OWN_BITS` requests full precision.

    Without a group size, each layer group takes the first of `GROUP_SIZES` that fits it. `rotated`
    says whether keys, and whether values, are rotated.
    """

    key_bits: int = 4
    value_bits: int = 4
    group_size: int | None = None
    rotated: tuple[bool, bool] = (False, False)

    @property
    def is_own(self) -> bool:
        """Whether full precision is requested."""
        return OWN_BITS in (self.key_bits, self.value_bits)

    def candidates(self) -> list[KVPrecision]:
        """Return the precisions to try, in order; none for full precision."""
        if self.is_own:
            return []
        sizes = GROUP_SIZES if self.group_size is None else (self.group_size,)
        return [
            KVPrecision.of(self.key_bits, size, self.value_bits, rotated=self.rotated)
            for size in sizes
        ]


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


@lru_cache(maxsize=32)
def rotation(dim: int, dtype: mx.Dtype) -> mx.array:
    """Return the orthonormal matrix [dim, dim] that keys and values are multiplied by.

    It is a Hadamard matrix where MLX knows one (2**k times 1, 12, 20 or 28), else the product of
    one and of a cosine transform of the odd rest. It spreads a large channel over all of them:
    https://arxiv.org/abs/2404.00456
    """
    power = dim & -dim
    odd = dim // power
    if odd == 1 or (odd in (3, 5, 7) and power >= 4):
        matrix = mx.hadamard_transform(mx.eye(dim))
    else:  # MLX 0.32 crashes on these
        at = mx.arange(odd)
        cosines = mx.cos(math.pi / odd * (at[:, None] + 0.5) * at)
        cosines = cosines / mx.sqrt(mx.square(cosines).sum(axis=0))
        matrix = mx.kron(cosines, mx.hadamard_transform(mx.eye(power)))
    matrix = matrix.astype(dtype)
    mx.eval(matrix)  # any thread may use it
    return matrix


def rotate(x: mx.array) -> mx.array:
    """Return `x` [..., D] rotated."""
    return x @ rotation(x.shape[-1], x.dtype)


def rotate_back(x: mx.array) -> mx.array:
    """Return what was rotated to `x` [..., D]."""
    return x @ rotation(x.shape[-1], x.dtype).T


def quantize(x: mx.array, quantization: Quantization) -> Packed:
    """Pack `x` [B, H, T, D]; scales and biases keep its dtype."""
    if quantization.rotated:
        x = rotate(x)
    weights, scales, biases = mx.quantize(
        x, group_size=quantization.group_size, bits=quantization.bits
    )
    return weights, scales, biases


def dequantize(packed: tuple[mx.array, ...], quantization: Quantization) -> mx.array:
    """Return all tokens [B, H, T, D] in the dtype of the scales; if rotated, they stay so."""
    weights, scales, biases = packed
    return mx.dequantize(
        weights, scales, biases, group_size=quantization.group_size, bits=quantization.bits
    )


def read(packed: tuple[mx.array, ...], quantization: Quantization) -> mx.array:
    """Return all tokens [B, H, T, D] as they came, but for rounding, in the dtype of the scales."""
    x = dequantize(packed, quantization)
    return rotate_back(x) if quantization.rotated else x


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

    def appended(buffer: mx.array, x: mx.array) -> mx.array:
        stop = start + x.shape[2]
        if stop <= buffer.shape[2]:
            buffer[:, :, start:stop] = x
            return buffer
        # astype: concatenate would promote, and scales of a wider dtype widen the activations.
        return _grown([buffer[:, :, :start], x.astype(buffer.dtype)] if start else [x])

    return each(appended, held, new)


def _grown(parts: list[mx.array]) -> mx.array:
    n_rows, n_heads, n_new, dim = parts[-1].shape
    room = mx.zeros((n_rows, n_heads, headroom(n_new), dim), parts[-1].dtype)
    return mx.concatenate([*parts, room], axis=2)


def n_bytes(held: Packed | mx.array | None) -> int:
    """Bytes of the buffers, spare room included."""
    arrays = [held] if isinstance(held, mx.array) else held or ()
    return sum(int(x.nbytes) for x in arrays)
