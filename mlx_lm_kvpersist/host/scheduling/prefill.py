"""The prompts that are being computed: order, chunks, and calls for several prompts.

A request that is served alone is computed in the same chunks, and plugins save each chunk. Then
mlx-lm computes the last token and the reply. Without the plugin, mlx-lm would compute the whole
prompt even if the client leaves, and save it only after the reply. Generation thread.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ClientGone
from ..hooks import PREFILL, PrefillLimits
from ..manager import Taken
from .model_provider import PluginCaches, caches_of
from .waiting import ASK_EVERY, WEIGH_EVERY

CHUNKS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
"""Sizes of chunks: few, because devices compile or tune kernels for each size."""

ROUND = 64
"""The positions where long chunks end are multiples of this number: so there are few shapes."""

IDLE_CHUNK_S = 1.0
"""How long a chunk may take while no replies run: a new prompt waits for the chunk.

With 0.3 s, a new prompt of 8K tokens took 1.3 times as long on an H200.
"""

IDLE_CHUNK = 512
"""The shortest chunk while no replies run: shorter chunks are slower per token."""

MOST_PASSED_OVER = 3
"""After this number of chunks of other prompts, the oldest prompt is computed."""

MOST_DRAFTED = 32
"""The most tokens of a draft model that are checked in one call. Caches can trim this number."""


def chunk_size(position: int, most: int) -> int:
    """Return how many of `most` tokens are computed in one chunk after `position` cached tokens."""
    size = max((size for size in CHUNKS if size <= most), default=max(most, 1))
    return size - position % ROUND if size >= ROUND else size


def peak_memory() -> Callable[[], int]:
    """Return a function that returns the peak of temporary memory since now, in bytes.

    Resets MLX's counter. Call this before the model, because some models evaluate when called.
    """
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    return lambda: max(0, mx.get_peak_memory() - max(before, mx.get_active_memory()))


def most_tokens(
    limits: PrefillLimits, position: int, step_size: int, stall_s: float | None = None
) -> int:
    """Return how many tokens memory and time allow to compute after `position` cached tokens.

    stall_s: how long replies may wait; None while no reply runs.
    """
    most = min(step_size, limits.most_tokens(position))
    if stall_s is not None:
        in_time = limits.pace.tokens(position, stall_s)
    else:
        in_time = max(IDLE_CHUNK, limits.pace.tokens(position, IDLE_CHUNK_S))
    return int(min(most, max(in_time, CHUNKS[0])))


@dataclass(eq=False)
class Prefill:
    """A prompt from the queue until its reply begins. mlx-lm's fields come first, in its order.

    `segments` are the ids that are left; the last segment is one id, with which the reply begins.
    `caches`, one per layer, hold `tokens`; `batch` has the caches once computing has begun.
    """

    uid: int
    segments: list[list[int]]
    max_tokens: int
    caches: list[Any]
    tokens: Any
    """A list of the ids of `caches`; `TakenTokens` if a plugin took the request."""
    sampler: Any
    processors: Any
    stops: Any
    _: KW_ONLY  # raises TypeError if stock's items get another field
    row: Any = None
    """mlx-lm's batch of a parked reply, without caches: it has the next token and the counters."""
    is_alone: bool = False
    """Whether to compute the prompt alone: it was parked, or failed with other prompts."""
    batch: Any = None
    """A batch of mlx-lm's class with this prompt as its row."""
    n_tokens: int = field(init=False)
    """How many ids the segments had before any id was computed."""
    passed_over: int = 0
    has_waited: bool = False
    """Whether the ready prompt has already waited for a short prompt, see `_groups`."""

    def __post_init__(self) -> None:
        self.n_tokens = self.n_left

    def again(self, segments: list[list[int]], tokens: list[int], caches: list[Any]) -> Prefill:
        """Return the same request with other segments, to be computed alone."""
        changes: dict[str, Any] = {"segments": segments, "tokens": tokens, "caches": caches}
        return replace(self, **changes, is_alone=True, batch=None)

    @property
    def n_left(self) -> int:
        return sum(map(len, self.segments))

    @property
    def is_ready(self) -> bool:
        """Whether only the last token is left, with which its reply begins."""
        return len(self.segments) == 1


