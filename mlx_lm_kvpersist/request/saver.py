"""Save the tokens of a request as blocks, and find what to restore. Generation thread.

The work is kept small: hash the ids, copy the new tokens' KV, evaluate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile, takewhile
from operator import attrgetter
from typing import Any, Protocol

from ..block import Block, Checkpoint, Record, Root, block_key, pack_ids
from ..cache.blocks import BLOCK_TOKENS, copy_newest, split
from ..cache.geometry.spec import ArrayForm, ModelCacheSpec, forms_bytes
from ..host.hooks import PREFILL, REPLY
from ..match.text import TokenText
from ..match.tree import BlockSource, beginnings
from ..store.block_store import BlockStore, Commit
from ..store.files import Arrays
from ..store.records import Leaf
from .outcome import Reason


@dataclass(eq=False)
class RunningSequence:
    """The tokens of a request that has entered. Generation thread.

    The first `n_reused` of its `n_prompt` prompt tokens, the `packed_ids`, were restored. `chain`
    holds the stored blocks of its beginning. Its leaf has `session`, `note` and `messages`.
    """

    root: Root
    n_prompt: int
    n_reused: int = 0
    chain: list[Block] = field(default_factory=list, repr=False)
    n_system: int = 0
    """The number of tokens of the prompt's system prompt."""
    packed_ids: bytes = field(default=b"", repr=False)
    session: str | None = None
    note: Mapping[str, str] = field(default_factory=dict, repr=False)
    messages: Sequence[dict[str, Any]] = field(default=(), repr=False)
    draft: RunningSequence | None = None
    """The same tokens for the caches of the draft model."""
    is_draft: bool = False

    @property
    def n_saved(self) -> int:
        """The number of first tokens that are in stored blocks."""
        return self.chain[-1].stop if self.chain else 0

    def leaf(self, chain: Sequence[Block], replaced: Iterable[tuple[bytes, bytes]] = ()) -> Leaf:
        """Return the leaf of its conversation, whose blocks are `chain`."""
        end, with_text = chain[-1], self.root.with_text
        note = {name: text for name, text in self.note.items() if name != "words" or with_text}
        moved, is_session = tuple(replaced), not self.is_draft
        return Leaf(self.session, end.key, end.stop, moved, note, self.messages, is_session)


@dataclass(frozen=True)
class Needed:
    """Tokens [start, stop) of a block or window, counted from its first; a state has none.

    `forms` are the forms of its arrays; `window` is the number of tokens that a window's layers
    see.
    """

    record: Record
    start: int
    stop: int
    forms: tuple[ArrayForm, ...]
    window: int | None = None

    @property
    def n_bytes(self) -> int:
        return forms_bytes(self.forms)


class CheckpointSource(BlockSource, Protocol):
    """A source of checkpoints: a store, or a conversation in the shared tier."""

    def checkpoints(self, blocks: Sequence[bytes]) -> Mapping[bytes, Sequence[Checkpoint]]:
        """Return the checkpoints of these blocks, by block."""


@dataclass(frozen=True)
class RestorePoint:
    """A position to resume from, and all records to read for it, in the order of reading."""

    n_tokens: int
    needed: list[Needed]


