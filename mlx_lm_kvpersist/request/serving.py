"""Requests for the loaded model: looked up, restored, recorded, saved, remembered.

Generation thread, except what counts tokens (`Serving.take`) and `Serving.remember`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..errors import ClientGone
from ..host.answers import Prepared, TakenRequest
from ..host.prompt import ClientRequest, Prompt
from ..store.block_store import BlockStore
from .computing import Computing
from .insert import insert
from .lookup import Lookup, Reuse
from .model import LoadedModel
from .outcome import Kind, Outcome, Reason
from .replies import remember, retokenize
from .state import RequestState, RunningSequence

logger = logging.getLogger(__name__)


class Serving:
    """What the plugin does for the requests of one loaded model.

    record: logs and keeps the outcome of a request. canary: whether what comes from disk is
    computed again in part, and compared. isolated: whether sessions share nothing.
    step_s: how long a waiting request may be worked on between two steps of the replies.
    """

    def __init__(
        self,
        store: BlockStore,
        model: LoadedModel,
        record: Callable[[RequestState, Outcome], None],
        *,
        canary: bool,
        isolated: bool,
        step_s: float,
    ) -> None:
        self.store, self.model, self.canary = store, model, canary
        self.record, self.isolated, self.step_s = record, isolated, step_s
        self.computing = Computing()

    def look_up(self, state: RequestState, prompt: Prompt) -> Lookup:
        """Find what is stored of a rendered prompt. Any thread."""
        session = (state.session or "") if self.isolated else ""
        state.root = replace(self.model.root, namespace=state.namespace, session=session)
        state.messages = prompt.messages
        return Lookup(
            retokenize(prompt, prompt.messages, state.root, self.store, self.model),
            state.root,
            self.store,
            self.model,
            canary=self.canary,
            session=state.session,
            messages=prompt.messages,
        )

    def remember(self, state: RequestState) -> None:
        """Remember a reply as soon as its ids are known, and again when it was sent. Any thread."""
        produced, sent, root = state.produced, state.sent, state.root
        # Another model may have been loaded since.
        if not produced or root is None or root.fingerprint != self.model.fingerprint:
            return
        if sent is not None:
            state.produced = None
        remember(state.messages, *produced, sent, root, self.store, self.model)


class ServedRequest(TakenRequest):
    """One request for the loaded model, from the look-up to the saved reply."""

    def __init__(self, serving: Serving, request: ClientRequest, prompt: Prompt) -> None:
        super().__init__(prompt)
        self._serving, self._request, self._rendered = serving, request, prompt
        self._state = state = RequestState.of(request)
        if state.lookup is not None:
            state.lookup.close()  # of a prompt for the model before this one
        self._waits: bool | None = None
        try:
            state.lookup = serving.look_up(state, prompt)
            self.prompt = state.lookup.fed
        except Exception:
            state.lookup = None
            logger.exception("kvpersist: the prompt could not be looked up")

    def advance(self) -> bool:
        lookup, computing = self._state.lookup, self._serving.computing
        if lookup is None:
            return True
        if self._waits is None:
            self._waits = lookup.prefetch() or computing.awaited(lookup)
        if not self._waits:
            return True
        is_free = lookup.is_begun or not computing.awaited(lookup)
        return is_free and lookup.advance(self._serving.step_s)

    def enter(self) -> Prepared:
        """Restore what is stored of the prompt, and record the outcome. Raises ClientGone."""
        state, serving = self._state, self._serving
        lookup, state.lookup = state.lookup, None
        reuse = None
        if lookup is not None:
            try:
                reuse = lookup.restore(lambda: self._request.client_gone)
            except ClientGone:
                raise
            except Exception:
                logger.exception("kvpersist: the prompt could not be restored")
        if reuse is None:
            fed = self._rendered
            reuse = Reuse(fed, Outcome(Kind.MISS, len(fed.ids), reason=Reason.STORE_FAILED))
        serving.record(state, reuse.outcome)
        fed, n_reused = reuse.prompt, reuse.outcome.n_reused
        n_system = len(fed.segments[0]) if fed.segment_types[0] == "system" else 0
        self._sequence = RunningSequence(
            state, len(fed.ids), n_reused, reuse.chain, n_system, fed.ids
        )
        if state.is_kept:
            serving.computing.add(self._sequence)
        return Prepared(fed, reuse.caches, n_reused)

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        """Save what the server has computed."""
        state, serving, sequence = self._state, self._serving, self._sequence
        if not state.is_kept or (serving.isolated and state.session is None):
            return  # no other request may, or could, find it
        try:
            insert(sequence, tokens, caches, cache_type, serving.store, serving.model)
        except Exception:
            logger.exception("kvpersist: a turn could not be saved")
        serving.remember(state)


class UnservedRequest(TakenRequest):
    """A request for a model whose conversations are not kept: only its outcome is recorded."""

    def __init__(self, prompt: Prompt, state: RequestState, record: Callable[[], None]) -> None:
        super().__init__(prompt)
        self._state, self._record = state, record

    def enter(self) -> Prepared | None:
        self._record()
        # Stock would keep the prompt.
        return None if self._state.is_kept else Prepared(self.prompt)
