"""Which strategy attends over quantized keys: a fixed policy, and the plan of a group of layers.

The policy is a table. A call that no row is for dequantizes: the fused kernel over dequantized keys
is right on every backend, and the quickest for prompts. A row only makes a call quicker. A plan
has a row only if the row's strategy was found right for the layers on this device
(`measuring/attention_check.py`), so nothing else may choose a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ..geometry.precision import Quantization
from .attention import MAX_DEQUANTIZED_BYTES, Strategy

Backend = Literal["cpu", "cuda", "metal"]

_PHASES = {"prefill": (512, 1), "decode": (1, 1), "batches": (1, 8)}
"""Typical calls, for people: queries of a sequence, and sequences."""


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
    least_queries: int = 1
    most_queries: int = 1 << 30
    least_rows: int = 1

    def applies(self, n_queries: int, n_rows: int) -> bool:
        """Say whether a call of this size takes the strategy."""
        return self.least_queries <= n_queries <= self.most_queries and n_rows >= self.least_rows


def _quick_on_metal(shape: AttentionShape, keys: Quantization) -> bool:
    width = shape.k_dim + keys.padding
    is_quick = width > 128 or (width in (64, 128) and keys.bits in (2, 4, 8))
    return is_quick and shape.n_q_heads < 4 * shape.n_kv_heads


class Row(NamedTuple):
    """A row of the policy: a rule of one backend, for the layers that it fits, and its reason."""

    backend: Backend
    rule: Rule
    why: str
    fits: Callable[[AttentionShape, Quantization], bool] = lambda shape, keys: True


POLICY = (
    Row(
        "cpu",
        Rule("packed", most_queries=4),
        "Packed keys are a quarter of the bytes: 4,096 keys of 8 heads take 43 ms instead of 167. "
        "From 8 queries on dequantizing is quicker.",
    ),
    Row(
        "cuda",
        Rule("packed", least_queries=2, most_queries=32),
        "cuDNN builds the fused kernel for each number of keys, which takes 40 to 65 ms.",
    ),
    Row(
        "cuda",
        Rule("packed", most_queries=1, least_rows=3),
        "8 rows of 32,768 keys take 0.93 ms instead of 1.76 on an H200. A single row is quicker "
        "dequantized: 0.38 ms against 0.47.",
    ),
    Row(
        "metal",
        Rule("packed", most_queries=17, least_rows=8),
        "Eight rows fill the GPU, and dequantizing would write all of their keys.",
    ),
    Row(
        "metal",
        Rule("packed", most_queries=17),
        "MLX has a quick kernel for few queries over keys of 2, 4 or 8 bits. With four query heads "
        "or more for a key head, its product with values is nearly serial.",
        _quick_on_metal,
    ),
)


def backend() -> Backend:
    """Return what MLX computes on."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "cuda" if mx.cuda.is_available() else "metal"


def rules_for(
    shape: AttentionShape, keys: Quantization, computed_on: Backend | None = None
) -> tuple[Rule, ...]:
    """Return the rules of the policy for such layers, on this backend unless another is named."""
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
            if rule.applies(n_queries, n_rows):
                return rule.strategy
        limit = self.max_dequantized_bytes if self.can_take_packed else None
        is_tiled = limit is not None and n_rows * n_keys * token_bytes > limit
        return "tiled" if is_tiled else "dequantize"

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON values, from which `read` makes it."""
        return asdict(self)

    @classmethod
    def read(cls, described: Any) -> AttentionPlan:
        """Return the plan of a description. Raises KeyError or TypeError if it describes none."""
        return cls(**{**described, "rules": tuple(Rule(**rule) for rule in described["rules"])})

    def __str__(self) -> str:
        sizes = _PHASES.items()
        return ", ".join(f"{name} {self.choose(n, 1, rows, 1)}" for name, (n, rows) in sizes)


def forced_plan(strategy: Strategy) -> AttentionPlan:
    """Return the plan of a model that takes packed keys, which always takes `strategy`."""
    if strategy == "dequantize":
        return AttentionPlan(can_take_packed=True, max_dequantized_bytes=None)
    return AttentionPlan((Rule(strategy),), can_take_packed=True)
