"""How finely keys and values are quantized."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GROUP_SIZES", "KVPrecision"]

GROUP_SIZES = (64, 32, 128)
"""The group sizes MLX has kernels for, in the order in which we try them."""

_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class KVPrecision:
    """MLX affine quantization: `bits` a number, one scale and one bias per `group_size` numbers.

    Raises:
        ValueError: MLX has no kernel for these bits or this group size.
    """

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits is {self.bits}; MLX quantizes to {_BITS}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(
                f"group size is {self.group_size}; MLX quantizes in groups of {sorted(GROUP_SIZES)}"
            )

    def __str__(self) -> str:
        return f"{self.bits}b{self.group_size}"

    def fits(self, dim: int) -> bool:
        """Whether a last dimension of `dim` numbers can be quantized."""
        return dim > 0 and dim % self.group_size == 0

    def packed_dim(self, dim: int) -> int:
        """Length in uint32 of the packed last dimension of `dim` numbers."""
        return self.bits * dim // 32

    def groups(self, dim: int) -> int:
        """Number of scales, and of biases, of a last dimension of `dim` numbers."""
        return dim // self.group_size

    def n_bytes(self, dim: int, scale_bytes: int) -> int:
        """Bytes of `dim` quantized numbers whose scales and biases take `scale_bytes` each."""
        return 4 * self.packed_dim(dim) + 2 * scale_bytes * self.groups(dim)
