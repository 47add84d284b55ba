"""What a block is worth keeping: Greedy-Dual-Size-Frequency (GDSF) on a tree of blocks.

    rank = clock + worth * expected hits        worth = seconds to have it again / bytes

A tier evicts the leaf or checkpoint of the lowest rank, of equal ones the least recently used, and
sets its clock to that rank: what is not used ages by what goes meanwhile. Each rank stays as it is
until the block is used again, so an ordered index or a sorted list finds the lowest.

GDSF is Cherkasova's (Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching
Policy, HP Labs, HPL-98-69, 1998). Only leaves go, as in RAGCache's prefix-aware GDSF (Jin et al.,
arXiv 2404.12457, 2024). Expected hits are not GDSF's count of all uses: with that, conversations
that are over stay for as long as they were long (benchmarks/eviction.py). They are two things:

- whether the conversation goes on: until a block is used again, the share of those blocks after the
  same parent that were. So what follows a prompt that is asked once at a time goes first;
- how many conversations branched off at the block or behind it. The turns of one count as nothing.

On disk the worth is one for all blocks of a model, from its measured pace. Later tokens take longer
to compute, but with a worth by position long conversations that are over outlive others: the
smallest stores found up to 1.3% fewer tokens and saved 1.2% less time, larger ones at most 0.2%
more (`benchmarks/eviction.py --disk`). What leaves RAM is read from disk again, at a price by the
byte: there all are worth the same.
"""

from __future__ import annotations

from dataclasses import dataclass

VALUE, LRU = "value", "lru"
"""The orders of eviction: as above, or the least recently used first."""
MOST_BRANCHES = 3
"""Each branch is a hit to be expected, up to so many."""
_REMEMBERED = 32
_TOKEN_S = 1e-3
"""Of a model whose pace is not known."""
_LEAST_S = 1e-12


def going_on(share: float) -> float:
    """Return expected hits by the share of blocks like this one that were used again.

    One in three counts as all, and few as almost none: a crowd of these must not age the others.
    """
    return min(1.0, 3 * share) ** 2


def mib_s(token_s: float | None, n_tokens: int, n_bytes: int) -> float:
    """Return the seconds to compute a MiB of blocks, of these tokens and bytes."""
    token_s = _TOKEN_S if token_s is None else token_s
    return max(_LEAST_S, token_s * n_tokens / max(n_bytes, 1) * (1 << 20))


@dataclass
class Habit:
    """How a block in RAM has been used.

    `n_next` blocks have come after it, and `n_next_used` of these were used again. `share` is the
    chance that it is used again itself.
    """

    share: float = 1.0
    n_branches: int = 0
    n_next: int = 0
    n_next_used: int = 0
    is_used: bool = False

    def of_next(self) -> Habit:
        """Return the habit of a block that comes after this one."""
        if self.n_next >= _REMEMBERED:  # habits change
            self.n_next, self.n_next_used = self.n_next // 2, self.n_next_used // 2
        share = (self.n_next_used + self.share) / (self.n_next + 1)
        self.n_next += 1
        return Habit(share)

    def use(self, parent: Habit | None, *, is_branch: bool) -> None:
        """Count a use, by a conversation that goes on here or branches off."""
        if parent is not None and not self.is_used:
            parent.n_next_used += 1
        self.is_used, self.share = True, 1.0
        self.n_branches += is_branch

    @property
    def expected_hits(self) -> float:
        return going_on(self.share) + min(MOST_BRANCHES, self.n_branches)
