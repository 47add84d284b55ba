"""A model's caches, the server's prompt cache, and attention, as plugins provide them.

The server ends when the device computes nothing. After some errors a device refuses all work until
the process ends: macOS does so after repeated time-outs of the GPU. Then only a new process helps,
and a supervisor starts it.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx

from ...errors import ClientGone, DeviceFailed, RequestRefused
from ...ranks import ranks
from .. import manager
from ..hooks import ModelSupport, PrefillLimits, check_batch, check_caches
from ..manager import TakenTokens

if TYPE_CHECKING:
    from mlx_lm.models.cache import LRUPromptCache as StockPromptCache
else:
    StockPromptCache = object

Step = Literal["prompt", "reply"]
"""A step computes a part of prompts, or the next tokens of replies."""

MOST_IN_A_ROW = 8
"""The number of failures of one kind of step, without a success in between, that end the server."""
_N_TRIES = 3
_PAUSE_S = 0.1
"""Seconds between two tries: the error of a step may be reported again at the next try."""


class StepFailures:
    """Counts the failures of steps since the last success. Generation thread.

    A successful step of the replies resets all counts. A step of a prompt resets only the count of
    prompts: otherwise the server would continue although each reply fails after its prompt.
    """

    def __init__(self) -> None:
        self._n: dict[Step, int] = {"prompt": 0, "reply": 0}

    def succeeded(self, step: Step) -> None:
        self._n["prompt"] = 0
        if step == "reply":
            self._n["reply"] = 0

    def failed(self, error: Exception, step: Step) -> None:
        """A step failed, and its clients got errors.

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
    """Whether the device can add a few numbers."""
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
    """Return the maker of a loaded model's caches: a plugin, or stock."""
    caches = getattr(model, "make_cache", None)
    if isinstance(caches, PluginCaches):
        return caches
    return PluginCaches(model, "", ModelSupport(list))


class PluginCaches:
    """Replaces a model's `make_cache`: a plugin makes and merges the caches.

    mlx-lm's `make_prompt_cache` asks the model first, so one attribute is enough. A plugin's
    exception would end the generation thread here: it is logged, and stock's caches are made.
    """

    def __init__(self, model: Any, plugin: str, support: ModelSupport) -> None:
        # A model in a reference cycle would keep its weights until a garbage collection.
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
        fits = self._safely(self._support.weigh, replies, prompts, n_bytes)
        return fits is None or bool(fits)

    def _safely(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return manager.safely(self._plugin, "model_loaded", function, *args, **kwargs)

    def _stock(self) -> list[Any]:
        from mlx_lm.models.cache import KVCache  # imported late, so that commands start sooner

        model = self._model()
        own = getattr(type(model), "make_cache", None)
        return list(own(model) if own is not None else (KVCache() for _ in model.layers))


class PluginPromptCache(StockPromptCache):  # type: ignore[misc]
    """A prompt cache for the batched path, where nothing catches an exception. Generation thread.

    An exception here, or a fetch that leaves no token to compute, ends stock's generation thread.
    So this class catches the exceptions of plugins, and every fetch leaves at least one token.
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
            prompt_cache.clear()  # stock's loop holds the list until the next prompt
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
