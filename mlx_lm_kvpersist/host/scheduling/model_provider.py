"""Loads models as mlx-lm does, and computes them with the caches that plugins make.

A plugin's answer to the hook `model_loaded` becomes the model's `PluginCaches`.

The server ends if the device computes nothing any more. After some errors a device refuses all
work until the process ends: macOS does so after repeated time-outs of the GPU.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from ...errors import ClientGone, ConfigError, DeviceFailed, RequestRefused
from ...ranks import LOADING_S, PATIENCE_S, ranks
from .. import manager
from ..attachments import IMAGE_KINDS
from ..hooks import ModelSupport, PrefillLimits, check_batch, check_caches
from ..manager import TakenTokens

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "n_ctx"),
    *("max_sequence_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len"),
)
"""Fields of a config.json with the number of tokens that a model was trained for."""
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""The fields with the configuration of the text part, for a model that also reads images."""
_STRETCHES = ("linear", "dynamic")
"""Kinds of rope scaling: the context length is `factor` times the configuration's length."""
_UNSTATED = 10**9
"""Greater lengths mean "not stated": tokenizers without a limit have 1e30."""

MOST_IN_A_ROW = 8
"""This number of failures of one kind of step, without a success in between, ends the server."""
_N_TRIES = 3
_PAUSE_S = 0.1
"""Seconds between two tests of the device. The first may report an earlier step's error."""

Step = Literal["prompt", "reply"]
"""A step computes a part of prompts, or the next tokens of replies."""

if TYPE_CHECKING:
    from mlx_lm.models.cache import LRUPromptCache as StockPromptCache
    from mlx_lm.server import ModelProvider as Stock
else:
    Stock = StockPromptCache = object


class PluginModelProvider(Stock):  # type: ignore[misc]
    """Loads as mlx-lm does, then asks the plugins. Generation thread."""

    is_ready = False
    """Whether requests can be served: the default model, if there is one, is loaded."""
    is_loading = False
    """Whether a model is being loaded, or the hook `model_loaded` is running."""
    fatal_error: BaseException | None = None
    """Why the server must end; `run` reports it."""
    _own_names: Sequence[str] = ()
    _plugin_error: Exception | None = None
    max_context: int | None = None
    """The most tokens that the loaded model's prompts may have; None if its files do not say."""
    reads_images = False
    """Whether the loaded model, its processor and its chat template take images."""
    _n_logits: int | None = None

    @property
    def n_logits(self) -> int:
        """The number of ids that the loaded model, and its draft model, can sample."""
        if self._n_logits is None:
            # MLX is lazy: this call builds a graph and computes nothing.
            token = mx.array([[0]])
            models = (model for model in (self.model, self.draft_model) if model is not None)
            self._n_logits = min(int(model(token).shape[-1]) for model in models)
        return self._n_logits

    def _load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        if ranks().are_several and self.cli_args.model not in (None, model_path):
            served = self.cli_args.model
            raise ValueError(f"several machines can serve only {served}, not {model_path}")
        self.is_loading = True
        ranks().wait_for(LOADING_S)
        self._n_logits = self._plugin_error = self.max_context = None
        try:
            super()._load(model_path, adapter_path, draft_model_path)
            self.max_context = max_context(model_path, self.tokenizer)
            # mlx-lm 0.31.3 has no processors.
            self.reads_images = renders_images(self.tokenizer, getattr(self, "processor", None))
            limit: Any = mx.set_wired_limit
            if isinstance(limit, WiredLimit) and (asked_bytes := limit.asked_bytes):
                limit.choose(manager.ask("wired_limit", provider=self, asked_bytes=asked_bytes))
            self._tell_plugins()
        finally:
            self.is_loading = False
            ranks().wait_for(PATIENCE_S)

    def _tell_plugins(self) -> None:
        try:
            answers = manager.ask("model_loaded", provider=self)
            if answers:
                plugin, support = answers[0]
                self.model.make_cache = caches = PluginCaches(self.model, plugin, support)
                can_merge = all(hasattr(cache, "merge") for cache in caches.make(raised=Exception))
                self.is_batchable = self.draft_model is None and can_merge and support.batches
                if self.draft_model is not None and support.draft is not None:
                    draft = PluginCaches(self.draft_model, plugin, support.draft)
                    self.draft_model.make_cache = draft
        except Exception as error:
            # Otherwise the next request would use this model without its plugins.
            for name in ("model_key", "model", "tokenizer", "processor", "draft_model"):
                setattr(self, name, None)
            self.is_batchable = False
            self._plugin_error = error
            raise

    def load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        """Load as mlx-lm does; the command line's model gets `--adapter-path` by default."""
        if model_path in ("default_model", *self._own_names) and self.cli_args.model is not None:
            model_path = self.cli_args.model
            adapter_path = adapter_path or self.cli_args.adapter_path
        return super().load(model_path, adapter_path, draft_model_path)

    def is_loaded(self, name: str) -> bool:
        """Whether the model of this name is loaded, and no model is being loaded. Any thread."""
        loaded = loaded_name(self) if self.is_ready and not self.is_loading else None
        is_own = name == "default_model" or name in self._own_names
        return loaded is not None and loaded == (self.cli_args.model if is_own else name)

    def load_default(self) -> None:
        """Load the model of the command line. Raises ConfigError if mlx-lm cannot load it."""
        if self.cli_args.model is not None:
            check_model_name(self.cli_args.model)
        self._own_names = own_names(self.cli_args)
        try:
            super().load_default()
        except Exception as error:
            if error is self._plugin_error:
                raise
            raise cannot_load(self.cli_args.model, error) from error
        self.is_ready = True


