"""The plugin: one method per hook of the server, the configuration and the routes."""

from __future__ import annotations

import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from functools import partial
from operator import methodcaller
from typing import Any

from . import config
from .api import admin
from .api.agents import WARM_PATH, AgentsAPI, Service, warm_at_start, warm_view
from .api.messages import COUNT_PATH, HELLO_PATHS, MESSAGES_PATH, MessagesAPI
from .api.responses import RESPONSES_PATH, ResponsesAPI
from .api.session_keys import is_kept, namespace, normalise, note, session_key, unshared
from .cache.geometry.kinds import most_taken_back
from .cache.live.attention import least_rows
from .cache.live.caches import batch_of
from .cache.live.rows import rows_of
from .errors import ModelNotSupported, RequestRefused
from .host import manager
from .host.hooks import ClientRequest, ModelSupport, Prompt, Route, TakenRequest, hookimpl
from .ranks import ranks
from .request.memory import Memory, total_bytes, weights_bytes, wired_bytes
from .request.model import ModelOptions, Speed, described, load_model, places
from .request.outcome import HEADERS, PENDING, Kind, Metrics, Outcome, Reason, RequestLog
from .request.replies import known_replies
from .request.serving import RequestState, ServedRequest, Serving, Stage
from .store.block_store import BlockStore
from .store.records import RAM
from .store.stored_sessions import StoredSessions

JOIN_SHARE = 0.2
"""Between two steps of the replies, restoring may take this share of the longest stall."""
CHUNK_SHARE = 8
"""A chunk of a prompt takes at most an eighth of the memory account."""

logger = logging.getLogger(__name__)


