"""Save what was computed: cut a sequence's caches into blocks and hand the new ones to the store.

Runs on the generation thread, so it does as little as it can: hash the ids, copy the new tokens' KV
out of the live cache, evaluate. Files and index are the writer's work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from collections.abc import Sequence as ListLike
from itertools import takewhile
from typing import Any

from ..cache.blocks import BLOCK_TOKENS, copy_state, n_cached_tokens, split_blocks, split_windows
from ..cache.prefill_memory import PASSING_TOKENS
from ..cache.slots import cached_positions, slots_of
from ..cache.spec import ModelCacheSpec
from ..host.prompt import PREFILL
from ..match.block import Block, Root, block_key, checkpoint, pack_ids
from ..match.tree import FEW
from ..store.block_store import BlockStore, Turn
from ..store.files import Arrays
from ..store.index import Leaf
from .lookup import Sequence
from .model import LoadedModel
from .restore import STATE, Stored, needed_at, stored_state, stored_window, window_kind

REPLY = "assistant"
"""The server's cache type at the end of a reply; the ends of earlier segments have others."""

SYSTEM_SESSION = "system prompt"
"""The name of the sessions that keep system prompts."""

MAX_CHECKPOINTS = 6
"""Newest checkpoints that a conversation keeps, beside its first: two for each of three turns."""

MAX_BRANCHES = 4
"""Older checkpoints that stay because conversations diverge there."""

MIN_TOKENS_BETWEEN = 16
"""Checkpoints nearer to each other are not worth two copies of what they need."""

_MAX_REPLY_BLOCKS = 64
_MAX_ASKED = 100
"""System prompts that are watched for a second conversation; agents have a handful."""


def insert(
    sequence: Sequence,
    tokens: list[int],
    caches: list[Any],
    cache_type: str,
    store: BlockStore,
    model: LoadedModel,
) -> None:
    """Store the prefix that `caches` hold: `tokens`, or the first of them if they hold fewer.

    At the end of a reply all blocks are written, and the session's leaf moves. At the end of the
    system prompt or of the user's message, full blocks are written and a partial one stays in RAM:
    if the client disconnects, the full blocks are kept. If the model can go on only from
    checkpoints, each of these places becomes one: the block ends there, and all of it is written.
    After a chunk of a prompt only full blocks are stored, or a checkpoint where one is due.
    """
    spec = model.spec
    if cache_type == PREFILL and not _part_is_due(sequence, len(tokens), spec):
        return
    n_cached = n_cached_tokens(spec, caches)
    n_tokens = len(tokens) if n_cached is None else min(len(tokens), n_cached)
    if n_tokens == 0:
        return
    if not spec.any_prefix and n_cached is not None and n_cached != n_tokens:
        return  # windows and states cannot be cut back to fewer tokens
    ended = cache_type == REPLY
    sequence.is_computed = ended or n_tokens >= sequence.n_prompt - 1
    if ended and n_tokens > sequence.n_prompt:
        prompt, reply = tokens[: sequence.n_prompt], tokens[sequence.n_prompt : n_tokens]
        sequence.request.produced = (prompt, reply)
    before = sequence.chain
    if spec.any_prefix:
        # Only full blocks stay: a partial one is replaced by a longer block.
        before = list(takewhile(lambda block: block.n_tokens == BLOCK_TOKENS, before))
    if not spec.any_prefix and before and not ended:
        if n_tokens - before[-1].stop < MIN_TOKENS_BETWEEN:
            if cache_type != PREFILL:
                sequence.passing.discard(before[-1].key)  # it stands for this one
            return
    if cache_type == PREFILL and spec.any_prefix:
        n_tokens -= n_tokens % BLOCK_TOKENS
    chain = sequence.chain = _chain(sequence.root, tokens[:n_tokens], before, model)
    if cache_type == PREFILL and not spec.any_prefix:
        sequence.passing.add(chain[-1].key)
    new = [block for block in chain if block.key not in store]
    arrays = split_blocks(spec, caches, [(block.start, block.stop) for block in new])
    blocks: list[tuple[Block, Arrays]] = list(zip(new, arrays, strict=True))
    if not spec.any_prefix:
        _insert_checkpoint(sequence, chain, blocks, caches, store, model, ended=ended)
        return
    if not ended and chain[-1].n_tokens < BLOCK_TOKENS:
        *chain, tail = chain
        store.put(one for one in blocks if one[0] is tail)
        blocks = [one for one in blocks if one[0] is not tail]
    leaf = None
    if ended:
        replaced = _replaced_tails(chain, sequence.n_reused, store)
        keys = tuple(block.key for block in chain)
        leaf = Leaf(sequence.request.session, keys[-1], n_tokens, keys, tuple(replaced))
    if chain:
        store.save_turn(Turn(sequence.root, tuple(chain), leaf), blocks)


