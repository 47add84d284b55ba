"""Restore what is stored into caches, and prove that it is what the model would compute.

Runs on the generation thread. Arrays from RAM are as they were computed here. What comes from disk
has its checksum verified by the store; that it fits this model is checked by its shapes, and by a
canary where the caches allow it: their last tokens are run again on top of the restored prefix.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..cache.blocks import n_bytes
from ..cache.canary import CANARY_TOLERANCE, can_step_back, canary_difference, trailing
from ..cache.join import Joiner, Piece, Pieces
from ..cache.packed import headroom
from ..cache.spec import ArrayForm, ModelCacheSpec, arrays_fit
from ..match.block import Block
from ..match.keys import Root
from ..match.tree import Match
from ..store.block_store import BlockStore, Loaded
from .checkpoints import Checkpoint, nearest_checkpoint
from .model import LoadedModel


@dataclass(frozen=True)
class Restored:
    """Caches that hold the first `n_tokens` of a prompt, `n_from_disk` of them read from disk."""

    caches: list[Any]
    n_tokens: int
    n_from_disk: int
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
        point = nearest_checkpoint(match.path, n_tokens, store, model.spec, lost)
        if point is None:
            return None
        reading = _Reading(store, root, model)  # what the one before made is let go of first
        missing = reading.read(match, point, headroom(n_prompt - point.n_tokens))
        if missing is None:
            break
        lost.add(missing.key)
        if not missing.is_checkpoint:
            n_tokens = missing.start
    if canary and reading.from_disk and can_step_back(model.spec, point.n_tokens):
        ids = match.ids[: point.n_tokens]
        tails = Pieces(point.n_tokens, reading.last_blocks, reading.last_windows)
        difference = canary_difference(model.model, model.spec, reading.caches, tails, ids)
        if not difference <= CANARY_TOLERANCE:
            for block in reading.from_disk:
                store.quarantine(block, f"canary: recomputed KV differs by {difference:.0%}")
            return None
    store.pool.trust(block.key for block in reading.from_disk)
    used = [node.key for node in match.path if node.start < point.n_tokens]
    store.touch(used[-1], point.parts)
    store.pool.touch(used)  # behind its parts, which are of no use without them
    return Restored(
        reading.caches,
        point.n_tokens,
        reading.n_from_disk,
        reading.join_s,
        reading.n_bytes,
        reading.disk_s,
        reading.n_disk_bytes,
    )


@dataclass(frozen=True)
class Needed:
    """Tokens [start, stop) of a block or part, counted from its first; a state has none.

    `forms` are the arrays that it must hold, `window` is that of a window part.
    """

    block: Block
    start: int
    stop: int
    forms: tuple[ArrayForm, ...]
    window: int | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(math.prod(shape) * int(dtype.size) for _, shape, dtype in self.forms)


def needed_for(path: Sequence[Block], point: Checkpoint, spec: ModelCacheSpec) -> list[Needed]:
    """Return what going on from a restore point needs, in the order in which it is read."""
    needed: list[Needed] = []
    for window, parts in point.windows.items():
        for wanted in parts:
            forms = tuple(spec.window_arrays(window, wanted.part.n_tokens))
            needed.append(Needed(wanted.part, wanted.start, wanted.stop, forms, window))
    if point.state is not None:
        needed.append(Needed(point.state, 0, 0, tuple(spec.state_arrays())))
    # Last, because without its parts a point is none, whatever was read of its blocks.
    for node in path if spec.full else ():
        n_used = min(node.stop, point.n_tokens) - node.start
        if n_used <= 0:
            break
        needed.append(Needed(node, 0, n_used, tuple(spec.block_arrays(node.n_tokens))))
    return needed


@dataclass
class _Reading:
    """Reads what a restore point needs into caches, and counts what came from disk."""

    store: BlockStore
    root: Root
    model: LoadedModel
    caches: list[Any] = field(default_factory=list)
    last_blocks: list[Piece] = field(default_factory=list)
    """Those that the canary looks at; the others need not stay in memory."""
    last_windows: dict[int, list[Piece]] = field(default_factory=dict)
    n_bytes: int = 0
    join_s: float = 0.0
    from_disk: list[Block] = field(default_factory=list)
    n_from_disk: int = 0
    """Tokens."""
    n_disk_bytes: int = 0
    disk_s: float = 0.0

    def read(self, match: Match, point: Checkpoint, headroom: int) -> Block | None:
        """Read everything; return the first that cannot be had, None when all is there."""
        spec = self.model.spec
        n_from_disk: dict[int | None, int] = {}
        needed = needed_for(match.path, point, spec)
        n_held = {
            window: sum(wanted.stop - wanted.start for wanted in parts)
            for window, parts in point.windows.items()
        }
        coming = self.store.load_all([one.block for one in needed], self.root)
        in_ram = all(one.block.key in self.store.pool for one in needed)
        with self._timed_join():
            joiner = Joiner(spec, point.n_tokens, headroom, n_held, whole=in_ram)
        for one in needed:
            started = time.perf_counter()
            loaded = self._checked(one, next(coming))
            if loaded is None:
                return one.block
            self.n_bytes += n_bytes(loaded.arrays)
            if loaded.from_disk:
                self.disk_s += time.perf_counter() - started + loaded.before_s
                self.n_disk_bytes += n_bytes(loaded.arrays)
                self.from_disk.append(one.block)
                # With nothing but states, they stand for all tokens.
                n_tokens = one.stop - one.start if one.stop or spec.full else point.n_tokens
                n_from_disk[one.window] = n_from_disk.get(one.window, 0) + n_tokens
            with self._timed_join():
                self._join(one, loaded, joiner)
        with self._timed_join():
            self.caches = joiner.finish()
        self.n_from_disk = max(n_from_disk.values(), default=0)
        return None

    def _join(self, one: Needed, loaded: Loaded, joiner: Joiner) -> None:
        if one.window is None and one.block.is_checkpoint:
            joiner.add_state(loaded.arrays)
            return
        piece = Piece(loaded.arrays, one.start, one.stop)
        joiner.add(piece, one.window)
        if one.window is None:
            self.last_blocks = trailing([*self.last_blocks, piece])
        else:
            window = self.last_windows.get(one.window, ())
            self.last_windows[one.window] = trailing([*window, piece])

    @contextmanager
    def _timed_join(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.join_s += time.perf_counter() - started

    def _checked(self, one: Needed, loaded: Loaded | None) -> Loaded | None:
        """Return what was loaded; what does not fit the model goes to quarantine instead."""
        misfit = arrays_fit(iter(one.forms), loaded.arrays) if loaded is not None else None
        if misfit is not None:
            self.store.quarantine(one.block, f"does not fit the model: {misfit}")
            return None
        return loaded
