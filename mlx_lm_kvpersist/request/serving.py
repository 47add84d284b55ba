"""Requests for the loaded model: their states, and their work from the lookup to the save.

Generation thread. HTTP threads use `RequestState`, and call `await_interrupted`, `fetch`,
`look_up`, `finish` and `remember` of `Serving`. To count tokens, they make a `ServedRequest`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import count, takewhile
from secrets import token_hex
from threading import Event
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ..block import BLOCK_TOKENS, Block, Checkpoint, Record, Root, n_packed, pack_ids
from ..cache.geometry.spec import forms_bytes
from ..errors import ClientGone, RequestRefused
from ..host.hooks import PARKED, REPLY, ClientRequest, Prepared, Prompt, TakenRequest
from ..match import common_prefix, match_prompt
from ..store.block_store import BlockStore, Commit
from .lookup import Lookup, Reuse
from .memory import Claim, Memory
from .model import LoadedModel
from .outcome import Kind, Outcome, Reason
from .replies import digest_of, remember, retokenize
from .saver import MIN_TOKENS_BETWEEN, RunningSequence

if TYPE_CHECKING:
    from ..store.shared import Plan, Wanted
    from ..store.shared_objects import Conversation

_ORDER = count()

LAST_PART_S = 2.0
"""The longest time that the last part of a reply waits until the earlier parts are on disk."""
INTERRUPTED_S = 2.0
"""The longest time that a prompt waits for the save of the interrupted reply that it continues."""
MIN_SHARED = 2 * BLOCK_TOKENS
"""If two prompts share fewer tokens, both requests compute them: waiting takes as long."""
SHORT_REPLY = 16
"""For a shorter reply, stored ids are not read: reading takes longer than drafts save."""
_MORE_BYTES = 1 << 20
"""A shared object may have this many bytes in addition to two blocks and two checkpoints."""

logger = logging.getLogger(__name__)


class Stage(Enum):
    """The stage of a request. Only `RequestState.move` changes it.

    A request enters (`ServedRequest.enter`) when the server starts to compute its prompt.
    """

    NEW = "new"
    """The request waits for memory."""
    FETCHING = "fetching"
    """The request's blocks are read and joined, or another request computes them."""
    READY = "ready"
    """The request may enter."""
    PREFILL = "prefill"
    DECODE = "decode"
    PARKED = "parked"
    """The reply was taken out of the batch, and waits for memory."""
    DONE = "done"
    """The reply has ended, or the client has left. No other stage follows."""


