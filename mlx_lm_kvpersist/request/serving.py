"""Requests for the loaded model: looked up, restored, recorded, saved, remembered.

Generation thread, except what counts tokens (`ServedRequest.__init__`), `Serving.finish` and
`Serving.remember`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from secrets import token_hex
from threading import Event
from typing import Any

from ..block import Block, Root
from ..cache.blocks.cut_join import BLOCK_TOKENS
from ..errors import ClientGone, RequestRefused
from ..host.answers import REPLY, ClientRequest, Prepared, Prompt, TakenRequest
from ..match.tree import common_prefix
from ..ranks import ranks
from ..store.block_store import BlockStore
from ..store.records import Leaf
from .checkpoint_saver import MIN_TOKENS_BETWEEN
from .lookup import Lookup, Reuse
from .memory import Claim, Memory
from .model import LoadedModel
from .outcome import Kind, Outcome, Reason
from .replies import remember, retokenize
from .saver import insert
from .sharing import fetch_ahead

_ORDER = count()
"""Of the requests, as they come."""

LAST_PART_S = 2.0
"""How long the last part of a reply waits at most until what its client has read is on disk."""
MIN_SHARED = 2 * BLOCK_TOKENS
"""Fewer common tokens are computed twice: waiting for them would take as long."""

logger = logging.getLogger(__name__)


@dataclass
class RequestState:
    """One request, from its HTTP thread to the generation thread and back.

    `session`, `namespace` and `is_kept` are set once, before the request is queued, and `outcome`
    before its reply begins.
    """

    session: str | None = None
    namespace: str = ""
    note: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For people: the `client`, and the first `words` of its user."""
    is_kept: bool = True
    """Whether anything of it may be stored, on disk or in RAM."""
    id: str = field(default_factory=lambda: f"kvp-{token_hex(8)}")
    """Random: a number that grows would tell how many requests the server gets."""
    outcome: Outcome | None = None
    saved_s: float | None = None
    """How long the tokens that it reused take to compute, where that is known."""
    n_prompt: int = 0
    """Tokens of its prompt, where stock serves it."""
    root: Root | None = None
    """Of the tree that the request's tenant may see, once its model is loaded."""
    messages: Sequence[dict[str, Any]] = field(default=(), repr=False)
    """Those that the prompt was rendered from."""
    fetched: str = ""
    """What is to be said of the fetch from the shared tier, if anything."""
    lookup: Lookup | None = field(default=None, repr=False)
    """The lookup of a request that has not entered. Generation thread."""
    sent: dict[str, Any] | None = field(default=None, repr=False)
    """The reply as the client got it, once it is whole. HTTP thread."""
    produced: tuple[Sequence[int], Sequence[int]] | None = field(default=None, repr=False)
    """The ids of the prompt and of the reply, once it has ended. Generation thread."""
    is_over: bool = False
    """Whether the reply has ended, or was given up."""
    is_saved: Event | None = field(default=None, repr=False)
    """Set when a reply that has ended was handed to the store; None for a prompt not served."""
    ended: RunningSequence | None = field(default=None, repr=False)
    """The sequence that was handed to the store, until its client has the reply."""
    remembered: frozenset[bytes] = field(default=frozenset(), repr=False)
    """The keys that the ids of the reply are found by."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what other ranks are told."""
        names = ("session", "namespace", "is_kept")
        return {name: getattr(self, name) for name in names} | {"note": dict(self.note)}

    def __setstate__(self, told: dict[str, Any]) -> None:
        self.__init__(**told)  # type: ignore[misc]

    @staticmethod
    def of(request: Any) -> RequestState:
        """Return the state of a server's request, made where there is none."""
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state


