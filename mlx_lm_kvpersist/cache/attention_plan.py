"""Choose the attention strategy of each call from its size alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .attention import MAX_DEQUANTIZED_BYTES, STRATEGIES, Strategy

PHASES = ("prefill", "decode", "batch_decode")
_FEW_ROWS = 2


@dataclass(frozen=True)
class AttentionPlan:
    """The strategies of one group: for prefill, for decoding one or two sequences, and for more.

    If the model takes packed keys, at most `max_dequantized_bytes` are dequantized together: beyond
    that `dequantize` becomes `tiled`, unless the limit is None. A tile has `tile_bytes` of
    dequantized keys and values. `measured_ms` has one layer's time per phase and strategy.
    """

    prefill: Strategy = "dequantize"
    decode: Strategy = "dequantize"
    batch_decode: Strategy = "dequantize"
    can_take_packed: bool = False
    max_dequantized_bytes: int | None = MAX_DEQUANTIZED_BYTES
    tile_bytes: int = MAX_DEQUANTIZED_BYTES
    measured_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for phase in PHASES:
            if (strategy := getattr(self, phase)) not in STRATEGIES:
                raise ValueError(f"{phase} is {strategy!r}; expected one of {STRATEGIES}")
            if strategy != "dequantize" and not self.can_take_packed:
                raise ValueError(f"{phase} is {strategy!r}, but the model cannot take packed keys")

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionPlan:
        return self

    def choose(self, n_queries: int, n_keys: int, n_rows: int, token_bytes: int) -> Strategy:
        """Return the strategy for `n_queries` against `n_keys` of each of `n_rows` sequences.

        `token_bytes` are those of one token's key and value, dequantized, all heads of one layer.
        """
        if n_queries > 1:
            strategy = self.prefill
        elif n_rows <= _FEW_ROWS:
            strategy = self.decode
        else:
            strategy = self.batch_decode
        if (
            strategy == "dequantize"
            and self.can_take_packed
            and self.max_dequantized_bytes is not None
            and n_rows * n_keys * token_bytes > self.max_dequantized_bytes
        ):
            return "tiled"
        return strategy

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            **{
                phase: {
                    "strategy": getattr(self, phase),
                    "ms": dict(self.measured_ms.get(phase, {})),
                }
                for phase in PHASES
            },
            "can_take_packed": self.can_take_packed,
            "max_dequantized_bytes": self.max_dequantized_bytes,
            "tile_bytes": self.tile_bytes,
        }


def forced_plan(strategy: Strategy, can_take_packed: bool) -> AttentionPlan:
    """Return the plan that always takes `strategy` if the model can take packed keys."""
    if strategy == "dequantize" or not can_take_packed:
        return AttentionPlan(can_take_packed=can_take_packed, max_dequantized_bytes=None)
    return AttentionPlan(strategy, strategy, strategy, can_take_packed)