@dataclass(frozen=True)
class Saver:
    """Saves and finds blocks, for models whose layers all hold every token."""

    spec: ModelCacheSpec
    text: TokenText | None

    saves_every = BLOCK_TOKENS
    """The number of tokens after which a prompt is saved while the rest is computed."""
    missing = Reason.EVICTED
    """Why fewer tokens are restored than match."""

    @property
    def granule(self) -> int:
        """Up to this many tokens may be computed again although nothing is missing."""
        return BLOCK_TOKENS if self.spec.quantized else 1

    def find(
        self,
        path: Sequence[Block],
        n_tokens: int,
        store: CheckpointSource,
        lost: Collection[bytes] = (),
    ) -> RestorePoint | None:
        """Return what to restore of the first `n_tokens` of a chain, without keys in `lost`.

        If the last used tokens are in a quantized block, an unfinished block that has them in full
        precision takes its place. If there is no such block, they are computed again. O(blocks).
        """
        needed, end = [], 0
        for block in path:
            usable = [block]
            if block.stop > n_tokens > block.start and self._is_packed(block):
                usable = beginnings(block, store)
            usable = [b for b in usable if b.start < n_tokens and b.key not in lost]
            if not usable:
                break
            longest = max(usable, key=attrgetter("stop"))
            end = min(longest.stop, n_tokens)
            needed.append(self._of_block(longest, end))
        return RestorePoint(end, needed) if needed else None

    def _of_block(self, block: Block, end: int) -> Needed:
        if (forms := self._forms.get(block.n_tokens)) is None:
            forms = self._forms[block.n_tokens] = tuple(self.spec.block_arrays(block.n_tokens))
        return Needed(block, 0, min(block.stop, end) - block.start, forms)

    @cached_property
    def _forms(self) -> dict[int, tuple[ArrayForm, ...]]:
        return {}

    def save(
        self,
        sequence: RunningSequence,
        tokens: Sequence[int],
        caches: list[Any],
        cache_type: str,
        store: BlockStore,
    ) -> None:
        """Save the blocks of a sequence, whose caches hold `tokens`. Generation thread.

        At the end of a reply all new blocks are written, and the session's leaf moves. Before that,
        full blocks are written, and an unfinished block of a whole prompt stays in RAM.
        """
        before = sequence.chain
        if before and not _is_full(before[-1]):
            before = before[:-1]  # a longer block will replace it
        new = self._following(before, tokens, sequence)
        full = list(takewhile(_is_full, new))
        unfinished: list[tuple[Block, Arrays]] = []
        if cache_type == PREFILL and not full:
            return
        if cache_type == PREFILL:
            new = full
        elif new and not _is_full(new[-1]) and new[-1].key not in store.pool:
            if newest := copy_newest(self.spec.full, caches, new[-1].stop):
                unfinished = [(new[-1], newest)]
            else:
                new = full
        chain = sequence.chain = [*before, *new]
        blocks = self._cut_new(full, caches, store)
        if chain and cache_type == REPLY:
            leaf = sequence.leaf(chain, self._replaced_tails(chain, sequence.n_reused, store))
            commit = Commit(sequence.root, tuple(new or chain[-1:]), leaf)
            store.commit(commit, [*blocks, *unfinished], math.inf, chain)
            return
        store.put(unfinished)
        if full:
            store.commit(Commit(sequence.root, tuple(full)), blocks, math.inf, chain)

    def _replaced_tails(
        self, chain: Sequence[Block], n_reused: int, store: BlockStore
    ) -> list[tuple[bytes, bytes]]:
        """Return the partial blocks that the chain contains, each with the longer block's key.

        If a reply fills a block to a quantized block, the prompt's unquantized part stays in RAM
        for the same prompt.
        """
        replaced = []
        for block in dropwhile(lambda block: block.stop <= n_reused, chain):
            for beginning in beginnings(block, store):
                if store.pool.is_spare(beginning.key):
                    if self._is_packed(block):
                        continue
                    store.pool.remove(beginning.key)
                replaced.append((beginning.key, block.key))
        return replaced

    def _is_packed(self, block: Block) -> bool:
        return _is_full(block) and bool(self.spec.quantized)

    def _following(
        self, chain: Sequence[Block], ids: Sequence[int], sequence: RunningSequence
    ) -> list[Block]:
        new, text = list[Block](), self.text
        parent, pending = chain[-1].key if chain else sequence.root.key, b""
        if chain and text is not None:
            # Computed, not read from the row: no check would find damage in the row.
            _, pending = text.feed(chain[-1].ids, chain[-2].pending if chain[1:] else b"")
        for start in range(chain[-1].stop if chain else 0, len(ids), BLOCK_TOKENS):
            block_ids = ids[start : start + BLOCK_TOKENS]
            packed = pack_ids(block_ids)
            block_text, pending = ("", b"") if text is None else text.feed(block_ids, pending)
            key = block_key(parent, packed)
            new.append(Block(key, parent, start, packed, block_text, pending))
            parent = key
        return new

    def _cut_new(
        self, blocks: Sequence[Block], caches: list[Any], store: BlockStore
    ) -> list[tuple[Block, Arrays]]:
        new = [block for block in blocks if block.key not in store]
        arrays = split(self.spec.full, caches, [(block.start, block.stop) for block in new])
        return list(zip(new, arrays, strict=True))


def _is_full(block: Block) -> bool:
    return block.n_tokens == BLOCK_TOKENS
