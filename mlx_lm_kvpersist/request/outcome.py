"""How much a request reused, and why not more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..block import Root, block_key, pack_ids
from ..cache.blocks import BLOCK_TOKENS
from ..cache.geometry.precision import layout_in_words
from ..match.tree import SHOWN_CHARS, Match, common_prefix
from ..store.block_store import BlockStore
from ..store.records import Gone

MIN_ALIKE_CHARS = 64
MIN_ALIKE_TOKENS = 16
"""If fewer characters or tokens match, they belong to the template, not to a conversation."""

_MAX_ROOTS = 64


class Kind(Enum):
    """How a prompt relates to what is stored."""

    EXACT = "EXACT"
    """All but the last token are stored."""
    EXTEND = "EXTEND"
    """The prompt continues a stored conversation."""
    DIVERGE = "DIVERGE"
    """The prompt begins as a stored conversation does, and continues differently."""
    MISS = "MISS"
    """Nothing of the prompt was reused."""
    STOCK = "STOCK"
    """The plugin does not store the prompt: the stock server uses its own prompt cache."""


PENDING = "outcome=PENDING"
"""The header of a stream that begins before its prompt is looked up."""
COLD = "cold"
"""The tier in the outcome if nothing of the prompt is reused."""


class Reason(Enum):
    """The reason why no more was reused: a word for programs, and a clause for people."""

    NOTHING_ALIKE = "new", "nothing stored begins like this"
    DIVERGED = "diverged", "the prompt diverges from what is stored"
    OTHER_MODEL = "other-model", "stored for another model"
    OTHER_PRECISION = "other-precision", "stored in another KV precision"
    OTHER_NAMESPACE = "new", "stored in another namespace or session"
    """Only the operator sees this; a reply shows `NOTHING_ALIKE` instead."""
    EVICTED = "evicted", "evicted to keep to the budget"
    DAMAGED = "damaged", "a stored file failed its check and is in quarantine"
    NOT_WORTH_IT = "not-worth-it", "restoring would take longer than computing"
    NO_CHECKPOINT = "no-checkpoint", "the model can resume only at an earlier checkpoint"
    OTHER_RANK = "other-rank", "another rank of the model has less of the prompt"
    STORE_FAILED = "store-failed", "the store could not be read, the log says why"
    NOT_KEPT = "not-kept", "this request is served as the stock server does"

    def __init__(self, word: str, text: str) -> None:
        self.word = word
        self.text = text


@dataclass(frozen=True)
class Divergence:
    """Where a prompt diverges from the nearest stored branch.

    `char` counts in the whole rendered prompt. `message` is the index of its message, `role` the
    message's role, and `message_char` the character in the content; all None between messages.
    `stored` and `asked` are the next characters of the stored text and of the prompt.
    """

    char: int
    message: int | None
    role: str | None
    message_char: int | None
    stored: str
    asked: str


@dataclass(frozen=True)
class Outcome:
    """How much a request reused: `n_reused` of `n_prompt` tokens.

    `n_restored` of them were read from tiers below RAM. `tier` is the slowest tier of these,
    or `COLD`.
    """

    kind: Kind
    n_prompt: int
    n_reused: int = 0
    n_restored: int = 0
    restore_ms: float = 0.0
    reason: Reason | None = None
    detail: str = ""
    divergence: Divergence | None = None
    tier: str = COLD

    @property
    def header(self) -> str:
        """The value of the X-KVPersist response header. It holds no text of the prompt."""
        reason = f"; reason={self.reason.word}" if self.reason else ""
        return (
            f"outcome={self.kind.value}; tier={self.tier}; reused={self.n_reused}; "
            f"restored={self.n_restored}; restore_ms={self.restore_ms:.1f}{reason}"
        )

    def sentence(self, session: str | None, *, is_kept: bool = True) -> str:
        """Return what happened in one sentence for people; `session` is the conversation's name."""
        why = self.detail or (self.reason.text if self.reason else "")
        if self.kind is Kind.STOCK:
            clauses = [f"served as the stock server does: {why}"]
        elif self.n_reused == 0:
            clauses = [f"computed all {self.n_prompt:,} tokens" + (f": {why}" if why else "")]
        else:
            source = "RAM"
            if self.n_restored:
                is_all = self.n_restored >= self.n_reused
                source = self.tier if is_all else f"RAM and {self.tier}"
                source += f" in {self.restore_ms:,.0f} ms"
            clauses = [
                f"reused {self.n_reused:,} of {self.n_prompt:,} tokens from {source}",
                f"{self.n_prompt - self.n_reused:,} computed" + (f" ({why})" if why else ""),
            ]
        if not is_kept:
            clauses.append("not kept")
        if session:
            clauses.append(f"session {json.dumps(session[:80], ensure_ascii=False)}")
        return ", ".join(clauses)