@dataclass(eq=False)
class RunningSequence:
    """The tokens of a taken request while the server computes them. Generation thread.

    Of its `n_prompt` prompt tokens, the `ids`, the first `n_reused` were restored. `chain` holds
    the blocks of its beginning that are known so far.
    """

    request: RequestState
    n_prompt: int
    n_reused: int = 0
    chain: list[Block] = field(default_factory=list, repr=False)
    n_system: int = 0
    """Tokens of the prompt's system prompt."""
    ids: Sequence[int] = field(default=(), repr=False)
    is_computed: bool = False
    """Whether all of its prompt was computed."""
    draft: RunningSequence | None = None
    """The same tokens in the caches of the draft model."""
    is_draft: bool = False

    @property
    def n_saved(self) -> int:
        """How many of its first tokens are in stored blocks."""
        return self.chain[-1].stop if self.chain else 0

    @property
    def root(self) -> Root:
        assert self.request.root is not None
        return self.request.root

    def leaf(self, chain: Sequence[Block], replaced: Iterable[tuple[bytes, bytes]] = ()) -> Leaf:
        """Return the end of its conversation, whose blocks are `chain`."""
        end, said = chain[-1], self.request
        note = {k: text for k, text in said.note.items() if k != "words" or self.root.with_text}
        moved, is_session = tuple(replaced), not self.is_draft
        return Leaf(said.session, end.key, end.stop, moved, note, said.messages, is_session)


