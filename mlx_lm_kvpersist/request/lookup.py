"""A prompt's way to restored caches: find what is stored of it, plan, prefetch, restore.

Generation thread. Whatever the store raises costs a restore, never a reply: the caller catches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ClientGone
from ..host.prompt import Prompt
from ..match.block import Block, Root, pack_ids
from ..match.tree import NO_MATCH, Match, match_ids, match_text, splice
from ..store.block_store import BlockStore, Prefetch
from .costs import ReusePolicy
from .model import LoadedModel
from .outcome import Kind, Outcome, Reason, divergence_at, why_not_stored
from .restore import Restored, nearest_checkpoint, restore

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

    `diverges`: the prompt goes on differently from what is stored. `refusal` then says why not all
    matching tokens are worth it.
    """

    prompt: Prompt
    match: Match
    diverges: bool
    n_tokens: int
    refusal: Reason | None = None


class Lookup:
    """One prompt, from what is stored of it to the caches that hold its beginning.

    The prompt is matched when the lookup is made, and again only if blocks came or went since.
    `prompt` is `rendered`, with replies spelled as the model spelled them. `session` is what the
    client calls the conversation. `messages` are those that the prompt was rendered from, to say
    where it diverges from others.
    """

    def __init__(
        self,
        prompt: Prompt,
        root: Root,
        store: BlockStore,
        model: LoadedModel,
        policy: ReusePolicy | None = None,
        *,
        rendered: Prompt | None = None,
        session: str | None = None,
        messages: ListLike[dict[str, Any]] = (),
    ) -> None:
        self.prompt, self.rendered = prompt, rendered or prompt
        self.model = model
        self.root, self._store, self._policy = root, store, policy or ReusePolicy()
        self._session, self._messages = session, messages
        # Without the text of every id the prompt is matched by ids.
        self._text = model.text.known_text(prompt.ids) if model.text else None
        self._prefetch: Prefetch | None = None
        self._steps: Generator[None, None, Reuse] | None = None
        self._reuse: Reuse | None = None
        self._spent_s = 0.0
        self._n_quarantined = store.counters.blocks_quarantined  # a prefetch finds damage, too
        self.n_shared: dict[int, tuple[Sequence, int]] = {}
        """For `Computing`: by the id of a sequence, what its prompt has in common with this."""
        self._find()

    def _find(self) -> None:
        """Match the prompt with what is stored, and put the stored ids in front of it."""
        self._n_changes = self._store.n_changes
        self._found: _Found | None = None
        self._nearest = NO_MATCH
        store, prompt, tokens = self._store, self.prompt, self.model.text
        prefer: set[bytes] = set()
        if self._session is not None:
            prefer = store.session_blocks(self.root, self._session)
        packed = pack_ids(prompt.ids)
        match: Match | None = None
        if tokens is not None and self._text is not None:
            source = store.hot_first(self.root.key, self._text)
            match = match_text(source, self.root.key, self._text, tokens, prefer, packed)
            self._nearest = match
            if match.n_tokens == 0:
                return
            if not packed.startswith(match.packed_ids):
                spliced = splice(prompt.ids, self._text, match, tokens, self.model.encode)
                if spliced is not None:
                    prompt = with_ids(prompt, spliced.ids, spliced.boundaries)
                match = replace(match, n_tokens=spliced.n_stored) if spliced is not None else None
        if match is None:
            source = store.hot_first(self.root.key, packed)
            match = match_ids(source, self.root.key, packed, prefer)
        if match.n_tokens == 0:
            return
        n_most = len(prompt.ids) - 1  # the last token must run, to give logits
        n_tokens, refusal = min(match.n_tokens, n_most), None
        diverges = match.n_tokens < n_most and not match.at_end
        if diverges:
            spec = self.model.spec
            n_tokens, refusal = self._policy.tokens_to_reuse(match, n_tokens, store, spec)
        self._found = _Found(prompt, match, diverges, n_tokens, refusal)

    @property
    def fed(self) -> Prompt:
        """The prompt that `restore` would return, as far as nothing is stored or lost meanwhile."""
        return self._found.prompt if self._found is not None else self.prompt

    @property
    def n_found(self) -> int:
        """How many of its tokens are worth restoring, as far as is known now."""
        return self._found.n_tokens if self._found is not None else 0

    def prefetch(self) -> bool:
        """Start to read from disk what `restore` will need; False if that would not take long.

        `restore` does not depend on it: by then these blocks may be gone, or others stored.
        """
        if self._found is None:
            return False
        path, n_tokens = self._found.match.path, self._found.n_tokens
        checkpoint = nearest_checkpoint(path, n_tokens, self._store, self.model.spec)
        if checkpoint is None:
            return False
        needed = checkpoint.needed
        n_bytes = sum(one.n_bytes for one in needed if one.block.key not in self._store.pool)
        if n_bytes > MIN_PREFETCH_BYTES:
            wanted = [(one.block, one.n_bytes) for one in needed]
            self._prefetch = self._store.prefetch(wanted, self.root)
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
        found: _Found | None = None
        restored: Restored | None = None
        while restored is None:
            if self._store.n_changes != self._n_changes and n_matched < _MAX_MATCHED:
                n_matched += 1
                self._find()
            if self._found is None:
                break
            found = self._found
            n_wanted = max(n_wanted, found.n_tokens)
            checkpoint = nearest_checkpoint(
                found.match.path, found.n_tokens, self._store, self.model.spec, lost
            )
            if checkpoint is None:
                break
            restored = yield from restore(
                checkpoint,
                found.prompt.ids,
                self.root,
                self._store,
                self.model,
                lost,
                canary=self._policy.canary,
                in_steps=in_steps,
            )
        is_damaged = self._store.counters.blocks_quarantined > self._n_quarantined
        outcome = self._outcome(found, restored, n_wanted, is_damaged=is_damaged)
        if found is None or restored is None:
            return Reuse(found.prompt if found is not None else self.prompt, outcome)
        self._policy.from_ram.learn(restored.n_bytes, restored.join_s)
        self._policy.from_disk.learn(restored.n_disk_bytes, restored.disk_s)
        chain = [block for block in found.match.path if block.stop <= restored.n_tokens]
        return Reuse(found.prompt, outcome, restored.caches, chain)

    def _outcome(
        self, found: _Found | None, restored: Restored | None, n_wanted: int, *, is_damaged: bool
    ) -> Outcome:
        """Return what was reused, and why not more."""
        prompt = found.prompt if found is not None else self.prompt
        match = found.match if found is not None else self._nearest
        n_prompt, n_reused = len(prompt.ids), restored.n_tokens if restored is not None else 0
        if n_reused == 0:
            kind = Kind.MISS
        elif n_reused == n_prompt - 1:
            kind = Kind.EXACT
        elif found is not None and match.at_end and n_reused == found.n_tokens:
            kind = Kind.EXTEND
        else:
            kind = Kind.DIVERGE
        reason: Reason | None = None
        detail = ""
        if found is None or found.diverges:
            reason, detail = why_not_stored(prompt.ids, self._text, match, self.root, self._store)
            if found is not None and found.refusal and reason is Reason.DIVERGED:
                reason = found.refusal
        if n_reused < n_wanted:
            reason = Reason.EVICTED if self.model.spec.any_prefix else Reason.NO_CHECKPOINT
        if is_damaged:
            reason = Reason.DAMAGED
        divergence, n_agreed, text = None, self._nearest.n_agreed, self._text or ""
        stored_next = self._nearest.stored_next if kind in (Kind.DIVERGE, Kind.MISS) else ""
        if stored_next and n_agreed < len(text):
            divergence = divergence_at(text, n_agreed, stored_next, self._messages)
        n_restored = restored.n_from_disk if restored is not None else 0
        if reason is not Reason.OTHER_PRECISION:
            detail = ""
        return Outcome(
            kind, n_prompt, n_reused, n_restored, 0.0, reason, detail, divergence=divergence
        )


