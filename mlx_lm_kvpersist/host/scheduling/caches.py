"""The server's prompt cache, and attention: plugins restore and save caches, and attend to keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..manager import TakenTokens

if TYPE_CHECKING:
    from mlx_lm.models.cache import LRUPromptCache as StockPromptCache
else:
    StockPromptCache = object


class PluginPromptCache(StockPromptCache):  # type: ignore[misc]
    """A prompt cache for the batched path, where nothing catches an exception. Generation thread.

    An exception here, or a fetch that leaves no token to feed, ends stock's generation thread. So
    plugins cannot raise through this class, and every fetch leaves at least one token.
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
            return
        kwargs["cache_type"] = cache_type
        super().insert_cache(model, tokens, prompt_cache, *args, **kwargs)


def plugin_quantized_attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of mlx-lm's `quantized_scaled_dot_product_attention`.

    A plugin's cache has an attribute `bits`, and its keys are a tuple with a method
    `attend(queries, values, scale, mask)` -> [B, heads, N, values' dimension]. For all other keys
    stock's function is called.
    """

    @functools.wraps(stock)
    def quantized_scaled_dot_product_attention(
        queries: Any,
        q_keys: Any,
        q_values: Any,
        scale: float,
        mask: Any,
        group_size: int = 64,
        bits: int = 8,
    ) -> Any:
        attend = getattr(q_keys, "attend", None)
        if attend is None:
            return stock(queries, q_keys, q_values, scale, mask, group_size=group_size, bits=bits)
        return attend(queries, q_values, scale, mask)

    return quantized_scaled_dot_product_attention