def renders_images(tokenizer: Any, processor: Any) -> bool:
    """Tell whether a chat template writes an image as the token that the processor expects."""
    if processor is None:
        return False
    for kind in IMAGE_KINDS:
        image = {"type": kind, kind: "data:,"}
        try:
            messages = [{"role": "user", "content": [image]}]
            if processor.image_token in tokenizer.apply_chat_template(messages, tokenize=False):
                return True
        except Exception:  # no template, or the template expects a text
            continue
    return False


def check_model_name(name: str) -> None:
    """Raise ConfigError unless the name is a folder, or has the form of a name on the hub."""
    if not (Path(name).is_dir() or _HUB_NAME.fullmatch(name)):
        wrong = "is a file" if Path(name).exists() else "does not exist"
        raise ConfigError(
            f"the model folder {name} {wrong}; expected a folder, or a name on the hub "
            "such as mlx-community/SmolLM2-135M-Instruct"
        )


def cannot_load(name: str, error: Exception) -> ConfigError:
    """Return the error for a model of `--model`, in one line: the hub's texts are long."""
    if isinstance(error, LocalEntryNotFoundError):
        reason = "no such folder, not downloaded before, and the hub cannot be reached"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "no such folder, and no repository on the hub that you may read"
    else:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ConfigError(
        f"--model {name} cannot be loaded ({reason}); expected a folder with an MLX model, or a "
        "repository of Hugging Face"
    )


def own_names(args: Any) -> list[str]:
    """Return the names of the command line's model, first the name that /v1/models lists.

    A plugin's option may set `served_name`. A folder in the hub's cache also has its hub name.
    """
    if args.model is None:
        return []
    names = [args.model]
    if (path := Path(args.model)).exists():
        path = path.resolve()
        names.insert(0, str(path))
        # huggingface_hub names the folder of a/b "models--a--b".
        names += [p[8:].replace("--", "/", 1) for p in path.parts if p.startswith("models--")]
    served = getattr(args, "served_name", None)
    return list(dict.fromkeys([served, *names] if served else names))


def loaded_name(provider: Any) -> str | None:
    """Return the loaded model's name, None while no model is loaded. Any thread."""
    key = provider.model_key  # read only once: another model may be loaded between two reads
    return key[0] if key is not None else None


