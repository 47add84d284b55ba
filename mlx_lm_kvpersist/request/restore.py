"""Restore what is stored into caches, and prove that it is what the model would compute.

A model all of whose layers hold every token can go on from any place. One with sliding windows
needs the last tokens of each window before that place, one with recurrent layers the state that
they had there. Both are stored beside the blocks of tokens at checkpoints: the ends of the system
prompt, of the user's messages and of the replies.

Runs on the generation thread. Arrays from RAM are as they were computed here. What comes from disk
has its checksum verified by the store; that it fits this model is checked by its shapes, and by a
canary where the caches allow it: their last tokens are run again on top of the restored prefix.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from time import perf_counter
from typing import Any

from ..cache.blocks import Joiner, Piece, n_bytes
from ..cache.canary import CANARY_TOLERANCE, canary_difference
from ..cache.packed import headroom
from ..cache.spec import (
    ArrayForm,
    ModelCacheSpec,
    arrays_fit,
    forms_bytes,
    state_arrays,
    token_arrays,
)
from ..match.block import Block, Root
from ..store.block_store import BlockStore
from .model import LoadedModel

STATE = "state"
"""The kind of the record that every checkpoint has: it holds the states of the recurrent layers,
and nothing for a model without them."""

Stored = Mapping[bytes, Sequence[Block]]
"""Windows and states, by the key of the block that they are at the end of."""


def window_kind(window: int) -> str:
    """Return the kind of the records that hold the last tokens of a block for a window."""
    return f"window-{window}"


@dataclass(frozen=True)
class Needed:
    """Tokens [start, stop) of a block or window, counted from its first; a state has none.

    `forms` are the arrays that it must hold, `window` is that of a window.
    """

    block: Block
    start: int
    stop: int
    forms: tuple[ArrayForm, ...]
    window: int | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return forms_bytes(self.forms)


@dataclass(frozen=True)
class Checkpoint:
    """A place to go on from, the blocks before it, and all that is read for it, in this order."""

    n_tokens: int
    chain: list[Block]
    needed: list[Needed]


def nearest_checkpoint(
    path: Sequence[Block],
    n_tokens: int,
    store: BlockStore,
    spec: ModelCacheSpec,
    lost: Collection[bytes] = (),
) -> Checkpoint | None:
    """Return the last checkpoint of a chain, up to `n_tokens`, that is stored whole.

    Whatever has its key in `lost` counts as missing.
    """
    n_tokens = min([n_tokens, *(block.start for block in path if block.key in lost)])
    if n_tokens <= 0:
        return None
    path = [block for block in path if block.start < n_tokens]
    needed: list[Needed] | None = []
    if not spec.any_prefix:
        stored = store.checkpoints([block.key for block in path])
        stored = {key: [one for one in all_ if one.key not in lost] for key, all_ in stored.items()}
        for end in [n_tokens, *(b.stop for b in reversed(path) if b.stop < n_tokens)]:
            n_tokens, needed = end, needed_at(path, end, stored, spec)
            if needed is not None:
                break
    if needed is None:
        return None
    chain = [block for block in path if block.start < n_tokens]
    # Blocks come last: without its windows and state a checkpoint is of no use.
    for block in chain if spec.full else ():
        n_used = min(block.stop, n_tokens) - block.start
        needed.append(Needed(block, 0, n_used, tuple(token_arrays(spec.full, block.n_tokens))))
    return Checkpoint(n_tokens, chain, needed)


def needed_at(
    path: Sequence[Block], n_tokens: int, stored: Stored, spec: ModelCacheSpec
) -> list[Needed] | None:
    """Return the windows and the state to go on from a place; None if any of it is not stored."""
    needed: list[Needed] = []
    state = None
    if spec.recurrent:
        ending = path[bisect_right(path, n_tokens - 1, key=attrgetter("start")) - 1]
        state = stored_state(stored, ending) if ending.stop == n_tokens else None
        if state is None:
            return None
    for window in spec.sliding:
        start = max(0, n_tokens - window)
        for block in path[bisect_right(path, start, key=attrgetter("start")) - 1 :]:
            if block.start >= n_tokens:
                break
            first, last = max(block.start, start), min(block.stop, n_tokens)
            found = stored_window(stored.get(block.key, ()), window, block.stop - first)
            if found is None:
                return None
            found_start = block.stop - found.n_tokens
            forms = tuple(token_arrays(spec.sliding[window], found.n_tokens))
            needed.append(Needed(found, first - found_start, last - found_start, forms, window))
    if state is not None:
        needed.append(Needed(state, 0, 0, tuple(state_arrays(spec.recurrent))))
    return needed


def stored_state(stored: Stored, block: Block) -> Block | None:
    """Return the state at the end of a block; it says that a checkpoint was made there."""
    return next((one for one in stored.get(block.key, ()) if one.kind == STATE), None)


def stored_window(stored: Sequence[Block], window: int, n_tokens: int) -> Block | None:
    """Return the smallest stored window that covers a block's last `n_tokens`."""
    kind = window_kind(window)
    fitting = [one for one in stored if one.kind == kind and one.n_tokens >= n_tokens]
    return min(fitting, key=lambda one: one.n_tokens, default=None)


