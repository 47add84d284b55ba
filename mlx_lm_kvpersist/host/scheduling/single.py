"""A request that is served alone: its prompt is computed in chunks, like prompts in a batch.

Stock would compute the prompt in one call, and lose the whole prompt if the client left. Here
plugins save each chunk, and stock computes the last token. Generation thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ClientGone
from ..hooks import PREFILL, PrefillLimits
from ..manager import Taken
from .caches import caches_of
from .prefill import chunk_size, compute_chunk, most_tokens
from .waiting import ASK_EVERY, WEIGH_EVERY

MOST_DRAFTED = 32
"""The most tokens of a draft model that are checked at once. Caches can take back this number."""


def plugin_stream_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of the server's `stream_generate`, which serves one request alone."""

    @wraps(stock)
    def stream_generate(*args: Any, **options: Any) -> Any:
        request = getattr(options.get("prompt"), "taken", None)
        return stock(*args, **options) if request is None else _reply(stock, request, options)

    return stream_generate


def _reply(stock: Callable[..., Any], request: Taken, options: dict[str, Any]) -> Iterator[Any]:
    """Yield stock's responses to the prompt of a plugin's request."""
    caches, n_tokens = caches_of(options["model"]), 0
    error: Exception | None = None
    several = caches.ranks if caches.ranks.are_several else None
    if several is not None and request.reply is not None:
        # Stock would end the reply on rank 0 alone, and the other ranks would wait for it.
        request.reply.stops_stock = False
    try:
        n_prompt = _compute_prompt(request, options)
        for response in stock(**options):
            if n_tokens % WEIGH_EVERY == 0:
                caches.weigh((), (n_prompt + n_tokens,), None)
            n_tokens += 1
            yield response
            if several is not None and n_tokens % ASK_EVERY == 0:
                if several.first(partial(_is_stopped, request), "whether a client has left"):
                    request.reply.fail(ClientGone())
                    return
    except Exception as failure:
        error = failure
        caches.failures.failed(error, "reply" if n_tokens else "prompt")
        raise
    finally:
        if n_tokens and error is None:
            caches.failures.succeeded("reply")


def _is_stopped(request: Taken) -> bool:
    return bool(request.reply is not None and request.reply.is_stopped)


@dataclass
class ComputedModel:
    """A model, and its caches of the first `n_tokens` of a prompt."""

    model: Any
    caches: list[Any]
    n_tokens: int

    @property
    def limits(self) -> PrefillLimits:
        return caches_of(self.model).limits

    def compute(self, ids: list[int], embeddings: mx.array | None) -> None:
        """Compute the next `ids`.

        embeddings: the rows [N, D] that stand for `ids` if the prompt has images.
        """
        position, limits = self.n_tokens, self.limits
        options: dict[str, Any] = {}
        if embeddings is not None:
            options["input_embeddings"] = embeddings[None, : len(ids)]
        caches = self.caches
        compute_chunk(self.model, [ids], caches, caches, limits, position, beside=False, **options)
        self.n_tokens += len(ids)


def _compute_prompt(request: Taken, options: dict[str, Any]) -> int:
    """Compute a prompt except its last token, which stays for stock in `options`.

    Returns the number of tokens of the prompt. Raises ClientGone if the client has left.
    """
    assert request.prompt is not None
    keys, n_cached, draft, request.draft = request.prompt.ids, request.n_cached, request.draft, None
    model, draft_model = options["model"], options.get("draft_model")
    rest, caches = options["prompt"], options["prompt_cache"]
    step_size: int = options["prefill_step_size"]
    ranks = caches_of(model).ranks
    ranks.told(None, "a request that is served alone")  # the call compares the ranks' restores
    model_caches = list(caches) if n_cached else make_prompt_cache(model)
    models = [ComputedModel(model, model_caches, n_cached)]
    if draft_model is not None:
        model_caches = list((draft.caches if draft else None) or make_prompt_cache(draft_model))
        models.append(ComputedModel(draft_model, model_caches, draft.n_cached if draft else 0))
        options["num_draft_tokens"] = min(options["num_draft_tokens"], MOST_DRAFTED)
    caches[:] = [cache for computed in models for cache in computed.caches]
    # With images the model reads other ids than the keys.
    read = list(keys if request.images is None else request.images)
    embeddings = options.get("input_embeddings")
    stop = max(len(keys) - 1, *(computed.n_tokens for computed in models))
    ends = [min(end, stop) for end in accumulate(map(len, request.prompt.segments))]
    while (behind := min(models, key=lambda computed: computed.n_tokens)).n_tokens < stop:
        position = behind.n_tokens
        options["prompt_progress_callback"](max(0, position - n_cached), len(rest))
        size = ranks.first(partial(_next_size, request, behind, step_size), "a chunk")
        if not size:
            raise ClientGone
        segment = bisect_right(ends, position)
        # Models with different numbers of tokens first compute to the same position.
        further = (computed.n_tokens for computed in models if computed.n_tokens > position)
        end = min([ends[segment], *further, position + size])
        rows = None if embeddings is None else embeddings[position - n_cached : end - n_cached]
        behind.compute(read[position:end], rows)
        is_end = all(computed.n_tokens == ends[segment] for computed in models)
        cache_type = request.prompt.segment_types[segment] if is_end else PREFILL
        request.insert(keys[: models[0].n_tokens], caches, cache_type)
    models[0].limits.stepped(1, None)  # a reply runs from here on
    before = mx.array(read[:stop], mx.uint32)
    processors = options.get("logits_processors") or []
    options["logits_processors"] = [_shown_all(before, processor) for processor in processors]
    options["prompt"] = read[stop:]
    if embeddings is not None:
        options["input_embeddings"] = embeddings[stop - n_cached :]
    return len(keys)


def _next_size(request: Taken, computed: ComputedModel, step_size: int) -> int:
    """Return how many tokens to compute now, 0 if the client has left."""
    if _is_stopped(request):
        return 0
    position = computed.n_tokens
    return chunk_size(position, most_tokens(computed.limits, position, step_size))


def _shown_all(before: mx.array, processor: Callable[..., Any]) -> Callable[..., Any]:
    """Return a processor that also sees the ids `before`, [N], like processors in a batch."""
    return lambda tokens, logits: processor(mx.concatenate([before, tokens]), logits)