class KVPersistPlugin:
    """Stores the KV caches of the server's conversations, so that they outlive the server."""

    _config: config.Config
    """Set by `configure`; hooks that are called earlier do not read it."""

    def __init__(self) -> None:
        self._refusal = ""
        self._store: BlockStore | None = None
        self._sessions: StoredSessions | None = None
        self._serving: Serving | None = None
        """Requests of the loaded model, if its conversations are stored."""
        self._refused: set[str] = set()
        self._address = ""
        self._log = RequestLog()
        self._metrics = Metrics(self._store_counts, self._memory_parts)

    # Startup and shutdown.

    @hookimpl
    def add_options(self, parser: ArgumentParser) -> None:
        config.add_options(parser)

    @hookimpl
    def configure(self, args: Namespace) -> None:
        self._config = config.from_args(args, ranks().rank, ranks().size)
        self._log = RequestLog(with_text=self._config.store_text)
        self._store = BlockStore(
            self._config.folder, self._config.limits, encryption=self._config.encryption
        )
        if (shared := self._config.shared) is not None:
            self._store.share(*shared, partial(known_replies, self._store))
        self._sessions = StoredSessions(self._store)
        if host := getattr(args, "host", None):
            self._address = f"http://{f'[{host}]' if ':' in host else host}:{args.port}"
        if getattr(args, "model", None) is None:
            logger.info("kvpersist: %s", places(self._store))

    @hookimpl
    def shutdown(self) -> None:
        self._drop_model()
        self._sessions = None
        if self._store is not None:
            self._store.close()
            self._store = None

    # The model.

    @hookimpl
    def wired_limit(self, provider: Any, asked_bytes: int) -> int | None:
        n_weights = weights_bytes(provider.model, getattr(provider, "draft_model", None))
        limit, why = wired_bytes(n_weights, asked_bytes)
        logger.info("kvpersist: wired memory: %s", why)
        return limit

    @hookimpl
    def model_loaded(self, provider: Any) -> ModelSupport | None:
        self._drop_model()
        self._refusal = ""
        store, options = self._store, self._config
        if store is None:
            return None  # the server ends
        store.reader.release_prefetched()
        provider.cli_args.kv_bits = None
        n_weights = weights_bytes(provider.model, getattr(provider, "draft_model", None))
        n_bytes = ranks().least(total_bytes(options.memory_bytes, n_weights), "the memory")
        chunk_bytes = min(options.max_prefill_bytes, n_bytes // CHUNK_SHARE)
        model_options = ModelOptions(
            options.precision, options.attention, chunk_bytes, options.store_text, ranks()
        )
        try:
            model = load_model(provider, model_options)
        except (ModelNotSupported, OSError) as error:  # the model's files may have been removed
            self._refuse(provider, str(error))
            return None
        step_s = options.max_stall_s * JOIN_SHARE
        memory = Memory(n_bytes, n_weights, store, model, refuses=options.refuses)
        isolated = options.isolate_sessions
        self._serving = Serving(store, model, self._record, isolated, step_s, memory)
        spec = model.spec
        logger.info("kvpersist: %s: %s", model.name, described(spec))
        logger.info("kvpersist: %s", places(store))
        logger.info("kvpersist: %s", memory)
        draft = None
        if model.draft is not None:
            logger.info("kvpersist: with a draft model requests are served one after another")
            limits = model.draft.speed.limits(options.max_stall_s)
            draft = ModelSupport(model.draft.spec.make_cache, limits=limits)
        return ModelSupport(
            spec.make_cache,
            batch_of,
            rows_of if spec.joins else lambda caches, n_tokens: None,
            spec.batches,
            model.speed.limits(
                options.max_stall_s, lambda n_replies, step_s: store.writer.set_n_replies(n_replies)
            ),
            memory.weigh,
            draft,
            # Calls of a few rows check drafts. No drafts if MLX compiles kernels for such calls.
            most_taken_back if options.prompt_lookup and least_rows() == 1 else lambda caches: 0,
        )

    def _drop_model(self) -> None:
        if self._serving is not None:
            self._serving.memory.close()
        self._serving = None

    def _refuse(self, provider: Any, why: str) -> None:
        self._refusal = why
        provider.cli_args.kv_bits = self._config.stock_kv_bits  # stock quantizes this model
        if provider.model_key[0] not in self._refused:
            self._refused.add(provider.model_key[0])
            logger.warning("kvpersist: served as stock does, nothing is kept: %s", why)
            if (bits := self._config.stock_kv_bits) is not None:
                logger.info("kvpersist: --kv-bits %d applies, with one request at a time", bits)

    # A request.

    @hookimpl
    def request_received(
        self, request: ClientRequest, headers: Message, body: Mapping[str, Any]
    ) -> None:
        state = RequestState.of(request)
        state.namespace = namespace(headers, by_key=self._config.namespace_by_key)
        state.is_kept = is_kept(headers)  # set first: a malformed body may raise
        state.session, state.note = session_key(headers, body), note(headers, request.messages)
        if self._config.isolate_sessions and state.session is None:
            state.namespace = unshared(state.namespace)

    @hookimpl
    def idle(self) -> None:
        if self._store is not None:
            self._store.writer.set_n_replies(0)
        if self._serving is not None:
            self._serving.memory.idle()

    @hookimpl
    def prepare_messages(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
        normalise(messages, tools)

    @hookimpl
    def prompt_rendered(self, request: ClientRequest, prompt: Prompt) -> None:
        if serving := self._serving:
            state = RequestState.of(request)
            serving.await_interrupted(request, prompt)
            serving.fetch(state, prompt)
            with serving.store.index.database.lent():
                if serving is self._serving:  # else another model was loaded, or the server ends
                    serving.look_up(state, prompt)

    @hookimpl
    def take_request(self, request: ClientRequest, prompt: Prompt) -> TakenRequest | None:
        if serving := self._serving:
            return ServedRequest(serving, request, prompt)
        state = RequestState.of(request)
        state.n_prompt = len(prompt.ids)
        # Stock would keep the prompt, and all tenants could find it.
        has_tenants = bool(state.namespace) or self._config.isolate_sessions
        return TakenRequest(prompt) if has_tenants or not state.is_kept else None

    def _record(self, state: RequestState, outcome: Outcome) -> None:
        model = serving.model if (serving := self._serving) else None
        name, precision = (model.name, model.precision) if model else ("", None)
        n_reused, n_restored = outcome.n_reused, outcome.n_restored
        if model and n_reused:
            state.saved_s = model.speed.pace.seconds(0, n_reused)
        record = self._log.add(state.record(name, outcome, precision))
        state.outcome = outcome
        # Unknown for stock, which has its own cache.
        n_computed = 0 if outcome.kind is Kind.STOCK else outcome.n_prompt - n_reused
        self._metrics.count(outcome.kind.value, n_computed)
        if self._store is not None and n_reused:  # only on the generation thread: no lock
            self._store.reused_tokens[RAM] += n_reused - n_restored
            self._store.reused_tokens[outcome.tier] += n_restored
        logger.info("kvpersist: %s (%s)", record["sentence"], state.id)

    @hookimpl
    def reply_sent(
        self,
        request: ClientRequest,
        content: str,
        reasoning: str,
        tool_calls: Sequence[dict[str, Any]],
    ) -> None:
        state = RequestState.of(request)
        state.sent = {"content": content, "reasoning": reasoning, "tool_calls": tool_calls}
        if serving := self._serving:
            serving.finish(state)

    @hookimpl
    def reply_timed(self, request: ClientRequest, times_s: Sequence[float]) -> None:
        state = RequestState.of(request)
        state.move(Stage.DONE)
        if (serving := self._serving) and request.client_gone:
            serving.remember(state)  # otherwise `reply_sent` remembers the reply
        outcome = state.outcome
        self._metrics.observe((outcome.kind if outcome else Kind.STOCK).value, times_s)
        record = self._log.timed(state.id, round(times_s[0], 4) if times_s else None)
        if record is not None and self._store is not None and state.is_kept:
            self._store.change_index(
                "remember the result of a request", lambda index: index.state.add_request(record)
            )

    @hookimpl
    def response_headers(self, request: ClientRequest, is_early: bool) -> list[tuple[str, str]]:
        state = RequestState.of(request)
        outcome = None if is_early else state.outcome
        if outcome is None and not is_early:
            state.drop_lookup()
            why, reason = self._refusal or "another plugin took it", Reason.NOT_KEPT
            outcome = Outcome(Kind.STOCK, state.n_prompt, reason=reason, detail=why)
            self._record(state, outcome)
        header = PENDING if outcome is None else outcome.header
        header += "" if state.is_kept else "; kept=no"
        return [("X-KVPersist", header), ("X-KVPersist-Request", state.id)]

    @hookimpl
    def routes(self) -> list[Route]:
        key, shows, exposed = self._config.api_key, self._shows_text, self._metrics.exposed
        views: dict[str, Callable[[Any], Any]] = {
            admin.REQUESTS_PATH: lambda handler: self._describe_requests(),
            admin.STATS_PATH: lambda handler: self._stats(),
            admin.SPEC_PATH: lambda handler: self._spec(),
            admin.METRICS_PATH: lambda handler: admin.Answer(exposed(), headers=HEADERS),
            admin.SESSIONS_PATH: admin.sessions_view(self._describe_sessions),
        }
        agents = AgentsAPI(self._service(), self._log.forget)
        changes = admin.session_changes(self._stored_sessions, self._log.forget, with_text=shows)
        return [
            *(Route("GET", path, admin.operator_route(view, key)) for path, view in views.items()),
            Route("GET", "/", admin.root_view(key)),
            Route("GET", admin.PAGE_PATH, admin.page_view(key)),
            *(
                Route("POST", path, admin.operator_change(change, key))
                for path, change in changes.items()
            ),
            *(Route("HEAD", path, admin.answering(lambda handler: b"")) for path in HELLO_PATHS),
            Route("POST", MESSAGES_PATH, methodcaller("serve", MessagesAPI())),
            Route("POST", RESPONSES_PATH, methodcaller("serve", ResponsesAPI())),
            Route("POST", COUNT_PATH, methodcaller("serve_count", MessagesAPI())),
            *(Route(*route) for route in agents.routes()),
            Route("POST", WARM_PATH, warm_view(self._service())),
        ]

    @hookimpl
    def started(self, serve: Callable[[Callable[[Any], None]], None]) -> None:
        if self._address:
            logger.info(
                "kvpersist: clients connect to %s/v1 (Anthropic's to %s), the page is %s%s",
                *(self._address, self._address, self._address, admin.PAGE_PATH),
            )
        if self._config.warm:
            warm_at_start(self._service(), self._config.warm, serve)

    def _service(self) -> Service:
        options = self._config
        key, by_key = options.api_key, options.namespace_by_key
        return Service(self._stored_sessions, key, by_key, lambda: self._refusal)

    def _store_counts(self, *, all_files: bool = False) -> dict[str, Any] | None:
        store = self._store  # None while the server ends
        stats = store.stats(all_files=all_files) if store else None
        return stats and {**stats, "failed": {**stats["failed"], **manager.failures.counts}}

    def _stored_sessions(self) -> StoredSessions:
        if self._sessions is None:
            raise RequestRefused("the server ends; ask it when it runs again", 503)
        return self._sessions

    @property
    def _shows_text(self) -> bool:
        return self._config.show_text and self._config.store_text

    def _describe_sessions(self, **which: Any) -> dict[str, Any]:
        sessions = self._stored_sessions().describe(**which, with_text=self._shows_text)
        return {**self._shown(), "with_text": self._shows_text, **sessions}

    def _describe_requests(self) -> list[dict[str, Any]]:
        records = self._log.records(with_text=self._shows_text)
        return self._stored_sessions().add_names(records, with_text=self._shows_text)

    def _spec(self) -> dict[str, Any]:
        if serving := self._serving:
            return serving.model.describe()
        return {"model": None, "kept": False, "why_not": self._refusal or "no model is loaded"}

    def _stats(self) -> dict[str, Any]:
        speed = self._serving.model.speed if self._serving else Speed()
        return {**self._shown(all_files=True), **speed.describe()}

    def _shown(self, *, all_files: bool = False) -> dict[str, Any]:
        model = serving.model if (serving := self._serving) else None
        name, precision = (model.name, model.precision) if model else (None, None)
        counts = {"store": self._store_counts(all_files=all_files), "memory": self._memory_parts()}
        return {"model": name, "precision": precision, **counts}

    def _memory_parts(self) -> dict[str, int] | None:
        return serving.memory.parts() if (serving := self._serving) else None
