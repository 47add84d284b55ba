"""The precision of keys and values: what is requested, and what a layer group gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
