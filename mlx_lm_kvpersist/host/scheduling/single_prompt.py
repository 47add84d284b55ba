"""The prompt of a request that is served by itself: computed in chunks, as prompts in a batch are.

Stock would compute it in one go and hand over its caches at the end of the reply, so a client that
leaves would lose all of it. Here plugins save each chunk, and stock gets the last tokens only. Its
penalties are shown all of the prompt all the same, as those of a batch are.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...ranks import ranks
from ..answers import PREFILL, PrefillLimits
from ..manager import TakenTokens
from .images import Images
from .model_provider import PluginCaches
from .prefill import IDLE_CHUNK, IDLE_CHUNK_S, chunk_size, evaluated
from .reply import ReplyQueue

MOST_DRAFTED = 32
"""Tokens of a draft model that are checked at once, at most. Caches can take back this number."""


@dataclass
class _Computed:
    """A model, and its caches of the first `n_tokens` of a prompt."""

    model: Any
    caches: list[Any]
    n_tokens: int
    limits: PrefillLimits

    def compute(self, ids: list[int], step_size: int, images: Images | None) -> None:
        """Compute some of the next `ids`: as many as nobody minds to wait for."""
        position, limits = self.n_tokens, self.limits
        ids = ids[: ranks().first(lambda: self._size(step_size), "a chunk")]
        given: dict[str, Any] = {}
        if images is not None:
            embedded = images.embedded(self.model, position, position + len(ids))
            if embedded is not None:
                ids, given = ids[: embedded.shape[1]], {"input_embeddings": embedded}
        started = time.perf_counter()
        self.model(mx.array([ids]), cache=self.caches, **given)
        taken_bytes = evaluated(self.caches)
        limits.pace.learn(position, len(ids), time.perf_counter() - started)
        limits.took(len(ids), position, taken_bytes)
        if mx.get_cache_memory() > limits.max_unused_bytes:
            mx.clear_cache()
        self.n_tokens += len(ids)

    def _size(self, step_size: int) -> int:
        position, limits = self.n_tokens, self.limits
        most = min(step_size, limits.most_tokens(position))
        most = min(most, max(IDLE_CHUNK, limits.pace.tokens(position, IDLE_CHUNK_S)))
        return chunk_size(position, most)


class SinglePrompt:
    """Computes the prompt of one request, once a plugin has taken it. Generation thread.

    `models` are the loaded one and its draft model, or None. `reply` is told how far the prompt is;
    that raises ClientGone where nobody waits any more. `step_size` are the tokens that stock would
    compute at once.
    """

    def __init__(self, models: Sequence[Any], reply: ReplyQueue, step_size: int) -> None:
        self._models = [model for model in models if model is not None]
        self._reply, self._step_size = reply, step_size
        self._before = mx.array([], mx.uint32)
        """The ids that stock does not compute itself, [N]."""

    def shown_all(self, processor: Callable[..., Any]) -> Callable[..., Any]:
        """Return a logits processor of mlx-lm's that sees these ids, too, before those it is given.

        A draft model's loop shows its processors the last token of the prompt, and the reply.
        """
        return lambda tokens, logits: processor(mx.concatenate([self._before, tokens]), logits)

    def compute(self, tokens: TakenTokens, caches: list[Any] | None) -> tuple[Any, list[int]]:
        """Compute a prompt, of which `caches` hold the beginning; return stock's last tokens, too.

        Without limits of a plugin stock computes the prompt.
        """
        taken = tokens.taken
        n_cached = taken.n_cached if caches is not None else 0
        draft, images, taken.draft = taken.draft, taken.images, None
        drafted = (None, 0) if draft is None else (draft.caches, draft.n_cached)
        held = zip(self._models, ((caches, n_cached), drafted), strict=False)
        parts = [part for model, one in held if (part := _computed(model, *one)) is not None]
        is_one = len(self._models) == 1
        if len(parts) < len(self._models) or taken.prompt is None or not (is_one or images is None):
            # The draft's caches are missing; or there are images, which stock refuses with a draft.
            return (caches, tokens[n_cached:]) if is_one else (None, tokens)
        stop = len(tokens) - 1
        if images is not None:
            stop = images.begin_of(stop)  # stock embeds whole images only
        stop = max(stop, *(part.n_tokens for part in parts))
        read = tokens if images is None else images.read
        ends = [min(end, stop) for end in accumulate(map(len, taken.prompt.segments))]
        all_caches = [cache for part in parts for cache in part.caches]
        while (least := min(parts, key=lambda part: part.n_tokens)).n_tokens < stop:
            self._reply.put((max(0, least.n_tokens - n_cached), len(tokens) - n_cached))
            segment = bisect_right(ends, least.n_tokens)
            # Models that are apart first come to one place.
            further = (part.n_tokens for part in parts if part.n_tokens > least.n_tokens)
            end = min([ends[segment], *further])
            least.compute(read[least.n_tokens : end], self._step_size, images)
            is_end = all(part.n_tokens == ends[segment] for part in parts)
            cache_type = taken.prompt.segment_types[segment] if is_end else PREFILL
            taken.insert(tokens[: parts[0].n_tokens], all_caches, cache_type)
        self._reply.n_cached = n_cached
        parts[0].limits.stepped(1, None)  # a reply runs from here on
        self._before = mx.array(read[:stop], mx.uint32)
        return all_caches, tokens[stop:]


def plugin_logits_processors(stock: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Return the replacement of the server's `_make_logits_processors`.

    Those of a request that is served by itself, `args.single`, are shown all of its prompt.
    """

    @wraps(stock)
    def _make_logits_processors(args: Any) -> list[Any]:
        single: SinglePrompt | None = getattr(args, "single", None)
        made = stock(args)
        return made if single is None else [single.shown_all(processor) for processor in made]

    return _make_logits_processors


def _computed(model: Any, caches: Sequence[Any] | None, n_tokens: int) -> _Computed | None:
    """Return a model and its caches, None if no plugin limits its chunks."""
    made = getattr(model, "make_cache", None)
    limits = made.limits if isinstance(made, PluginCaches) else None
    if limits is None:
        return None
    return _Computed(model, list(caches or make_prompt_cache(model)), n_tokens, limits)
