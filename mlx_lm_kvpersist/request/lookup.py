"""Prepare a prompt: find what is stored of it, splice the stored ids in, restore their caches.

Runs on the generation thread. Whatever goes wrong in the store costs a restore, never a reply.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from ..host.prompt import Prompt
from ..match.keys import Root, pack_ids
from ..match.splice import splice
from ..match.tree import NO_MATCH, Match, common_prefix, match_ids, match_text
from ..store.block_store import BlockStore, ReadAhead
from .checkpoints import nearest_point
from .costs import ReusePolicy
from .explain import why_not_stored
from .model import LoadedModel
from .outcome import Kind, Outcome, Parting, Reason, parting_of
from .restore import needed_for, restore
from .state import RequestState

MIN_AHEAD_BYTES = 8 << 20
"""Less than this is read from disk in the time of one or two steps: it is not worth a detour."""

_MAX_TRIES = 3
"""Blocks can go before they are read: the turn that is being written replaces the end of the one
before it, another server makes room. Then the prompt is looked up again, without them."""


@dataclass(frozen=True)
class _Found:
    """A prompt that begins with stored ids."""

    prompt: Prompt
    match: Match

    @property
    def n_reusable(self) -> int:
        """Tokens that can be reused: the last token of a prompt must run, to give logits."""
        return min(self.match.n_tokens, len(self.prompt.ids) - 1)

    @property
    def diverges(self) -> bool:
        """Whether it goes on in another way than what is stored."""
        return self.n_reusable < len(self.prompt.ids) - 1 and not self.match.at_end


def look_up(
    state: RequestState,
    prompt: Prompt,
    store: BlockStore,
    model: LoadedModel,
    policy: ReusePolicy | None = None,
    messages: list[dict[str, Any]] | None = None,
) -> Prompt:
    """Return the prompt to feed; its restored caches and the outcome are left in `state`.

    `messages` are those that the prompt was rendered from, to say where it parts from others.
    """
    assert state.root is not None
    policy = policy or ReusePolicy()
    found, nearest = _find(state, state.root, prompt, store, model)
    parting: Parting | None = None
    reason: Reason | None = None
    if model.text is not None and nearest.stored_next:
        text = model.text.decode(prompt.ids)
        if nearest.n_agreed < len(text):
            parting = parting_of(text, nearest.n_agreed, nearest.stored_next, messages or [])
    if found is None:
        whole = model.text.decode(prompt.ids) if model.text is not None else None
        reason = why_not_stored(prompt.ids, whole, nearest, state.root, store)
        state.outcome = Outcome(Kind.MISS, len(prompt.ids), reason=reason, parting=parting)
        return prompt
    n_quarantined = store.counters.blocks_quarantined
    n_wanted = 0
    started = time.perf_counter()
    for n_tries_left in reversed(range(_MAX_TRIES)):
        n_tokens, refusal = _tokens_to_reuse(found, store, model, policy)
        n_wanted = max(n_wanted, n_tokens)
        n_gone = store.counters.blocks_gone
        n_prompt = len(found.prompt.ids)
        restored = restore(
            found.match, n_tokens, n_prompt, state.root, store, model, canary=policy.canary
        )
        n_reused = restored.n_tokens if restored else 0
        if n_reused == n_tokens or store.counters.blocks_gone == n_gone or not n_tries_left:
            break
        again, _ = _find(state, state.root, prompt, store, model)
        if again is None:
            break
        found, restored = again, None  # two restores at once may be more than there is room for
    restore_ms = (time.perf_counter() - started) * 1e3
    n_found = found.n_reusable
    if found.diverges:
        reason = why_not_stored(found.prompt.ids, None, found.match, state.root, store)
        reason = refusal if refusal and reason is Reason.PARTED else reason
    if n_reused < n_wanted:
        if store.counters.blocks_quarantined > n_quarantined:
            reason = Reason.QUARANTINED
        else:
            reason = Reason.EVICTED if model.spec.any_prefix else Reason.NO_POINT
    if restored is not None:
        state.restored = (restored.caches, n_reused)
        state.chain = [node for node in found.match.path if node.stop <= n_reused]
        policy.costs.learn_restore(
            restored.join_s, restored.n_bytes, restored.disk_s, restored.n_disk_bytes
        )
    if n_reused == 0:
        kind = Kind.MISS
    elif n_reused == n_prompt - 1:
        kind = Kind.EXACT
    elif found.match.at_end and n_reused == n_found:
        kind = Kind.EXTEND
    else:
        kind = Kind.DIVERGE
    if kind in (Kind.EXACT, Kind.EXTEND):
        parting = None
    state.outcome = Outcome(
        kind,
        n_prompt,
        n_reused,
        restored.n_from_disk if restored else 0,
        restore_ms,
        reason,
        parting=parting,
    )
    return found.prompt


def read_ahead(
    state: RequestState, prompt: Prompt, store: BlockStore, model: LoadedModel, policy: ReusePolicy
) -> ReadAhead | None:
    """Begin to read what `look_up` will want of a prompt from disk, unless that is little.

    Nothing depends on its answer: by then other blocks may be stored, or these be gone.
    """
    assert state.root is not None
    found, _ = _find(state, state.root, prompt, store, model)
    if found is None:
        return None
    n_tokens, _ = _tokens_to_reuse(found, store, model, policy)
    point = nearest_point(found.match.path, n_tokens, store, model.spec)
    if point is None:
        return None
    needed = needed_for(found.match.path, point, model.spec)
    n_missing_bytes = sum(one.n_bytes for one in needed if one.what.key not in store.pool)
    if n_missing_bytes <= MIN_AHEAD_BYTES:
        return None
    return store.read_ahead([(one.what, one.n_bytes) for one in needed], state.root)


def _tokens_to_reuse(
    found: _Found, store: BlockStore, model: LoadedModel, policy: ReusePolicy
) -> tuple[int, Reason | None]:
    """Return how many of the tokens that were found to reuse, and why not all."""
    if not found.diverges:
        return found.n_reusable, None
    return policy.tokens_to_reuse(found.match, found.n_reusable, store, model.spec)


def _find(
    state: RequestState, root: Root, prompt: Prompt, store: BlockStore, model: LoadedModel
) -> tuple[_Found | None, Match]:
    """Return the prompt with stored ids in front, if any are, and the nearest stored branch."""
    prefer = store.session_blocks(root, state.session) if state.session is not None else set()
    nearest = NO_MATCH
    if model.text is not None and model.text.covers(prompt.ids):
        text = model.text.decode(prompt.ids)
        nearest = match_text(store, root.key, text, model.text, prefer)
        if nearest.n_tokens == 0:
            return None, nearest
        spliced = splice(prompt.ids, text, nearest, model.text, model.encode)
        if spliced is not None:
            segmented = _cut_segments(prompt, spliced.ids, spliced.boundaries)
            used = replace(nearest, n_tokens=spliced.n_stored)
            return _Found(segmented, used), nearest
    match = match_ids(store, root.key, pack_ids(prompt.ids), prefer)
    return (_Found(prompt, match) if match.n_tokens else None), nearest


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


def respelled_prompt(prompt: Prompt, text: str, model: LoadedModel) -> Prompt:
    """Return the prompt that `text`, another spelling of it, encodes to, cut where it was cut.

    A cut is found again by the text before it, or by the text behind it.
    """
    assert model.text is not None
    ids = model.encode(text)
    if not model.text.covers((*ids, *prompt.ids)):
        return prompt
    old_ends = [0, *model.text.n_bytes_ends(prompt.ids)]
    new_ends = [0, *model.text.n_bytes_ends(ids)]
    from_start = {end: i for i, end in enumerate(new_ends)}
    from_end = {new_ends[-1] - end: i for i, end in enumerate(new_ends)}
    n_same = common_prefix(text, model.text.decode(prompt.ids), 0)
    n_same_bytes = len(text[:n_same].encode())
    boundaries = {}
    for i, end in enumerate(old_ends):
        place = from_start.get(end) if end <= n_same_bytes else from_end.get(old_ends[-1] - end)
        if place is not None:
            boundaries[i] = place
    return _cut_segments(prompt, ids, boundaries)