def max_context(model: str, tokenizer: Any) -> int | None:
    """Return a loaded model's context length in tokens, None if its files do not state it.

    model: a folder, or a repository of Hugging Face in this machine's cache. The tokenizer's length
    counts if it is greater: no prompt must be refused wrongly. If config.json states no length, the
    tokenizer's length is ignored, because it is often another model's.
    """
    try:
        file: Any = Path(model) / "config.json"
        if not Path(model).exists():
            file = try_to_load_from_cache(model, "config.json")
        stated = length_of(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return None
    own = getattr(tokenizer, "model_max_length", None)
    if stated and isinstance(own, int) and own < _UNSTATED:
        return max(stated, own)
    return stated


def length_of(config: Mapping[str, Any]) -> int | None:
    """Return the context length, in tokens, that a configuration states, or None.

    https://huggingface.co/docs/transformers/internal/rope_utils has the fields of rope scaling.
    """
    for inner in (config, *(config.get(name) for name in _TEXT_CONFIGS)):
        stated = inner if isinstance(inner, Mapping) else {}
        length = next((stated[name] for name in _LENGTHS if _is_length(stated.get(name))), None)
        if length is not None:
            rope = stated.get("rope_scaling") or stated.get("rope_parameters")
            scaling = rope if isinstance(rope, Mapping) else {}
            factor, kind = scaling.get("factor"), scaling.get("rope_type", scaling.get("type"))
            before = scaling.get("original_max_position_embeddings")
            if before is None and kind in _STRETCHES:
                before = length
            if isinstance(factor, int | float) and before is not None and _is_length(before):
                length = max(length, int(factor * before))
            return int(length)
    return None


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _UNSTATED


class WiredLimit:
    """Replaces `mx.set_wired_limit`: the host sets a limit, and plugins choose the real limit.

    mlx-lm sets a limit when its server starts, around each batch, and around a single stream. MLX
    gets no limit before a model is loaded, because the limit depends on the model's size. A late
    limit is no loss: MLX then also wires memory allocated before (`ResidencySet::resize`).
    """

    asked_bytes = 0
    """The last limit that the host has set; 0 on devices without wired memory."""
    _set_bytes = 0
    _chosen_bytes: int | None = 0

    def __init__(self, stock: Callable[[int], object]) -> None:
        self._stock = stock

    def __call__(self, limit: int) -> int:
        """Set the limit that the host asks for, in bytes; return the host's previous limit."""
        before, self.asked_bytes = self.asked_bytes, limit
        chosen = limit if self._chosen_bytes is None else min(limit, self._chosen_bytes)
        if chosen != self._set_bytes:
            self._stock(chosen)
            self._set_bytes = chosen
        return before

    def choose(self, limit: int | None) -> None:
        """Limit the wired memory to `limit` bytes from now on; None means the host's limit."""
        self._chosen_bytes = limit
        self(self.asked_bytes)


class StepFailures:
    """Counts the failures of steps since the last success. Generation thread.

    A successful step of the replies resets all counts. A step of a prompt resets only the count of
    prompts: otherwise the server would never end if each reply failed after its prompt.
    """

    def __init__(self) -> None:
        self._n: dict[Step, int] = {"prompt": 0, "reply": 0}

    def succeeded(self, step: Step) -> None:
        self._n["prompt"] = 0
        if step == "reply":
            self._n["reply"] = 0

    def failed(self, error: Exception, step: Step) -> None:
        """Count a failed step, whose clients got errors.

        Raises DeviceFailed if the device computes nothing, or too many steps failed in a row.
        """
        if isinstance(error, (ClientGone, RequestRefused)):
            return
        self._n[step] = n = self._n[step] + 1
        why = f"{type(error).__name__}: {error}"
        if not _computes():
            raise DeviceFailed(f"the server ends: its device computes nothing any more ({why})")
        if n >= MOST_IN_A_ROW:
            raise DeviceFailed(f"the server ends: {n} steps in a row failed, at last: {why}")


def _computes() -> bool:
    for _ in range(_N_TRIES):
        try:
            total = mx.ones(8).sum()
            mx.eval(total)
            if total.item() == 8:
                return True
        except Exception:
            time.sleep(_PAUSE_S)
    return False


def caches_of(model: Any) -> PluginCaches:
    """Return the maker of a loaded model's caches: a plugin, or mlx-lm."""
    caches = getattr(model, "make_cache", None)
    if isinstance(caches, PluginCaches):
        return caches
    return PluginCaches(model, "", ModelSupport(list))


class PluginCaches:
    """Replaces a model's `make_cache`: a plugin makes and merges the caches.

    mlx-lm's `make_prompt_cache` calls a model's `make_cache` if it exists. A plugin's exception
    would end the generation thread, so it is logged, and mlx-lm's own caches are made instead.
    """

    def __init__(self, model: Any, plugin: str, support: ModelSupport) -> None:
        # Else a reference cycle would keep the model's weights until a garbage collection.
        self._model: Any = weakref.ref(model)
        self._support = support
        self._safely = partial(manager.safely, plugin, "model_loaded")
        self.ranks = ranks()
        self.limits = support.limits or PrefillLimits(math.inf, lambda position: sys.maxsize)
        self.failures = StepFailures()

    def __call__(self) -> list[Any]:
        caches = self.make()
        return self._stock() if caches is None else list(caches)

    def make(self, *, raised: type[Exception] | tuple[()] = ()) -> Any:
        """Return the plugin's caches for a new sequence, None if that fails."""
        check = partial(check_caches, n_layers=len(self._stock()))
        return self._safely(self._support.make_caches, check=check, raised=raised)

    def merge(self, cache: Any) -> Any:
        """Return a batch cache of one row: the plugin's, otherwise the result of `cache.merge`."""
        merged = self._safely(self._support.merge, (cache,), check=check_batch)
        if merged is None and not hasattr(cache, "merge"):
            raise ValueError(f"{type(cache)} does not yet support batching with history")
        return cache.merge([cache]) if merged is None else merged

    def together(self, caches: Sequence[Any], n_tokens: Sequence[int]) -> Any:
        """Return one cache for one layer of several prompts, None if these cannot be joined."""
        return self._safely(self._support.together, tuple(caches), tuple(n_tokens))

    def most_taken_back(self, caches: Sequence[Any]) -> int:
        """Return how many tokens one call may append if `trim` must be able to remove them."""
        return self._safely(lambda: int(self._support.most_taken_back(caches))) or 0

    def weigh(self, replies: Sequence[int], prompts: Sequence[int], n_bytes: int | None) -> bool:
        fits = self._safely(self._support.weigh, replies, prompts, n_bytes)
        return fits is None or bool(fits)

    def _stock(self) -> list[Any]:
        from mlx_lm.models.cache import KVCache  # imported late, so that commands start sooner

        model = self._model()
        own = getattr(type(model), "make_cache", None)
        return list(own(model) if own is not None else (KVCache() for _ in model.layers))


class PluginPromptCache(StockPromptCache):  # type: ignore[misc]
    """mlx-lm's prompt cache, but a request that a plugin took gets the plugin's caches.

    An exception, or a fetch that leaves no token to compute, would end the generation thread.
    So `Taken` catches the exceptions of plugins, and every fetch leaves a token. Generation thread.
    """

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int], *args: Any, **kwargs: Any
    ) -> tuple[Any, list[int]]:
        if isinstance(tokens, TakenTokens):
            request = tokens.taken
            # Caches are returned only once, because the server changes them afterwards.
            caches, request.caches = request.caches, None
            return (None, tokens) if caches is None else (list(caches), tokens[request.n_cached :])
        cache, rest = super().fetch_nearest_cache(model, tokens, *args, **kwargs)
        if len(rest) > 0:
            return cache, rest
        if len(tokens) < 2:
            return None, tokens
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1], *args, **kwargs)
        return cache, tokens[len(tokens) - 1 - len(rest) :]

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *args: Any,
        cache_type: str = "assistant",
        **kwargs: Any,
    ) -> None:
        if isinstance(tokens, TakenTokens):
            tokens.taken.insert(tokens, prompt_cache, cache_type)
            prompt_cache.clear()  # stock's loop refers to the list until the next prompt
            return
        super().insert_cache(model, tokens, prompt_cache, *args, cache_type=cache_type, **kwargs)


def plugin_quantized_attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that lets the keys of a plugin's cache compute the attention.

    The cache has an attribute `bits`, and its keys have a method
    `attend(queries, values, scale, mask)` -> [B, heads, N, values' dimension].
    """

    @functools.wraps(stock)
    def quantized_scaled_dot_product_attention(
        queries: Any, q_keys: Any, q_values: Any, scale: float, mask: Any, **options: Any
    ) -> Any:
        attend = getattr(q_keys, "attend", None)
        if attend is None:
            return stock(queries, q_keys, q_values, scale, mask, **options)
        return attend(queries, q_values, scale, mask)

    return quantized_scaled_dot_product_attention