def divergence_at(
    text: str, nearest: Match, messages: Sequence[dict[str, Any]]
) -> Divergence | None:
    """Find, by its content, the message with a prompt's first character that is not stored.

    None if the prompt or the stored text ends there.
    """
    n_agreed = nearest.n_agreed
    prompt_next = text[n_agreed : n_agreed + SHOWN_CHARS]
    if not prompt_next or not nearest.stored_next:
        return None
    texts = nearest.stored_next, prompt_next
    position = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            continue
        start = text.find(content, position)
        if start < 0:  # a template may trim
            content = content.strip()
            start = text.find(content, position)
        if start < 0:
            continue
        if n_agreed < start:
            break
        position = start + len(content)
        if n_agreed < position:
            char = n_agreed - start
            return Divergence(n_agreed, index, message.get("role"), char, *texts)
    return Divergence(n_agreed, None, None, None, *texts)


def why_not_stored(
    prompt_ids: Sequence[int],
    text: str | None,
    match: Match,
    root: Root,
    store: BlockStore,
    before: tuple[Reason, str] | None = None,
) -> tuple[Reason, str]:
    """Return why the text after a match is not stored: it was removed, is stored under another
    root, or was never saved.

    The returned text, unless it is "", replaces the reason's own text. The tenant's own blocks are
    compared first, so that the word in a reply does not depend on other tenants. If `before`, an
    earlier answer for the same prompt, is given, other trees are not searched again.
    """
    used = (block for block in match.path if block.stop <= match.n_tokens)
    full = [block for block in used if block.n_tokens == BLOCK_TOKENS]
    start = full[-1].stop if full else 0
    next_ids = prompt_ids[start : start + BLOCK_TOKENS]
    if next_ids:
        parent = full[-1].key if full else root.key
        gone = store.disk.gone.get(block_key(parent, pack_ids(next_ids)))
        if gone is not None:
            return (Reason.EVICTED if gone is Gone.EVICTED else Reason.DAMAGED), ""
    if match.n_tokens >= MIN_ALIKE_TOKENS or match.n_agreed >= MIN_ALIKE_CHARS:
        return Reason.DIVERGED, ""
    if before is not None:
        return before
    if text:
        largest = store.view.roots(_MAX_ROOTS)
        of_tenant = largest if len(largest) < _MAX_ROOTS else store.view.roots(_MAX_ROOTS, root)
        trees = (tree for tree, _ in of_tenant if tree.shares_tenant(root))
        own = [tree for tree in trees if tree.with_text]
        for tree in sorted(own, key=lambda tree: tree.fingerprint != root.fingerprint):
            if tree.key == root.key or not _begins_alike(tree, text, store):
                continue
            if tree.fingerprint != root.fingerprint:
                return Reason.OTHER_MODEL, ""
            stored, live = map(layout_in_words, (tree.layout, root.layout))
            stored += ", in an older form or other groups" if stored == live else ""
            reason = Reason.OTHER_PRECISION
            return reason, f"{reason.text}: {stored}; now {live}"
        for tree, _ in largest:
            if not tree.shares_tenant(root) and _begins_alike(tree, text, store):
                return Reason.OTHER_NAMESPACE, ""
    return Reason.NOTHING_ALIKE, ""


def _begins_alike(root: Root, text: str, store: BlockStore) -> bool:
    """Whether a block below a root begins like a text, for more characters than a template has."""
    return any(
        block.text and common_prefix(block.text, text, 0) >= min(MIN_ALIKE_CHARS, len(block.text))
        for block in store.children(root.key, text)
    )