@dataclass(eq=False)
class RequestState:
    """One request, from its HTTP thread to the generation thread and back.

    `session`, `namespace` and `is_kept` are set once, before the request is queued, and `outcome`
    before its reply begins.
    """

    session: str | None = None
    namespace: str = ""
    note: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For people: the client's name (`client`), and the first words of its user (`words`)."""
    is_kept: bool = True
    """Whether the request's tokens may be stored, on disk or in RAM."""
    id: str = field(default_factory=lambda: f"kvp-{token_hex(8)}")
    """Random: a growing number would show how many requests the server gets."""
    received_s: float = field(default_factory=time.time)
    """When the request arrived, in seconds since the epoch."""
    stage: Stage = Stage.NEW
    outcome: Outcome | None = None
    saved_s: float | None = None
    """The estimated seconds to compute the reused tokens, if known."""
    n_prompt: int = 0
    """The number of prompt tokens, if mlx-lm serves the request."""
    root: Root | None = None
    """The root of the tree that the request's tenant may see, once the model is loaded."""
    messages: Sequence[dict[str, Any]] = field(default=(), repr=False)
    rendered: Prompt | None = field(default=None, repr=False)
    """The prompt that `look_up` or `resume` got, before `retokenize`."""
    digest: tuple[int, str] | None = field(default=None, repr=False)
    """The size in bytes and the digest of the text that the model reads, if known."""
    fetched: str = ""
    """A sentence about the fetch from the shared tier, or ""."""
    lookup: Lookup | None = field(default=None, repr=False)
    """The lookup of the prompt; None once the request has entered."""
    sequence: RunningSequence | None = field(default=None, repr=False)
    """The tokens of the request, once it has entered. Generation thread."""
    sent: dict[str, Any] | None = field(default=None, repr=False)
    """The reply as sent to the client, once the reply is complete. HTTP thread."""
    produced: tuple[Sequence[int], Sequence[int]] | None = field(default=None, repr=False)
    """The ids of the prompt and of the reply, once the reply has ended, for `remember`."""
    is_saved: Event | None = field(default=None, repr=False)
    """Set when the ended reply was handed to the store. None until the request enters, and if
    mlx-lm serves the request."""
    remembered: frozenset[bytes] = field(default=frozenset(), repr=False)
    """The keys by which the ids of the reply are found."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that other ranks need."""
        names = ("session", "namespace", "is_kept")
        return {name: getattr(self, name) for name in names} | {"note": dict(self.note)}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__init__(**fields)  # type: ignore[misc]

    @staticmethod
    def of(request: Any) -> RequestState:
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state

    def move(self, stage: Stage) -> None:
        """Enter the next stage, unless the request is done. A done request pins no blocks."""
        if self.stage is not Stage.DONE:
            self.stage = stage
        if stage is Stage.DONE:
            self.drop_lookup()

    def record(self, model: str, outcome: Outcome, precision: str | None = None) -> dict[str, Any]:
        """Return a JSON object about the request."""
        return {
            "id": self.id,
            "received": self.received_s,
            "session": self.session,
            "client": self.note.get("client"),
            "namespace": self.namespace,
            "model": model,
            "precision": precision,
            "sentence": outcome.sentence(self.session, is_kept=self.is_kept),
            "kept": self.is_kept,
            "outcome": outcome.kind.value,
            "tier": outcome.tier,
            "prompt_tokens": outcome.n_prompt,
            "reused_tokens": outcome.n_reused,
            "restored_tokens": outcome.n_restored,
            "restore_ms": round(outcome.restore_ms, 2),
            "saved_s": self.saved_s,
            "reason": outcome.reason.text if outcome.reason else None,
            "detail": outcome.detail or None,
            "divergence": asdict(outcome.divergence) if outcome.divergence else None,
            "first_token_s": None,
        }

    def drop_lookup(self) -> None:
        """Release the blocks that were read for the request. Any thread."""
        if (lookup := self.lookup) is not None:
            lookup.close()


class _Source:
    """A conversation's blocks and checkpoints in the shared tier, to match and to restore."""

    def __init__(self, conversation: Conversation) -> None:
        self._children = {block.parent: [block] for block in conversation.chain}
        self._checkpoints: dict[bytes, list[Checkpoint]] = {}
        for checkpoint in conversation.checkpoints:
            self._checkpoints.setdefault(checkpoint.block, []).append(checkpoint)

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> Sequence[Block]:
        return self._children.get(parent, ())

    def checkpoints(self, blocks: Sequence[bytes]) -> Mapping[bytes, Sequence[Checkpoint]]:
        return {key: self._checkpoints[key] for key in blocks if key in self._checkpoints}


