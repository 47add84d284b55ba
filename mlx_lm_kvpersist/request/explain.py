"""Find out why nothing more of a prompt was stored, where that can be known."""

from __future__ import annotations

from ..cache.blocks import BLOCK_TOKENS
from ..match.keys import Root, block_key, pack_ids
from ..match.tree import Match, common_prefix
from ..store.block_store import BlockStore
from ..store.turn import Gone
from .outcome import Reason

MIN_ALIKE_CHARS = 64
MIN_ALIKE_TOKENS = 16
"""Fewer characters or tokens in common are a template's, not a conversation's."""

_MAX_ROOTS = 64


def why_not_stored(
    prompt_ids: list[int], text: str | None, match: Match, root: Root, store: BlockStore
) -> Reason:
    """Return why what follows a match is not stored: removed, elsewhere, or never saved."""
    whole = [block for block in match.path if block.stop <= match.n_tokens]
    whole = [block for block in whole if block.n_tokens == BLOCK_TOKENS]
    start = whole[-1].stop if whole else 0
    next_ids = prompt_ids[start : start + BLOCK_TOKENS]
    if next_ids:
        parent = whole[-1].key if whole else root.key
        gone = store.gone(block_key(parent, pack_ids(next_ids)))
        if gone is not None:
            return Reason.EVICTED if gone is Gone.EVICTED else Reason.DAMAGED
    if match.n_tokens >= MIN_ALIKE_TOKENS or match.n_agreed >= MIN_ALIKE_CHARS:
        return Reason.DIVERGED
    if text:
        others = store.other_roots(root, _MAX_ROOTS)
        for other in sorted(others, key=lambda other: len(_differences(root, other))):
            if _is_alike(store, other, text):
                return _differences(root, other)[0]
    return Reason.NOTHING_ALIKE


def _is_alike(store: BlockStore, root: Root, text: str) -> bool:
    return any(
        common_prefix(block.text, text, 0) >= min(MIN_ALIKE_CHARS, len(block.text))
        for block in store.children(root.key, text)
        if block.text
    )


def _differences(root: Root, other: Root) -> list[Reason]:
    """Return all that tells two roots apart; the last stands for what has no name."""
    found = []
    if (other.namespace, other.session) != (root.namespace, root.session):
        found.append(Reason.OTHER_NAMESPACE)
    if other.fingerprint != root.fingerprint:
        found.append(Reason.OTHER_MODEL)
    if other.precision != root.precision:
        found.append(Reason.OTHER_PRECISION)
    return found or [Reason.NOTHING_ALIKE]
