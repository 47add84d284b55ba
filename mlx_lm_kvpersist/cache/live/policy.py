"""The choice of the attention strategy over quantized keys: a fixed policy, and a plan per group.

A call without a row in the policy dequantizes: the fused kernel over dequantized keys is right on
every backend, and the fastest for prompts. A plan keeps a row only if its strategy passed the check
for the layers on this device (`measuring/attention_check.py`): no other code may choose a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ..geometry.precision import Quantization
from .attention import MAX_DEQUANTIZED_BYTES, Strategy

Backend = Literal["cpu", "cuda", "metal"]

_CUDA_ROWS = 33
"""MLX's CUDA backend has a kernel for products of 2 to 16 rows with quantized weights, and another
for up to 32. It compiles each for half a minute when it is first used."""

_PHASES = {"prefill": (512, 1), "decode": (1, 1), "batches": (1, 8)}
"""Typical calls, for descriptions: queries of a sequence, and sequences."""


@dataclass(frozen=True)
class AttentionShape:
    """The geometry of a layer's attention; with the number of tokens it decides the kernels."""

    n_q_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True)
class Rule:
    """A strategy, and the calls that take it: by queries of a sequence, and by sequences."""

    strategy: Strategy
    most_queries: int = 1 << 30
    least_rows: int = 1


def _fast_on_metal(shape: AttentionShape, keys: Quantization) -> bool:
    width = shape.k_dim + keys.padding
    is_fast = width > 128 or (width in (64, 128) and keys.bits in (4, 8))
    return is_fast and shape.n_q_heads < 4 * shape.n_kv_heads


class Row(NamedTuple):
    """A row of the policy: a rule of one backend, the reason, and the layers that it fits."""

    backend: Backend
    rule: Rule
    why: str
    fits: Callable[[AttentionShape, Quantization], bool] = lambda shape, keys: True


_FEW = 17
"""Most queries of a decoding step: a token and 16 draft tokens."""

POLICY = (
    Row(
        "cpu",
        Rule("packed", most_queries=_FEW),
        "Packed keys of 8 bits are a quarter of the bytes of float32: a query over 4,089 keys of "
        "8 heads takes 32 ms instead of 171, 8 queries 205 instead of 298, and 17 as long.",
    ),
    Row(
        "metal",
        Rule("packed", most_queries=_FEW, least_rows=8),
        "Eight rows fill the GPU, and dequantizing would write all of their keys.",
    ),
    Row(
        "metal",
        Rule("packed", most_queries=_FEW),
        "MLX has a fast kernel for few queries over keys of 4 or 8 bits. If a key head has four "
        "query heads or more, the product with values runs in few threadgroups.",
        _fast_on_metal,
    ),
)
"""CUDA has no row. MLX compiles each packed kernel when it is first used, which took up to 47 s on
an H100, and packed products over keys of 8 bits are wrong on Hopper for heads of 64
(docs/upstream.md)."""


def backend() -> Backend:
    """Return the name of the backend that MLX computes on."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def least_rows() -> int:
    """Return the least number of rows, above 1, that a call of our own may give a model.

    Stock needs the kernels of one row and of long prompts. So a call of one row, or of this number
    and more, never waits for a kernel that stock would not compile.
    """
    return _CUDA_ROWS if backend() == "cuda" else 1


def rules_for(
    shape: AttentionShape, keys: Quantization, computed_on: Backend | None = None
) -> tuple[Rule, ...]:
    """Return the policy's rules for layers of a shape, on this backend unless one is given."""
    on = computed_on or backend()
    return tuple(row.rule for row in POLICY if row.backend == on and row.fits(shape, keys))


@dataclass(frozen=True)
class AttentionPlan:
    """How the layers of one group attend: by the first rule that applies, else dequantized.

    Rules are for models that take packed keys. Such a model dequantizes at most
    `max_dequantized_bytes` together: beyond that `dequantize` becomes `tiled`, unless the limit is
    None. A tile has `tile_bytes` of dequantized keys and values.
    """

    rules: Sequence[Rule] = ()
    can_take_packed: bool = False
    max_dequantized_bytes: int | None = MAX_DEQUANTIZED_BYTES
    tile_bytes: int = MAX_DEQUANTIZED_BYTES

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionPlan:
        return self

    def choose(self, n_queries: int, n_keys: int, n_rows: int, token_bytes: int) -> Strategy:
        """Return the strategy for `n_queries` against `n_keys` of each of `n_rows` sequences.

        `token_bytes` is the size of a token's key and value, dequantized, all heads of one layer.
        """
        for rule in self.rules:
            if n_queries <= rule.most_queries and n_rows >= rule.least_rows:
                return rule.strategy
        limit = self.max_dequantized_bytes if self.can_take_packed else None
        is_tiled = limit is not None and n_rows * n_keys * token_bytes > limit
        return "tiled" if is_tiled else "dequantize"

    def __str__(self) -> str:
        sizes = _PHASES.items()
        return ", ".join(f"{name} {self.choose(n, 1, rows, 1)}" for name, (n, rows) in sizes)


def forced_plan(strategy: Strategy) -> AttentionPlan:
    """Return the plan of a model that takes packed keys, which always takes `strategy`."""
    if strategy == "dequantize":
        return AttentionPlan(can_take_packed=True, max_dequantized_bytes=None)
    return AttentionPlan((Rule(strategy),), can_take_packed=True)
