"""Models all of whose layers hold every token: what is stored of them, and where they go on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ..block import Block
from ..cache.blocks.cut_join import BLOCK_TOKENS
from ..cache.geometry.spec import ModelCacheSpec
from ..host.prompt import PREFILL, REPLY
from ..match.text import TokenText
from ..store.block_store import BlockStore, Commit
from ..store.records import Leaf
from .insert import cut_new, extended
from .outcome import Reason
from .restore import RestorePoint, restore_point, until_lost

if TYPE_CHECKING:
    from .state import RunningSequence


@dataclass(frozen=True)
class PrefixSaver:
    """Saves blocks, and finds what to restore: such a model goes on from any token."""

    spec: ModelCacheSpec
    text: TokenText | None

    saves_every = BLOCK_TOKENS
    """Tokens of a prompt after which it is saved while the rest is computed."""
    missing = Reason.EVICTED
    """Why fewer tokens are restored than match."""

    def find(
        self, path: Sequence[Block], n_tokens: int, store: BlockStore, lost: Collection[bytes] = ()
    ) -> RestorePoint | None:
        """Return what to restore of the first `n_tokens` of a chain; `lost` keys are missing."""
        path = until_lost(path, lost)
        n_tokens = min(n_tokens, path[-1].stop) if path else 0
        return restore_point(path, n_tokens, self.spec) if n_tokens > 0 else None

    def save(
        self,
        sequence: RunningSequence,
        tokens: Sequence[int],
        caches: list[Any],
        cache_type: str,
        store: BlockStore,
    ) -> None:
        """Save the blocks of a sequence, whose caches hold `tokens`.

        At the end of a reply all blocks are written, and the session's leaf moves. Before that full
        blocks are written and a partial one stays in RAM, except after a chunk of a prompt: nobody
        else can begin with it.
        """
        if cache_type == PREFILL:
            tokens = tokens[: len(tokens) - len(tokens) % BLOCK_TOKENS]
            if len(tokens) <= sequence.n_saved:
                return
        # Only full blocks stay: a partial one is replaced by a longer block.
        before = list(takewhile(lambda block: block.n_tokens == BLOCK_TOKENS, sequence.chain))
        chain = sequence.chain = extended(before, tokens, sequence.root, self.text)
        blocks = cut_new(chain, caches, store, self.spec)
        leaf = None
        if cache_type == REPLY:
            replaced = _replaced_tails(chain, sequence.n_reused, store)
            keys = tuple(block.key for block in chain)
            leaf = Leaf(sequence.request.session, keys[-1], len(tokens), keys, tuple(replaced))
        elif chain[-1].n_tokens < BLOCK_TOKENS:
            *chain, tail = chain
            store.put(one for one in blocks if one[0] is tail)
            blocks = [one for one in blocks if one[0] is not tail]
        if chain:
            store.commit(Commit(sequence.root, tuple(chain), leaf), blocks)


def _replaced_tails(
    chain: list[Block], n_reused: int, store: BlockStore
) -> list[tuple[bytes, bytes]]:
    """Return the keys of partial blocks that a block of the chain contains, each with that block's.

    They are the ends of this conversation's earlier turns, so they are siblings of blocks after the
    `n_reused` tokens. A partial block that is in RAM only is dropped.
    """
    replaced = []
    for block in chain:
        if block.stop <= n_reused:
            continue
        for sibling in store.children(block.parent, block.packed_ids):
            is_beginning = sibling.key != block.key and sibling.is_genuine
            if is_beginning and block.packed_ids.startswith(sibling.packed_ids):
                store.pool.drop_unpinned(sibling.key, written=False)
                replaced.append((sibling.key, block.key))
    return replaced