@dataclass
class Serving:
    """What the plugin does for the requests of one loaded model.

    `record` logs and keeps the outcome of a request. `isolated`: whether sessions share nothing. A
    waiting request may be worked on for `step_s` between two steps of the replies. `computing` are
    those whose prompts are being computed, and some that have been.
    """

    store: BlockStore
    model: LoadedModel
    record: Callable[[RequestState, Outcome], None]
    isolated: bool
    step_s: float
    memory: Memory
    computing: list[RunningSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory.serve(self.model)

    def root_of(self, state: RequestState, model: LoadedModel | None = None) -> Root:
        """Return the root of the model's tree, or another's, that the request's tenant may see."""
        session = (state.session or "") if self.isolated else ""
        root = (model or self.model).root
        return replace(root, namespace=state.namespace, session=session)

    def keeps(self, state: RequestState) -> bool:
        """Whether what is computed of a request is kept, and another one can find it."""
        return state.is_kept and (state.session is not None or not self.isolated)

    def fetch(self, state: RequestState, prompt: Prompt) -> None:
        """Bring what the shared tier has of a prompt into RAM. HTTP thread, which waits for it."""
        if self.store.shared is not None and self.keeps(state):
            state.fetched = fetch_ahead(prompt, self.root_of(state), self.store, self.model)

    def save(
        self, sequence: RunningSequence, tokens: Sequence[int], caches: list[Any], cache_type: str
    ) -> None:
        """Save the computed part of a sequence; a draft model's caches come last in `caches`."""
        n_layers, parts = len(self.model.spec.template), [(sequence, self.model)]
        if sequence.draft is not None and self.model.draft is not None:
            parts.append((sequence.draft, self.model.draft))
        for one, model in parts:
            its = caches[:n_layers] if model is self.model else caches[n_layers:]
            try:
                insert(one, tokens, its, cache_type, self.store, model)
            except Exception:
                logger.exception("kvpersist: a turn could not be saved")
        self.remember(sequence.request)

    def finish(self, state: RequestState) -> None:
        """Wait until enough of a turn is on disk; its reply was sent but for the end. HTTP thread.

        A kill then loses at most a block of its prompt, and the last one of the reply.
        """
        ends_s = time.monotonic() + LAST_PART_S
        if state.is_saved is not None:
            state.is_saved.wait(LAST_PART_S)
        self.remember(state)
        ended, state.ended = state.ended, None
        parts = [one for one in (ended, ended.draft if ended else None) if one and one.chain]

        def is_safe() -> bool:
            unwritten = self.store.writer.unwritten()
            return not any(self._is_at_risk(one, unwritten) for one in parts)

        if parts and not is_safe():
            self.store.writer.finish(is_safe, max(0.0, ends_s - time.monotonic()))

    def _is_at_risk(self, sequence: RunningSequence, unwritten: Collection[bytes]) -> bool:
        """Say whether a kill would lose more of a turn than it may."""
        chain, n_prompt, are_ids_lost = sequence.chain, sequence.n_prompt, False
        end = chain[-1]
        if not sequence.is_draft:  # without its ids a reply is not found
            are_ids_lost = not sequence.request.remembered.isdisjoint(unwritten)
        if not self.model.spec.any_prefix:  # without what is at its end none of it is of use
            return are_ids_lost or end.key in unwritten
        start = next((one.start for one in chain if one.key in unwritten), end.stop)
        start = min(start, n_prompt) if are_ids_lost else start
        n_most = 2 * BLOCK_TOKENS if start < n_prompt else BLOCK_TOKENS
        return n_prompt - start > BLOCK_TOKENS or end.stop - start >= n_most

    def remember(self, state: RequestState) -> None:
        """Remember a reply as soon as its ids are known, and again when it was sent. Any thread."""
        produced, sent, root = state.produced, state.sent, state.root
        # Another model may have been loaded since.
        if not produced or root is None or root.fingerprint != self.model.fingerprint:
            return
        if sent is not None:
            state.produced = None
        keys = remember(state.messages, *produced, sent, root, self.store, self.model)
        state.remembered |= frozenset(keys)


class ServedRequest(TakenRequest):
    """One request for the loaded model, from the look-up to the saved reply."""

    def __init__(self, serving: Serving, request: ClientRequest, prompt: Prompt) -> None:
        super().__init__(prompt)
        self._serving, self._request, self._rendered = serving, request, prompt
        self._state = state = RequestState.of(request)
        if state.lookup is not None:
            state.lookup.close()  # of a prompt for the model before this one
            state.lookup = None
        self._sequence: RunningSequence | None = None
        self._order = next(_ORDER)
        self._waits: bool | None = None
        self._has_guessed = False
        self._n_shared: dict[RunningSequence, int] = {}
        state.messages = prompt.messages
        self._root = state.root = serving.root_of(state)
        self._look_up()
        self._claim = self._claimed()

    def _look_up(self) -> None:
        state, store, model = self._state, self._serving.store, self._serving.model
        if not ranks().decides:
            return
        try:
            fed = retokenize(self._rendered, self._root, store, model)
            state.lookup = Lookup(fed, self._root, store, model)
            self.prompt = state.lookup.found.prompt
        except Exception:
            logger.exception("kvpersist: the prompt could not be looked up")

    def _common(self, lookup: Lookup | None) -> Lookup | None:
        """Return the lookup of what rank 0 has found, on each rank its own."""
        if not (together := ranks()).are_several:
            return lookup
        found = together.first(
            lambda: lookup.agreed() if lookup is not None else None, "what is restored"
        )
        if found is None or together.decides:
            return lookup
        prompt, n_worth = found
        model = replace(self._serving.model, text=None)
        return Lookup(prompt, self._root, self._serving.store, model, n_worth=n_worth)

    def _claimed(self) -> Claim:
        state, request = self._state, self._request
        n_tokens = len(self.prompt.ids)
        return Claim(
            self._order, n_tokens, lambda: state.is_over or request.client_gone, state.lookup
        )

    def advance(self) -> bool:
        """Wait for memory, then for what is restored. Raises RequestRefused where it must not."""
        lookup, memory = self._state.lookup, self._serving.memory
        if not memory.admits(self._claim):
            if memory.refuses and self._sequence is None:
                memory.waiting.remove(self._claim)
                raise RequestRefused("no memory is free for this prompt now; try again soon", 503)
            return False
        if lookup is None:
            return True
        others = self._serving.computing, self._n_shared
        if self._waits is None:
            self._waits = lookup.prefetch() or awaits_another(lookup, *others)
        if not self._waits:
            return True
        is_free = lookup.is_begun or not awaits_another(lookup, *others)
        return is_free and lookup.advance(self._serving.step_s)

    def enter(self) -> Prepared:
        """Restore what is stored of the prompt, and record the outcome. Raises ClientGone."""
        state, serving = self._state, self._serving
        lookup, state.lookup = self._common(state.lookup), None
        self._claim.lookup = lookup
        serving.memory.enters(self._claim)
        reuse = self._restored(lambda: lookup) if lookup is not None else None
        n_restored = reuse.outcome.n_reused if reuse is not None else 0
        if len(set(ranks().all_of(n_restored, "how much was restored"))) > 1:
            reuse = None
        if reuse is None:
            is_common = ranks().are_several and lookup is not None  # what all of them read
            fed = lookup.found.prompt if is_common and lookup else self._rendered
            outcome = Outcome(Kind.MISS, len(fed.ids), reason=Reason.STORE_FAILED)
            reuse = Reuse(fed, outcome)
        if state.fetched and reuse.outcome.kind is not Kind.EXACT:
            outcome = reuse.outcome
            said = outcome.detail or (outcome.reason.text if outcome.reason else "")
            detail = f"{said}; {state.fetched}" if said else state.fetched
            reuse.outcome = replace(outcome, detail=detail)
        fed, n_reused = reuse.prompt, reuse.outcome.n_reused
        if self._sequence is not None:  # it goes on
            self._sequence.chain, self._sequence.n_reused = reuse.chain, n_reused
            return Prepared(fed, reuse.caches, n_reused)
        serving.record(state, reuse.outcome)
        state.is_saved = Event()
        n_system = len(fed.segments[0]) if fed.segment_types[0] == "system" else 0
        self._sequence = RunningSequence(
            state, len(fed.ids), n_reused, reuse.chain, n_system, fed.ids
        )
        draft = self._draft_of(fed, self._sequence)
        if state.is_kept and ranks().decides:  # which knows their ends
            running = serving.computing
            running = [one for one in running if not (one.is_computed or one.request.is_over)]
            serving.computing = [*running, self._sequence]
        return Prepared(fed, reuse.caches, n_reused, draft)

    def _draft_of(self, fed: Prompt, sequence: RunningSequence) -> Prepared | None:
        """Restore what is stored of the same tokens for the draft model, if there is one."""
        serving, state = self._serving, self._state
        if (model := serving.model.draft) is None:
            return None
        root = serving.root_of(state, model)
        its = replace(state, lookup=None, root=root)
        reuse = self._restored(lambda: Lookup(fed, root, serving.store, model))
        reuse = reuse or Reuse(fed, Outcome(Kind.MISS, len(fed.ids)))
        n_reused = reuse.outcome.n_reused
        n_prompt = len(fed.ids)
        sequence.draft = RunningSequence(its, n_prompt, n_reused, reuse.chain, is_draft=True)
        return Prepared(fed, reuse.caches, n_reused)

    def _restored(self, find: Callable[[], Lookup]) -> Reuse | None:
        """Restore what a lookup found, None if that fails. Raises ClientGone."""
        try:
            return find().restore(lambda: self._request.client_gone)
        except ClientGone:
            raise
        except Exception:
            logger.exception("kvpersist: the prompt could not be restored")
            return None

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        """Save what the server has computed."""
        state, serving, sequence = self._state, self._serving, self._sequence
        if sequence is not None and serving.keeps(state):  # else no other request does
            serving.save(sequence, tokens, caches, cache_type)
            state.ended = sequence if cache_type == REPLY else None
        if cache_type == REPLY and state.is_saved is not None:
            state.is_saved.set()

    def guess(self, run: Sequence[int], n: int) -> Sequence[int]:
        """Return what followed in what is stored; the first time that has to be read."""
        root, runs = self._root, self._serving.store.runs
        self._has_guessed = self._has_guessed or runs.read(root)
        return runs.after(root, run, n)

    def resume(self, prompt: Prompt) -> None:
        """Look up what was saved of a sequence: by its ids, which must stay these."""
        self.prompt = self._rendered = prompt
        state, model = self._state, replace(self._serving.model, text=None)
        self._waits = None
        if self._sequence is not None:
            self._sequence.is_computed = True  # else it would wait for blocks of its own
        if ranks().decides:
            state.lookup = Lookup(prompt, self._root, self._serving.store, model)
        self._claim = self._claimed()


def awaits_another(
    lookup: Lookup, others: Sequence[RunningSequence], known: dict[RunningSequence, int]
) -> bool:
    """Tell whether a prompt does better to wait for blocks that another request is computing.

    known: how many of its tokens will be stored for both, as far as they were compared before.
    """
    for one in others:
        if one.is_computed or one.request.is_over or one.root != lookup.root:
            continue
        if one not in known:
            n_common = common_prefix(one.ids, lookup.found.prompt.ids, 0)
            n_shared = n_common - n_common % lookup.model.saver.saves_every
            # A system prompt is stored up to its last token.
            known[one] = max(n_shared, one.n_system) if one.n_system <= n_common else n_shared
        is_saved = one.n_saved > known[one] - MIN_TOKENS_BETWEEN
        if not is_saved and known[one] - lookup.found.n_tokens >= MIN_SHARED:
            return True
    return False