@dataclass
class Serving:
    """Serves the requests of one loaded model.

    `isolated`: whether sessions share nothing. `step_s`: how long a waiting request may work
    between two steps of the replies. `computing`: the requests in prefill, and the requests that
    left prefill since the last request entered.
    """

    store: BlockStore
    model: LoadedModel
    record: Callable[[RequestState, Outcome], None]
    isolated: bool
    step_s: float
    memory: Memory
    computing: list[RequestState] = field(default_factory=list)
    known: WeakValueDictionary[str, ClientRequest] = field(default_factory=WeakValueDictionary)

    def root_of(self, state: RequestState, model: LoadedModel | None = None) -> Root:
        """Return the root of a model's tree (default: the main model) for a request's tenant."""
        session = (state.session or "") if self.isolated else ""
        root = (model or self.model).root
        return replace(root, namespace=state.namespace, session=session)

    def keeps(self, state: RequestState) -> bool:
        """Whether a request's tokens are stored so that another request can find them."""
        return state.is_kept and (state.session is not None or not self.isolated)

    def await_interrupted(self, request: ClientRequest, prompt: Prompt) -> None:
        """Wait until an interrupted reply is saved, if the prompt continues it."""
        state, messages = RequestState.of(request), prompt.messages
        root, deadline_s = self.root_of(state), time.monotonic() + INTERRUPTED_S
        for earlier in filter(None, [known() for known in self.known.valuerefs()]):
            other = RequestState.of(earlier)
            n, is_saved = len(other.messages), other.is_saved
            if (
                earlier.client_gone
                and other.stage in (Stage.DECODE, Stage.DONE)
                and is_saved is not None
                and other.root == root
                and [m.get("role") for m in messages[n : n + 1]] == ["assistant"]
                and messages[:n] == other.messages
                and not is_saved.is_set()
            ):
                is_saved.wait(max(0.0, deadline_s - time.monotonic()))
                self.remember(other)
        self.known[state.id] = request

    def fetch(self, state: RequestState, prompt: Prompt) -> None:
        """Fetch a prompt's blocks from the shared tier into RAM, if that saves time."""
        if self.store.shared is not None and self.keeps(state):
            wanted = self._wanted(prompt, self.root_of(state))
            if len(wanted.ids) - wanted.n_tokens > BLOCK_TOKENS:
                state.fetched = self.store.shared.fetch(wanted)

    def _wanted(self, prompt: Prompt, root: Root) -> Wanted:
        """Return which blocks of a prompt this store has, and how to fetch the missing blocks."""
        from ..store.shared import Wanted  # imported late: most servers have no shared tier

        store, model, spec = self.store, self.model, self.model.spec
        with store.index.database.lent():
            stored = Lookup(retokenize(prompt, root, store, model), root, store, model).stored
            point = model.saver.find(stored.match.path, stored.n_tokens, store)
        n_here = point.n_tokens if point else 0
        is_here = takewhile(lambda block: block.stop <= n_here, stored.match.path)
        whole = [b for b in is_here if b.n_tokens == BLOCK_TOKENS or not spec.any_prefix]

        def learn(replies: Mapping[bytes, bytes]) -> Wanted:
            remembered = store.replies(root.key, list(replies))
            if new := {digest: ids for digest, ids in replies.items() if digest not in remembered}:
                store.commit(Commit(root, (), replies=new), [])
                return self._wanted(prompt, root)
            return wanted

        arrays_bytes = forms_bytes(spec.block_arrays(BLOCK_TOKENS)) + spec.bytes_per_checkpoint
        wanted = Wanted(
            root,
            stored.prompt.ids,
            prompt.messages,
            whole,
            partial(self._plan, stored.prompt, root, n_here),
            model.speed.compute_s,
            learn,
            2 * arrays_bytes + _MORE_BYTES,
            spec.any_prefix,
        )
        return wanted

    def _plan(self, prompt: Prompt, root: Root, n_here: int, conversation: Conversation) -> Plan:
        """Return the records to fetch, if they restore more than the `n_here` stored tokens."""
        from ..store.shared import Plan

        source, packed, model = _Source(conversation), pack_ids(prompt.ids), self.model
        tokens = model.text
        text = tokens.known_text(prompt.ids) if tokens else None
        if tokens is None or text is None:
            matched = match_prompt(source, root.key, packed)
        else:
            matched = match_prompt(source, root.key, text, tokens, packed)
        path = list(matched.path)
        point = model.saver.find(path, matched.n_tokens, source) if path else None
        if point is None or point.n_tokens <= n_here:
            return Plan()
        if model.spec.any_prefix:
            path = [block for block in path if block.start < point.n_tokens]
        # Models with checkpoints also fetch later blocks, because a splice uses these blocks' ids.
        forms = [(block, model.spec.block_arrays(block.n_tokens)) for block in path]
        needed: list[tuple[Record, int]] = [(block, forms_bytes(form)) for block, form in forms]
        needed += [(need.record, need.n_bytes) for need in point.needed if need.record not in path]
        missing = [item for item in needed if item[0].key not in self.store]
        return Plan(path, missing, point.n_tokens)

    def look_up(self, state: RequestState, prompt: Prompt) -> None:
        """Look up a prompt before it is queued. O(prompt).

        The generation thread calls this only for a prompt with images, or if the model was loaded
        after the prompt was queued.
        """
        state.drop_lookup()
        state.lookup, state.rendered, state.messages = None, prompt, prompt.messages
        state.digest = None
        root = state.root = self.root_of(state)
        if not self.model.ranks.decides:
            return
        try:
            fed = retokenize(prompt, root, self.store, self.model)
            state.lookup = lookup = Lookup(fed, root, self.store, self.model)
            state.digest = digest_of(lookup.text) if lookup.text is not None else None
        except Exception:
            logger.exception("kvpersist: the prompt could not be looked up")

    def save(
        self, state: RequestState, tokens: Sequence[int], caches: list[Any], cache_type: str
    ) -> None:
        """Save the computed part of a sequence; a draft model's caches come last in `caches`.

        O(new tokens), plus O(blocks) for models with checkpoints.
        """
        model, sequence, n_layers = self.model, state.sequence, len(self.model.spec.template)
        assert sequence is not None
        n_prompt, chains = sequence.n_prompt, [(sequence, model, caches[:n_layers])]
        if sequence.draft is not None and model.draft is not None:
            chains.append((sequence.draft, model.draft, caches[n_layers:]))
        for chain, chain_model, chain_caches in chains:
            try:
                n_saved = chain_model.save(chain, tokens, chain_caches, cache_type, self.store)
                if cache_type == REPLY and n_saved > n_prompt and chain is sequence:
                    state.produced = tokens[:n_prompt], tokens[n_prompt:n_saved]
            except Exception:
                logger.exception("kvpersist: a turn could not be saved")

    def finish(self, state: RequestState) -> None:
        """Before a reply's last part is sent, wait up to `LAST_PART_S` for the disk. HTTP thread.

        Unless the wait ends after `LAST_PART_S`, a kill then loses at most one block of the prompt,
        the last block of the reply, and postponed checkpoints.
        """
        ends_s = time.monotonic() + LAST_PART_S
        is_saved = state.is_saved is not None and state.is_saved.wait(LAST_PART_S)
        self.remember(state)
        ended = state.sequence if is_saved and self.keeps(state) else None
        parts = [part for part in (ended, ended and ended.draft) if part and part.chain]

        def is_safe() -> bool:
            unwritten = self.store.writer.unwritten()
            are_ids_lost = not state.remembered.isdisjoint(unwritten)
            return not any(self._is_at_risk(part, unwritten, are_ids_lost) for part in parts)

        self.store.writer.finish(is_safe, max(0.0, ends_s - time.monotonic()))

    def _is_at_risk(
        self, sequence: RunningSequence, unwritten: Collection[bytes], are_ids_lost: bool
    ) -> bool:
        """Whether a kill would lose more of a turn than `finish` allows.

        are_ids_lost: whether the kill would also lose the reply's ids, so that only its text could
        be matched.
        """
        chain, n_prompt, end = sequence.chain, sequence.n_prompt, sequence.chain[-1]
        are_ids_lost = are_ids_lost and not sequence.is_draft
        if not self.model.spec.any_prefix:  # no block is useful without the checkpoint at the end
            return are_ids_lost or end.key in unwritten
        start = next((block.start for block in chain if block.key in unwritten), end.stop)
        start = min(start, n_prompt) if are_ids_lost else start
        n_most = 2 * BLOCK_TOKENS if start < n_prompt else BLOCK_TOKENS
        return n_prompt - start > BLOCK_TOKENS or end.stop - start >= n_most

    def remember(self, state: RequestState) -> None:
        """Remember a reply's ids once it is complete, or when its client has left. Any thread."""
        produced, sent, root = state.produced, state.sent, state.root
        # Another model may have been loaded since the lookup.
        if not produced or root is None or root.fingerprint != self.model.fingerprint:
            return
        if sent is not None:
            state.produced = None
        prompt, reply = produced
        messages, digest = state.messages, state.digest
        keys = remember(messages, prompt, reply, sent, root, self.store, self.model, digest)
        state.remembered |= frozenset(keys)


