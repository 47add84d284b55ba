"""The server's batch generator: plugins merge caches, and say which prompts may be joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import manager

if TYPE_CHECKING:
    from mlx_lm.generate import BatchGenerator as Stock
else:
    Stock = object


class PluginBatchGenerator(Stock):  # type: ignore[misc]
    """Merges as stock does, after asking the plugins. Generation thread.

    To merge one layer's caches of several sequences mlx-lm asks the cache of the first sequence
    only: `caches[0][i].merge(...)`. So the first sequence's caches are put behind an adapter
    until the batch is made; nothing of `_make_batch` is written again here.
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
