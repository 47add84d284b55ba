"""The plugin: answers the server's hooks and wires the parts together. Only it knows them all."""

from __future__ import annotations

import logging
import time
import weakref
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from dataclasses import replace
from email.message import Message
from functools import partial
from typing import Any

from . import config
from .api.admin import (
    METRICS_PATH,
    REQUESTS_PATH,
    SELFTEST_PATH,
    SPEC_PATH,
    STATS_PATH,
    SelfTest,
    operator_change,
    operator_view,
)
from .api.agents import AgentsAPI
from .api.messages import COUNT_PATH, HELLO_PATHS, MESSAGES_PATH, MessagesAPI, empty_answer
from .api.metrics import CONTENT_TYPE, Metrics
from .api.normalise import normalise
from .api.page import PAGE_PATH, SESSIONS_PATH, page_view, session_changes
from .api.responses import RESPONSES_PATH, ResponsesAPI
from .api.session_keys import KEEP_HEADER, is_kept, namespace, session_key, unshared
from .api.warming import warm_at_start
from .cache.batch import batch_of
from .cache.spec import Batching, ModelCacheSpec
from .errors import ClientGone, ModelNotSupported, RequestRefused
from .host import chat_api
from .host.hookspecs import hookimpl
from .host.prompt import PREFILL, PrefillLimits, Prepared, Prompt
from .host.request_checks import read_json
from .host.routes import Route
from .host.waiting import has_text_only
from .request.computing import Computing
from .request.costs import ReusePolicy
from .request.insert import REPLY, insert, pin_system
from .request.loading import places, prepare
from .request.lookup import Lookup, RequestState, Reuse, Sequence
from .request.model import LoadedModel
from .request.outcome import History, Kind, Outcome, Reason
from .request.replies import remember, respell
from .request.roles import TemplateRoles, share_reasoning
from .request.round_trip import check_round_trip
from .store.block_store import BlockStore
from .store.named_sessions import NamedSessions
from .store.stored_sessions import StoredSessions

JOIN_SHARE = 0.2
"""The share of the longest stall that restoring takes between two steps of the replies."""

logger = logging.getLogger(__name__)


