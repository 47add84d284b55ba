"""Attention over packed keys and values of any shape: three strategies with the same result.

`dequantize` dequantizes the layer's keys and values and runs MLX's fused kernel, which is the
fastest for prompts. `packed` never dequantizes: it reads fewer bytes, but writes the scores between
its two products. `tiled` dequantizes a few heads at a time, at least one, so that the dequantized
numbers stay below a limit. An `AttentionPlan` chooses the strategy of a call.
`measuring/attention_check.py` checks the strategies for a model's layers on this device.

Shapes: queries [B, Hq, N, Dk]; keys and values [B, Hkv, S, ...]. Hq is a multiple of Hkv. Query
head h reads key head h // (Hq // Hkv). The result [B, Hq, N, Dv] has the queries' dtype. A mask is
None, "causal" (the queries are the last N of the S tokens), or an array that broadcasts to [B, Hq,
N, S]. An array is boolean (True: visible) or added to the scores. No query sees a later token,
unless the mask is None.

A query sees the keys and values of its own block of the grid in full precision. So attention is
computed span by span: the queries of one span are in one block.

Callers pass and get arrays that are neither rotated nor padded. Rotated keys are multiplied by
rotated queries, and the sum of rotated values is rotated back. A dot product does not change if
both rows are padded, or multiplied by the same orthonormal matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import mlx.core as mx

from ..geometry.precision import Quantization
from . import packed as pk
from .packed import Backend, Packed

Strategy = Literal["dequantize", "packed", "tiled"]
Mask = mx.array | str | None

MAX_DEQUANTIZED_BYTES = 256 << 20
"""The most bytes of dequantized keys and values, or of scores, at one time, if the work can be
divided. The decision to divide does not count spare room, although a step may read it."""

_FEW = 17
"""The most queries of a decoding step: a token and 16 draft tokens."""

_MOST_ON_CPU = 16
"""How many queries of one key head are computed with packed keys on a CPU; more would be slower."""

KEY_MULTIPLE, QUERY_MULTIPLE = 4096, 64
"""If MLX builds a kernel for each number of keys and of queries, both are padded to multiples of
these numbers. In the first block of the grid, keys are padded to one block. Single queries are not
padded."""


class _Span(NamedTuple):
    """Queries [start, stop) see keys [0, first) quantized, [first, last) in full precision."""

    start: int
    stop: int
    first: int
    last: int


@dataclass
class PackedKV:
    """Packed keys, or values, of one layer on their way from the cache to attention.

    All arrays are the cache's buffers, with spare room at the end: call `attend` before the next
    update. `buffers` hold `n_tokens`. `newest` [B, H, S, D] holds the last `n_newest` tokens in
    full precision: the queries' tokens, and earlier tokens of the block (of the grid) in which the
    queries begin. That block has `n_own` earlier tokens; the first of them may be packed. If rows
    differ in `n_own`, each row has one query, and `n_own` is the largest. `rows_differ`: some rows
    of `newest` have zeros in front, in the place of packed tokens.
    """

    buffers: Packed
    quantization: Quantization
    n_tokens: int
    newest: mx.array
    n_newest: int
    n_own: int = 0
    strategy: Strategy = "packed"
    tile_bytes: int = MAX_DEQUANTIZED_BYTES
    is_computed: bool = False
    """Whether `newest` has all tokens, because all are in the first block of the grid."""
    rows_differ: bool = False

    def attend(self, queries: mx.array, values: PackedKV, scale: float, mask: Mask) -> mx.array:
        if self.is_computed:
            if needs_padding(queries, values.newest, mask):
                block = self.first_block(), values.first_block()
                return _padded_attention(queries, *block, scale, self.n_newest)
            newest = (pk.view(x.newest, 0, x.n_newest) for x in (self, values))
            return mx.fast.scaled_dot_product_attention(queries, *newest, scale=scale, mask=mask)
        if self.strategy == "packed":
            return packed_attention(queries, self, values, scale, mask)
        tile_bytes = self.tile_bytes if self.strategy == "tiled" else None
        return dequantized_attention(queries, self, values, scale, mask, tile_bytes)

    def spans(self, n_queries: int, mask: Mask) -> list[_Span]:
        """Return the spans of the queries, cut at the ends of blocks."""
        n_keys, n_own, start = self.n_tokens, self.n_own, 0
        before, first, spans = n_keys - n_queries, n_keys - self.n_newest, []
        while start < n_queries:
            stop = min(n_queries, start + pk.GRID - n_own)
            spans.append(_Span(start, stop, first, n_keys if mask is None else before + stop))
            start, first, n_own = stop, before + stop, 0
        return spans

    @property
    def n_to_read(self) -> int:
        """How many positions a step reads if MLX would copy a view: all, or those in use.

        If at most a quarter is unused, all are read, without a copy.
        """
        capacity = self.buffers[0].shape[2]
        return capacity if (capacity - self.n_tokens) * 4 <= capacity else self.n_tokens

    def factors(self) -> Packed:
        """Return the packed tokens for products; on CUDA, spare room can follow them.

        CUDA's quantized_matmul refuses views.
        """
        in_use = pk.view(self.buffers, 0, self.n_tokens)
        if pk.backend() != "cuda":
            return in_use
        return self.buffers if self.n_to_read > self.n_tokens else pk.each(mx.contiguous, in_use)

    def tile(self, rows: slice, heads: slice, after: mx.array | None) -> PackedKV:
        """Return some rows and heads, whose buffers are read only after `after` is computed."""
        weights, scales, biases = (x[rows, heads] for x in self.buffers)
        if after is not None:
            # Otherwise MLX could dequantize every tile before it uses the first tile.
            (weights,) = mx.depends([weights], [after])
        return replace(self, buffers=(weights, scales, biases), newest=self.newest[rows, heads])

    def dequantized(self, start: int, stop: int, dtype: mx.Dtype) -> mx.array:
        """Return tokens [start, stop), still rotated and padded."""
        return pk.dequantize(pk.view(self.buffers, start, stop), self.quantization, dtype)

    def prepared(self) -> mx.array:
        """Return the newest tokens rotated and padded, like dequantized tokens.

        On a GPU, spare room is rotated, too: copying a slice first would take longer.
        """
        if pk.backend() == "cpu":
            return pk.prepared(pk.view(self.newest, 0, self.n_newest), self.quantization)
        return pk.view(pk.prepared(self.newest, self.quantization), 0, self.n_newest)

    def first_block(self) -> mx.array:
        """Return the newest tokens [B, H, GRID, D], with any finite numbers after them."""
        if self.newest.shape[2] == pk.GRID:
            return self.newest
        n_more = pk.GRID - self.n_newest
        newest = pk.view(self.newest, 0, self.n_newest)
        return mx.pad(newest, [(0, 0), (0, 0), (0, n_more), (0, 0)])

    def computed(self, first: int, last: int) -> mx.array:
        before = self.n_tokens - self.n_newest
        return self.newest[:, :, first - before : last - before]

    def placed(self, packed: mx.array, own: mx.array, at: tuple[Any, ...]) -> mx.array:
        """Return `packed` (keys, values or scores) with the tokens `own` at index `at`.

        If rows differ, each token is in `packed` or in `own`, and the other array has zeros for it.
        `packed` is not sliced, because MLX would copy it.
        """
        if self.rows_differ:
            return packed.at[at].add(own)
        packed[at] = own
        return packed


def dequantized_attention(
    queries: mx.array,
    keys: PackedKV,
    values: PackedKV,
    scale: float,
    mask: Mask,
    tile_bytes: int | None = None,
) -> mx.array:
    """Dequantize and run the fused kernel that mlx-lm runs in full precision.

    With `tile_bytes`, at most this number of bytes is dequantized at a time. A single head of one
    row is never split, even if it is larger.
    """
    queries = pk.prepared(queries, keys.quantization)
    if tile_bytes is None:
        out = _fused(queries, keys, values, scale, mask)
    else:
        out = _tiled(queries, keys, values, scale, mask, tile_bytes)
    return pk.as_it_came(out, values.quantization)


def _tiled(
    queries: mx.array, keys: PackedKV, values: PackedKV, scale: float, mask: Mask, tile_bytes: int
) -> mx.array:
    n_rows, n_heads = queries.shape[:2]
    n_kv_heads = keys.newest.shape[1]
    # The dequantized numbers of a token's key and value in one head.
    n_numbers = sum(x.buffers[1].shape[3] * x.quantization.group_size for x in (keys, values))
    n_at_once = tile_bytes // max(1, keys.n_to_read * n_numbers * queries.dtype.size)
    n_repeats = n_heads // n_kv_heads
    last: mx.array | None = None
    rows_out: list[mx.array] = []
    for rows in _slices(0, n_rows, max(1, n_at_once // n_kv_heads)):
        heads_out: list[mx.array] = []
        for heads in _slices(0, n_kv_heads, max(1, n_at_once)):
            query_heads = slice(heads.start * n_repeats, heads.stop * n_repeats)
            tile_keys, tile_values = (x.tile(rows, heads, last) for x in (keys, values))
            tile_mask = _part(mask, rows, query_heads)
            last = _fused(queries[rows, query_heads], tile_keys, tile_values, scale, tile_mask)
            heads_out.append(last)
        rows_out.append(mx.concatenate(heads_out, axis=1))
    return mx.concatenate(rows_out, axis=0)


def _fused(
    queries: mx.array, keys: PackedKV, values: PackedKV, scale: float, mask: Mask
) -> mx.array:
    """Dequantize and run the fused kernel, span after span.

    Queries and results are rotated and padded. At first, the tokens of all spans are in full
    precision. After each span, its tokens are overwritten by their quantized values.
    """
    n_queries, dtype = queries.shape[2], queries.dtype
    spans = keys.spans(n_queries, mask)
    first, last = spans[0].first, keys.n_tokens
    is_padded = needs_padding(queries, values.newest, mask)
    n_read = keys.n_to_read if n_queries <= _FEW and not is_padded else last
    n_more = -last % KEY_MULTIPLE if is_padded else 0
    keys_and_values, rounded = [], []
    for x in (keys, values):
        array = x.dequantized(0, n_read, dtype)
        if n_more:
            array = mx.pad(array, [(0, 0), (0, 0), (0, n_more), (0, 0)])
        if len(spans) > 1:
            rounded.append(x.dequantized(first, last, dtype))
        own_tokens = slice(None), slice(None), slice(first, last)
        keys_and_values.append(x.placed(array, x.prepared(), own_tokens))

    def attended(span: _Span) -> mx.array:
        all_keys, all_values = keys_and_values
        own = queries if len(spans) == 1 else queries[:, :, span.start : span.stop]
        if is_padded:
            return _padded_attention(own, all_keys, all_values, scale, span.last)
        own_mask = mask
        if len(spans) > 1:
            own_mask = _part(mask, slice(None), slice(None), slice(*span[:2]), slice(span.last))
        seen = pk.view(all_keys, 0, span.last), pk.view(all_values, 0, span.last)
        return mx.fast.scaled_dot_product_attention(own, *seen, scale=scale, mask=own_mask)

    out = [attended(spans[0])]
    for done, span in pairwise(spans):
        keys_and_values = mx.depends(keys_and_values, out[-1:])
        done_tokens = slice(done.first - first, done.last - first)
        for array, older in zip(keys_and_values, rounded, strict=True):
            array[:, :, done.first : done.last] = older[:, :, done_tokens]
        out.append(attended(span))
    return mx.concatenate(out, axis=2) if len(out) > 1 else out[0]


def _padded_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, last: int
) -> mx.array:
    """Return the causal attention of queries to padded keys; the last query is at `last` - 1.

    Each padding query sees the first key, so its result is finite.
    """
    n_queries = queries.shape[2]
    # Even a pad of 0 copies the queries: MLX would build a kernel for each set of strides.
    queries = mx.pad(queries, [(0, 0), (0, 0), (0, -n_queries % QUERY_MULTIPLE), (0, 0)])
    first = last - n_queries
    positions = mx.arange(first, first + queries.shape[2])[:, None]
    # MLX would expand a boolean mask for every head.
    zero, lowest = mx.zeros(1, queries.dtype), mx.array(-mx.inf, queries.dtype)
    mask = mx.where(mx.arange(keys.shape[2]) <= positions, zero, lowest)
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return out[:, :, :n_queries]


def needs_padding(queries: mx.array, values: mx.array, mask: Mask) -> bool:
    """Whether to pad queries and keys, so that MLX builds few kernels."""
    is_prompt = queries.shape[2] > 1 and isinstance(mask, str) and mask == "causal"
    return is_prompt and builds_for_each_length(queries, values)


def builds_for_each_length(*arrays: mx.array) -> bool:
    """Whether MLX builds its fused kernel for each number of queries and keys [B, H, S, D].

    MLX does so on CUDA with cuDNN, which needs heads of up to 128 numbers of 16 bits. A build takes
    40 to 65 ms on an H200, a hundred times as long as the attention of a span.
    """
    return mx.cuda.is_available() and all(x.shape[3] <= 128 and x.dtype.size == 2 for x in arrays)


def packed_attention(
    queries: mx.array,
    keys: PackedKV,
    values: PackedKV,
    scale: float,
    mask: Mask,
    max_score_bytes: int = MAX_DEQUANTIZED_BYTES,
) -> mx.array:
    """Attend without dequantizing; the result of a query that sees no key is finite.

    Queries are cut into parts of at least one query; the scores of a larger part take at most
    `max_score_bytes`.
    """
    n_rows, n_heads, n_queries = queries.shape[:3]
    n_kv_heads, n_keys = keys.newest.shape[1], keys.n_tokens
    all_keys, all_values = keys.factors(), values.factors()
    capacity = all_keys[0].shape[2]
    # Otherwise each product would convert the scales again.
    all_keys, all_values = (pk.with_scales(x, queries.dtype) for x in (all_keys, all_values))
    queries = queries * scale
    step = max(1, max_score_bytes // (n_rows * n_heads * capacity * queries.dtype.size))
    results: list[mx.array] = []
    spans = keys.spans(n_queries, mask)
    cut = ((span, at) for span in spans for at in _slices(span.start, span.stop, step))
    for span, at in cut:
        block = queries[:, :, at]
        if results:
            (block,) = mx.depends([block], results[-1:])
        n = block.shape[2]
        packable = pk.prepared(block, keys.quantization)
        block, packable = (x.reshape(n_rows, n_kv_heads, -1, x.shape[3]) for x in (block, packable))
        scores = pk.matmul(packable, all_keys, keys.quantization, transpose=True)
        first, last = span.first, span.last
        own = block @ keys.computed(first, last).swapaxes(-1, -2)
        scores = keys.placed(scores, own, (..., slice(first, last)))
        if mask is not None:
            scores = scores.reshape(n_rows, n_kv_heads, -1, n, capacity)
        scores = _hidden(scores, mask, n_queries, n_keys, at)
        weights = mx.softmax(scores, axis=-1, precise=True)
        weights = weights.reshape(n_rows, n_kv_heads, -1, capacity)
        own = weights[..., first:last]
        if len(spans) > 1:
            weights[..., first:last] = 0
        out = pk.matmul(weights, all_values, values.quantization, transpose=False)
        out = pk.as_it_came(out, values.quantization)
        out += own @ values.computed(first, last)
        results.append(out.reshape(n_rows, n_heads, n, -1))
    return mx.concatenate(results, axis=2).astype(queries.dtype)


def _hidden(scores: mx.array, mask: Mask, n_queries: int, n_keys: int, queries: slice) -> mx.array:
    """Return `scores` [B, Hkv, Hq / Hkv, n, S] with the lowest number for hidden keys.

    The scores are those of the range `queries`. Keys after the first `n_keys` are always hidden.
    """
    lowest, n_spare = mx.finfo(scores.dtype).min, scores.shape[-1] - n_keys
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'the mask is "{mask}"; expected None, "causal" or an array')
        own = mx.arange(queries.start, queries.stop) + n_keys - n_queries
        return mx.where(mx.arange(scores.shape[-1]) <= own[:, None], scores, lowest)
    if mask is not None:
        visible = _part(mask, slice(None), slice(None), queries)
        rows, heads, *rest = visible.shape
        groups = (1, 1) if heads == 1 else (scores.shape[1], heads // scores.shape[1])
        visible = visible.reshape(rows, *groups, *rest)
        if n_spare and visible.shape[4] > 1:
            visible = mx.pad(visible, [(0, 0)] * 4 + [(0, n_spare)])
        if visible.dtype == mx.bool_:
            scores = mx.where(visible, scores, lowest)
        else:
            # A row with -inf everywhere would become NaN.
            scores = mx.maximum(scores + visible.astype(scores.dtype), lowest)
    if n_spare:
        scores[..., n_keys:] = lowest
    return scores


def _part(mask: Mask, *axes: slice) -> Any:
    """Return a part of a mask, by slices of four axes. Axes of length 1 broadcast, so they stay."""
    if not isinstance(mask, mx.array):
        return mask
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    whole = slice(None)
    kept = tuple(whole if n == 1 else part for n, part in zip(mask.shape, axes, strict=False))
    return mask[kept] if any(part != whole for part in kept) else mask


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


@dataclass(frozen=True)
class AttentionShape:
    """The geometry of a layer's attention, by which MLX chooses kernels."""

    n_q_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int


