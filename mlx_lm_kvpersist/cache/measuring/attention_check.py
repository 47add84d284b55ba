"""Plan the attention of a model's layers by the policy, and compare it with a reference.

MLX chooses among kernels by the number of queries and keys, and some versions of MLX have kernels
that are wrong on some devices (docs/upstream.md). So each load compares the strategies of a plan
with a reference: matrix products and a softmax in float32, for the model's own heads and dtype. The
tested sizes are below and above those at which MLX changes the kernel. This takes some
milliseconds.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models import base

from ...errors import ModelNotSupported
from ..geometry.kinds import slots_of
from ..geometry.precision import KVPrecision, Quantization
from ..geometry.spec import ModelCacheSpec
from ..live import packed as pk
from ..live.attention import (
    AttentionPlan,
    AttentionShape,
    PackedKV,
    Strategy,
    forced_plan,
    plan_by_policy,
)
from ..live.caches import SequenceQuantizedKVCache

logger = logging.getLogger(__name__)

_TARGET = "quantized_scaled_dot_product_attention"
_PROMPT = ((1, 2, 3), (4,))
"""A prompt, and a token of a reply: a model may attend differently in the two calls."""

_Cases = Mapping[tuple[int, int], Sequence[int]]
"""The numbers of queries to test, by the number of keys and of spare tokens after the keys."""

_FEW_CASES: _Cases = {(72, 8): (1, 4)}
"""One query as in a step of a reply, and four as in a chunk."""

_CUDA_CASES: _Cases = {
    (300, 0): (1, 8, 16, 32),
    (301, 0): (1, 32),
    (1037, 243): (1, 8, 16, 32),
    (33_000, 0): (1,),
}
"""CUDA's packed kernel depends on the number of keys with spare room: a multiple of 128, of 4, or
neither. It also changes at 16, 32, 64 and 128 queries of one key head."""

_METAL_CASES: _Cases = {
    (301, 83): (1, 2, 3, 4, 17, 32),
    (1037, 243): (1, 2, 3, 4, 17, 32),
    (1280, 0): (1, 4, 17),
    (33_000, 0): (1, 17),
}
"""On Metal, MLX 0.32 changes the kernel at 1,024 and at 32,768 keys, for multiples of 8, 32 or 64
keys, at 4 rows of a product, and at a number of rows from 6 to 33 that depends on the device. With
spare room, products read views."""

_MANY_KEYS = 1 << 15

_N_COMPUTED = 40
"""The number of keys in full precision: the queries' own keys, and some earlier keys."""

_TOLERANCE = 0.1
"""The largest accepted difference from the reference, as a share of the result's norm."""


def plan_attention(
    model: Any,
    spec: ModelCacheSpec,
    choice: Strategy | Literal["auto"] = "auto",
    packed: bool = True,
    least: Callable[[int], int] = int,
) -> ModelCacheSpec:
    """Return `spec` with a checked attention plan for each quantized group.

    The policy chooses the plans, or `choice` does; no plan has a strategy that is wrong.

    `packed` says whether the architecture's attention accepts packed keys. A group whose layers do
    not attend to packed keys, or attend in several shapes, dequantizes. If packed attention is
    wrong for any group, in any process of the model, all groups dequantize. For this, each process
    calls `least` with its number of right strategies, and gets the smallest number of all.

    Raises ModelNotSupported if dequantizing is wrong: no other strategy can replace it.
    """
    template = spec.make_cache()
    slots = slots_of(template)
    shapes: list[AttentionShape | None] = [None] * len(slots)
    if packed:
        quantized = [slot for group in spec.quantized for slot in group.slots]
        shapes = packed_shapes(model, spec.make_cache, quantized)
    wrong_for = cache(wrong_strategies)
    wrong: set[Strategy] = set()
    plans: dict[str, AttentionPlan] = {}
    for group in spec.quantized:
        assert group.precision is not None and group.keys is not None and group.values is not None
        plan = AttentionPlan()
        shape, *more_shapes = {shapes[slot] for slot in group.slots}
        if shape is None or more_shapes:
            n_heads = group.keys.n_heads
            shape = AttentionShape(n_heads, n_heads, group.keys.dim, group.values.dim)
        elif choice == "auto":
            plan = plan_by_policy(shape, group.precision.keys, pk.backend())
        else:
            plan = forced_plan(choice)
        try:
            dtype = getattr(mx, group.keys.dtype)
            wrong |= wrong_for(plan, shape, group.precision, dtype)
        except Exception as error:  # MLX may have no kernel, or too little memory
            logger.warning("kvpersist: attention over quantized keys fails: %r", error)
            wrong.add("dequantize")
        plans[group.name] = plan
    n_right = least(0 if "dequantize" in wrong else 1 if "packed" in wrong else 2)
    keys = " and ".join(dict.fromkeys(str(group.precision) for group in spec.quantized))
    info = mx.device_info()
    device = info.get("device_name") or info.get("architecture")
    device = f"{device} {mx.default_device()} mlx {version('mlx')}"
    if n_right == 0:
        raise ModelNotSupported(f"dequantizing attention over {keys} keys is wrong on {device}")
    if n_right == 1:
        logger.warning(
            "kvpersist: packed attention over %s keys is wrong on %s: all layers dequantize",
            keys,
            device,
        )
        plans = {
            name: AttentionPlan(can_take_packed=True) if plan.strategy == "packed" else plan
            for name, plan in plans.items()
        }
    for group in spec.quantized:
        for slot in group.slots:
            slots[slot].plan = plans[group.name]
    return replace(spec, template=template, plans=plans)