class Prefills:
    """The prompts that are being computed. Rank 0 alone decides; all ranks compute."""

    def __init__(self, model: Any, caches: PluginCaches, step_size: int) -> None:
        self._model, self._caches, self._limits = model, caches, caches.limits
        self._step_size = step_size
        self._waited_s = 0.0
        """How long the last chunk waited for the device to end a step of the replies."""
        self.all: list[Prefill] = []

    def drop(self, prefills: Collection[Prefill]) -> None:
        self.all = [prefill for prefill in self.all if prefill not in prefills]

    def decide(
        self, stopped: Collection[int], step_s: float, *, beside: bool
    ) -> tuple[list[list[int]], dict[int, int], Exception | None]:
        """Return groups of uids whose replies begin, the chunk (tokens by uid), a plugin's error.

        With an error, the chunk has only the chosen prompt. stopped: uids of prompts that end now.
        step_s: the time of the replies' last step. beside: whether replies run at the same time.
        """
        prefills = [prefill for prefill in self.all if prefill.uid not in stopped]
        unready = [prefill for prefill in prefills if not prefill.is_ready]
        ready = [prefill for prefill in prefills if prefill.is_ready]
        begins = _groups(ready, unready, beside=beside)
        if not unready:
            return begins, {}, None
        # Only the oldest prompt may go before shorter prompts: these must not wait long.
        oldest, turn = unready[0], min(unready, key=lambda prefill: prefill.n_left)
        if oldest.passed_over >= MOST_PASSED_OVER:
            turn = oldest
        try:
            return begins, self._chunk(turn, unready, step_s if beside or begins else None), None
        except Exception as error:
            return begins, {turn.uid: 0}, error

    def _chunk(
        self, turn: Prefill, unready: Sequence[Prefill], step_s: float | None
    ) -> dict[int, int]:
        """Return the prompts to compute, `turn` first, and how many tokens of each prompt.

        If the chunk ends the segment of `turn`, other prompts whose whole segments fit join it.
        """
        most, widest = self._most_tokens(turn, step_s), len(turn.segments[0])
        sizes = {turn.uid: min(chunk_size(len(turn.tokens), most), widest)}
        furthest = len(turn.tokens)
        if turn.is_alone or sizes[turn.uid] < widest:
            return sizes
        joining = [prefill for prefill in unready if prefill is not turn and not prefill.is_alone]
        for prefill in sorted(joining, key=lambda prefill: len(prefill.segments[0])):
            most = min(most, self._most_tokens(prefill, step_s))
            widest = max(widest, len(prefill.segments[0]))
            furthest = max(furthest, len(prefill.tokens))
            # The padding must not go beyond the end of the model's table of positions.
            if widest * (len(sizes) + 1) > most or furthest + widest > self._limits.n_positions:
                break
            sizes[prefill.uid] = len(prefill.segments[0])
        return sizes

    def _most_tokens(self, prefill: Prefill, step_s: float | None) -> int:
        stall_s = None
        if step_s is not None:
            # The last chunk's wait for a step of the replies counts as a part of the step.
            longest_s = self._limits.max_stall_s
            stall_s = max(longest_s - step_s - self._waited_s, longest_s / 4)
        return most_tokens(self._limits, len(prefill.tokens), self._step_size, stall_s)

    def compute(self, chunk: dict[Prefill, int], step: Any, step_s: float) -> None:
        """Compute the decided chunk. The logits are never evaluated.

        step, step_s: see `compute_chunk`.

        If the caches cannot be joined, all prompts except the first are removed from `chunk`.
        """
        caches, width = self._joined(chunk)
        for prefill in self.all:
            prefill.passed_over = 0 if prefill in chunk else prefill.passed_over + 1
        position = max(len(prefill.tokens) for prefill in chunk)
        inputs = []
        for prefill, n_tokens in chunk.items():
            segment = prefill.segments[0]
            ids, prefill.segments[0] = segment[:n_tokens], segment[n_tokens:]
            prefill.tokens += ids
            inputs.append(ids + [0] * (width - n_tokens))
        states = [cache for prefill in chunk for cache in prefill.batch.prompt_cache]
        self._waited_s = compute_chunk(
            self._model, inputs, caches, states, self._limits, position, step, step_s
        )

    def _joined(self, chunk: dict[Prefill, int]) -> tuple[list[Any], int]:
        """Return a cache for each layer, and how many tokens each prompt has with its padding."""
        turn, *_ = chunk
        n_tokens = tuple(chunk.values())
        width, furthest = max(n_tokens), max(len(prefill.tokens) for prefill in chunk)
        if furthest + self._limits.least_width <= self._limits.n_positions:
            width = max(width, self._limits.least_width)
        if len(chunk) > 1 or width > chunk[turn]:
            layers = zip(*(prefill.batch.prompt_cache for prefill in chunk), strict=True)
            caches = [self._caches.together(layer, n_tokens) for layer in layers]
            # A model makes one mask for all layers of a kind: their caches must need the same mask.
            classes = {getattr(cache, "kind", None): type(cache) for cache in caches}
            is_one_mask = None not in caches and set(classes.values()) == set(map(type, caches))
            # Compared with the other ranks: they have layers of the same kinds, so they must agree.
            self._caches.ranks.note(is_one_mask)
            if is_one_mask:
                return caches, width
            for prefill in list(chunk)[1:]:
                del chunk[prefill]
        return turn.batch.prompt_cache, chunk[turn]

    def merged(self, prefills: Sequence[Prefill]) -> Any:
        """Return one batch of mlx-lm's class. If possible, the caches are copied only once."""
        first, *following = prefills
        batch = first.batch
        if following:
            layers = zip(*(prefill.batch.prompt_cache for prefill in prefills), strict=True)
            for cache, *more in layers:
                if getattr(cache, "extends_by_many", False):
                    cache.extend(*more)
                    continue
                for row in more:
                    cache.extend(row)
            for prefill in following:
                prefill.batch.prompt_cache = []
                batch.extend(prefill.batch)
        for cache in batch.prompt_cache:
            if hasattr(cache, "finalize"):
                cache.finalize()  # else each step adds an unevaluated operation to the padding
        return batch


