"""Restore what is stored into caches, and prove that it is what the model would compute.

Runs on the generation thread. Arrays from RAM are as they were computed here. What comes from disk
has its checksum verified by the store; that it fits this model is checked by its shapes, and by a
canary where the caches allow it: their last tokens are run again on top of the restored prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from ..cache.blocks import n_bytes
from ..cache.canary import CANARY_TOLERANCE, canary_difference, trailing
from ..cache.join import Joiner, Piece, Pieces
from ..cache.packed import headroom
from ..cache.spec import ArrayForm, ModelCacheSpec, arrays_fit, forms_bytes
from ..match.block import Block
from ..match.keys import Root
from ..match.tree import Match
from ..store.block_store import BlockStore
from .checkpoints import Checkpoint, nearest_checkpoint
from .model import LoadedModel


@dataclass
class Restored:
    """Caches that hold the first `n_tokens` of a prompt, `n_from_disk` of them read from disk."""

    n_tokens: int
    caches: list[Any] = field(default_factory=list)
    last: dict[int | None, list[Piece]] = field(default_factory=dict)
    """The pieces that the canary looks at, by window. The others need not stay in memory."""
    n_from_disk: int = 0
    from_disk: list[Block] = field(default_factory=list)
    join_s: float = 0.0
    n_bytes: int = 0
    disk_s: float = 0.0
    n_disk_bytes: int = 0


def restore(
    match: Match,
    n_tokens: int,
    n_prompt: int,
    root: Root,
    store: BlockStore,
    model: LoadedModel,
    *,
    canary: bool,
) -> Restored | None:
    """Load the first `n_tokens` of a match, or as many before them as can be had.

    The caches get room for the rest of a prompt of `n_prompt` tokens. None when nothing is left,
    or when the canary found that the blocks are not this model's; then they go to quarantine.
    """
    lost: set[bytes] = set()
    while True:
        checkpoint = nearest_checkpoint(match.path, n_tokens, store, model.spec, lost)
        if checkpoint is None:
            return None
        restored = _read(match.path, checkpoint, n_prompt, root, store, model)
        if isinstance(restored, Restored):
            break
        lost.add(restored.key)
        if not restored.is_checkpoint:
            n_tokens = restored.start
    if canary and restored.from_disk:
        windows = {window: restored.last[window] for window in model.spec.sliding}
        tails = Pieces(restored.n_tokens, restored.last.get(None, ()), windows)
        ids = match.ids[: restored.n_tokens]
        difference = canary_difference(model.model, model.spec, restored.caches, tails, ids)
        if not difference <= CANARY_TOLERANCE:
            for block in restored.from_disk:
                store.quarantine(block, f"canary: recomputed KV differs by {difference:.0%}")
            return None
    store.pool.trust(block.key for block in restored.from_disk)
    used = [block.key for block in match.path if block.start < restored.n_tokens]
    store.touch(used[-1], checkpoint.blocks)
    store.pool.touch(used)  # behind the checkpoint, which is of no use without them
    return restored


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


def needed_for(path: Sequence[Block], checkpoint: Checkpoint, spec: ModelCacheSpec) -> list[Needed]:
    """Return what going on from a checkpoint needs, in the order in which it is read."""
    needed: list[Needed] = []
    for window, covering in checkpoint.windows.items():
        for one in covering:
            forms = tuple(spec.window_arrays(window, one.block.n_tokens))
            needed.append(Needed(one.block, one.start, one.stop, forms, window))
    if checkpoint.state is not None:
        needed.append(Needed(checkpoint.state, 0, 0, tuple(spec.state_arrays())))
    # Last, because without its windows and state a checkpoint is none, whatever was read of tokens.
    for block in path if spec.full else ():
        n_used = min(block.stop, checkpoint.n_tokens) - block.start
        if n_used <= 0:
            break
        needed.append(Needed(block, 0, n_used, tuple(spec.block_arrays(block.n_tokens))))
    return needed


def _read(
    path: Sequence[Block],
    checkpoint: Checkpoint,
    n_prompt: int,
    root: Root,
    store: BlockStore,
    model: LoadedModel,
) -> Restored | Block:
    """Read what a checkpoint needs into caches; return the first block that cannot be had instead.

    What does not fit the model goes to quarantine.
    """
    spec, restored = model.spec, Restored(checkpoint.n_tokens)
    n_from_disk: dict[int | None, int] = {}
    needed = needed_for(path, checkpoint, spec)
    n_held = {
        window: sum(one.stop - one.start for one in covering)
        for window, covering in checkpoint.windows.items()
    }
    coming = store.load_all([one.block for one in needed], root)
    in_ram = all(one.block.key in store.pool for one in needed)
    started = perf_counter()
    room = headroom(n_prompt - checkpoint.n_tokens)
    joiner = Joiner(spec, checkpoint.n_tokens, room, n_held, whole=in_ram)
    for one in needed:
        restored.join_s += perf_counter() - started
        started = perf_counter()
        loaded = next(coming)
        if loaded is None:
            return one.block
        if (misfit := arrays_fit(one.forms, loaded.arrays)) is not None:
            store.quarantine(one.block, f"does not fit the model: {misfit}")
            return one.block
        loaded_bytes = n_bytes(loaded.arrays)
        restored.n_bytes += loaded_bytes
        if loaded.from_disk:
            restored.disk_s += perf_counter() - started + loaded.before_s
            restored.n_disk_bytes += loaded_bytes
            restored.from_disk.append(one.block)
            # With nothing but states, they stand for all tokens.
            n_tokens = one.stop - one.start if one.stop or spec.full else checkpoint.n_tokens
            n_from_disk[one.window] = n_from_disk.get(one.window, 0) + n_tokens
        started = perf_counter()
        if one.window is None and one.block.is_checkpoint:
            joiner.add_state(loaded.arrays)
            continue
        piece = Piece(loaded.arrays, one.start, one.stop)
        joiner.add(piece, one.window)
        restored.last[one.window] = trailing([*restored.last.get(one.window, ()), piece])
    restored.caches = joiner.finish()
    restored.join_s += perf_counter() - started
    restored.n_from_disk = max(n_from_disk.values(), default=0)
    return restored
