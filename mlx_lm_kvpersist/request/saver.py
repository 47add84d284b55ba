"""Save the tokens of a request as blocks and checkpoints, and find the records to restore.

Generation thread; any thread may call `find`.

A model with windows or recurrent layers can resume only at a checkpoint. In this module, the word
"checkpoint" means such a position. The states and the last tokens of the windows are stored for it.
An object of the class `Checkpoint` is only one record of this: the states, or the tokens of one
window in one block. A checkpoint may need several records.

Checkpoints are at the ends of the system prompt, of the user's messages and of the replies. A long
prompt also has temporary checkpoints, every `CHECKPOINT_EVERY` tokens, until its reply ends. If a
checkpoint can be computed again within `StoreLimits.max_loss_s`, its records are not written at
once but postponed, because the next checkpoint may replace it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain as chained
from itertools import dropwhile, takewhile
from operator import attrgetter
from typing import Any, Protocol

from ..block import Block, Checkpoint, Record, Root, block_key, pack_ids
from ..cache.blocks import BLOCK_TOKENS, copy_newest, copy_state, first_cached, split
from ..cache.geometry.spec import (
    ArrayForm,
    ModelCacheSpec,
    as_computed,
    forms_bytes,
    state_arrays,
    token_arrays,
)
from ..cache.measuring.prefill_memory import CHECKPOINT_EVERY
from ..host.hooks import PREFILL, REPLY
from ..host.scheduling.pace import Pace
from ..match import FEW, BlockSource, TokenText, beginnings
from ..store.block_store import BlockStore, Commit
from ..store.files import Arrays
from ..store.records import Leaf
from .outcome import Reason

STATE = "state"
"""The `kind` of a state. `CheckpointSaver` saves a state at each position to resume from."""

MAX_CHECKPOINTS = 6
"""A chain keeps its first checkpoint and this many of its newest: two per turn, for 3 turns."""

N_SAFE = 2
"""A chain also keeps this many of its newest checkpoints that are stored below RAM, or wait to be
written (`BlockStore.is_safe`)."""

MAX_BRANCHES = 4
"""For this many forks with other conversations, the last checkpoint before each is also kept."""

MIN_TOKENS_BETWEEN = 16
"""Least tokens between two checkpoints of a prompt, except after a temporary checkpoint."""

_MAX_REPLY_BLOCKS = 64

Stored = Mapping[bytes, Sequence[Checkpoint]]
"""The stored windows and states at the end of each block, by the block's key."""


@dataclass(eq=False)
class RunningSequence:
    """The tokens of a request, from the time when the request enters (`ServedRequest.enter`).

    `packed_ids` are the prompt's ids; the first `n_reused` were restored. `chain`: stored blocks.
    """

    root: Root
    n_prompt: int
    n_reused: int = 0
    chain: list[Block] = field(default_factory=list, repr=False)
    n_system: int = 0
    """The number of tokens of the system prompt."""
    packed_ids: bytes = field(default=b"", repr=False)
    session: str | None = None
    note: Mapping[str, str] = field(default_factory=dict, repr=False)
    messages: Sequence[dict[str, Any]] = field(default=(), repr=False)
    draft: RunningSequence | None = None
    """The same request's sequence in the draft model, with its own root and stored blocks."""
    is_draft: bool = False

    @property
    def n_saved(self) -> int:
        return self.chain[-1].stop if self.chain else 0

    def leaf(self, chain: Sequence[Block], replaced: Iterable[tuple[bytes, bytes]] = ()) -> Leaf:
        end, with_text = chain[-1], self.root.with_text
        note = {name: text for name, text in self.note.items() if name != "words" or with_text}
        moved, is_session = tuple(replaced), not self.is_draft
        return Leaf(self.session, end.key, end.stop, moved, note, self.messages, is_session)


@dataclass(frozen=True)
class Needed:
    """A record to read: its tokens [start, stop), counted from the record's first token.

    `window`: how many tokens a window's layers see; None for a block or a state.
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
    """A source of blocks, windows and states: a store, or a conversation in the shared tier."""

    def checkpoints(self, blocks: Sequence[bytes]) -> Mapping[bytes, Sequence[Checkpoint]]:
        """Return the windows and states at the ends of these blocks, by the block's key."""


@dataclass(frozen=True)
class RestorePoint:
    """A position to resume from, and all records to read for it, in the order of reading."""

    n_tokens: int
    needed: list[Needed]