def _groups(
    ready: Sequence[Prefill], unready: Sequence[Prefill], *, beside: bool
) -> list[list[int]]:
    """Return the uids of prompts with one token left, in groups whose replies begin together.

    A request with processors begins in a separate group, because processors may fail. If no replies
    run, ready prompts wait once for a prompt with few tokens left, because a reply would make its
    chunks shorter.
    """
    is_short = any(prefill.n_left <= IDLE_CHUNK for prefill in unready)
    if is_short and not (beside or any(prefill.has_waited for prefill in ready)):
        for prefill in ready:
            prefill.has_waited = True
        return []
    single = [prefill for prefill in ready if prefill.is_alone or prefill.processors]
    together = [prefill.uid for prefill in ready if prefill not in single]
    return [*([together] if together else []), *([prefill.uid] for prefill in single)]


def compute_chunk(
    model: Any,
    inputs: list[list[int]],
    caches: Sequence[Any],
    states: Sequence[Any],
    limits: PrefillLimits,
    position: int,
    step: Any = None,
    step_s: float = 0.0,
    **options: Any,
) -> float:
    """Compute one chunk; let the plugin learn the chunk's time, and its memory if no replies run.

    inputs: ids, [B, N]. states: the caches that are evaluated. step: the tokens that a step of
    replies computes at the same time; None if no replies run. step_s: how long a step takes that
    runs alone. options: more arguments of the model. Returns how many seconds the chunk waited for
    the step.
    """
    started, peak_bytes = time.perf_counter(), peak_memory()
    if step is not None:  # if a reply has begun or ended, the tokens are not submitted yet
        mx.async_eval(step)  # type: ignore[no-untyped-call]
    model(mx.array(inputs), cache=caches, **options)
    evaluated = [cache.state for cache in states]
    if step is not None:  # submitted now, so that the device does not pause after the step
        mx.async_eval(evaluated)  # type: ignore[no-untyped-call]
    built = time.perf_counter()
    if step is not None:
        mx.eval(step)
    else:
        mx.synchronize()  # the last step of an ended reply may still run
    waited_s = time.perf_counter() - built
    mx.eval(evaluated)
    mx.synchronize()  # raises the errors of work that had ended before `eval` looked
    n_tokens, total_s = len(inputs) * len(inputs[0]), time.perf_counter() - started
    # MLX limits the work in its queue, so submitting the chunk may also have waited for the step.
    unsure_s = 0.0 if step is None else min(built - started, step_s)
    chunk_s = limits.pace.learn(position, n_tokens, total_s - waited_s, unsure_s=unsure_s)
    if step is None:  # else the peak may be the step's
        limits.took(n_tokens, position, peak_bytes())
    give_back(limits)
    return total_s - chunk_s


