"""How two runs of a prompt are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TOLERANCE = 1e-3
"""The largest allowed difference of log-probabilities, as a share of their range."""

_Logprobs = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Comparison:
    """`difference` is the largest of all steps. If the run and the reference prefer different
    tokens, this counts as a near tie if noise can explain it, otherwise as another token."""

    difference: float
    n_other_tokens: int = 0
    n_near_ties: int = 0

    @property
    def is_equal(self) -> bool:
        return self.difference <= TOLERANCE and self.n_other_tokens == 0

    def __str__(self) -> str:
        other_tokens = f", {self.n_other_tokens} other tokens" if self.n_other_tokens else ""
        return f"logits {self.difference:.1e} apart{other_tokens}"


def compare(reference: _Logprobs, logprobs: _Logprobs) -> Comparison:
    """Compare log-probabilities [n, vocab] step by step."""
    if reference.shape != logprobs.shape:
        return Comparison(float("inf"), abs(len(reference) - len(logprobs)))
    worst, n_other, n_ties = 0.0, 0, 0
    for expected, row in zip(reference, logprobs, strict=True):
        # Some architectures mask tokens with -inf.
        valid = np.isfinite(expected)
        if not np.array_equal(valid, np.isfinite(row)):
            return Comparison(float("inf"), n_other, n_ties)
        scale = float(np.ptp(expected[valid])) or 1.0
        worst = max(worst, float(np.abs(expected[valid] - row[valid]).max()) / scale)
        chosen = int(np.argmax(row))
        lead = float(expected.max() - expected[chosen])
        n_other += lead > 2 * TOLERANCE * scale
        n_ties += 0 < lead <= 2 * TOLERANCE * scale
    return Comparison(worst, n_other, n_ties)


def worst(comparisons: list[Comparison]) -> Comparison:
    """Return the largest difference and the summed counts."""
    return Comparison(
        max((c.difference for c in comparisons), default=0.0),
        sum(c.n_other_tokens for c in comparisons),
        sum(c.n_near_ties for c in comparisons),
    )
