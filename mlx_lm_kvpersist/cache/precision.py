"""How finely keys and values are quantized: what is asked for, and what a layer group gets."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["GROUP_SIZES", "OWN_BITS", "KVPrecision", "PrecisionChoice"]

GROUP_SIZES = (64, 32, 128)
"""The group sizes MLX has kernels for, in the order in which we try them."""

OWN_BITS = 16
"""Stands for the precision that the model computes in, whatever that is."""

_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class KVPrecision:
    """MLX affine quantization: `bits` a number, one scale and one bias per `group_size` numbers.

    Values may take other bits than keys: `value_bits`, equal to `bits` when None is given.

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
        """The precision of the values, as one for keys and values alike."""
        assert self.value_bits is not None
        return KVPrecision(self.value_bits, self.group_size)

    def fits(self, dim: int) -> bool:
        """Whether a last dimension of `dim` numbers can be quantized."""
        return dim > 0 and dim % self.group_size == 0

    def packed_dim(self, dim: int) -> int:
        """Length in uint32 of the packed last dimension of `dim` keys."""
        return self.bits * dim // 32

    def groups(self, dim: int) -> int:
        """Number of scales, and of biases, of a last dimension of `dim` numbers."""
        return dim // self.group_size

    def n_bytes(self, dim: int, scale_bytes: int) -> int:
        """Bytes of `dim` quantized keys whose scales and biases take `scale_bytes` each."""
        return 4 * self.packed_dim(dim) + 2 * scale_bytes * self.groups(dim)


@dataclass(frozen=True)
class PrecisionChoice:
    """The precision that is asked for: bits of keys and of values, `OWN_BITS` for the model's own.

    Without a group size, each group of layers takes the first of `GROUP_SIZES` that fits it.
    """

    key_bits: int = 4
    value_bits: int = 4
    group_size: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether nothing is to be quantized."""
        return OWN_BITS in (self.key_bits, self.value_bits)

    def candidates(self) -> list[KVPrecision]:
        """Return the precisions to try, in order; none when nothing is to be quantized."""
        if self.is_own:
            return []
        sizes = GROUP_SIZES if self.group_size is None else (self.group_size,)
        return [KVPrecision(self.key_bits, size, self.value_bits) for size in sizes]
