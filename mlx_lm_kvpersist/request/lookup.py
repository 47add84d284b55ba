"""A prompt's way to restored caches: find what is stored of it, plan, prefetch, restore.

Generation thread. Whatever the store raises costs a restore, never a reply: the caller catches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..block import Block, Root, pack_ids
from ..errors import ClientGone
from ..host.prompt import Prompt
from ..match.tree import NO_MATCH, Match, match_ids, match_text, splice
from ..store.block_store import BlockStore, Prefetch
from .costs import tokens_to_reuse
from .model import LoadedModel
from .outcome import COLD, Kind, Outcome, Reason, divergence_at, why_not_stored
from .restore import Restored, restore

MIN_PREFETCH_BYTES = 8 << 20
"""Less than this is read from disk in the time of one or two steps: no request waits for it."""

MIN_STEPWISE_BYTES = 64 << 20
"""Less than this is joined in the time of one or two steps of the replies."""

_LOOK_S = 0.1
"""How often a restore looks whether its client is still there."""

_MAX_MATCHED = 3
"""Blocks can disappear between find and restore: a turn that is being saved replaces the end of the
turn before it, another server evicts, a check fails. Then the prompt is matched again, so often."""


@dataclass(frozen=True)
class Reuse:
    """The result of a lookup: the prompt to feed, and caches that hold its first tokens.

    `caches` is None when nothing is reused. `chain` are the stored blocks that the caches hold
    as a whole. `outcome` counts the tokens and says why not more were reused.
    """

    prompt: Prompt
    outcome: Outcome
    caches: list[Any] | None = None
    chain: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class _Found:
    """A prompt that begins with stored ids, of which the first `n_tokens` are worth restoring.

    `diverges`: the prompt goes on differently from what is stored, or nothing of it is. `refusal`
    then says why not all matching tokens are worth it.
    """

    prompt: Prompt
    match: Match
    diverges: bool = True
    n_tokens: int = 0
    refusal: Reason | None = None


class Lookup:
    """One prompt, from what is stored of it to the caches that hold its beginning.

    The prompt is matched when the lookup is made, and again only if blocks came or went since.
    `prompt` has replies as the ids that the model produced. `session` is what the client calls the
    conversation. `messages` are those that the prompt was rendered from, to say
    where it diverges from others.
    """

    def __init__(
        self,
        prompt: Prompt,
        root: Root,
        store: BlockStore,
        model: LoadedModel,
        *,
        canary: bool = True,
        session: str | None = None,
        messages: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.prompt, self.model = prompt, model
        self.root, self._store, self._canary = root, store, canary
        self._session, self._messages = session, messages
        # Without the text of every id the prompt is matched by ids.
        self._text = model.text.known_text(prompt.ids) if model.text else None
        self._prefetch: Prefetch | None = None
        self._steps: Generator[None, None, Reuse] | None = None
        self._reuse: Reuse | None = None
        self._spent_s = 0.0
        self._n_quarantined = store.counters.blocks_quarantined  # a prefetch finds damage, too
        self.n_shared: dict[int, tuple[object, int]] = {}
        """For `Computing`: by the id of a sequence, what its prompt has in common with this."""
        self._found = self._find()

    def _find(self) -> _Found:
        """Match the prompt with what is stored, and put the stored ids in front of it."""
        self._n_changes = self._store.n_changes
        self._nearest = NO_MATCH
        store, prompt, tokens = self._store, self.prompt, self.model.text
        prefer: set[bytes] = set()
        if self._session is not None:
            prefer = store.view.session_blocks(self.root.key, self._session)
        packed = pack_ids(prompt.ids)
        match: Match | None = None
        if tokens is not None and self._text is not None:
            source = store.ram_first(self.root.key, self._text)
            match = match_text(source, self.root.key, self._text, tokens, prefer, packed)
            self._nearest = match
            if match.n_tokens == 0:
                return _Found(prompt, match)
            if not packed.startswith(match.packed_ids):
                spliced = splice(prompt.ids, self._text, match, tokens, self.model.encode)
                if spliced is not None:
                    prompt = with_ids(prompt, spliced.ids, spliced.boundaries)
                match = replace(match, n_tokens=spliced.n_stored) if spliced is not None else None
        if match is None:
            source = store.ram_first(self.root.key, packed)
            match = match_ids(source, self.root.key, packed, prefer)
        if match.n_tokens == 0:
            return _Found(prompt, self._nearest)
        n_most = len(prompt.ids) - 1  # the last token must run, to give logits
        n_tokens, refusal = min(match.n_tokens, n_most), None
        diverges = match.n_tokens < n_most and not match.at_end
        if diverges:
            n_tokens, refusal = tokens_to_reuse(match, n_tokens, store, self.model)
        return _Found(prompt, match, diverges, n_tokens, refusal)

    @property
    def fed(self) -> Prompt:
        """The prompt that `restore` would return, as far as nothing is stored or lost meanwhile."""
        return self._found.prompt

    @property
    def n_found(self) -> int:
        """How many of its tokens are worth restoring, as far as is known now."""
        return self._found.n_tokens

    def prefetch(self) -> bool:
        """Start to read from disk what `restore` will need; False if that would not take long.

        `restore` does not depend on it: by then these blocks may be gone, or others stored.
        """
        point = self.model.saver.find(self._found.match.path, self.n_found, self._store)
        if point is None:
            return False
        needed = point.needed
        n_bytes = sum(one.n_bytes for one in needed if one.record.key not in self._store.pool)
        if n_bytes > MIN_PREFETCH_BYTES:
            wanted = [(one.record, one.n_bytes) for one in needed]
            self._prefetch = self._store.reader.prefetch(wanted, self.root)
        is_large = sum(one.n_bytes for one in needed) > MIN_STEPWISE_BYTES
        return self._prefetch is not None or is_large

    @property
    def is_begun(self) -> bool:
        """Whether `advance` has begun to restore."""
        return self._steps is not None

    def advance(self, seconds: float) -> bool:
        """Restore for about so long, if all is prefetched; tell whether nothing is left to do."""
        if self._reuse is None and (self._prefetch is None or self._prefetch.finished):
            self._run(seconds, in_steps=True)
        return self._reuse is not None

    def close(self) -> None:
        """Let go of what was prefetched and restored. Any number of times."""
        self._reuse = None
        self._steps = None  # its frame holds this and half-filled caches
        if self._prefetch is not None:
            self._prefetch.release()
            self._prefetch = None

    def restore(self, is_gone: Callable[[], bool] = lambda: False) -> Reuse:
        """Load the stored tokens into caches, as many as can be read and are worth it.

        Raises:
            ClientGone: `is_gone` said so meanwhile.
        """
        if self._prefetch is not None:
            self._prefetch.stop()  # blocks that it has not read yet are read faster from here
        try:
            while (reuse := self._reuse) is None:
                if is_gone():
                    raise ClientGone
                self._run(_LOOK_S, in_steps=False)
        finally:
            self.close()
        outcome = replace(reuse.outcome, restore_ms=self._spent_s * 1e3)
        return replace(reuse, outcome=outcome)

    def _run(self, seconds: float, *, in_steps: bool) -> None:
        """Restore for about so long, at least one step, from where it stopped."""
        started = time.perf_counter()
        if self._steps is None:
            self._steps = self._restoring(in_steps=in_steps)
        try:
            next(self._steps)
            while time.perf_counter() - started < seconds:
                next(self._steps)
        except StopIteration as end:
            self._reuse = end.value
        except BaseException:
            self._steps = None
            raise
        self._spent_s += time.perf_counter() - started

    def _restoring(self, *, in_steps: bool) -> Generator[None, None, Reuse]:
        n_wanted = n_matched = 0
        lost: set[bytes] = set()
        restored: Restored | None = None
        while restored is None:
            if self._store.n_changes != self._n_changes and n_matched < _MAX_MATCHED:
                n_matched += 1
                self._found = self._find()
            found = self._found
            n_wanted = max(n_wanted, found.n_tokens)
            path = found.match.path
            point = self.model.saver.find(path, found.n_tokens, self._store, lost)
            if point is None:
                break
            restored = yield from restore(
                point,
                found.prompt.ids,
                self.root,
                self._store,
                self.model,
                lost,
                canary=self._canary,
                in_steps=in_steps,
            )
        is_damaged = self._store.counters.blocks_quarantined > self._n_quarantined
        outcome = self._outcome(found, restored or Restored(0), n_wanted, is_damaged=is_damaged)
        if restored is None:
            return Reuse(found.prompt, outcome)
        for tier, n_bytes in restored.n_bytes.items():
            self.model.speed.restores[tier].learn(n_bytes, restored.seconds[tier])
        chain = [block for block in found.match.path if block.stop <= restored.n_tokens]
        return Reuse(found.prompt, outcome, restored.caches, chain)

    def _outcome(
        self, found: _Found, restored: Restored, n_wanted: int, *, is_damaged: bool
    ) -> Outcome:
        """Return what was reused, and why not more."""
        ids, n_reused = found.prompt.ids, restored.n_tokens
        if n_reused == 0:
            kind = Kind.MISS
        elif n_reused == len(ids) - 1:
            kind = Kind.EXACT
        elif found.match.at_end and n_reused == found.n_tokens:
            kind = Kind.EXTEND
        else:
            kind = Kind.DIVERGE
        reason: Reason | None = None
        detail = ""
        if found.diverges:
            reason, detail = why_not_stored(ids, self._text, found.match, self.root, self._store)
            if found.refusal and reason is Reason.DIVERGED:
                reason = found.refusal
        if n_reused < n_wanted:
            reason = self.model.saver.missing
        if is_damaged:
            reason = Reason.DAMAGED
        divergence, n_agreed, text = None, self._nearest.n_agreed, self._text or ""
        stored_next = self._nearest.stored_next if kind in (Kind.DIVERGE, Kind.MISS) else ""
        if stored_next and n_agreed < len(text):
            divergence = divergence_at(text, n_agreed, stored_next, self._messages)
        if reason is not Reason.OTHER_PRECISION:
            detail = ""
        read = [tier.name for tier in self._store.tiers if tier.name in restored.n_bytes]
        slowest, n_read = read[-1] if read else COLD, restored.n_read
        return Outcome(kind, len(ids), n_reused, n_read, 0.0, reason, detail, divergence, slowest)


def with_ids(prompt: Prompt, ids: list[int], boundaries: Mapping[int, int]) -> Prompt:
    """Return the prompt with other ids, cut where it was cut, as far as a token ends there.

    boundaries: number of tokens before a place in the old ids -> in the new ids.
    """
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
