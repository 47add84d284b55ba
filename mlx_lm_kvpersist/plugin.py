"""The plugin: answers the server's hooks and wires the parts together. Only it knows them all."""

from __future__ import annotations

import logging
import time
import weakref
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache

from . import config
from .api.admin import REQUESTS_PATH, STATS_PATH, json_view
from .api.normalise import normalise
from .api.session_keys import namespace, session_key
from .cache.batch import BatchQuantizedKVCache
from .cache.calibration import with_plans
from .cache.fingerprint import content_hash, model_fingerprint
from .cache.plain import PlainBatchKVCache
from .cache.quantized import SequenceQuantizedKVCache
from .cache.spec import Batching, ModelCacheSpec
from .cache.warm_up import warm_up
from .errors import ModelNotSupported
from .host.hookspecs import hookimpl
from .host.prompt import Prompt, RequestTokens
from .host.routes import Route
from .match.keys import Root
from .match.text import TokenText
from .request.costs import ReusePolicy
from .request.history import History, RequestRecord
from .request.insert import keep, remember_reply
from .request.lookup import look_up, read_ahead, respelled_prompt
from .request.model import LoadedModel
from .request.outcome import Kind, Outcome, Reason
from .request.replies import read_conversation, respell
from .request.round_trip import check_round_trip
from .request.state import RequestState
from .store.block_store import BlockStore

logger = logging.getLogger(__name__)


