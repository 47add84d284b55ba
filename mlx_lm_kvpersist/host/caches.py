"""The server's caches: plugins merge them, give and save them, and attend to their keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import manager
from .prompt import TakenTokens

if TYPE_CHECKING:
    from mlx_lm.generate import BatchGenerator as StockBatchGenerator
    from mlx_lm.models.cache import LRUPromptCache as StockPromptCache
else:
    StockBatchGenerator = StockPromptCache = object


class PluginBatchGenerator(StockBatchGenerator):  # type: ignore[misc]
    """Merges as stock does, after asking the plugins. Generation thread.

    To merge one layer's caches of several sequences, mlx-lm asks the cache of the first sequence
    only: `caches[0][i].merge(...)`. So the first sequence's caches are put behind an adapter while
    the batch is made. `_make_batch` itself stays stock's.
    """

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        if manager.ask_first("joins_prompts", model=model) is False:
            # Stock pads the shorter prompts on the right, which some models read as tokens.
            self.prefill_batch_size = 1

    def _make_batch(self, n: int) -> Any:
        if n > 0 and manager.is_implemented("merge_caches"):
            queue = self._unprocessed_sequences
            adapted = [MergeAdapter(cache) for cache in queue[0][3]]
            queue[0] = (*queue[0][:3], adapted, *queue[0][4:])
        return super()._make_batch(n)


class MergeAdapter:
    """One layer's cache of the first sequence of a batch, while the batch is made."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def merge(self, row_caches: Sequence[Any]) -> Any:
        """Return one batch cache: a plugin's, or what the first cache's own merge makes."""
        caches = [self.cache, *row_caches[1:]]
        merged = manager.ask_first("merge_caches", caches=caches)
        if merged is not None:
            return merged
        if not hasattr(self.cache, "merge"):
            raise ValueError(f"{type(self.cache)} does not yet support batching with history")
        return self.cache.merge(caches)


class PluginPromptCache(StockPromptCache):  # type: ignore[misc]
    """A prompt cache for the batched path, where nothing catches an exception. Generation thread.

    An exception here, or a fetch that leaves no token to feed, ends stock's generation thread (in
    0.31.x all requests then hang while /health says ok). So plugins cannot raise through this
    class, and every fetch leaves at least one token.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        if isinstance(tokens, TakenTokens):
            taken = tokens.taken
            # They are returned only once, because the server changes them from here on.
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
        given = {"tokens": tokens, "prompt_cache": prompt_cache, "cache_type": cache_type}
        taken = tokens.taken
        manager.ask_first("insert_cache", taken.plugin, handle=taken.handle, **given)


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
