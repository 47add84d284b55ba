"""The precision of keys and values, and the arithmetic on them: quantize, append, read back.

A `Packed` is what `mx.quantize` returns for an array [B, H, T, D]: weights uint32
[B, H, T, D * bits / 32], then scales and biases [B, H, T, D / group size] in the array's own
dtype. Zeros in all three stand for zeros, so zeroed buffers are finite padding.
Keys or values in full precision are one array; `each`, `view`, `share` and `append` take both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
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
class KVPrecision:
    """MLX affine quantization: `bits` per number, one scale and bias per `group_size` numbers.

    `value_bits` are the bits of values; None stands for the same as keys.

    Raises:
        ValueError: MLX has no kernel for these bits or this group size.
    """

    bits: int = 4
    group_size: int = 64
    value_bits: int | None = None

    def __post_init__(self) -> None:
        if self.value_bits is None:
            object.__setattr__(self, "value_bits", self.bits)
        for bits in (self.bits, self.value_bits):
            if bits not in _BITS:
                raise ValueError(f"bits is {bits}; MLX quantizes to {_BITS}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"group size is {self.group_size}; MLX quantizes in groups of {sorted(GROUP_SIZES)}"
            )

    def __str__(self) -> str:
        bits = (
            f"{self.bits}b" if self.value_bits == self.bits else f"k{self.bits}v{self.value_bits}b"
        )
        return f"{bits}{self.group_size}"

    @cached_property
    def of_values(self) -> KVPrecision:
        """The precision of the values, as a precision of its own."""
        assert self.value_bits is not None
        return KVPrecision(self.value_bits, self.group_size)

    def fits(self, dim: int) -> bool:
        """Return whether a last dimension of `dim` numbers can be quantized."""
        return dim > 0 and dim % self.group_size == 0


@dataclass(frozen=True)
class PrecisionChoice:
    """The requested bits of keys and of values; `OWN_BITS` requests full precision.

    Without a group size, each layer group takes the first of `GROUP_SIZES` that fits it.
    """

    key_bits: int = 4
    value_bits: int = 4
    group_size: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether full precision is requested."""
        return OWN_BITS in (self.key_bits, self.value_bits)

    def candidates(self) -> list[KVPrecision]:
        """Return the precisions to try, in order; none for full precision."""
        if self.is_own:
            return []
        sizes = GROUP_SIZES if self.group_size is None else (self.group_size,)
        return [KVPrecision(self.key_bits, size, self.value_bits) for size in sizes]


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