def wrong_strategies(
    plan: AttentionPlan, shape: AttentionShape, precision: KVPrecision, dtype: mx.Dtype
) -> frozenset[Strategy]:
    """Return which of "dequantize" and "packed" are wrong in calls that follow the plan.

    Tiles are not checked: they run the same kernels as dequantizing.
    """
    wrong: set[Strategy] = set()
    for size, counts in _cases(plan).items():
        layer = _Layer(shape, precision, dtype, *size)
        for n_queries in counts:
            is_packed = plan.strategy == "packed" and n_queries <= plan.most_queries
            tried: list[Strategy] = ["dequantize", "packed"] if is_packed else ["dequantize"]
            wrong.update(layer.disagreeing(tried, n_queries))
        del layer
        mx.clear_cache()
    return frozenset(wrong)


def _cases(plan: AttentionPlan) -> _Cases:
    # The CPU has one kernel for all sizes. On CUDA only packed kernels depend on the size.
    if pk.backend() == "metal":
        return _METAL_CASES
    return _CUDA_CASES if pk.backend() == "cuda" and plan.strategy == "packed" else _FEW_CASES


@contextlib.contextmanager
def observed_attention() -> Iterator[list[tuple[AttentionShape, PackedKV]]]:
    """Yield a list that collects the shape and the values of each attention over our packed keys.

    This works without the attention patch. All threads are observed until the context ends.
    """
    calls: list[tuple[AttentionShape, PackedKV]] = []
    before = getattr(base, _TARGET)

    def observe(
        queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, *a: Any, **kw: Any
    ) -> Any:
        if not isinstance(q_keys, PackedKV):
            return before(queries, q_keys, q_values, scale, mask, *a, **kw)
        out = q_keys.attend(queries, q_values, scale, mask)
        (_, n_heads, _, k_dim), n_kv_heads = queries.shape, q_keys.newest.shape[1]
        calls.append((AttentionShape(n_heads, n_kv_heads, k_dim, out.shape[3]), q_values))
        return out

    setattr(base, _TARGET, observe)
    try:
        yield calls
    finally:
        setattr(base, _TARGET, before)


def packed_shapes(
    model: Any, make_caches: Callable[[], Sequence[Any]], slots: Sequence[int]
) -> list[AttentionShape | None]:
    """Return, for each slot of a prompt cache, the shape of its layer's attention over packed keys.

    Nothing is evaluated. The shape is None for a slot whose layer does not call attention over its
    packed keys, and for all slots of a model that raises.
    """
    caches = list(make_caches())
    all_slots = slots_of(caches)
    tried = {i: all_slots[i] for i in slots if isinstance(all_slots[i], SequenceQuantizedKVCache)}
    for slot in tried.values():
        slot.plan = forced_plan("packed")
    shapes: list[AttentionShape | None] = [None] * len(all_slots)
    try:
        for n, tokens in enumerate(_PROMPT):
            with observed_attention() as calls:
                model(mx.array([tokens]), cache=caches)
            # Found by values, because a model over several ranks replaces its last layer's keys.
            traced = {id(values.buffers[0]): shape for shape, values in calls}
            for i, slot in tried.items():
                shape = traced.get(id(slot.values[0]))
                shapes[i] = shape if n == 0 or shape == shapes[i] else None
    except Exception as error:
        logger.debug("kvpersist: the model does not take packed keys: %r", error)
        return [None] * len(all_slots)
    return shapes


