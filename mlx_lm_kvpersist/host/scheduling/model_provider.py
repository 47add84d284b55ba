"""The server's model provider: tells plugins of a model, and lets them make its caches."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...ranks import LOADING_S, PATIENCE_S, ranks
from .. import manager
from ..attachments import IMAGE_KINDS
from ..hooks import ModelSupport, PrefillLimits, check_batch, check_caches
from .context_length import max_context
from .step_failures import StepFailures
from .wired import choose_wired_limit

_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")

if TYPE_CHECKING:
    from mlx_lm.server import ModelProvider as Stock
else:
    Stock = object


class PluginModelProvider(Stock):  # type: ignore[misc]
    """Loads as stock does, then asks the plugins. Generation thread."""

    is_ready = False
    """Whether the default model is loaded, if there is one, and requests are served."""
    is_loading = False
    """Whether a model is being loaded, or the hook `model_loaded` is running."""
    fatal_error: BaseException | None = None
    """Why the server must end; `run` reports it."""
    _own_names: Sequence[str] = ()
    _plugin_error: Exception | None = None
    max_context: int | None = None
    """The most tokens of a prompt of the loaded model, None if its files do not state it."""
    reads_images = False
    """Whether the loaded model, its processor and its chat template take images."""
    _n_logits: int | None = None

    @property
    def n_logits(self) -> int:
        """The number of ids that the loaded model, and its draft model, can sample."""
        if self._n_logits is None:
            import mlx.core as mx

            # MLX is lazy: this builds a graph and computes nothing.
            token = mx.array([[0]])
            models = (model for model in (self.model, self.draft_model) if model is not None)
            self._n_logits = min(int(model(token).shape[-1]) for model in models)
        return self._n_logits

    def _load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        if ranks().are_several and self.cli_args.model not in (None, model_path):
            served = self.cli_args.model
            raise ValueError(f"several machines serve {served} alone, not {model_path}")
        self.is_loading = True
        ranks().wait_for(LOADING_S)
        self._n_logits = self._plugin_error = self.max_context = None
        try:
            super()._load(model_path, adapter_path, draft_model_path)
            self.max_context = max_context(model_path, self.tokenizer)
            # 0.31.3 has no processors.
            self.reads_images = renders_images(self.tokenizer, getattr(self, "processor", None))
            choose_wired_limit(self)
            self._tell_plugins()
        finally:
            self.is_loading = False
            ranks().wait_for(PATIENCE_S)

    def _tell_plugins(self) -> None:
        try:
            answers = manager.ask("model_loaded", provider=self)
            if answers:
                plugin, support = answers[0]
                caches = PluginCaches(self.model, plugin, support)
                self.model.make_cache = caches
                can_merge = all(hasattr(cache, "merge") for cache in caches.make(raised=Exception))
                self.is_batchable = self.draft_model is None and can_merge and support.batches
                if self.draft_model is not None and support.draft is not None:
                    draft = PluginCaches(self.draft_model, plugin, support.draft)
                    self.draft_model.make_cache = draft
        except Exception as error:
            # Otherwise the next request would find this model loaded, without its plugins.
            if hasattr(self, "reset"):  # from 0.32.0
                self.reset()
            else:
                provider: Any = self
                provider.model_key = provider.model = provider.tokenizer = None
                provider.draft_model, provider.is_batchable = None, False
            self._plugin_error = error
            raise

    def load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        """Load like stock; the command line's model has its adapter under each of its names."""
        if model_path in self._own_names:
            model_path = self.cli_args.model
            adapter_path = adapter_path or self.cli_args.adapter_path
        return super().load(model_path, adapter_path, draft_model_path)

    def is_loaded(self, name: str) -> bool:
        """Whether the model of this name is loaded, and no model is being loaded. Any thread."""
        loaded = loaded_name(self) if self.is_ready and not self.is_loading else None
        is_own = name == "default_model" or name in self._own_names
        return loaded is not None and loaded == (self.cli_args.model if is_own else name)

    def load_default(self) -> None:
        """Load the model of the command line. Raises ConfigError if stock cannot load it."""
        if self.cli_args.model is not None:
            check_model_name(self.cli_args.model)
        self._own_names = own_names(self.cli_args)
        try:
            super().load_default()
        except Exception as error:
            if error is self._plugin_error:
                raise
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"--model {self.cli_args.model} cannot be loaded ({type(error).__name__}: {reason}"
                "); expected a folder with an MLX model, or a repository of Hugging Face"
            ) from error
        self.is_ready = True