@dataclass
class Restored:
    """Caches that hold the first `n_tokens` of a prompt, `n_from_disk` of them read from disk."""

    n_tokens: int
    caches: list[Any] = field(default_factory=list)
    n_from_disk: int = 0
    from_disk: list[Block] = field(default_factory=list)
    join_s: float = 0.0
    n_bytes: int = 0
    disk_s: float = 0.0
    n_disk_bytes: int = 0


def restore(
    checkpoint: Checkpoint,
    ids: Sequence[int],
    root: Root,
    store: BlockStore,
    model: LoadedModel,
    lost: set[bytes],
    *,
    canary: bool,
    in_steps: bool = False,
) -> Generator[None, None, Restored | None]:
    """Load what a checkpoint needs into caches with room for the rest of the prompt `ids`.

    Returns None when a block cannot be read, or the canary found that what was read is not this
    model's, which then goes to quarantine. `lost` gets the keys of these blocks.

    Yields after each block, and each buffer that is made. in_steps: whether replies go on between,
    so that no step may be long; otherwise what is in RAM anyway is joined at once, which takes less
    time in all.
    """
    spec, restored = model.spec, Restored(checkpoint.n_tokens)
    n_from_disk: dict[int | None, int] = {}
    needed = checkpoint.needed
    n_held: Counter[int] = Counter()
    for one in needed:
        if one.window is not None:
            n_held[one.window] += one.stop - one.start
    coming = store.load_all([one.block for one in needed], root)
    whole = not in_steps and all(one.block.key in store.pool for one in needed)
    started = perf_counter()
    room = headroom(len(ids) - checkpoint.n_tokens)
    joiner = Joiner(spec, checkpoint.n_tokens, room, n_held, whole=whole)
    for _ in joiner.make_room() if in_steps else ():
        restored.join_s += perf_counter() - started
        yield
        started = perf_counter()
    for one in needed:
        restored.join_s += perf_counter() - started
        yield
        started = perf_counter()
        loaded = next(coming)
        if loaded is None:
            lost.add(one.block.key)
            return None
        if (misfit := arrays_fit(one.forms, loaded.arrays)) is not None:
            store.quarantine(one.block, f"does not fit the model: {misfit}")
            lost.add(one.block.key)
            return None
        loaded_bytes = n_bytes(loaded.arrays)
        restored.n_bytes += loaded_bytes
        if loaded.from_disk:
            restored.disk_s += perf_counter() - started + loaded.before_s
            restored.n_disk_bytes += loaded_bytes
            restored.from_disk.append(one.block)
            # If a model has only states, each stands for all tokens.
            n_tokens = one.stop - one.start if one.stop or spec.full else checkpoint.n_tokens
            n_from_disk[one.window] = n_from_disk.get(one.window, 0) + n_tokens
        started = perf_counter()
        if one.window is None and one.block.is_checkpoint:
            joiner.add_state(loaded.arrays)
            continue
        joiner.add(Piece(loaded.arrays, one.start, one.stop), one.window)
    restored.caches = joiner.finish()
    restored.join_s += perf_counter() - started
    restored.n_from_disk = max(n_from_disk.values(), default=0)
    yield
    if canary and restored.from_disk:
        restored_ids = ids[: restored.n_tokens]
        difference = canary_difference(model.model, spec, restored.caches, restored_ids)
        if not difference <= CANARY_TOLERANCE:
            for block in restored.from_disk:
                store.quarantine(block, f"canary: recomputed KV differs by {difference:.0%}")
                lost.add(block.key)
            return None
    store.pool.trust(block.key for block in restored.from_disk)
    used = [block.key for block in checkpoint.chain]
    store.touch(used, [one.block for one in needed if one.block.is_checkpoint])
    return restored
