"""The server's prompt cache: asks the plugins first, then does as stock does."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import manager

if TYPE_CHECKING:
    from mlx_lm.models.cache import LRUPromptCache as Stock
else:
    Stock = object

logger = logging.getLogger(__name__)


class PluginPromptCache(Stock):  # type: ignore[misc]
    """A prompt cache for the batched path, where nobody catches an exception. Generation thread.

    Stock lets the generation thread die of an exception here, and of a fetch that leaves no
    token to feed (in 0.31.x all requests then hang while /health says ok). So hooks cannot
    raise through this class, and every fetch leaves at least one token.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        found = manager.ask_safely("fetch_nearest_cache", model=model, tokens=tokens)
        if found is not None:
            if leaves_a_suffix(found, tokens):
                cache, rest = found
                return cache, rest
            logger.error(
                "hook fetch_nearest_cache returned a rest that is not an end of the prompt with "
                "at least one token; the prompt is computed from its start"
            )
            return None, tokens
        return self._fetch_stock(model, tokens)

    def _fetch_stock(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Return stock's answer, one token shorter where it would leave nothing to feed."""
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
        kept = manager.ask_safely(
            "insert_cache",
            model=model,
            tokens=tokens,
            prompt_cache=prompt_cache,
            cache_type=cache_type,
        )
        if kept is None:
            # A plain list: stock keeps the tokens for long, the request must not stay with them.
            super().insert_cache(model, list(tokens), prompt_cache, cache_type=cache_type)


def leaves_a_suffix(found: Any, tokens: list[int]) -> bool:
    """Tell whether a fetch is (cache or None, the last tokens, at least one)."""
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    cache, rest = found
    if len(rest) == 0 or (cache is None and len(rest) != len(tokens)):
        return False
    return len(rest) <= len(tokens) and list(rest) == list(tokens[-len(rest) :])
