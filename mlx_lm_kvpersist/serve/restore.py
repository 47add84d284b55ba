"""Restore stored blocks into caches, and prove that they are what the model would compute.

Runs on the generation thread. Arrays from RAM are as they were computed here. What comes from disk
has its checksum verified by the store; that it fits this model is checked by its shapes, and by a
canary: its last tokens are run again on top of the restored prefix.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..kv.blocks import block_nbytes, join_blocks
from ..match.keys import Root
from ..match.tree import Match, Node
from ..tiers.store import BlockStore
from .model import LoadedModel

CANARY_TOKENS = 8
CANARY_TOLERANCE = 0.25
"""Most that recomputed KV may differ from stored, as a share of its size.

Arithmetic noise moves few values to the next of 16 steps: some percent. KV of other tokens, other
positions or another model differs by its whole size.
"""

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
    headroom = min(max(n_prompt - n_reused + 256, 512), 1024)
    started = time.perf_counter()
    caches = join_blocks(model.spec, parts, headroom)
    join_s = time.perf_counter() - started
    if canary and from_disk:
        difference = canary_difference(caches, parts, match.ids[:n_reused], model)
        if not difference <= CANARY_TOLERANCE:
            for node in from_disk:
                store.quarantine(node.key, f"canary: recomputed KV differs by {difference:.0%}")
            return None
    store.pool.touch(node.key for node in used)
    store.touch(used[-1].key)
    return Restored(caches, n_reused, n_from_disk, join_s, n_bytes, disk_s, n_disk_bytes)


def canary_difference(
    caches: list[Any], parts: Sequence[_Part], ids: list[int], model: LoadedModel
) -> float:
    """Run the last tokens of restored caches again; return how far their KV is off, 0 for not.

    That is the largest, over layers, keys and values, of the median over tokens of the difference,
    as a share of the stored values' size. The caches hold the stored values again afterwards.
    """
    n_tokens = min(CANARY_TOKENS, len(ids))
    start, stop = len(ids) - n_tokens, len(ids)
    stored = _tail(parts, n_tokens)
    for cache in caches:
        cache.trim(n_tokens)
    model.model(mx.array([ids[start:]]), cache=caches)
    differences = []
    for group in model.spec.groups:
        for part in ("k", "v"):
            names = [f"{group.name}.{part}.{field}" for field in ("weights", "scales", "biases")]
            for i, layer in enumerate(group.layers):
                old = tuple(stored[name][i : i + 1] for name in names)
                new = caches[layer].packed(start, stop)[part == "v"]
                differences.append(_difference(old, new, model))
    worst = float(mx.max(mx.stack(differences)))
    _write_back(caches, stored, start, stop, model)
    return worst


def _difference(old: Any, new: Any, model: LoadedModel) -> mx.array:
    """Return the median over tokens of |new - old| / |old|; both are packed, [1, H, n, D]."""
    precision = model.spec.precision
    plain_old, plain_new = (
        mx.dequantize(
            weights, scales, biases, group_size=precision.group_size, bits=precision.bits
        ).astype(mx.float32)
        for weights, scales, biases in (old, new)
    )
    error = mx.square(plain_new - plain_old).sum(axis=(0, 1, 3))
    size = mx.square(plain_old).sum(axis=(0, 1, 3))
    ratio = mx.sqrt(error / (size + 1e-12))
    return mx.sort(ratio)[ratio.shape[0] // 2]


def _tail(parts: Sequence[_Part], n_tokens: int) -> dict[str, mx.array]:
    """Return the last `n_tokens` of joined blocks, [L, H, n_tokens, ...] by array name."""
    pieces: list[tuple[Mapping[str, mx.array], int, int]] = []
    for arrays, n_used in reversed(parts):
        n_taken = min(n_used, n_tokens)
        pieces.insert(0, (arrays, n_used - n_taken, n_used))
        n_tokens -= n_taken
        if n_tokens == 0:
            break
    return {
        name: mx.concatenate([arrays[name][:, :, a:b] for arrays, a, b in pieces], axis=2)
        for name in pieces[0][0]
    }


def _write_back(
    caches: list[Any], stored: Mapping[str, mx.array], start: int, stop: int, model: LoadedModel
) -> None:
    """Put the stored values back, so that nothing depends on whether there was a canary."""
    for group in model.spec.groups:
        for i, layer in enumerate(group.layers):
            for part, packed in (("k", caches[layer].keys), ("v", caches[layer].values)):
                for field, buffer in zip(("weights", "scales", "biases"), packed, strict=True):
                    value = stored[f"{group.name}.{part}.{field}"][i : i + 1]
                    buffer[:, :, start:stop] = value
    mx.eval([cache.state for cache in caches])
