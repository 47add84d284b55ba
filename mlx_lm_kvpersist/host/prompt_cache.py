"""The server's prompt cache: gives out and saves the caches of requests that a plugin took."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import manager
from .prompt import TakenTokens

if TYPE_CHECKING:
    from mlx_lm.models.cache import LRUPromptCache as Stock
else:
    Stock = object

logger = logging.getLogger(__name__)


class PluginPromptCache(Stock):  # type: ignore[misc]
    """A prompt cache for the batched path, where nothing catches an exception. Generation thread.

    Stock's generation thread dies of an exception here, and of a fetch that leaves no token to
    feed (in 0.31.x all requests then hang while /health says ok). So plugins cannot raise through
    this class, and every fetch leaves at least one token.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        if isinstance(tokens, TakenTokens):
            taken = tokens.taken
            # Given out once: the server changes these caches from here on.
            caches, taken.caches = taken.caches, None
            return (None, tokens) if caches is None else (caches, tokens[taken.n_cached :])
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if len(rest) > 0:
            return cache, rest
        if len(tokens) < 2:
            return None, tokens
        cache, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return cache, tokens[len(tokens) - 1 - len(rest) :]

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        if not isinstance(tokens, TakenTokens):
            super().insert_cache(model, tokens, prompt_cache, cache_type=cache_type)
            return
        manager.ask_plugin(
            tokens.taken.plugin,
            "insert_cache",
            handle=tokens.taken.handle,
            tokens=tokens,
            prompt_cache=prompt_cache,
            cache_type=cache_type,
        )
