"""Prepare a prompt: find what is stored of it, splice the stored ids in, restore their caches.

Runs on the generation thread. Whatever goes wrong in the store costs a restore, never a reply.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from ..host.prompt import Prompt
from ..kv.blocks import join_blocks
from ..match.keys import pack_ids
from ..match.splice import splice
from ..match.tree import Match, Node, match_ids, match_text
from ..tiers.store import BlockStore
from .model import LoadedModel
from .request import Kind, Outcome, RequestState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Found:
    """A prompt that begins with stored ids."""

    prompt: Prompt
    match: Match


def look_up(
    state: RequestState, prompt: Prompt, store: BlockStore, model: LoadedModel
) -> Prompt:
    """Return the prompt to feed; its restored caches and the outcome are left in `state`."""
    found = _find(state, prompt, store, model)
    if found is None:
        state.outcome = Outcome(Kind.MISS, n_prompt=len(prompt.ids))
        return prompt
    # The last token must run, to give logits.
    n_tokens = min(found.match.n_tokens, len(found.prompt.ids) - 1)
    started = time.perf_counter()
    n_reused, n_restored = _restore(state, found, n_tokens, store, model)
    restore_ms = (time.perf_counter() - started) * 1e3
    if n_reused == 0:
        kind = Kind.MISS
    elif n_reused == len(found.prompt.ids) - 1:
        kind = Kind.EXACT
    elif found.match.at_end and n_reused == n_tokens:
        kind = Kind.EXTEND
    else:
        kind = Kind.DIVERGE
    state.outcome = Outcome(kind, len(found.prompt.ids), n_reused, n_restored, restore_ms)
    return found.prompt


def _find(
    state: RequestState, prompt: Prompt, store: BlockStore, model: LoadedModel
) -> _Found | None:
    prefer: set[bytes] = set()
    if state.session is not None:
        prefer.update(store.index.session_leaves(state.root, state.session))
    if model.text is not None:
        text = model.text.decode(prompt.ids)
        match = match_text(store, state.root, text, model.text, prefer)
        if match.n_tokens == 0:
            return None
        spliced = splice(prompt.ids, text, match, model.text, model.encode)
        if spliced is not None:
            return _Found(_cut_segments(prompt, spliced.ids, spliced.boundaries), match)
    match = match_ids(store, state.root, pack_ids(prompt.ids), prefer)
    return _Found(prompt, match) if match.n_tokens else None


def _cut_segments(prompt: Prompt, ids: list[int], boundaries: dict[int, int]) -> Prompt:
    """Cut `ids` where the rendered prompt was cut, as far as the cuts are still token boundaries."""
    segments, types = [], []
    start = end = 0
    for segment, segment_type in zip(prompt.segments, prompt.segment_types, strict=True):
        end += len(segment)
        stop = len(ids) if end == len(prompt.ids) else boundaries.get(end)
        if stop is not None and stop > start:
            segments.append(ids[start:stop])
            types.append(segment_type)
            start = stop
    return replace(prompt, ids=ids, segments=segments, segment_types=types)


def _restore(
    state: RequestState, found: _Found, n_tokens: int, store: BlockStore, model: LoadedModel
) -> tuple[int, int]:
    """Load the matched blocks up to the first that cannot be had; return reused and from disk."""
    parts, n_reused, n_restored = [], 0, 0
    used: list[Node] = []
    for node in found.match.path:
        n_used = min(node.stop, n_tokens) - node.start
        if n_used <= 0:
            break
        loaded = store.load(node, state.root)
        if loaded is None:
            break
        misfit = model.spec.block_arrays_fit(loaded.arrays, node.n_tokens)
        if misfit is not None:
            logger.warning("block %s does not fit the model: %s", node.key.hex(), misfit)
            break
        parts.append((loaded.arrays, n_used))
        used.append(node)
        n_reused += n_used
        n_restored += n_used if loaded.from_disk else 0
    if not parts:
        return 0, 0
    n_rest = len(found.prompt.ids) - n_reused
    headroom = min(max(n_rest + 256, 512), 1024)
    state.restored = (join_blocks(model.spec, parts, headroom), n_reused)
    store.pool.touch(node.key for node in used)
    store.touch(used[-1].key)
    return n_reused, n_restored