@dataclass(frozen=True)
class Saver:
    """Saves and finds blocks, for models in which every layer holds all tokens."""

    spec: ModelCacheSpec
    text: TokenText | None

    saves_every = BLOCK_TOKENS
    """While a prompt is computed, it is saved at multiples of this number of tokens."""
    missing = Reason.EVICTED
    """The reason if not all matched tokens are restored."""

    @property
    def granule(self) -> int:
        """If no record is missing, matched tokens up to the last multiple of this are restored."""
        return BLOCK_TOKENS if self.spec.quantized else 1

    def find(
        self,
        path: Sequence[Block],
        n_tokens: int,
        store: CheckpointSource,
        lost: Collection[bytes] = (),
    ) -> RestorePoint | None:
        """Return the records to restore for a chain's first `n_tokens`, none with a key in `lost`.

        If position `n_tokens` is inside a quantized block, an unfinished block with the same first
        tokens is used. If no such block exists, the last tokens are computed again. O(blocks).
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
        """Save the blocks of a sequence, whose caches hold `tokens`.

        At the end of a reply, all new blocks are written, and the session's end is recorded
        (`Leaf`). Before that, only full blocks are written; the unfinished block at a prompt's end
        stays in RAM.
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
        """Return the shorter blocks that the chain's blocks replace, each with the new block's key.

        Such a shorter block, or "tail", was the end of a conversation or of a prompt. A longer
        block of the chain begins with all of its tokens. A shorter block that is only in RAM is not
        replaced by a quantized block: a later equal prompt continues from the shorter block.
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
            # The `pending` in the index is not used, because no check would find damage in it.
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
        new = [block for block in blocks if not store.has(block)]
        arrays = split(self.spec.full, caches, [(block.start, block.stop) for block in new])
        return list(zip(new, arrays, strict=True))


def _is_full(block: Block) -> bool:
    return block.n_tokens == BLOCK_TOKENS


def window_kind(window: int) -> str:
    return f"window-{window}"


@dataclass(frozen=True)
class CheckpointSaver(Saver):
    """Also saves checkpoints, and finds the last usable checkpoint. `pace`: the computing speed."""

    pace: Pace = field(default_factory=Pace)

    saves_every = CHECKPOINT_EVERY
    granule = 1
    missing = Reason.NO_CHECKPOINT

    def find(
        self,
        path: Sequence[Block],
        n_tokens: int,
        store: CheckpointSource,
        lost: Collection[bytes] = (),
    ) -> RestorePoint | None:
        """Return the restore point at a chain's last complete checkpoint, up to `n_tokens`."""
        path = list(takewhile(lambda block: block.key not in lost and block.start < n_tokens, path))
        if not path:
            return None
        n_tokens = min(n_tokens, path[-1].stop)
        stored = store.checkpoints([block.key for block in path])
        stored = {key: [c for c in at if c.key not in lost] for key, at in stored.items()}
        for end in [n_tokens, *(b.stop for b in reversed(path) if b.stop < n_tokens)]:
            if (needed := self._needed_at(path, end, stored)) is not None:
                # Windows and state are read first: without these the blocks are useless.
                blocks = path[: bisect_left(path, end, key=attrgetter("start"))]
                full = [self._of_block(block, end) for block in blocks] if self.spec.full else []
                return RestorePoint(end, [*needed, *full])
        return None

    def save(
        self,
        sequence: RunningSequence,
        tokens: Sequence[int],
        caches: list[Any],
        cache_type: str,
        store: BlockStore,
    ) -> None:
        """Save blocks with a checkpoint at their end; after a reply, record the session's end."""
        ended, before = cache_type == REPLY, sequence.chain
        if cache_type == PREFILL and len(tokens) % CHECKPOINT_EVERY:
            return
        # A checkpoint may follow just after a temporary checkpoint, which will be deleted.
        is_last = before and (cache_type == PREFILL or not _is_temporary(before[-1]))
        if is_last and not ended and len(tokens) - before[-1].stop < MIN_TOKENS_BETWEEN:
            return
        new = self._following(before, tokens, sequence)
        chain = sequence.chain = [*before, *new]
        blocks = self._cut_new(new, caches, store)
        listed = store.checkpoints([block.key for block in chain])
        stored = {key: [c for c in at if store.has(c)] for key, at in listed.items()}
        loss_s = self._loss_s(chain, stored, store, cache_type)
        at_once = loss_s > store.limits.max_loss_s
        checkpoints = self._new(chain, caches, stored, store, at_once=at_once)
        for checkpoint, _ in checkpoints:
            stored.setdefault(checkpoint.block, []).append(checkpoint)
        leaf = sequence.leaf(chain) if ended else None
        superseded = self.superseded(sequence, stored, store) if ended else ()
        # The commit names all windows and states that the checkpoint needs, to pin them.
        at_end = self._needed_at(chain, chain[-1].stop, stored) or ()
        used = [need.record for need in at_end if isinstance(need.record, Checkpoint)]
        added = tuple(new or chain[-1:])
        kept = tuple(dict.fromkeys([*used, *(point for point, _ in checkpoints)]))
        commit = Commit(sequence.root, added, leaf, {}, kept, tuple(superseded))
        store.commit(commit, [*blocks, *checkpoints], loss_s, chain)

    def _loss_s(
        self, chain: Sequence[Block], stored: Stored, store: BlockStore, cache_type: str
    ) -> float:
        """Return the seconds to compute all tokens after the last safe checkpoint again.

        Infinite if the speed is unknown, and for the first checkpoint that is not temporary,
        because other conversations share it. Earlier temporary checkpoints count only if the new
        checkpoint is temporary, too.
        """
        is_chunk = cache_type == PREFILL
        before = [
            (block.stop, state.key)
            for block in reversed(chain[:-1])
            if (state := _stored_state(stored, block)) and (is_chunk or not _is_temporary(block))
        ]
        if not before and not is_chunk:
            return math.inf
        start = next((stop for stop, key in before if store.is_safe(key)), 0)
        seconds = self.pace.seconds(start, chain[-1].stop - start)
        return math.inf if seconds is None else seconds

    def _new(
        self,
        chain: Sequence[Block],
        caches: list[Any],
        stored: Stored,
        store: BlockStore,
        *,
        at_once: bool,
    ) -> list[tuple[Checkpoint, Arrays]]:
        """Return the missing windows and state at the end of the chain.

        A stored window that is longer than needed is enough. `at_once`: the checkpoints are written
        now, not postponed. A longer window is then enough only if a tier below RAM has it, or if it
        waits to be written.
        """
        n_tokens = chain[-1].stop
        new: list[tuple[Checkpoint, Arrays]] = []

        def has(block: Block, window: int, n_needed: int) -> bool:
            found = _stored_window(stored, block, window, n_needed)
            if found is None or found.n_tokens == n_needed:
                return found is not None
            return not at_once or store.is_safe(found.key)

        for window in self.spec.sliding:
            first = first_cached(self.spec, window, caches)
            starts = ((block, max(block.start, n_tokens - window)) for block in chain)
            missing = [
                (block, start)
                for block, start in starts
                if first <= start < block.stop and not has(block, window, block.stop - start)
            ]
            ranges = [(start, block.stop) for block, start in missing]
            arrays = split(self.spec.sliding[window], caches, ranges)
            kind = window_kind(window)
            for (block, start), its_arrays in zip(missing, arrays, strict=True):
                new.append((Checkpoint.at(block.key, kind, block.stop - start), its_arrays))
        if _stored_state(stored, chain[-1]) is None:
            newest = copy_newest(self.spec.quantized, caches, n_tokens)
            if newest or not n_tokens % BLOCK_TOKENS or not self.spec.quantized:
                state = {**copy_state(self.spec, caches), **newest}
                new.append((Checkpoint.at(chain[-1].key, STATE, 0), state))
        return new

    def superseded(
        self, sequence: RunningSequence, stored: Stored, store: BlockStore
    ) -> list[Checkpoint]:
        """Return the windows and states to delete: unneeded in `stored`, or of abandoned replies.

        The first checkpoint is kept, because other conversations share it. The newest checkpoints
        are kept, too. If another session ends in the chain, the last checkpoint up to this end is
        kept. The same holds for up to `MAX_BRANCHES` forks, at which other conversations branch
        off.

        The last safe checkpoints (`BlockStore.is_safe`) up to each of these positions are also
        kept. So if a postponed checkpoint is lost, at most `config.MAX_LOSS_S` seconds of computing
        are repeated. A temporary checkpoint is kept only at such an end or fork, or at the end of
        the chain.
        """
        chain = sequence.chain
        ends, forks = store.ends(chain, sequence.session), store.forks(chain)
        states = {block.key: state for block in chain if (state := _stored_state(stored, block))}

        of_use = {*ends, *forks, chain[-1].key, *(b.key for b in chain if not _is_temporary(b))}
        of_use &= states.keys()
        useful = [block for block in chain if block.key in of_use]
        safe = [b for b in useful if b is not chain[-1] and store.is_safe(states[b.key].key)]

        def last_up_to(stop: int) -> set[bytes]:
            before = ([b.key for b in blocks if b.stop <= stop] for blocks in (useful, safe))
            return {key for keys in before for key in keys[-1:]}

        newest = [*useful[:1], *useful[-MAX_CHECKPOINTS:], *safe[-N_SAFE:]]
        stay = {block.key for block in newest}
        stay.update(*(last_up_to(block.stop) for block in chain if block.key in ends))
        at_forks = (last_up_to(block.stop) for block in chain if block.key in forks)
        stay.update(*[keys for keys in at_forks if not keys <= stay][-MAX_BRANCHES:])
        needed = {states[key].key for key in stay}
        for block in chain:
            if block.key in stay:
                at_end = self._needed_at(chain, block.stop, stored) or ()
                needed.update(need.record.key for need in at_end)
        unneeded = [c for at_block in stored.values() for c in at_block if c.key not in needed]
        left = _replies_left(chain, sequence, store)
        return list(dict.fromkeys([*unneeded, *left]))

    def _needed_at(
        self, path: Sequence[Block], n_tokens: int, stored: Stored
    ) -> list[Needed] | None:
        """Return the windows and the state to resume at a position; None if any is missing."""
        needed: list[Needed] = []
        at_end: list[Needed] = []
        n_newest = n_tokens % BLOCK_TOKENS if self.spec.quantized else 0
        if self.spec.recurrent or n_newest:
            ending = path[bisect_left(path, n_tokens, key=attrgetter("start")) - 1]
            state, n_after = _stored_state(stored, ending), ending.stop - n_tokens
            is_beyond = bool(self.spec.recurrent and n_after) or n_newest + n_after >= BLOCK_TOKENS
            if state is None or is_beyond:
                return None
            newest = token_arrays(as_computed(self.spec.quantized), n_newest + n_after)
            forms = *state_arrays(self.spec.recurrent), *newest
            at_end = [Needed(state, 0, n_newest, forms)]
        for window, groups in self.spec.sliding.items():
            start = max(0, n_tokens - window)
            for block in path[bisect_right(path, start, key=attrgetter("start")) - 1 :]:
                if block.start >= n_tokens:
                    break
                first, last = max(block.start, start), min(block.stop, n_tokens)
                found = _stored_window(stored, block, window, block.stop - first)
                if found is None:
                    return None
                begin = block.stop - found.n_tokens
                forms = tuple(token_arrays(groups, found.n_tokens))
                needed.append(Needed(found, first - begin, last - begin, forms, window))
        return needed + at_end


