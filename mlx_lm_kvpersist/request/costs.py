"""Whether reusing is worth it: the time to restore tokens against the time to compute them again.

The rates are learned while serving. Until they are known, restoring counts as worth it: on most
devices it is faster by one or two orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..cache.spec import ModelCacheSpec
from ..match.block import Block
from ..match.tree import FEW, Match
from ..store.block_store import BlockStore
from .outcome import Reason

_WEIGHT = 0.2
"""Of the newest measurement in a running average: a handful of requests settle it."""

MIN_PREFILL_TOKENS = 64
MIN_RESTORE_BYTES = 4 << 20
"""Shorter prefills and smaller restores are mostly overhead, so no rate is learned from them."""

MIN_TOKENS = 16
"""Fewer are computed in less time than it takes to make caches of them, on any device."""

MIN_REUSE_CHARS = 100
"""With a fixed share to reuse, also the least number of characters."""


@dataclass
class Rate:
    """A running average of units per second. Measurements of fewer than `min_units` are ignored."""

    min_units: int = 1
    per_s: float | None = None

    def learn(self, n_units: float, seconds: float) -> None:
        if n_units < self.min_units or seconds <= 0:
            return
        measured = n_units / seconds
        if self.per_s is None:
            self.per_s = measured
        else:
            self.per_s += _WEIGHT * (measured - self.per_s)

    def seconds(self, n_units: float) -> float | None:
        """Return how long so many units take, or None while that is unknown."""
        return None if self.per_s is None else n_units / self.per_s


@dataclass
class ReusePolicy:
    """When stored blocks are used, and how they are checked. Generation thread.

    `prefill` is how many tokens a second this model computes, `from_ram` and `from_disk` are how
    many bytes a second are restored. `min_reuse` is a fixed rule instead of these rates: if a
    prompt diverges from a stored branch, at least this share of the branch's characters must match.
    """

    canary: bool = True
    min_reuse: float | None = None
    prefill: Rate = field(default_factory=lambda: Rate(MIN_PREFILL_TOKENS))
    from_ram: Rate = field(default_factory=lambda: Rate(MIN_RESTORE_BYTES))
    from_disk: Rate = field(default_factory=lambda: Rate(MIN_RESTORE_BYTES))

    def describe(self) -> dict[str, Any]:
        """Return the rates as JSON values."""
        restored = {"hot": self.from_ram.per_s, "warm": self.from_disk.per_s}
        return {"prefill_tokens_per_s": self.prefill.per_s, "restore_bytes_per_s": restored}

    def worth_it(self, n_tokens: int, ram_bytes: int, disk_bytes: int) -> bool:
        """Say whether restoring so many bytes takes no longer than computing `n_tokens` again."""
        prefill_s = self.prefill.seconds(n_tokens)
        ram_s, disk_s = self.from_ram.seconds(ram_bytes), self.from_disk.seconds(disk_bytes)
        if prefill_s is None:
            return True
        return (ram_s or 0.0) + (disk_s or 0.0) <= prefill_s

    def tokens_to_reuse(
        self, match: Match, n_tokens: int, store: BlockStore, spec: ModelCacheSpec
    ) -> tuple[int, Reason | None]:
        """Return how many of the first `n_tokens` of a diverging match to use, and why not all."""
        if self.min_reuse is not None:
            n_stored = _branch_chars(match, store)
            if match.n_chars < max(MIN_REUSE_CHARS, self.min_reuse * n_stored):
                return 0, Reason.BELOW_THRESHOLD
            return n_tokens, None
        if n_tokens < MIN_TOKENS:
            return 0, None  # a template's first words; nothing of the conversation is stored
        blocks = [block for block in match.path if block.start < n_tokens]
        reason = None
        if spec.any_prefix and not self._worth_it(blocks[-1:], n_tokens, store, spec):
            # A whole block must be read for the few of its tokens that are of use.
            n_tokens, reason = blocks.pop().start, Reason.NOT_WORTH_IT
        if blocks and not self._worth_it(blocks, n_tokens, store, spec):
            return 0, Reason.NOT_WORTH_IT
        return n_tokens, reason

    def _worth_it(
        self, blocks: Sequence[Block], n_tokens: int, store: BlockStore, spec: ModelCacheSpec
    ) -> bool:
        ram_bytes = disk_bytes = 0
        for block in blocks:
            n_bytes = block.n_tokens * spec.bytes_per_token
            ram_bytes += n_bytes
            disk_bytes += 0 if block.key in store.pool else n_bytes
        ram_bytes += spec.bytes_per_checkpoint
        disk_bytes += spec.bytes_per_checkpoint if disk_bytes else 0
        return self.worth_it(n_tokens - blocks[0].start, ram_bytes, disk_bytes)


def _branch_chars(match: Match, store: BlockStore) -> int:
    """Return the characters of the branch that a match lies on, followed to one of its ends."""
    path = list(match.path)
    while path:
        # Each begins where its parent ends, so the circles of a damaged index are not followed.
        found = store.children(path[-1].key, limit=FEW)
        children = [block for block in found if block.start == path[-1].stop]
        if not children:
            break
        path.append(max(children, key=lambda block: len(block.text)))
    return sum(len(block.text) for block in path)