class ServedRequest(TakenRequest):
    """One request for the loaded model, from the lookup to the saved reply."""

    def __init__(self, serving: Serving, request: ClientRequest, prompt: Prompt) -> None:
        super().__init__(prompt)
        self._serving, self._request = serving, request
        self._state = state = RequestState.of(request)
        self._order = next(_ORDER)
        self._n_drafted = 0
        self._has_asked_runs = False
        self._n_shared: dict[RequestState, int] = {}
        is_other_model = state.lookup is not None and state.lookup.model is not serving.model
        if state.rendered is not prompt or is_other_model:
            serving.look_up(state, prompt)
        self._root = serving.root_of(state)
        if state.lookup is not None:
            self.prompt = state.lookup.stored.prompt
        self._claim = self._new_claim()

    def _new_claim(self) -> Claim:
        state, request = self._state, self._request

        def is_over() -> bool:
            return state.stage is Stage.DONE or request.client_gone

        return Claim(self._order, len(self.prompt.ids), is_over, state.lookup)

    def advance(self) -> bool:
        """Return whether the request may enter; before that, claim memory, and continue a restore.

        Called between steps, while other requests run, until it returns True. O(blocks), and about
        `Serving.step_s` for the restore. A short restore is left to `enter`. Raises RequestRefused
        if memory is short and the policy is `refuse`.
        """
        state, memory, lookup = self._state, self._serving.memory, self._state.lookup
        if state.stage in (Stage.NEW, Stage.PARKED):
            if not memory.admits(self._claim):
                if not memory.refuses or state.stage is not Stage.NEW:
                    return False
                memory.waiting.remove(self._claim)
                raise RequestRefused("no memory is free for this prompt now; try again soon", 503)
            has_to_wait = lookup is not None and (lookup.prefetch() or self._awaits_another(lookup))
            state.move(Stage.FETCHING if has_to_wait else Stage.READY)
        if state.stage is Stage.FETCHING and lookup is not None:
            is_free = lookup.is_begun or not self._awaits_another(lookup)
            if is_free and lookup.advance(self._serving.step_s):
                state.move(Stage.READY)
        return state.stage is not Stage.FETCHING

    def _awaits_another(self, lookup: Lookup) -> bool:
        return awaits_another(lookup, self._serving.computing, self._n_shared)

    def enter(self) -> Prepared:
        """Restore the stored part of the prompt. O(blocks), and MLX's work. Raises ClientGone."""
        state, serving = self._state, self._serving
        lookup, state.lookup = self._common(state.lookup), None
        self._claim.lookup = lookup
        serving.memory.enters(self._claim)
        reuse = self._restored(lambda: lookup) if lookup is not None else None
        if reuse is None:
            fed = state.rendered or self.prompt
            if lookup is not None and serving.model.ranks.are_several:
                fed = lookup.stored.prompt  # all ranks use the prompt that rank 0 has looked up
            reuse = Reuse(fed, Outcome(Kind.MISS, len(fed.ids), reason=Reason.STORE_FAILED))
            state.digest = None  # it describes the looked-up text, and `fed` may differ
        if state.fetched and reuse.outcome.kind is not Kind.EXACT:
            detail = "; ".join(filter(None, (reuse.outcome.why, state.fetched)))
            reuse.outcome = replace(reuse.outcome, detail=detail)
        fed, n_reused = reuse.prompt, reuse.outcome.n_reused
        state.move(Stage.PREFILL)
        if state.sequence is not None:  # the request was parked
            state.sequence.chain, state.sequence.n_reused = reuse.chain, n_reused
            state.move(Stage.DECODE)
            return Prepared(fed, reuse.caches, n_reused)
        serving.record(state, reuse.outcome)
        state.is_saved = Event()
        state.sequence = sequence = RunningSequence(
            self._root,
            len(fed.ids),
            n_reused,
            reuse.chain,
            n_system=len(fed.segments[0]) if fed.segment_types[0] == "system" else 0,
            session=state.session,
            note=state.note,
            messages=state.messages,
        )
        draft = self._draft_of(fed, sequence)
        if state.is_kept and serving.model.ranks.decides:  # only rank 0 knows when requests end
            found = lookup.stored if lookup is not None and fed is lookup.stored.prompt else None
            sequence.packed_ids = found.packed_ids if found else pack_ids(fed.ids)
            running = [other for other in serving.computing if other.stage is Stage.PREFILL]
            serving.computing = [*running, state]
        return Prepared(fed, reuse.caches, n_reused, draft)

    def _common(self, lookup: Lookup | None) -> Lookup | None:
        """Return this rank's lookup of the tokens that rank 0 has found."""
        if not (together := self._serving.model.ranks).are_several:
            return lookup
        agreed = together.first(lambda: lookup.agreed() if lookup else None, "what is restored")
        if agreed is None or together.decides:
            return lookup
        prompt, n_worth = agreed
        model = replace(self._serving.model, text=None)
        return Lookup(prompt, self._root, self._serving.store, model, n_worth=n_worth)

    def _draft_of(self, fed: Prompt, sequence: RunningSequence) -> Prepared | None:
        serving, model = self._serving, self._serving.model.draft
        if model is None:
            return None
        root = serving.root_of(self._state, model)
        reuse = self._restored(lambda: Lookup(fed, root, serving.store, model))
        reuse = reuse or Reuse(fed, Outcome(Kind.MISS, len(fed.ids)))
        n_reused = reuse.outcome.n_reused
        sequence.draft = replace(
            sequence, root=root, n_reused=n_reused, chain=reuse.chain, is_draft=True
        )
        return Prepared(fed, reuse.caches, n_reused)

    def _restored(self, find: Callable[[], Lookup]) -> Reuse | None:
        """Restore the tokens that a lookup found; return None after an error. Raises ClientGone."""
        try:
            return find().restore(lambda: self._request.client_gone)
        except ClientGone:
            raise
        except Exception:
            logger.exception("kvpersist: the prompt could not be restored")
            return None

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        state, serving = self._state, self._serving
        has_ended = cache_type == REPLY
        if (sequence := state.sequence) is not None:
            if cache_type == PARKED:
                state.move(Stage.PARKED)
            elif has_ended or len(tokens) >= sequence.n_prompt - 1:
                state.move(Stage.DONE if has_ended else Stage.DECODE)
            if serving.keeps(state):  # otherwise no request would find the tokens
                serving.save(state, tokens, caches, cache_type)
                # If the sent text is not known yet, `finish` remembers the reply.
                if self._request.client_gone or state.sent is not None:
                    serving.remember(state)
        if has_ended and state.is_saved is not None:
            state.is_saved.set()

    def draft_ids(self, run: Sequence[int], n: int) -> Sequence[int]:
        """Return up to `n` ids that followed the ids `run` in stored text, or none."""
        root, runs = self._root, self._serving.store.runs
        self._n_drafted += 1
        if self._n_drafted >= SHORT_REPLY and not self._has_asked_runs:
            self._has_asked_runs = runs.read(root)
        return runs.after(root, run, n)

    def resume(self, prompt: Prompt) -> None:
        """Look up the saved part of a sequence by ids: text could give other ids. O(prompt)."""
        state, model = self._state, replace(self._serving.model, text=None)
        self.prompt = state.rendered = prompt
        state.move(Stage.PARKED)  # a prompt whose chunk failed is in an earlier stage
        if self._serving.model.ranks.decides:
            state.lookup = Lookup(prompt, self._root, self._serving.store, model)
        self._claim = self._new_claim()


def awaits_another(
    lookup: Lookup, others: Sequence[RequestState], n_shared: dict[RequestState, int]
) -> bool:
    """Whether a prompt should wait for blocks that another request is computing.

    n_shared: how many of the prompt's tokens each other request will store. O(requests), and O(ids)
    for each request that `n_shared` does not have yet.
    """
    for other in others:
        sequence = other.sequence
        if other.stage is not Stage.PREFILL or sequence is None or sequence.root != lookup.root:
            continue
        if other not in n_shared:
            n_bytes = common_prefix(sequence.packed_ids, lookup.stored.packed_ids, 0)
            n_common = n_packed(sequence.packed_ids[: n_bytes - n_bytes % 4])
            n_whole = n_common - n_common % lookup.model.saver.saves_every
            # A system prompt is stored up to its last token.
            is_system = sequence.n_system <= n_common
            n_shared[other] = max(n_whole, sequence.n_system) if is_system else n_whole
        is_saved = sequence.n_saved > n_shared[other] - MIN_TOKENS_BETWEEN
        if not is_saved and n_shared[other] - lookup.stored.n_tokens >= MIN_SHARED:
            return True
    return False