def _is_temporary(block: Block) -> bool:
    return block.stop % CHECKPOINT_EVERY == 0


def _stored_state(stored: Stored, block: Block) -> Checkpoint | None:
    return next((c for c in stored.get(block.key, ()) if c.kind == STATE), None)


def _stored_window(stored: Stored, block: Block, window: int, n_tokens: int) -> Checkpoint | None:
    """Return the smallest stored window that covers a block's last `n_tokens`."""
    windows = (c for c in stored.get(block.key, ()) if c.kind == window_kind(window))
    fitting = [c for c in windows if c.n_tokens >= n_tokens]
    return min(fitting, key=attrgetter("n_tokens"), default=None)


def _replies_left(
    chain: Sequence[Block], sequence: RunningSequence, store: BlockStore
) -> list[Checkpoint]:
    """Return the windows and states of abandoned replies, which branch off after restored blocks.

    No turn follows an abandoned reply, so its only state is at its end. A branch is another
    conversation if it has a second state, or if another session ends in it.
    """
    n_reused = sequence.n_reused
    # `n_reused` may be some tokens after the end of the last block that both chains share.
    fork = bisect_right([block.stop for block in chain], n_reused) - 1
    if fork < 0 or fork + 1 >= len(chain):
        return []
    children = store.children(chain[fork].key, limit=FEW + 1)
    if len(children) > FEW:
        return []  # more children than FEW are separate conversations
    left: list[Checkpoint] = []
    for child in children:
        branch: list[Block] = []
        following = [child] if child.key != chain[fork + 1].key else []
        while len(following) == 1 and len(branch) < _MAX_REPLY_BLOCKS:
            branch += following
            following = store.children(branch[-1].key, limit=2)
        stored = store.checkpoints([block.key for block in branch])
        checkpoints = list(chained.from_iterable(stored.values()))
        is_reply = sum(checkpoint.kind == STATE for checkpoint in checkpoints) == 1
        if is_reply and not following and not store.ends(branch, sequence.session):
            left += checkpoints
    return left
