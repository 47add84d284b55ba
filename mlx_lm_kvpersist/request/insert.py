"""Save what was computed: cut a sequence's caches into blocks and hand the new ones to the store.

Runs on the generation thread, so it does as little as it can: hash the ids, copy the new tokens' KV
out of the live cache, evaluate. Files and index are the writer's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..block import Block, Root, block_key, pack_ids
from ..cache.blocks.cut_join import BLOCK_TOKENS, n_cached_tokens, split_blocks
from ..cache.geometry.spec import ModelCacheSpec
from ..host.prompt import REPLY
from ..match.text import TokenText
from ..store.block_store import BlockStore
from ..store.files import Arrays

if TYPE_CHECKING:
    from .model import LoadedModel
    from .state import RunningSequence


def insert(
    sequence: RunningSequence,
    tokens: Sequence[int],
    caches: list[Any],
    cache_type: str,
    store: BlockStore,
    model: LoadedModel,
) -> None:
    """Store the prefix that `caches` hold: `tokens`, or the first of them if they hold fewer."""
    n_cached = n_cached_tokens(model.spec, caches)
    n_tokens = len(tokens) if n_cached is None else min(len(tokens), n_cached)
    if n_tokens == 0:
        return
    if not model.spec.any_prefix and n_cached is not None and n_cached != n_tokens:
        return  # windows and states cannot be cut back to fewer tokens
    n_prompt, ended = sequence.n_prompt, cache_type == REPLY
    sequence.is_computed = ended or n_tokens >= n_prompt - 1
    if ended and n_tokens > n_prompt:
        sequence.request.produced = tokens[:n_prompt], tokens[n_prompt:n_tokens]
    model.saver.save(sequence, tokens[:n_tokens], caches, cache_type, store)


def extended(
    chain: Sequence[Block], ids: Sequence[int], root: Root, text: TokenText | None
) -> list[Block]:
    """Return a chain of blocks below `root`, followed by blocks of the rest of `ids`."""
    chain = list(chain)
    parent, pending = root.key, b""
    if chain:
        parent = chain[-1].key
        if text is not None:
            # Computed, not read from its row: no check would find damage there.
            _, pending = text.feed(chain[-1].ids, chain[-2].pending if chain[1:] else b"")
    for start in range(chain[-1].stop if chain else 0, len(ids), BLOCK_TOKENS):
        block_ids = ids[start : start + BLOCK_TOKENS]
        packed = pack_ids(block_ids)
        its_text, after = "", b""
        if text is not None:
            its_text, after = text.feed(block_ids, pending)
        key = block_key(parent, packed)
        chain.append(Block(key, parent, start, packed, its_text, after))
        parent, pending = key, after
    return chain


def cut_new(
    chain: Sequence[Block], caches: list[Any], store: BlockStore, spec: ModelCacheSpec
) -> list[tuple[Block, Arrays]]:
    """Return those blocks of a chain that are not stored, with their arrays."""
    new = [block for block in chain if block.key not in store]
    arrays = split_blocks(spec, caches, [(block.start, block.stop) for block in new])
    return list(zip(new, arrays, strict=True))