class KVPersistPlugin:
    """Gives the server's conversations a KV cache that outlives it."""

    def __init__(self) -> None:
        self._config: config.Config | None = None
        self._refusal = ""
        self._template_args: dict[str, Any] = {}
        self._store: BlockStore | None = None
        self._loaded: LoadedModel | None = None
        self._model_ref: Callable[[], Any] = lambda: None
        self._refused: set[str] = set()
        self._policy = ReusePolicy()
        self._history = History()

    # Startup and shutdown.

    @hookimpl
    def add_options(self, parser: ArgumentParser) -> None:
        config.add_options(parser)

    @hookimpl
    def configure(self, args: Namespace) -> None:
        self._config = config.from_args(args)
        self._template_args = getattr(args, "chat_template_args", {})
        self._store = BlockStore(self._config.folder, self._config.limits)
        logger.info(
            "kvpersist: %d blocks in %s (%.2f of %.2f GB)",
            self._store.index.n_blocks(),
            self._config.folder,
            self._store.index.n_bytes() / 1e9,
            self._config.limits.max_disk_bytes / 1e9,
        )

    @hookimpl
    def self_test(self) -> None:
        assert self._config is not None
        check_round_trip(self._config.precision, self._config.attention)

    @hookimpl
    def shutdown(self) -> None:
        self._loaded = None
        if self._store is not None:
            self._store.close()
            self._store = None

    # The model.

    @hookimpl
    def model_loaded(self, provider: Any) -> None:
        assert self._config is not None
        self._loaded, self._refusal = None, ""
        if self._store is not None:
            self._store.release_ahead()
        # What was learned of one model's speed says nothing of another's.
        self._policy = ReusePolicy(self._config.canary, self._config.min_reuse)
        try:
            self._loaded = self._describe(provider)
        except ModelNotSupported as error:
            self._refusal = str(error)
            if provider.model_key[0] not in self._refused:
                self._refused.add(provider.model_key[0])
                logger.warning("kvpersist: served as stock does, nothing is kept: %s", error)

    def _describe(self, provider: Any) -> LoadedModel:
        assert self._config is not None
        model_path, adapter_path, draft_path = provider.model_key
        if draft_path is not None:
            raise ModelNotSupported("a draft model is in use")
        spec = ModelCacheSpec.probe(provider.model, self._config.precision)
        measured = self._config.folder / "attention.json"
        spec = with_plans(provider.model, spec, measured, self._config.attention)
        warm_up(provider.model, spec)
        fingerprint = model_fingerprint(
            local_path(model_path),
            Path(adapter_path) if adapter_path else None,
            self._content_hash,
        )
        text = TokenText.of(provider.tokenizer) if self._config.store_text else None
        if text is None and self._config.store_text:
            logger.warning("kvpersist: this tokenizer's prompts are matched by ids, not by text")
        logger.info(
            "kvpersist: %s keeps %.1f KB a token (%s)",
            model_path,
            spec.bytes_per_token / 1e3,
            spec.layout,
        )
        for group in spec.full:
            if group.precision is None and not self._config.precision.is_own:
                logger.warning(
                    "kvpersist: %d of its layers stay in full precision: %s",
                    len(group.slots),
                    group.why,
                )
        self._model_ref = weakref.ref(provider.model)
        model = weakref.proxy(provider.model)
        return LoadedModel(model, provider.tokenizer, spec, fingerprint, text, str(model_path))

    def _content_hash(self, path: Path) -> str:
        """Hash a file once: weights are gigabytes, and change as seldom as their stamp does."""
        assert self._store is not None
        stat = path.stat()
        stamp = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
        known = self._store.file_hash(str(path), stamp)
        if known is None:
            logger.info("kvpersist: reading %s once, to tell models apart", path.name)
            known = content_hash(path)
            self._store.keep_file_hash(str(path), stamp, known)
        return known

    @hookimpl
    def make_prompt_cache(self, model: Any) -> list[Any] | None:
        if self._loaded is None or model is not self._model_ref():
            return None
        return list(self._loaded.spec.make_cache())

    @hookimpl
    def merge_caches(self, caches: list[Any]) -> Any | None:
        if any(isinstance(cache, SequenceQuantizedKVCache) for cache in caches):
            return BatchQuantizedKVCache.merge(caches)
        if self._loaded is not None and all(type(cache) is KVCache for cache in caches):
            return PlainBatchKVCache.merge(caches)
        return None

    @hookimpl
    def batches(self, model: Any) -> bool | None:
        if self._loaded is None or model is not self._model_ref():
            return None
        return self._loaded.spec.batching is not Batching.NONE

    @hookimpl
    def joins_prompts(self, model: Any) -> bool | None:
        if self._loaded is None or model is not self._model_ref():
            return None
        return self._loaded.spec.batching is Batching.ALL

    # A request.

    @hookimpl
    def request_received(self, request: Any, headers: Message, body: dict[str, Any]) -> None:
        assert self._config is not None
        state = RequestState.of(request)
        state.session = session_key(headers, body, self._config.session_header)
        state.namespace = namespace(headers, by_key=self._config.namespace_by_key)
        normalise(request.messages, request.tools, self._config.normalise)

    @hookimpl
    def serving_changed(self, serving: bool) -> None:
        if self._store is not None:
            self._store.set_gentle(serving)

    @hookimpl
    def prepare_messages(self, request: Any, args: Any, tokenizer: Any) -> None:
        state, loaded, store = RequestState.of(request), self._loaded, self._store
        if loaded is None or store is None:
            return
        state.root = self._root(state, loaded)
        if request.request_type == "chat":
            try:
                state.conversation, state.known_replies = read_conversation(
                    request.messages, state.root, store
                )
            except Exception:
                logger.exception("kvpersist: replies could not be looked up")

    def _root(self, state: RequestState, loaded: LoadedModel) -> Root:
        assert self._config is not None
        session = (state.session or "") if self._config.isolate_sessions else ""
        return loaded.root(state.namespace, session)

    @hookimpl
    def fetch_ahead(
        self, request: Any, args: Any, tokenizer: Any, prompt: Prompt
    ) -> Callable[[], bool] | None:
        state, loaded, store = RequestState.of(request), self._loaded, self._store
        if loaded is None or store is None:
            return None
        state.root = self._root(state, loaded)
        respelled = self._respelled(state, prompt, request, args, loaded)
        state.respelled = (prompt, respelled)
        state.ahead = read_ahead(state, respelled, store, loaded, self._policy)
        return state.ahead.is_done if state.ahead is not None else None

    @hookimpl
    def prepare_prompt(
        self, request: Any, args: Any, tokenizer: Any, prompt: Prompt
    ) -> Prompt | None:
        state, loaded, store = RequestState.of(request), self._loaded, self._store
        state.n_prompt = len(prompt.ids)
        if loaded is None or store is None:
            state.outcome = Outcome(
                Kind.STOCK, state.n_prompt, reason=Reason.NOT_KEPT, detail=self._refusal
            )
            self._record(state)
            return None
        assert self._config is not None
        state.root = self._root(state, loaded)
        if state.ahead is not None:
            state.ahead.stop()  # what it has not read by now is read faster from here
        try:
            prompt = self._respelled(state, prompt, request, args, loaded)
            prompt = look_up(state, prompt, store, loaded, self._policy, request.messages)
        except Exception:
            # A store that fails costs a restore, never a reply.
            logger.exception("kvpersist: the prompt could not be looked up")
            state.restored = None
            state.outcome = Outcome(Kind.MISS, n_prompt=len(prompt.ids))
        finally:
            if state.ahead is not None:
                state.ahead.release()
                state.ahead = None
        state.n_prompt = len(prompt.ids)
        self._record(state)
        state.ready_s = time.perf_counter()
        return prompt

    def _respelled(
        self, state: RequestState, prompt: Prompt, request: Any, args: Any, loaded: LoadedModel
    ) -> Prompt:
        """Return the prompt with its earlier replies spelled as the model did."""
        (known, respelled), state.respelled = state.respelled or (None, prompt), None
        if known is prompt:
            return respelled
        if not state.known_replies or not loaded.tokenizer.has_chat_template:
            return prompt
        template_args = {**self._template_args, **(args.chat_template_kwargs or {})}

        def render(messages: list[dict[str, Any]]) -> str:
            rendered: str = loaded.tokenizer.apply_chat_template(
                messages,
                tools=request.tools,
                tokenize=False,
                add_generation_prompt=True,
                **template_args,
            )
            return rendered

        try:
            text = respell(request.messages, state.known_replies, render, loaded)
        except Exception as error:
            # Templates may refuse a message that they would not have refused as it was.
            logger.debug("kvpersist: replies stay as they were sent: %s", error)
            text = None
        return prompt if text is None else respelled_prompt(prompt, text, loaded)

    def _record(self, state: RequestState) -> None:
        """Write the request's one line, and keep it for those who ask why."""
        assert state.outcome is not None
        state.id = self._history.new_id()
        model = self._loaded.name if self._loaded else ""
        outcome = state.outcome
        why = f"; {outcome.reason.value}" if outcome.reason else ""
        session = repr(state.session[:80]) if state.session else "none"
        logger.info("kvpersist: %s%s; session=%s; id=%s", outcome.header, why, session, state.id)
        if outcome.parting:
            logger.debug("kvpersist: %s parts at %r", state.id, outcome.parting)
        self._history.add(RequestRecord(state.id, state.session, state.namespace, model, outcome))

    @hookimpl
    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]] | None:
        if self._loaded is None or not isinstance(tokens, RequestTokens):
            return None
        state = RequestState.of(tokens.request)
        if state.restored is None:
            return None, tokens
        (caches, n_tokens), state.restored = state.restored, None
        return caches, tokens[n_tokens:]

    @hookimpl
    def insert_cache(
        self, model: Any, tokens: list[int], prompt_cache: list[Any], cache_type: str
    ) -> bool | None:
        if self._loaded is None or self._store is None or not isinstance(tokens, RequestTokens):
            return None
        state = RequestState.of(tokens.request)
        if state.ready_s is not None and state.outcome is not None:
            n_computed = len(tokens) - state.outcome.n_reused
            self._policy.costs.learn_prefill(n_computed, time.perf_counter() - state.ready_s)
            state.ready_s = None
        try:
            keep(state, tokens, prompt_cache, self._store, self._loaded)
        except Exception:
            logger.exception("kvpersist: a turn could not be kept")
        if state.said is not None and state.sent is not None:
            remember_reply(state, self._store, self._loaded)
        return True

    @hookimpl
    def reply_sent(
        self, request: Any, content: str, reasoning: str, tool_calls: list[dict[str, Any]]
    ) -> None:
        state = RequestState.of(request)
        state.sent = {"content": content, "reasoning": reasoning, "tool_calls": tool_calls}
        if state.said is not None and self._loaded is not None and self._store is not None:
            remember_reply(state, self._store, self._loaded)

    @hookimpl
    def response_headers(self, request: Any) -> list[tuple[str, str]]:
        state = RequestState.of(request)
        if state.outcome is None:
            # The server prepares prompts with images by itself, and asks nobody.
            detail = "prompts with images are left to the stock server"
            state.outcome = Outcome(Kind.STOCK, 0, reason=Reason.NOT_KEPT, detail=detail)
            self._record(state)
        return [("X-KVPersist", state.outcome.header), ("X-KVPersist-Request", state.id)]

    @hookimpl
    def routes(self) -> list[Route]:
        return [
            Route("GET", REQUESTS_PATH, json_view(self._requests)),
            Route("GET", STATS_PATH, json_view(self._stats)),
        ]

    def _requests(self) -> list[dict[str, Any]]:
        """Return the last requests, the newest first."""
        assert self._config is not None
        with_text = self._config.store_text
        return [record.to_json(with_text=with_text) for record in self._history.records()][::-1]

    def _stats(self) -> dict[str, Any]:
        loaded, store, costs = self._loaded, self._store, self._policy.costs
        return {
            "model": loaded.name if loaded else None,
            "spec": loaded.spec.describe() if loaded else None,
            "attention": {name: plan.describe() for name, plan in loaded.spec.plans.items()}
            if loaded
            else None,
            "not_kept": self._refusal or None,
            "prefill_tokens_per_s": costs.prefill.per_s,
            "restore_bytes_per_s": {
                "hot": costs.from_ram.per_s,
                "warm": costs.from_disk.per_s,
            },
            "store": store.stats() if store else None,
        }


def local_path(model: str) -> Path:
    """Return the folder of a model that has been loaded: a path, or a repository in the cache."""
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:
        raise ModelNotSupported(f"the files of model {model} cannot be found: {error}") from error
