"""Which way of attending each call takes, decided from its size alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .attention import MAX_PLAIN_BYTES, STRATEGIES, Strategy

__all__ = ["PHASES", "AttentionPlan", "forced_plan"]

PHASES = ("prefill", "decode", "batch_decode")
_FEW_ROWS = 2


@dataclass(frozen=True)
class AttentionPlan:
    """How the layers of one group attend: several queries, one query of one sequence, of many.

    Where the model takes packed keys, nothing above `max_plain_bytes` is dequantized at once:
    then `dequantize` becomes `tiled`, unless that limit is None. Tiles have `tile_bytes` of plain
    keys and values. `measured_ms` has, per phase and strategy, how long one layer took.
    """

    prefill: Strategy = "dequantize"
    decode: Strategy = "dequantize"
    batch_decode: Strategy = "dequantize"
    can_take_packed: bool = False
    max_plain_bytes: int | None = MAX_PLAIN_BYTES
    tile_bytes: int = MAX_PLAIN_BYTES
    measured_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for phase in PHASES:
            if (strategy := getattr(self, phase)) not in STRATEGIES:
                raise ValueError(f"{phase} is {strategy!r}; expected one of {STRATEGIES}")
            if strategy != "dequantize" and not self.can_take_packed:
                raise ValueError(f"{phase} is {strategy!r}, but the model takes plain keys only")

    def __deepcopy__(self, memo: dict[int, Any]) -> AttentionPlan:
        return self

    def choose(self, n_queries: int, n_keys: int, n_rows: int, token_bytes: int) -> Strategy:
        """Return the strategy for `n_queries` against `n_keys` of each of `n_rows` sequences.

        `token_bytes`: what the key and value of one token take plain, all heads of one layer.
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
            and self.max_plain_bytes is not None
            and n_rows * n_keys * token_bytes > self.max_plain_bytes
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
            "max_plain_bytes": self.max_plain_bytes,
            "tile_bytes": self.tile_bytes,
        }


def forced_plan(strategy: Strategy, can_take_packed: bool) -> AttentionPlan:
    """Return the plan that always takes `strategy`, where the model's attention allows it."""
    if strategy == "dequantize" or not can_take_packed:
        return AttentionPlan(can_take_packed=can_take_packed, max_plain_bytes=None)
    return AttentionPlan(strategy, strategy, strategy, can_take_packed)
