"""Keep what was computed: split a sequence's caches into blocks and hand the new ones to the store.

Runs on the generation thread, so it does as little as it can: hash the ids, copy the new tokens' KV
out of the live cache, evaluate. Files and index are the writer's work.
"""

from __future__ import annotations

from typing import Any

from ..kv.blocks import BLOCK_TOKENS, split_blocks
from ..match.keys import Root, block_key, pack_ids
from ..match.tree import Node
from ..tiers.index import Leaf
from ..tiers.store import BlockStore, Turn
from .model import LoadedModel
from .replies import reply_to_remember
from .request import RequestState


def keep(
    state: RequestState,
    tokens: list[int],
    caches: list[Any],
    store: BlockStore,
    model: LoadedModel,
) -> None:
    """Store the prefix that `caches` hold: `tokens`, or the first of them if they hold fewer.

    At the end of a turn everything is written and the session moves. Before it, at the end of the
    system prompt or of the user's message, full blocks are written and the rest stays in RAM: if
    the client goes away, what it waited for so far is not lost.
    """
    n_tokens = min(len(tokens), *(cache.size() for cache in caches))
    if n_tokens == 0 or state.root is None:
        return
    ended = n_tokens > state.n_prompt
    chain = _chain(state.root, tokens[:n_tokens], store, model)
    new = [node for node in chain if node.key not in store]
    arrays = split_blocks(model.spec, caches, [(node.start, node.stop) for node in new])
    blocks = list(zip(new, arrays, strict=True))
    if not ended and chain[-1].n_tokens < BLOCK_TOKENS:
        tail = chain.pop()
        store.keep(block for block in blocks if block[0] is tail)
        blocks = [block for block in blocks if block[0] is not tail]
    replaced = _replaced_tails(chain, state, store)
    if ended:
        state.said = list(tokens[state.n_prompt : n_tokens])
    leaf = None
    if ended:
        keys = tuple(node.key for node in chain)
        leaf = Leaf(state.session, keys[-1], n_tokens, keys, tuple(replaced))
    if chain:
        store.keep_turn(Turn(state.root, tuple(chain), leaf), blocks)


def _chain(root: Root, ids: list[int], store: BlockStore, model: LoadedModel) -> list[Node]:
    """Cut ids into the blocks of a chain below `root`."""
    chain: list[Node] = []
    parent, pending = root.key, b""
    for start in range(0, len(ids), BLOCK_TOKENS):
        block_ids = ids[start : start + BLOCK_TOKENS]
        packed = pack_ids(block_ids)
        text = ""
        if model.text is not None:
            text, after = model.text.feed(block_ids, pending)
        else:
            after = b""
        key = block_key(parent, packed)
        chain.append(Node(key, parent, start, packed, text, after))
        parent, pending = key, after
    return chain


def _replaced_tails(
    chain: list[Node], state: RequestState, store: BlockStore
) -> list[tuple[bytes, bytes]]:
    """Return partial blocks whose tokens all stand in a block of the chain, with that block.

    Only blocks behind what was reused can have such siblings: the ends of this conversation's
    earlier turns. One that is in RAM alone is dropped.
    """
    n_reused = state.outcome.n_reused if state.outcome else 0
    replaced = []
    for node in chain:
        if node.stop <= n_reused:
            continue
        for sibling in store.tails(node.parent, BLOCK_TOKENS):
            if sibling.key != node.key and node.packed_ids.startswith(sibling.packed_ids):
                store.drop_unwritten(sibling.key)
                replaced.append((sibling.key, node.key))
    return replaced


def remember_reply(state: RequestState, store: BlockStore, model: LoadedModel) -> None:
    """Remember a reply once both are known, what was said and what was sent. Any thread."""
    if state.said is None or state.sent is None or state.conversation is None:
        return
    assert state.root is not None
    reply = reply_to_remember(state.conversation, state.said, state.sent, model)
    if reply is not None:
        store.keep_turn(Turn(state.root, (), None, (reply,)), [])
