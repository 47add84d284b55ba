"""The precision of keys and values: how it is requested, named and shown. Needs no mlx."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

GROUP_SIZES = (64, 32, 128)
"""The group sizes that MLX has kernels for, in the order in which they are tried."""

FULL_BITS = 16
"""Requests full precision: the dtype that the model computes in."""

_NAME = re.compile(r"full|(?:k(\d)r?(?:p\d+)?v)?(\d)(r?)(?:p\d+)?b\d+")
"""A precision's name. Groups: bits of keys, if values have other bits; bits of values; rotation."""


@dataclass(frozen=True)
class Quantization:
    """How keys, or values, are quantized: MLX affine, `bits` per number.

    `group_size` numbers share a scale and a bias. With `rotated`, the numbers are first multiplied
    by `rotation`. Otherwise an outlier channel would leave few levels for all other channels. A
    head of 80 numbers is padded to 96, which is three groups of 32: `padding` is 16.
    """

    bits: int = 4
    group_size: int = 64
    rotated: bool = False
    padding: int = 0

    def __str__(self) -> str:
        padding = f"p{self.padding}" if self.padding else ""
        return f"{self.bits}{'r' if self.rotated else ''}{padding}"

    def fitted(self, dim: int) -> Quantization:
        """Return this quantization with the padding for a head of `dim` numbers.

        Groups do not span heads, because packed kernels read each head separately.
        """
        return replace(self, padding=-dim % self.group_size)


class KVPrecision(NamedTuple):
    """How a layer's keys and values are quantized. They differ only in bits and padding."""

    keys: Quantization
    values: Quantization

    @classmethod
    def of(
        cls,
        key_bits: int = 4,
        group_size: int = 64,
        value_bits: int | None = None,
        *,
        rotated: bool = False,
    ) -> KVPrecision:
        keys = Quantization(key_bits, group_size, rotated)
        return cls(keys, replace(keys, bits=value_bits or key_bits))

    def fitted(self, k_dim: int, v_dim: int) -> KVPrecision:
        return KVPrecision(self.keys.fitted(k_dim), self.values.fitted(v_dim))

    @property
    def group_size(self) -> int:
        return self.keys.group_size

    def __str__(self) -> str:
        is_same = self.keys == self.values
        bits = str(self.keys) if is_same else f"k{self.keys}v{self.values}"
        return f"{bits}b{self.group_size}"


@dataclass(frozen=True)
class PrecisionChoice:
    """The requested bits; the defaults are the server's.

    Without a group size, each layer group gets the size of `GROUP_SIZES` with the least padding.
    """

    key_bits: int = 8
    value_bits: int = 4
    group_size: int | None = None
    rotated: bool = True

    @property
    def is_full_precision(self) -> bool:
        return self.key_bits == self.value_bits == FULL_BITS

    def candidates(self) -> list[KVPrecision]:
        if self.is_full_precision:
            return []
        sizes = GROUP_SIZES if self.group_size is None else (self.group_size,)
        return [
            KVPrecision.of(self.key_bits, size, self.value_bits, rotated=self.rotated)
            for size in sizes
        ]

    def __str__(self) -> str:
        turned = "r" if self.rotated else ""
        bits = f"k{self.key_bits}{turned}v{self.value_bits}{turned}"
        return f"{bits}, group {self.group_size or 'auto'}"


def layout_in_words(layout: str) -> str:
    """Return a layout in words, like "keys 8 bits, values 4, rotated"; unchanged if unknown."""
    words = [word.partition("*")[0] for word in layout.split(",")]
    names = [word for word in words if word != "state" and not re.fullmatch(r"[cw]\d+", word)]
    matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
    quantized = {match.groups() for match in matches if match[0] != "full"}
    if len(matches) < len(names) or len(quantized) > 1:
        return layout
    if not quantized:
        return "full precision" if names else "windows and states alone"
    ((key_bits, value_bits, rotated),) = quantized
    said = [f"keys {key_bits or value_bits} bits", f"values {value_bits}"]
    if rotated:
        said.append("rotated")
    if "full" in names:
        said.append("some layers in full precision")
    return ", ".join(said)