def give_back(limits: PrefillLimits) -> None:
    """Give freed memory back to the system if MLX keeps more than the plugin allows."""
    if mx.get_cache_memory() > limits.max_unused_bytes:
        mx.clear_cache()


def plugin_stream_generate(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of the server's `stream_generate`, which serves one request alone."""

    @wraps(stock)
    def stream_generate(*args: Any, **options: Any) -> Any:
        request = getattr(options.get("prompt"), "taken", None)
        return stock(*args, **options) if request is None else _reply(stock, request, options)

    return stream_generate


def _reply(stock: Callable[..., Any], request: Taken, options: dict[str, Any]) -> Iterator[Any]:
    caches, n_tokens = caches_of(options["model"]), 0
    error: Exception | None = None
    if caches.ranks.are_several and request.reply is not None:
        # Stock would end the reply on rank 0 alone, and the other ranks would wait for it.
        request.reply.stops_stock = False
    try:
        n_prompt = _compute_prompt(request, options)
        for response in stock(**options):
            if n_tokens % WEIGH_EVERY == 0:
                caches.weigh((), (n_prompt + n_tokens,), None)
            n_tokens += 1
            yield response
            is_asked = caches.ranks.are_several and n_tokens % ASK_EVERY == 0
            if is_asked and caches.ranks.first(partial(_is_stopped, request), "a client has left"):
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
    """A model, and caches of the first `n_tokens` of a prompt."""

    model: Any
    caches: list[Any]
    n_tokens: int

    @property
    def limits(self) -> PrefillLimits:
        return caches_of(self.model).limits

    def compute(self, ids: list[int], **options: Any) -> None:
        caches, limits, position = self.caches, self.limits, self.n_tokens
        compute_chunk(self.model, [ids], caches, caches, limits, position, **options)
        self.n_tokens += len(ids)


def _compute_prompt(request: Taken, options: dict[str, Any]) -> int:
    """Compute a prompt except its last token, which stays for mlx-lm in `options`.

    Returns the prompt's length in tokens. Raises ClientGone if the client has left.
    """
    assert request.prompt is not None
    keys, n_cached, draft, request.draft = request.prompt.ids, request.n_cached, request.draft, None
    model, draft_model = options["model"], options.get("draft_model")
    rest, caches = options["prompt"], options["prompt_cache"]
    step_size: int = options["prefill_step_size"]
    ranks = caches_of(model).ranks
    ranks.told(None, "a request that is served alone")  # also compares the ranks' noted restores
    model_caches = list(caches) if n_cached else make_prompt_cache(model)
    models = [ComputedModel(model, model_caches, n_cached)]
    if draft_model is not None:
        model_caches = list((draft.caches if draft else None) or make_prompt_cache(draft_model))
        models.append(ComputedModel(draft_model, model_caches, draft.n_cached if draft else 0))
        options["num_draft_tokens"] = min(options["num_draft_tokens"], MOST_DRAFTED)
    caches[:] = [cache for computed in models for cache in computed.caches]
    # With images, the model reads ids that differ from `keys`.
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
        # The model with fewer cached tokens first computes up to the other's position.
        further = (computed.n_tokens for computed in models if computed.n_tokens > position)
        end = min([ends[segment], *further, position + size])
        rows: dict[str, Any] = {}
        if embeddings is not None:
            rows["input_embeddings"] = embeddings[None, position - n_cached : end - n_cached]
        behind.compute(read[position:end], **rows)
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
    if _is_stopped(request):
        return 0
    position = computed.n_tokens
    return chunk_size(position, most_tokens(computed.limits, position, step_size))


def _shown_all(before: mx.array, processor: Callable[..., Any]) -> Callable[..., Any]:
    """Return a processor that also sees the ids `before`, [N], like processors in a batch."""
    return lambda tokens, logits: processor(mx.concatenate([before, tokens]), logits)