def least_rows() -> int:
    """Return the least number of rows for calls of several rows that only the plugin makes.

    The canary makes such calls. A call of one row is always allowed. MLX's CUDA backend has a
    kernel for products of 2 to 16 rows with quantized weights, and another for up to 32. Compiling
    either at its first use takes half a minute.
    """
    return 33 if pk.backend() == "cuda" else 1


@dataclass(frozen=True)
class AttentionPlan:
    """How the layers of one group attend.

    `strategy` is for calls with at least `least_rows` sequences, and at most `most_queries` queries
    for each. All other calls dequantize, in tiles of at most `max_dequantized_bytes` if the model
    takes packed keys.
    """

    strategy: Strategy | None = None
    most_queries: int = 1 << 30
    least_rows: int = 1
    can_take_packed: bool = False
    max_dequantized_bytes: int = MAX_DEQUANTIZED_BYTES

    def choose(self, n_queries: int, n_keys: int, n_rows: int, token_bytes: int) -> Strategy:
        """Return the strategy for `n_queries` against `n_keys` of each of `n_rows` sequences.

        `token_bytes` is the size of a token's dequantized keys and values, in one layer.
        """
        if self.strategy and n_queries <= self.most_queries and n_rows >= self.least_rows:
            return self.strategy
        is_large = n_rows * n_keys * token_bytes > self.max_dequantized_bytes
        return "tiled" if is_large and self.can_take_packed else "dequantize"

    def describe(self) -> dict[str, Any]:
        names = ("strategy", "most_queries", "least_rows")
        return {
            "rules": [{name: getattr(self, name) for name in names}] if self.strategy else [],
            "can_take_packed": self.can_take_packed,
            "max_dequantized_bytes": self.max_dequantized_bytes,
            "tile_bytes": self.max_dequantized_bytes,
        }

    def __str__(self) -> str:
        calls = {"prefill": (512, 1), "decode": (1, 1), "batches": (1, 8)}
        chosen = (f"{name} {self.choose(n, 1, rows, 1)}" for name, (n, rows) in calls.items())
        return ", ".join(chosen)


