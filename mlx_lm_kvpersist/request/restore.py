"""Restore what is stored into caches, and prove that it is what the model would compute.

Runs on the generation thread. Arrays from RAM are as they were computed here. What comes from a
tier below has its checksum verified by the store; that it fits this model is checked by its shapes,
and by a canary where the caches allow it: their last tokens are run again on top of the restored
prefix.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..block import Block, Checkpoint, Record, Root
from ..cache.blocks.canary import CANARY_TOLERANCE, canary_difference
from ..cache.blocks.cut_join import Joiner, Piece, n_bytes
from ..cache.geometry.spec import (
    ArrayForm,
    ModelCacheSpec,
    arrays_fit,
    forms_bytes,
    token_arrays,
)
from ..cache.live.packed import headroom
from ..store.block_store import BlockStore
from ..store.tier import RAM

if TYPE_CHECKING:
    from .model import LoadedModel


@dataclass(frozen=True)
class Needed:
    """Tokens [start, stop) of a block or window, counted from its first; a state has none.

    `forms` are the arrays that it must hold, `window` is that of a window.
    """

    record: Record
    start: int
    stop: int
    forms: tuple[ArrayForm, ...]
    window: int | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return forms_bytes(self.forms)


@dataclass(frozen=True)
class RestorePoint:
    """A place to go on from, the blocks before it, and all that is read for it, in this order."""

    n_tokens: int
    chain: list[Block]
    needed: list[Needed]


def until_lost(path: Sequence[Block], lost: Collection[bytes]) -> list[Block]:
    """Return the blocks of a chain before the first whose key is lost."""
    return list(takewhile(lambda block: block.key not in lost, path))


def restore_point(
    path: Sequence[Block], n_tokens: int, spec: ModelCacheSpec, first: Sequence[Needed] = ()
) -> RestorePoint:
    """Return the restore point after some tokens of a chain; what is needed `first` is read first.

    Those are windows and state: without them the blocks are of no use.
    """
    chain = [block for block in path if block.start < n_tokens]
    needed = list(first)
    for block in chain if spec.full else ():
        n_used = min(block.stop, n_tokens) - block.start
        needed.append(Needed(block, 0, n_used, tuple(token_arrays(spec.full, block.n_tokens))))
    return RestorePoint(n_tokens, chain, needed)


@dataclass
class Restored:
    """Caches that hold the first `n_tokens` of a prompt.

    `n_read` of them came from tiers below RAM, in the blocks and checkpoints `read`. `n_bytes` and
    `seconds` are what was read from each tier, and how long that took; for RAM, what was joined.
    """

    n_tokens: int
    caches: list[Any] = field(default_factory=list)
    n_read: int = 0
    read: list[Record] = field(default_factory=list)
    n_bytes: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


def restore(
    point: RestorePoint,
    ids: Sequence[int],
    root: Root,
    store: BlockStore,
    model: LoadedModel,
    lost: set[bytes],
    *,
    canary: bool,
    in_steps: bool = False,
) -> Generator[None, None, Restored | None]:
    """Load what a restore point needs into caches with room for the rest of the prompt `ids`.

    Returns None when a block cannot be read, or the canary found that what was read is not this
    model's, which then goes to quarantine. `lost` gets the keys of these blocks.

    Yields after each block, and each buffer that is made. in_steps: whether replies go on between,
    so that no step may be long; otherwise what is in RAM anyway is joined at once, which takes less
    time in all.
    """
    spec, restored = model.spec, Restored(point.n_tokens)
    n_read: Counter[int | None] = Counter()
    needed = point.needed
    n_held: Counter[int] = Counter()
    for one in needed:
        if one.window is not None:
            n_held[one.window] += one.stop - one.start
    coming = store.reader.load_all([one.record for one in needed], root)
    whole = not in_steps and all(one.record.key in store.pool for one in needed)
    started = perf_counter()
    room = headroom(len(ids) - point.n_tokens)
    joiner = Joiner(spec, point.n_tokens, room, n_held, whole=whole)
    for _ in joiner.make_room() if in_steps else ():
        restored.seconds[RAM] += perf_counter() - started
        yield
        started = perf_counter()
    for one in needed:
        restored.seconds[RAM] += perf_counter() - started
        yield
        started = perf_counter()
        loaded = next(coming)
        if loaded is None:
            lost.add(one.record.key)
            return None
        if (misfit := arrays_fit(one.forms, loaded.arrays)) is not None:
            store.lose(one.record, f"does not fit the model: {misfit}")
            lost.add(one.record.key)
            return None
        loaded_bytes = n_bytes(loaded.arrays)
        restored.n_bytes[RAM] += loaded_bytes
        if loaded.tier != RAM:
            restored.seconds[loaded.tier] += loaded.read_s
            restored.n_bytes[loaded.tier] += loaded_bytes
            restored.read.append(one.record)
            # If a model has only states, each stands for all tokens.
            n_tokens = one.stop - one.start if one.stop or spec.full else point.n_tokens
            n_read[one.window] += n_tokens
        started = perf_counter()
        if one.window is None and isinstance(one.record, Checkpoint):
            joiner.add_state(loaded.arrays)
            continue
        joiner.add(Piece(loaded.arrays, one.start, one.stop), one.window)
    restored.caches = joiner.finish()
    restored.seconds[RAM] += perf_counter() - started
    restored.n_read = max(n_read.values(), default=0)
    yield
    if canary and restored.read:
        restored_ids = ids[: restored.n_tokens]
        difference = canary_difference(model.model, spec, restored.caches, restored_ids)
        if not difference <= CANARY_TOLERANCE:
            for block in restored.read:
                store.lose(block, f"canary: recomputed KV differs by {difference:.0%}")
                lost.add(block.key)
            return None
    store.pool.trust(block.key for block in restored.read)
    used = [block.key for block in point.chain]
    store.touch(used, [one.record for one in needed if isinstance(one.record, Checkpoint)])
    return restored
