"""How quickly a model's prompts are computed and restored, and in how much memory.

Everything is learned while serving, from time of working alone: chunks without the steps of replies
between them, reads in their own threads, joins without the pauses between their steps. So the same
prompt is restored, or not, whatever else runs. Until a speed is known, restoring counts as quicker:
on most devices it is, by one or two orders of magnitude.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cache.measuring.prefill_memory import PrefillMemory
from ..host.answers import PrefillLimits
from ..host.scheduling.pace import Pace
from ..store.tier import DISK, RAM

MIN_RESTORE_BYTES = 4 << 20
"""Smaller restores are mostly overhead, so no rate is learned from them."""

_WEIGHT = 0.2
"""Of the newest measurement in a running average: a handful of requests settle it."""


@dataclass
class Rate:
    """A running average of bytes per second."""

    per_s: float | None = None

    def learn(self, n_bytes: int, seconds: float) -> None:
        """Learn that `n_bytes` took `seconds`; few bytes are ignored."""
        if n_bytes < MIN_RESTORE_BYTES or seconds <= 0:
            return
        measured = n_bytes / seconds
        if self.per_s is None:
            self.per_s = measured
        else:
            self.per_s += _WEIGHT * (measured - self.per_s)

    def seconds(self, n_bytes: int) -> float:
        """Return how long so many bytes take; 0 while that is unknown."""
        return 0.0 if self.per_s is None else n_bytes / self.per_s


@dataclass
class Speed:
    """The speeds of one model on this device. Generation thread.

    `pace` learns from the chunks of prompts. `restores` has a rate for each tier: for RAM that of
    joining, which every restored byte needs, for the others that of reading.
    """

    memory: PrefillMemory | None = None
    """None: prompts are computed as stock does."""
    pace: Pace = field(default_factory=Pace)
    restores: defaultdict[str, Rate] = field(
        default_factory=lambda: defaultdict(Rate, {RAM: Rate(), DISK: Rate()})
    )

    def limits(self, max_stall_s: float) -> PrefillLimits | None:
        """Return how prompts are computed beside replies that wait `max_stall_s` at most."""
        if self.memory is None:
            return None
        return PrefillLimits(
            max_stall_s, self.memory.most_tokens, self.memory.limit_bytes, self.pace
        )

    def is_restored(self, position: int, n_tokens: int, n_bytes: Mapping[str, int]) -> bool:
        """Say whether restoring takes no longer than computing tokens after `position` cached ones.

        n_bytes: what each tier gives for it.
        """
        compute_s = self.pace.seconds(position, n_tokens)
        restore_s = sum(self.restores[tier].seconds(n) for tier, n in n_bytes.items())
        return compute_s is None or restore_s <= compute_s

    def describe(self) -> dict[str, Any]:
        """Return the speeds as JSON values; the pace by position."""
        rates = {tier: rate.per_s for tier, rate in dict(self.restores).items()}
        return {"prefill_tokens_per_s": self.pace.describe(), "restore_bytes_per_s": rates}