def _part_is_due(sequence: Sequence, n_tokens: int, spec: ModelCacheSpec) -> bool:
    """Say whether so much of a prompt is worth storing while the rest is computed."""
    if spec.any_prefix:
        return n_tokens // BLOCK_TOKENS > sequence.n_saved // BLOCK_TOKENS
    return n_tokens % PASSING_TOKENS == 0


def pin_system(sequence: Sequence, store: BlockStore, asked: dict[bytes, int]) -> None:
    """Pin a stored sequence's system prompt, if another conversation begins with it, too.

    It becomes a session of its own. A user who unpins it is heeded: it is pinned once.
    asked: by the last block of each system prompt, a hash of the first message after it.
    """
    begin = list(takewhile(lambda block: block.stop <= sequence.n_system, sequence.chain))
    if not begin:
        return
    said = (message for message in sequence.request.messages if message.get("role") == "user")
    first = hash(str(next(said, None)))
    if asked.setdefault(begin[-1].key, first) == first:
        if len(asked) > _MAX_ASKED:
            del asked[next(iter(asked))]
        return
    if any(session.name == SYSTEM_SESSION for session in store.sessions_at(begin[-1].key)):
        return
    keys = tuple(block.key for block in begin)
    leaf = Leaf(SYSTEM_SESSION, keys[-1], begin[-1].stop, keys, pinned=True)
    store.save_turn(Turn(sequence.root, tuple(begin), leaf), [])


def _insert_checkpoint(
    sequence: Sequence,
    chain: list[Block],
    blocks: list[tuple[Block, Arrays]],
    caches: list[Any],
    store: BlockStore,
    model: LoadedModel,
    *,
    ended: bool,
) -> None:
    """Make the end of the chain a checkpoint; at the end of a reply, give up old ones."""
    stored = store.checkpoints([block.key for block in chain])
    checkpoints = _new_checkpoints(chain, caches, stored, model.spec)
    for new, _ in checkpoints:
        stored.setdefault(new.parent, []).append(new)
    leaf, superseded = None, []
    if ended:
        keys = tuple(block.key for block in chain)
        leaf = Leaf(sequence.request.session, keys[-1], chain[-1].stop, keys)
        superseded = superseded_checkpoints(
            chain, sequence.n_reused, stored, store, model.spec, sequence.passing
        )
    # All that the checkpoint needs, windows that were stored before included: while the turn waits
    # to be written, none of it is evicted.
    at_end = needed_at(chain, chain[-1].stop, stored, model.spec) or ()
    needed = {
        one.key: one for one in [*(one.block for one in at_end), *(n for n, _ in checkpoints)]
    }
    turn = Turn(sequence.root, tuple(chain), leaf, (), tuple(needed.values()), tuple(superseded))
    store.save_turn(turn, [*blocks, *checkpoints])


def _new_checkpoints(
    chain: ListLike[Block], caches: list[Any], stored: Stored, spec: ModelCacheSpec
) -> list[tuple[Block, Arrays]]:
    """Return the windows and the state at the end of the chain that are not stored yet."""
    n_tokens = chain[-1].stop
    new: list[tuple[Block, Arrays]] = []
    slots = slots_of(caches)
    for window, groups in spec.sliding.items():
        missing = []
        first_cached = max(
            cached_positions(slots[slot])[0] for group in groups for slot in group.slots
        )
        for block in chain:
            start = max(block.start, n_tokens - window)
            if start >= block.stop or start < first_cached:
                continue
            if stored_window(stored.get(block.key, ()), window, block.stop - start) is None:
                missing.append((block, start))
        ranges = [(start, block.stop) for block, start in missing]
        arrays = split_windows(spec, window, caches, ranges)
        for (block, start), its_arrays in zip(missing, arrays, strict=True):
            new.append((checkpoint(block.key, window_kind(window), block.stop - start), its_arrays))
    if stored_state(stored, chain[-1]) is None:
        new.append((checkpoint(chain[-1].key, STATE, 0), copy_state(spec, caches)))
    return new


