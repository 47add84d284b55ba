"""The server's model provider: tells plugins of a model, and lets them make its caches."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from . import manager
from .context_length import max_context

if TYPE_CHECKING:
    from mlx_lm.server import ModelProvider as Stock
else:
    Stock = object


class PluginModelProvider(Stock):  # type: ignore[misc]
    """Loads as stock does, then asks the plugins. Generation thread."""

    is_ready = False
    """Whether the default model is loaded, if there is one, and requests are served."""
    is_loading = False
    """Whether a model is being loaded, or plugins are being told of it."""
    fatal_error: BaseException | None = None
    """Why the server must end; `run` reports it."""
    _plugin_error: Exception | None = None
    max_context: int | None = None
    """How many tokens a prompt of the loaded model may have, None where its files do not say."""
    _n_logits: int | None = None

    @property
    def n_logits(self) -> int:
        """How many tokens the loaded model, and its draft model, can choose from."""
        if self._n_logits is None:
            import mlx.core as mx

            # MLX is lazy: this builds a graph and computes nothing.
            token = mx.array([[0]])
            models = (model for model in (self.model, self.draft_model) if model is not None)
            self._n_logits = min(int(model(token).shape[-1]) for model in models)
        return self._n_logits

    def _load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        self.is_loading = True
        try:
            self._load_and_tell(model_path, adapter_path, draft_model_path)
        finally:
            self.is_loading = False

    def _load_and_tell(self, model_path: Any, adapter_path: Any, draft_model_path: Any) -> None:
        self._n_logits = self._plugin_error = self.max_context = None
        super()._load(model_path, adapter_path, draft_model_path)
        self.max_context = max_context(model_path, self.tokenizer)
        try:
            manager.ask("model_loaded", provider=self)
            if let_plugins_make_caches(self.model):
                self.is_batchable = (
                    self.draft_model is None
                    and all(hasattr(cache, "merge") for cache in self.model.make_cache())
                    and manager.ask("batches", model=self.model) is not False
                )
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

    def load_default(self) -> None:
        """Load the model of the command line. Raises ConfigError where stock cannot load it."""
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


def loaded_name(provider: Any) -> str | None:
    """Return which model is loaded, None while there is none. Any thread."""
    key = provider.model_key  # asked once: another model may be loaded in between
    return key[0] if key is not None else None


def let_plugins_make_caches(model: Any) -> bool:
    """Set `make_cache` on this model, unless no plugin makes caches for it.

    mlx-lm's `make_prompt_cache` asks the model first, under whatever name it was imported. So one
    attribute of one object is enough, and nothing else in the process changes.

    Raises what the hook raises: while the model is being loaded, that can still be reported.
    """
    if manager.ask("make_prompt_cache", model=model) is None:
        return False
    from mlx_lm.models.cache import KVCache

    own = getattr(type(model), "make_cache", None)
    # The model must not hold itself, or its weights would stay until a garbage collection.
    reference = weakref.ref(model)

    def make_cache() -> list[Any]:
        model: Any = reference()
        # Later nothing would catch an exception, and it would end the generation thread.
        caches = manager.ask_first("make_prompt_cache", model=model)
        if caches is None:
            caches = own(model) if own is not None else (KVCache() for _ in model.layers)
        return list(caches)

    model.make_cache = make_cache
    return True