class _Layer:
    """Random keys and values of one layer [1, H, n_keys, D], packed and in full precision.

    All key heads behave equally, so two are enough. With many keys, one head saves memory.
    """

    def __init__(
        self,
        shape: AttentionShape,
        precision: KVPrecision,
        dtype: mx.Dtype,
        n_keys: int,
        n_spare: int,
    ) -> None:
        self.n_heads = 1 if n_keys >= _MANY_KEYS else min(2, shape.n_kv_heads)
        self.n_keys, self.dtype = n_keys, dtype
        self.n_repeats, self.k_dim = shape.n_q_heads // shape.n_kv_heads, shape.k_dim
        self.scale = 2 * shape.k_dim**-0.5  # a peaked softmax, so that errors do not average out
        self.sides: list[tuple[Quantization, mx.array, pk.Packed]] = []
        self.plain: list[mx.array] = []
        """Keys and values [1, H, 1, n_keys, D] in float32, as a query sees them."""
        # As in a live cache, buffers have zeros for the last block's tokens, then spare room.
        n_packed = n_keys - _N_COMPUTED
        spare = [(0, 0), (0, 0), (0, _N_COMPUTED + n_spare), (0, 0)]
        for dim, side in ((shape.k_dim, precision.keys), (shape.v_dim, precision.values)):
            computed = self._random((1, self.n_heads, n_keys, dim))
            packed = pk.quantize(computed[:, :, :n_packed], side)
            newest = mx.contiguous(computed[:, :, n_packed:])
            older = pk.read(packed, side, mx.float32)
            self.plain.append(mx.concatenate([older, newest], axis=2)[:, :, None])
            packed = pk.each(lambda x: mx.pad(x, spare), packed)
            self.sides.append((side, newest, packed))
            mx.eval(self.sides, self.plain)

    def _random(self, shape: tuple[int, ...]) -> mx.array:
        # A separate random key is used, because a check must not change the server's samples.
        return mx.random.normal(shape, key=mx.random.key(shape[2])).astype(self.dtype)

    def disagreeing(self, strategies: Sequence[Strategy], n_queries: int) -> Iterator[Strategy]:
        """Yield the strategies that differ from the reference for `n_queries` per head.

        A single query is also checked with two rows and `rows_differ`, as if the rows differed.
        """
        queries = self._random((1, self.n_heads * self.n_repeats, n_queries, self.k_dim))
        expected = self._plain(queries.astype(mx.float32) * self.scale)
        most = _TOLERANCE * mx.linalg.norm(expected, axis=-1)
        for strategy in strategies:
            for n_rows in (1, 2) if n_queries == 1 and self.n_keys < _MANY_KEYS else (1,):
                result = self._attend(strategy, queries, n_rows)
                if not (mx.linalg.norm(result - expected, axis=-1) <= most).all().item():
                    yield strategy

    def _attend(self, strategy: Strategy, queries: mx.array, n_rows: int) -> mx.array:
        """Attend by a strategy, for equal rows; return the result in float32.

        The same call is first made with NaN, which stays in the memory that the second call gets.
        So a kernel that reads uninitialized memory cannot be right by chance.
        """
        n_queries = queries.shape[2]

        def rows(x: mx.array, factor: float = 1) -> mx.array:
            return mx.repeat(x * factor if factor != 1 else x, n_rows, axis=0)

        for factor in (mx.nan, 1):
            keys, values = (
                PackedKV(
                    (rows(weights), rows(scales, factor), rows(biases, factor)),
                    side,
                    self.n_keys,
                    rows(newest, factor),
                    _N_COMPUTED,
                    _N_COMPUTED - n_queries,
                    strategy,
                    rows_differ=n_rows > 1,
                )
                for side, newest, (weights, scales, biases) in self.sides
            )
            scaled = rows(queries, factor)
            mx.eval(scaled, [(x.buffers, x.newest) for x in (keys, values)])
            mask = "causal" if n_queries > 1 else None
            result = keys.attend(scaled, values, self.scale, mask).astype(mx.float32)
            mx.eval(result)
        return result

    def _plain(self, queries: mx.array) -> mx.array:
        n_queries = queries.shape[2]
        queries = queries.reshape(1, self.n_heads, self.n_repeats, n_queries, self.k_dim)
        keys, values = self.plain
        last_seen = mx.arange(self.n_keys - n_queries, self.n_keys)[:, None]
        is_seen = mx.arange(self.n_keys) <= last_seen
        weights = mx.softmax(mx.where(is_seen, queries @ keys.swapaxes(-1, -2), -mx.inf), axis=-1)
        return (weights @ values).reshape(1, self.n_heads * self.n_repeats, n_queries, -1)
