"""Restore stored blocks into caches, and prove that they are what the model would compute.

Runs on the generation thread. Arrays from RAM are as they were computed here. What comes from disk
has its checksum verified by the store; that it fits this model is checked by its shapes, and by a
canary: its last tokens are run again on top of the restored prefix.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..kv.blocks import block_nbytes, join_blocks
from ..kv.canary import CANARY_TOLERANCE, canary_difference
from ..kv.packed import headroom
from ..match.keys import Root
from ..match.tree import Match, Node
from ..tiers.store import BlockStore
from .model import LoadedModel

_Part = tuple[Mapping[str, mx.array], int]


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
    """Load the first `n_tokens` of a match, up to the first block that cannot be had.

    The caches get room for the rest of a prompt of `n_prompt` tokens. None when nothing is left,
    or when the canary found that the blocks are not this model's; then they go to quarantine.
    """
    parts: list[_Part] = []
    used: list[Node] = []
    from_disk: list[Node] = []
    n_reused = n_from_disk = n_bytes = n_disk_bytes = 0
    disk_s = 0.0
    for node in match.path:
        n_used = min(node.stop, n_tokens) - node.start
        if n_used <= 0:
            break
        started = time.perf_counter()
        loaded = store.load(node, root)
        if loaded is None:
            break
        misfit = model.spec.block_arrays_fit(loaded.arrays, node.n_tokens)
        if misfit is not None:
            store.quarantine(node.key, f"does not fit the model: {misfit}")
            break
        parts.append((loaded.arrays, n_used))
        used.append(node)
        n_reused += n_used
        n_bytes += block_nbytes(loaded.arrays)
        if loaded.from_disk:
            disk_s += time.perf_counter() - started
            n_disk_bytes += block_nbytes(loaded.arrays)
            from_disk.append(node)
            n_from_disk += n_used
    if not parts:
        return None
    started = time.perf_counter()
    caches = join_blocks(model.spec, parts, headroom(n_prompt - n_reused))
    join_s = time.perf_counter() - started
    if canary and from_disk:
        ids = match.ids[:n_reused]
        difference = canary_difference(model.model, model.spec, caches, parts, ids)
        if not difference <= CANARY_TOLERANCE:
            for node in from_disk:
                store.quarantine(node.key, f"canary: recomputed KV differs by {difference:.0%}")
            return None
    store.pool.touch(node.key for node in used)
    store.touch(used[-1].key)
    return Restored(caches, n_reused, n_from_disk, join_s, n_bytes, disk_s, n_disk_bytes)
