"""The server's model provider: tells plugins of a model, and lets them make its caches."""

from __future__ import annotations

import _thread
import logging
import signal
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import manager

if TYPE_CHECKING:
    from mlx_lm.server import ModelProvider as Stock
else:
    Stock = object

logger = logging.getLogger(__name__)


class PluginModelProvider(Stock):  # type: ignore[misc]
    """Loads as stock does, then asks the plugins. Generation thread."""

    startup_error: Exception | None = None
    """Why the default model could not be prepared; `run` reports it when the server has ended."""
    _plugin_error: Exception | None = None

    def _load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> Any:
        self._plugin_error = None
        super()._load(model_path, adapter_path, draft_model_path)
        try:
            manager.ask("model_loaded", provider=self)
            if let_plugins_make_caches(self.model):
                self.is_batchable = (
                    self.draft_model is None
                    and all(hasattr(cache, "merge") for cache in self.model.make_cache())
                    and manager.ask("batches", model=self.model) is not False
                )
        except Exception as error:
            # Otherwise the next request would find this model loaded and be served without us.
            forget_model(self)
            self._plugin_error = error
            raise

    def load_default(self) -> None:
        try:
            super().load_default()
        except Exception:
            if self._plugin_error is None:
                raise
            self.startup_error = self._plugin_error
            # Up to 0.31.3 the generation thread would die unseen and every request would hang.
            _thread.interrupt_main(signal.SIGTERM)
            # The quiet way to end a thread: `run` tells what happened, in one line.
            raise SystemExit from None


def forget_model(provider: Any) -> None:
    """Make a provider load again when it is asked next; `reset` exists from 0.32.0."""
    if hasattr(provider, "reset"):
        provider.reset()
        return
    provider.model_key = provider.model = provider.tokenizer = provider.draft_model = None
    provider.is_batchable = False


def let_plugins_make_caches(model: Any) -> bool:
    """Set `make_cache` on this model, unless no plugin makes caches for it.

    Every binding of mlx-lm's `make_prompt_cache` asks the model first, so one attribute of one
    object reaches them all and nothing else in the process changes.

    Raises what the hook raises: here, while the model is loaded, that can still be reported.
    """
    if manager.ask("make_prompt_cache", model=model) is None:
        return False
    own = own_make_cache(model)
    # The model must not hold itself, or its weights would stay until a garbage collection.
    reference = weakref.ref(model)

    def make_cache() -> list[Any]:
        model = reference()
        # Nothing catches an exception here later, and the generation thread would die.
        caches = manager.ask_safely("make_prompt_cache", model=model)
        return own(model) if caches is None else list(caches)

    model.make_cache = make_cache
    return True


def own_make_cache(model: Any) -> Callable[[Any], list[Any]]:
    """Return the way this model makes its caches without plugins."""
    if hasattr(type(model), "make_cache"):
        return lambda model: list(type(model).make_cache(model))
    from mlx_lm.models.cache import KVCache

    return lambda model: [KVCache() for _ in model.layers]
