"""Prepare a prompt: find what is stored of it, splice the stored ids in, restore their caches.

Runs on the generation thread. Whatever goes wrong in the store costs a restore, never a reply.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ..host.prompt import Prompt
from ..match.keys import Root, pack_ids
from ..match.splice import splice
from ..match.tree import Match, match_ids, match_text
from ..tiers.store import BlockStore
from .model import LoadedModel
from .request import Kind, Outcome, RequestState
from .restore import restore


@dataclass(frozen=True)
class _Found:
    """A prompt that begins with stored ids."""

    prompt: Prompt
    match: Match


def look_up(
    state: RequestState,
    prompt: Prompt,
    store: BlockStore,
    model: LoadedModel,
    *,
    canary: bool = True,
) -> Prompt:
    """Return the prompt to feed; its restored caches and the outcome are left in `state`."""
    assert state.root is not None
    found = _find(state, state.root, prompt, store, model)
    if found is None:
        state.outcome = Outcome(Kind.MISS, n_prompt=len(prompt.ids))
        return prompt
    n_prompt = len(found.prompt.ids)
    # The last token must run, to give logits.
    n_tokens = min(found.match.n_tokens, n_prompt - 1)
    started = time.perf_counter()
    restored = restore(found.match, n_tokens, n_prompt, state.root, store, model, canary=canary)
    restore_ms = (time.perf_counter() - started) * 1e3
    if restored is None:
        state.outcome = Outcome(Kind.MISS, n_prompt, restore_ms=restore_ms)
        return found.prompt
    state.restored = (restored.caches, restored.n_tokens)
    if restored.n_tokens == n_prompt - 1:
        kind = Kind.EXACT
    elif found.match.at_end and restored.n_tokens == n_tokens:
        kind = Kind.EXTEND
    else:
        kind = Kind.DIVERGE
    state.outcome = Outcome(kind, n_prompt, restored.n_tokens, restored.n_from_disk, restore_ms)
    return found.prompt


def _find(
    state: RequestState, root: Root, prompt: Prompt, store: BlockStore, model: LoadedModel
) -> _Found | None:
    prefer: set[bytes] = set()
    if state.session is not None:
        prefer.update(store.session_leaves(root, state.session))
    if model.text is not None:
        text = model.text.decode(prompt.ids)
        match = match_text(store, root.key, text, model.text, prefer)
        if match.n_tokens == 0:
            return None
        spliced = splice(prompt.ids, text, match, model.text, model.encode)
        if spliced is not None:
            return _Found(_cut_segments(prompt, spliced.ids, spliced.boundaries), match)
    match = match_ids(store, root.key, pack_ids(prompt.ids), prefer)
    return _Found(prompt, match) if match.n_tokens else None


def _cut_segments(prompt: Prompt, ids: list[int], boundaries: dict[int, int]) -> Prompt:
    """Cut `ids` where the rendered prompt was cut, as far as that is a token boundary."""
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