def renders_images(tokenizer: Any, processor: Any) -> bool:
    """Tell whether a chat template writes the token for which a model's processor puts an image."""
    if processor is None:
        return False
    for kind in IMAGE_KINDS:
        image = {"type": kind, kind: "data:,"}
        try:
            messages = [{"role": "user", "content": [image]}]
            if processor.image_token in tokenizer.apply_chat_template(messages, tokenize=False):
                return True
        except Exception:  # no template, or one that expects a text
            continue
    return False


def check_model_name(name: str) -> None:
    """Raise ConfigError unless the name is a folder, or has the form of a name on the hub."""
    if not (Path(name).is_dir() or _HUB_NAME.fullmatch(name)):
        raise ConfigError(
            f"the model folder {name} does not exist; expected a folder, or a name on the hub "
            "such as mlx-community/SmolLM2-135M-Instruct"
        )


def own_names(args: Any) -> list[str]:
    """Return the names of the command line's model, first the name that /v1/models lists.

    They are `served_name`, if a plugin's option sets it; the folder's absolute path; the folder or
    hub name on the command line; and the hub name of a folder in the hub's cache.
    """
    if args.model is None:
        return []
    names = [args.model]
    if (path := Path(args.model)).exists():
        path = path.resolve()
        names.insert(0, str(path))
        # huggingface_hub names the folder of a repository like this, with "--" for "/".
        names += [p[8:].replace("--", "/", 1) for p in path.parts if p.startswith("models--")]
    served = getattr(args, "served_name", None)
    return list(dict.fromkeys([served, *names] if served else names))


def loaded_name(provider: Any) -> str | None:
    """Return the loaded model's name, None while no model is loaded. Any thread."""
    key = provider.model_key  # read once: another model may be loaded between two reads
    return key[0] if key is not None else None


def caches_of(model: Any) -> PluginCaches:
    """Return the maker of a loaded model's caches: a plugin, or stock."""
    caches = getattr(model, "make_cache", None)
    if isinstance(caches, PluginCaches):
        return caches
    return PluginCaches(model, "", ModelSupport(list))


class PluginCaches:
    """Takes the place of a model's `make_cache`: caches as a plugin makes and merges them.

    mlx-lm's `make_prompt_cache` asks the model first, so one attribute is enough. A plugin's
    exception would end the generation thread here: it is logged, and stock's caches are made.
    """

    def __init__(self, model: Any, plugin: str, support: ModelSupport) -> None:
        # A model that refers to itself would keep its weights until a garbage collection.
        self._model: Any = weakref.ref(model)
        self._plugin, self._support = plugin, support
        self.ranks = ranks()
        self._n_layers: int | None = None
        self.limits = support.limits or PrefillLimits(math.inf, lambda position: sys.maxsize)
        self.failures = StepFailures()

    def __call__(self) -> list[Any]:
        caches = self.make()
        return self._stock() if caches is None else list(caches)

    def make(self, *, raised: type[Exception] | tuple[()] = ()) -> Any:
        """Return the plugin's caches for a new sequence, None if that fails."""
        if self._n_layers is None:
            self._n_layers = len(self._stock())
        check = partial(check_caches, n_layers=self._n_layers)
        return self._safely(self._support.make_caches, check=check, raised=raised)

    def merge(self, cache: Any) -> Any:
        """Return a batch cache of one row: the plugin's, or stock's if the plugin has none."""
        merged = self._safely(self._support.merge, (cache,), check=check_batch)
        if merged is None and not hasattr(cache, "merge"):
            raise ValueError(f"{type(cache)} does not yet support batching with history")
        return cache.merge([cache]) if merged is None else merged

    def together(self, caches: Sequence[Any], n_tokens: Sequence[int]) -> Any:
        """Return one cache for one layer of several prompts, None if they cannot be joined."""
        return self._safely(self._support.together, tuple(caches), tuple(n_tokens))

    def most_taken_back(self, caches: Sequence[Any]) -> int:
        """Return how many tokens a call may append to a batch's caches and remove again."""
        count = self._safely(lambda: int(self._support.most_taken_back(caches)))
        return count or 0

    def weigh(self, replies: Sequence[int], prompts: Sequence[int], n_bytes: int | None) -> bool:
        fits = self._safely(self._support.memory.weigh, replies, prompts, n_bytes)
        return fits is None or bool(fits)

    def _safely(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return manager.safely(self._plugin, "model_loaded", function, *args, **kwargs)

    def _stock(self) -> list[Any]:
        from mlx_lm.models.cache import KVCache

        model = self._model()
        own = getattr(type(model), "make_cache", None)
        return list(own(model) if own is not None else (KVCache() for _ in model.layers))