class KVPersistPlugin:
    """Gives the server's conversations a KV cache that outlives it."""

    _config: config.Config
    """Set by `configure`, before the server asks for anything else."""

    def __init__(self) -> None:
        self._refusal = ""
        self._store: BlockStore | None = None
        self._sessions: StoredSessions | None = None
        self._loaded: LoadedModel | None = None
        self._roles = TemplateRoles()
        self._model_ref: Callable[[], Any] = lambda: None
        self._refused: set[str] = set()
        self._policy = ReusePolicy()
        self._history = History()
        self._metrics = Metrics(self._store_counts)
        self._computing = Computing()
        self._asked: dict[bytes, int] = {}
        """For `pin_system`."""

    # Startup and shutdown.

    @hookimpl
    def add_options(self, parser: ArgumentParser) -> None:
        config.add_options(parser)

    @hookimpl
    def configure(self, args: Namespace) -> None:
        self._config = config.from_args(args)
        self._history = History(with_text=self._config.store_text)
        self._store = BlockStore(self._config.folder, self._config.limits)
        self._sessions = StoredSessions(self._store)
        if getattr(args, "model", None) is None:
            logger.info("kvpersist: %s", places(self._store))
        if self._config.warm:
            where = args.host, args.port, self._config.folder, self._config.api_key
            warm_at_start(self._config.warm, *where)

    @hookimpl
    def self_test(self) -> None:
        check_round_trip(self._config.precision.choice(), self._config.attention)

    @hookimpl
    def shutdown(self) -> None:
        self._loaded = self._sessions = None
        if self._store is not None:
            self._store.close()
            self._store = None

    # The model.

    @hookimpl
    def model_loaded(self, provider: Any) -> None:
        self._loaded, self._refusal = None, ""
        self._roles = TemplateRoles.of(provider.tokenizer)
        store = self._store
        if store is None:
            return  # the server ends
        store.release_prefetched()
        # The speeds of one model are not those of another.
        self._policy = ReusePolicy(self._config.canary, self._config.min_reuse)
        precision, attention = self._config.precision, self._config.attention
        with_text = self._config.store_text
        try:
            most = self._config.max_prefill_bytes
            self._loaded = prepare(provider, store, precision, attention, most, with_text=with_text)
            self._model_ref = weakref.ref(provider.model)
        except ModelNotSupported as error:
            self._refusal = str(error)
            if provider.model_key[0] not in self._refused:
                self._refused.add(provider.model_key[0])
                logger.warning("kvpersist: served as stock does, nothing is kept: %s", error)

    def _spec_of(self, model: Any) -> ModelCacheSpec | None:
        """Return the spec of the loaded model, None for any other."""
        return self._loaded.spec if self._loaded and model is self._model_ref() else None

    @hookimpl
    def make_prompt_cache(self, model: Any) -> list[Any] | None:
        spec = self._spec_of(model)
        return spec.make_cache() if spec else None

    @hookimpl
    def merge_caches(self, caches: list[Any]) -> Any | None:
        return batch_of(caches, full_precision=self._loaded is not None)

    @hookimpl
    def batches(self, model: Any) -> bool | None:
        spec = self._spec_of(model)
        return spec.batching is not Batching.NONE if spec else None

    @hookimpl
    def prefill_limits(self, model: Any) -> PrefillLimits | None:
        loaded = self._loaded
        if loaded is None or loaded.memory is None or self._spec_of(model) is None:
            return None
        stall_s, memory = self._config.max_stall_s, loaded.memory
        return PrefillLimits(stall_s, memory.most_tokens, memory.limit_bytes)

    # A request.

    @hookimpl
    def request_received(self, request: Any, headers: Message, body: dict[str, Any]) -> None:
        state = RequestState.of(request)
        state.namespace = namespace(headers, by_key=self._config.namespace_by_key)
        state.is_kept = is_kept(headers)  # both come before what a strange body may break
        state.session = session_key(headers, body, self._config.session_header)
        if not state.is_kept and not has_text_only(request):
            raise RequestRefused(
                f"{KEEP_HEADER} is no, but the stock server keeps prompts with images; leave out "
                "the header or the images"
            )
        if self._config.isolate_sessions and state.session is None:
            state.namespace = unshared(state.namespace)
        normalise(request.messages, request.tools, self._config.normalise)

    @hookimpl
    def serving_changed(self, serving: bool) -> None:
        if self._store is not None:
            self._store.set_gentle(serving)

    @hookimpl
    def prepare_messages(self, request: Any, args: Any, tokenizer: Any) -> None:
        share_reasoning(request.messages)
        self._roles.fit(request.messages)

    @hookimpl
    def prefetch(
        self, request: Any, args: Any, tokenizer: Any, prompt: Prompt
    ) -> Callable[[], bool] | None:
        if self._loaded is None or self._store is None:
            return None
        state = RequestState.of(request)
        lookup = state.lookup = self._look_up(state, request, prompt)
        awaited = partial(self._computing.awaited, lookup)
        if not (lookup.prefetch() or awaited()):
            return None
        step_s = self._config.max_stall_s * JOIN_SHARE
        return lambda: (lookup.is_begun or not awaited()) and lookup.advance(step_s)

    def _look_up(self, state: RequestState, request: Any, prompt: Prompt) -> Lookup:
        loaded, store = self._loaded, self._store
        assert loaded is not None and store is not None
        session = (state.session or "") if self._config.isolate_sessions else ""
        state.root = replace(loaded.root, namespace=state.namespace, session=session)
        state.messages = request.messages or []
        return Lookup(
            respell(prompt, state.messages, state.root, store, loaded),
            state.root,
            store,
            loaded,
            self._policy,
            rendered=prompt,
            session=state.session,
            messages=state.messages,
        )

    @hookimpl
    def take_request(
        self, request: Any, args: Any, tokenizer: Any, prompt: Prompt
    ) -> Prepared | None:
        state = RequestState.of(request)
        lookup, state.lookup = state.lookup, None
        if self._loaded is None or self._store is None:
            self._record(state, Outcome.stock(len(prompt.ids), self._refusal))
            # The stock server would keep it.
            return None if state.is_kept else Prepared(prompt, handle=Sequence(state, 0))
        try:
            if lookup is None or lookup.rendered is not prompt or lookup.model is not self._loaded:
                if lookup is not None:
                    lookup.close()
                lookup = self._look_up(state, request, prompt)
            reuse = lookup.restore(lambda: getattr(request, "client_gone", False))
        except ClientGone:
            raise
        except Exception:
            logger.exception("kvpersist: the prompt could not be looked up")
            reuse = Reuse(prompt, Outcome(Kind.MISS, len(prompt.ids), reason=Reason.STORE_FAILED))
        self._record(state, reuse.outcome)
        fed, n_reused = reuse.prompt, reuse.outcome.n_reused
        n_system = len(fed.segments[0]) if fed.segment_types[0] == "system" else 0
        sequence = Sequence(
            state, len(fed.ids), n_reused, reuse.chain, n_system, time.perf_counter()
        )
        taken = Prepared(fed, reuse.caches, n_reused, sequence)
        if state.is_kept:
            self._computing.add(taken)
        return taken

    @hookimpl
    def spell_prompt(
        self, request: Any, args: Any, tokenizer: Any, prompt: Prompt
    ) -> Prompt | None:
        if self._loaded is None or self._store is None:
            return None
        return self._look_up(RequestState.of(request), request, prompt).fed

    def _record(self, state: RequestState, outcome: Outcome) -> None:
        """Log the request's one line, and remember it for `why`."""
        model, kept = self._loaded.name if self._loaded else "", state.is_kept
        record = self._history.add(state.session, state.namespace, model, outcome, kept=kept)
        state.outcome, state.id = outcome, record["id"]
        reused = outcome.n_reused, outcome.n_restored
        self._metrics.count(outcome.kind.value, *reused, outcome.n_computed)
        logger.info("kvpersist: %s (%s)", record["sentence"], state.id)
        if outcome.divergence and kept:
            logger.debug("kvpersist: %s diverges at %r", state.id, outcome.divergence)
        if self._store is not None and kept:
            self._store.keep_request(record)

    @hookimpl
    def insert_cache(
        self, handle: Any, tokens: list[int], prompt_cache: list[Any], cache_type: str
    ) -> None:
        if self._loaded is None or self._store is None:
            return
        sequence: Sequence = handle
        if sequence.entered_s is not None and cache_type != PREFILL:
            n_computed = len(tokens) - sequence.n_reused
            self._policy.prefill.learn(n_computed, time.perf_counter() - sequence.entered_s)
            sequence.entered_s = None
        if not sequence.request.is_kept:
            return
        if self._config.isolate_sessions and sequence.request.session is None:
            return  # no other request could find it
        try:
            insert(sequence, tokens, prompt_cache, cache_type, self._store, self._loaded)
            if self._config.pin_system and cache_type == REPLY:
                pin_system(sequence, self._store, self._asked)
        except Exception:
            logger.exception("kvpersist: a turn could not be saved")
        self._remember(sequence.request)

    @hookimpl
    def reply_sent(
        self, request: Any, content: str, reasoning: str, tool_calls: list[dict[str, Any]]
    ) -> None:
        state = RequestState.of(request)
        state.sent = {"content": content, "reasoning": reasoning, "tool_calls": tool_calls}
        self._remember(state)

    @hookimpl
    def reply_timed(self, request: Any, times_s: ListLike[float]) -> None:
        state = RequestState.of(request)
        if not times_s and state.lookup is not None:
            state.lookup.close()
        outcome = state.outcome
        # The server serves a prompt with images before anybody asks for its headers.
        self._metrics.observe((outcome.kind if outcome else Kind.STOCK).value, times_s)
        if times_s:
            self._history.timed(state.id, times_s[0])

    def _remember(self, state: RequestState) -> None:
        """Remember a reply once its ids and what the client was sent are both known. Any thread."""
        loaded, store = self._loaded, self._store
        if loaded and store and state.root and state.produced and state.sent:
            if state.root.fingerprint != loaded.fingerprint:
                return  # another model was loaded since
            remember(state.messages, *state.produced, state.sent, state.root, store, loaded)

    @hookimpl
    def response_headers(self, request: Any) -> list[tuple[str, str]]:
        state = RequestState.of(request)
        if state.outcome is None:
            if state.lookup is not None:
                state.lookup.close()
            has_text = has_text_only(request)
            why = "another plugin took it" if has_text else "prompts with images are left to it"
            self._record(state, Outcome.stock(0, why))
        assert state.outcome is not None
        said = state.outcome.header + ("" if state.is_kept else "; kept=no")
        return [("X-KVPersist", said), ("X-KVPersist-Request", state.id)]

    @hookimpl
    def routes(self) -> list[Route]:
        key = self._config.api_key
        records = partial(self._history.records, with_text=self._config.show_text)
        agents = AgentsAPI(
            chat_api,
            self._named_sessions,
            self._history.forget,
            key=key,
            by_key=self._config.namespace_by_key,
            session_header=self._config.session_header,
        )
        return [
            Route("GET", REQUESTS_PATH, operator_view(records, key)),
            Route("GET", STATS_PATH, operator_view(self._stats, key)),
            Route("GET", SPEC_PATH, operator_view(self._spec, key)),
            Route("POST", SELFTEST_PATH, operator_view(SelfTest(), key, costs=True)),
            Route("GET", METRICS_PATH, operator_view(self._metrics.exposed, key, CONTENT_TYPE)),
            Route("GET", PAGE_PATH, page_view(key)),
            Route("GET", SESSIONS_PATH, operator_view(self._describe_sessions, key)),
            *(
                Route("POST", path, operator_change(change, read_json, key))
                for path, change in session_changes(
                    self._stored_sessions, self._history.forget
                ).items()
            ),
            *(Route("HEAD", path, empty_answer) for path in HELLO_PATHS),
            Route("POST", MESSAGES_PATH, partial(chat_api.serve, api=MessagesAPI())),
            Route("POST", RESPONSES_PATH, partial(chat_api.serve, api=ResponsesAPI())),
            Route("POST", COUNT_PATH, partial(chat_api.count_tokens, api=MessagesAPI())),
            *(Route(*route) for route in agents.routes()),
        ]

    def _named_sessions(self) -> NamedSessions:
        if self._store is None:
            raise RequestRefused("the server ends", 503)
        return NamedSessions(self._store)

    def _store_counts(self, *, all_files: bool = False) -> dict[str, Any] | None:
        store = self._store  # the server may end meanwhile
        return store.stats(all_files=all_files) if store else None

    def _stored_sessions(self) -> StoredSessions:
        if self._sessions is None:
            raise RequestRefused("the server ends; ask it when it runs again", 503)
        return self._sessions

    def _describe_sessions(self) -> dict[str, Any]:
        model = self._loaded.name if self._loaded else None
        return {"model": model, "store": self._store_counts(), **self._stored_sessions().describe()}

    def _spec(self) -> dict[str, Any]:
        if self._loaded is not None:
            return self._loaded.describe()
        why_not = self._refusal or "no model is loaded"
        return {"model": None, "kept": False, "why_not": why_not}

    def _stats(self) -> dict[str, Any]:
        return {
            "model": self._loaded.name if self._loaded else None,
            **self._policy.describe(),
            "store": self._store_counts(all_files=True),
        }