def plan_by_policy(
    shape: AttentionShape, keys: Quantization, computed_on: Backend
) -> AttentionPlan:
    """Return the plan for layers of this shape, in a model that takes packed keys."""
    most_queries, least_rows = _FEW, 1
    if computed_on == "cuda":
        # MLX compiles each packed kernel when it is first used, which took up to 47 s on an H100,
        # and packed products over keys of 8 bits are wrong on Hopper for heads of 64
        # (docs/upstream.md).
        return AttentionPlan(can_take_packed=True)
    if computed_on == "metal":
        # MLX has a fast kernel for few queries over keys of 4 or 8 bits. If a key head has four
        # query heads or more, the product with values has too few threadgroups to fill the GPU.
        width = shape.k_dim + keys.padding
        is_fast = width > 128 or (width in (64, 128) and keys.bits in (4, 8))
        if not is_fast or shape.n_q_heads >= 4 * shape.n_kv_heads:
            # Packed keys of eight rows fill the GPU; fewer rows are faster dequantized.
            least_rows = 8
    if computed_on == "cpu":
        # MLX's product with packed keys dequantizes the keys again for each query. Over 4,096 keys
        # of 3 heads, one query of each of 9 heads takes 3.8 ms packed and 15 ms dequantized; 17
        # take 62 and 27 ms (OpenBLAS).
        most_queries = max(1, _MOST_ON_CPU * shape.n_kv_heads // shape.n_q_heads)
    return AttentionPlan("packed", most_queries, least_rows, can_take_packed=True)


def forced_plan(strategy: Strategy) -> AttentionPlan:
    """Return a plan that always uses `strategy`, for a model that takes packed keys."""
    return AttentionPlan(strategy, can_take_packed=True)