@dataclass
class RequestState:
    """One request, from its HTTP thread to the generation thread and back.

    `session`, `namespace` and `is_kept` are set once, before the request is queued. `id` and
    `outcome` are set when the request enters, before its reply begins.
    """

    session: str | None = None
    namespace: str = ""
    is_kept: bool = True
    """Whether anything of it may be stored, on disk or in RAM."""
    id: str = ""
    outcome: Outcome | None = None
    root: Root | None = None
    """Of the tree that the request's tenant may see, once its model is loaded."""
    messages: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Those that the prompt was rendered from."""
    lookup: Lookup | None = field(default=None, repr=False)
    """The lookup of a request that waits for its prefetch. Generation thread."""
    sent: dict[str, Any] | None = field(default=None, repr=False)
    """The reply as the client got it, once it is whole. HTTP thread."""
    produced: tuple[list[int], list[int]] | None = field(default=None, repr=False)
    """The ids of the prompt and of the reply, once it has ended. Generation thread."""

    @staticmethod
    def of(request: Any) -> RequestState:
        """Return the state of a server's request, made where there is none."""
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state


@dataclass
class Sequence:
    """The tokens of a taken request while the server computes them. Generation thread.

    Of its `n_prompt` prompt tokens the first `n_reused` were restored. `chain` holds the blocks
    of its beginning that are known so far.
    """

    request: RequestState
    n_prompt: int
    n_reused: int = 0
    chain: list[Block] = field(default_factory=list, repr=False)
    n_system: int = 0
    """Tokens of the prompt's system prompt."""
    entered_s: float | None = None
    """When it was handed on to be prefilled (perf_counter); None once that is measured."""
    passing: set[bytes] = field(default_factory=set, repr=False)
    """Blocks with a checkpoint that is of use only until the prompt is computed."""
    is_computed: bool = False
    """Whether all of its prompt was computed."""

    @property
    def n_saved(self) -> int:
        """How many of its first tokens are in stored blocks."""
        return self.chain[-1].stop if self.chain else 0

    @property
    def root(self) -> Root:
        assert self.request.root is not None
        return self.request.root


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
