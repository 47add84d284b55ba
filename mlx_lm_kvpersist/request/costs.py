"""Which stored blocks are used: the time to restore them against the time to compute them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..block import Block
from ..match.tree import Match
from ..store.block_store import BlockStore
from ..store.tier import RAM
from .model import LoadedModel
from .outcome import Reason

MIN_TOKENS = 16
"""Fewer are computed in less time than it takes to make caches of them, on any device."""


def tokens_to_reuse(
    match: Match, n_tokens: int, store: BlockStore, model: LoadedModel
) -> tuple[int, Reason | None]:
    """Return how many of the first `n_tokens` of a diverging match to use, and why not all."""
    if n_tokens < MIN_TOKENS:
        return 0, None  # a template's first words; nothing of the conversation is stored
    blocks = [block for block in match.path if block.start < n_tokens]
    reason = None
    if model.spec.any_prefix and not _is_restored(blocks[-1:], n_tokens, store, model):
        # A whole block must be read for the few of its tokens that are of use.
        n_tokens, reason = blocks.pop().start, Reason.NOT_WORTH_IT
    if blocks and not _is_restored(blocks, n_tokens, store, model):
        return 0, Reason.NOT_WORTH_IT
    return n_tokens, reason


def _is_restored(
    blocks: Sequence[Block], n_tokens: int, store: BlockStore, model: LoadedModel
) -> bool:
    """Say whether restoring blocks is quicker than computing their tokens up to `n_tokens`."""
    spec, start = model.spec, blocks[0].start
    n_bytes: Counter[str] = Counter()
    for block in blocks:
        size = block.n_tokens * spec.bytes_per_token
        n_bytes[RAM] += size  # what is read is joined there, too
        if (tier := store.tier_of(block.key)) != RAM:
            n_bytes[tier] += size
    for tier in n_bytes:
        n_bytes[tier] += spec.bytes_per_checkpoint
    return model.speed.is_restored(start, n_tokens - start, n_bytes)