def _chain(root: Root, ids: list[int], before: ListLike[Block], model: LoadedModel) -> list[Block]:
    """Cut ids into the blocks of a chain below `root`, of which `before` are known."""
    chain = list(before)
    parent, pending = root.key, b""
    if chain:
        parent = chain[-1].key
        if model.text is not None:
            # Computed, not read from its row: no check would find damage there.
            _, pending = model.text.feed(chain[-1].ids, chain[-2].pending if chain[1:] else b"")
    for start in range(chain[-1].stop if chain else 0, len(ids), BLOCK_TOKENS):
        block_ids = ids[start : start + BLOCK_TOKENS]
        packed = pack_ids(block_ids)
        text, after = "", b""
        if model.text is not None:
            text, after = model.text.feed(block_ids, pending)
        key = block_key(parent, packed)
        chain.append(Block(key, parent, start, packed, text, after))
        parent, pending = key, after
    return chain


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


def superseded_checkpoints(
    chain: ListLike[Block],
    n_reused: int,
    stored: Stored,
    store: BlockStore,
    spec: ModelCacheSpec,
    passing: Collection[bytes] = (),
) -> list[Block]:
    """Return the windows and states, of those `stored`, that can be deleted.

    These checkpoints of a conversation stay, with all that they need: the newest ones, the first
    (the end of the system prompt, which others share), the newest of those where conversations
    diverge, and those where another session ends. The chain went on from `n_reused` tokens. If an
    earlier reply began there, and was left out or repeated in other words, it loses its checkpoint.
    So do the blocks in `passing`, which have one only since their prompt was computed, but for
    those where others went on meanwhile.
    """
    kept = (
        block
        for block in chain
        if block.key not in passing
        or len(store.children(block.key, limit=2)) > 1
        or store.sessions_at(block.key)
    )
    made = {block.key: state for block in kept if (state := stored_state(stored, block))}
    keys = list(made)
    stay = {*keys[:1], *keys[-MAX_CHECKPOINTS:]}
    branches = [key for key in keys if key not in stay and len(store.children(key, limit=2)) > 1]
    stay.update(branches[-MAX_BRANCHES:])
    stay.update(key for key in keys if key not in stay and store.sessions_at(key))
    needed = {made[key].key for key in stay}
    for block in chain:
        if block.key in stay:
            at_block = needed_at(chain, block.stop, stored, spec)
            needed.update(one.block.key for one in at_block or ())
    held = [one for found in stored.values() for one in found]
    gone = {one.key: one for one in held if one.key not in needed}
    gone.update((one.key, one) for one in _replies_left(chain, n_reused, store))
    return list(gone.values())


def _replies_left(chain: ListLike[Block], n_reused: int, store: BlockStore) -> list[Block]:
    """Return the checkpoints of replies that branch off where this chain went on, without children.

    A reply has one checkpoint, at its end. A turn of another conversation has one before it, too.
    """
    # `n_reused` may be some tokens after the end of the last block that both have.
    fork = bisect_right([block.stop for block in chain], n_reused) - 1
    if fork < 0 or fork + 1 >= len(chain):
        return []
    children = store.children(chain[fork].key, limit=FEW + 1)
    if len(children) > FEW:
        return []  # so many children are conversations that begin alike
    left: list[Block] = []
    for child in children:
        branch: list[Block] = []
        following = [child] if child.key != chain[fork + 1].key else []
        while len(following) == 1 and len(branch) < _MAX_REPLY_BLOCKS:
            branch += following
            following = store.children(branch[-1].key, limit=2)
        stored = store.checkpoints([block.key for block in branch])
        found = [one for at_block in stored.values() for one in at_block]
        is_reply = sum(one.kind == STATE for one in found) == 1
        if branch and not following and is_reply:
            left += found
    return left
