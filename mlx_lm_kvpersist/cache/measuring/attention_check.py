"""Check that attention over quantized keys is right on this device, and plan the layers by that.

MLX chooses among kernels by the number of queries and keys, and some versions have kernels that are
wrong on some devices: docs/upstream.md has one. So each strategy is compared with plain arithmetic,
for a model's own heads and dtype, on both sides of the numbers at which MLX takes another kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

import mlx.core as mx

from ...errors import ModelNotSupported
from ...ranks import ranks
from ..geometry.kinds import replaced, slots_of
from ..geometry.precision import KVPrecision, Quantization
from ..geometry.spec import ModelCacheSpec
from ..live import packed as pk
from ..live.attention import PackedKV, Strategy
from ..live.policy import AttentionPlan, AttentionShape, Backend, backend, forced_plan, rules_for
from ..steps import Steps
from .observe import packed_shapes

logger = logging.getLogger(__name__)

_CASES: Mapping[Backend, Mapping[tuple[int, int], Sequence[int]]] = {
    "cpu": {(300, 0): (1, 4), (1037, 243): (1, 4)},
    "cuda": {
        (300, 0): (1, 8, 16, 32),
        (301, 0): (1, 32),
        (1037, 243): (1, 8, 16, 32),
        (33_000, 0): (1,),
    },
    "metal": {
        (301, 0): (1, 2, 3, 4, 17, 32),
        (1037, 243): (1, 2, 3, 4, 17, 32),
        (33_000, 0): (1, 32),
    },
}
"""Queries of a sequence, by its keys and the spare room behind them.

The CPU backend has one kernel for all sizes. On Metal MLX 0.32 takes other kernels from 1,024 keys
on, beyond 32,767, from 4 rows of a product on, and from 6 to 33, which depends on the device; the
rows are the queries of all heads of a key head. On CUDA it takes other kernels if the keys, here
with their spare room, are a multiple of 4, of 128, or neither, and for 16, 32, 64 and 128 rows.
Each kernel is compiled when it is first used, so these cases are few."""

_TOLERANCE = 0.1
"""Most that the result of a query may differ from plain arithmetic, as a share of its norm."""


def planning(
    model: Any, spec: ModelCacheSpec, choice: Strategy | Literal["auto"] = "auto"
) -> Steps[ModelCacheSpec]:
    """Plan every quantized group: by the policy, or always `choice`, if that is right here.

    A forward pass shows which groups the model can attend to packed, and with how many query
    heads. All other groups dequantize. Raises ModelNotSupported if dequantizing is wrong.
    """
    plans: dict[str, AttentionPlan] = {}
    for group in spec.quantized:
        assert group.precision is not None and group.keys is not None
        found = packed_shapes(model, spec.make_cache, group.slots)
        shape, *others = {found[slot] for slot in group.slots}
        plan = AttentionPlan()
        if shape is not None and not others:
            if choice == "auto":
                plan = AttentionPlan(rules_for(shape, group.precision.keys), can_take_packed=True)
            else:
                plan = forced_plan(choice)
            plan = yield from checking_attention(plan, shape, group.precision, group.keys.mx_dtype)
        plans[group.name] = plan
    return planned(spec, plans)


def planned(spec: ModelCacheSpec, plans: dict[str, AttentionPlan]) -> ModelCacheSpec:
    """Return the spec with these plans, by the names of its quantized groups."""
    slots = slots_of(spec.make_cache())
    for group in spec.quantized:
        for slot in group.slots:
            slots[slot].plan = plans[group.name]
    return replace(spec, template=replaced(spec.template, slots), plans=plans)


def checking_attention(
    plan: AttentionPlan, shape: AttentionShape, precision: KVPrecision, dtype: mx.Dtype
) -> Steps[AttentionPlan]:
    """Return a plan without the rules whose strategy is wrong for layers of `shape` in `dtype`.

    Raises ModelNotSupported if dequantizing is wrong, which no other strategy could replace. Tiles
    run the kernels of dequantizing.
    """
    right: list[Strategy] = ["dequantize", "packed"]
    for size, counts in _CASES[backend()].items():
        layer = _Layer(shape, precision, dtype, *size)
        for n_queries in counts:
            yield
            right = layer.agreeing(right, n_queries)
        del layer
        mx.clear_cache()
    about = f"attention over {precision} keys is wrong in {dtype}"
    if not ranks().agree("dequantize" in right, "whether dequantizing is right"):
        raise ModelNotSupported(f"dequantizing {about} on {device_key()}")
    is_right = ranks().agree("packed" in right, "whether packed attention is right")
    kept = tuple(rule for rule in plan.rules if is_right or rule.strategy != "packed")
    if len(kept) < len(plan.rules):
        logger.warning("kvpersist: packed %s on %s: they dequantize", about, device_key())
    return replace(plan, rules=kept)


def device_key() -> str:
    """Return a name for this device and version of MLX: results apply to this pair only."""
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture")
    return f"{name} {mx.default_device()} mlx {version('mlx')}"


class _Layer:
    """Random keys and values of one layer [1, H, n_keys, D], packed and in full precision.

    Key heads are alike, so two are enough.
    """

    def __init__(
        self,
        shape: AttentionShape,
        precision: KVPrecision,
        dtype: mx.Dtype,
        n_keys: int,
        n_spare: int,
    ) -> None:
        self.n_heads, self.n_keys, self.dtype = min(2, shape.n_kv_heads), n_keys, dtype
        self.n_repeats, self.k_dim = shape.n_q_heads // shape.n_kv_heads, shape.k_dim
        self.scale = 2 * shape.k_dim**-0.5  # a peaked softmax, so that errors do not average out
        self.sides: list[tuple[Quantization, mx.array, pk.Packed]] = []
        # As in a live cache, buffers have zeros for the tokens of the last block, and spare room.
        n_packed = (n_keys - 1) // pk.GRID * pk.GRID
        spare = [(0, 0), (0, 0), (0, n_keys - n_packed + n_spare), (0, 0)]
        for dim, side in ((shape.k_dim, precision.keys), (shape.v_dim, precision.values)):
            computed = self._random((1, self.n_heads, n_keys, dim))
            packed = pk.quantize(computed[:, :, :n_packed], side)
            packed = pk.each(lambda x: mx.pad(x, spare), packed)
            self.sides.append((side, computed, packed))
        mx.eval(self.sides)

    def _random(self, shape: tuple[int, ...]) -> mx.array:
        # With a key of its own, because a check must not change what the server samples.
        return mx.random.normal(shape, key=mx.random.key(shape[2])).astype(self.dtype)

    def agreeing(self, strategies: Sequence[Strategy], n_queries: int) -> list[Strategy]:
        """Return the strategies that give what plain arithmetic gives for `n_queries` a head."""
        queries = self._random((1, self.n_heads * self.n_repeats, n_queries, self.k_dim))
        expected = self._plain(queries.astype(mx.float32) * self.scale)
        right: list[Strategy] = []
        for strategy in strategies:
            error = mx.linalg.norm(self._attend(strategy, queries) - expected, axis=-1)
            if (error <= _TOLERANCE * mx.linalg.norm(expected, axis=-1)).all().item():
                right.append(strategy)
        return right

    def _attend(self, strategy: Strategy, queries: mx.array) -> mx.array:
        """Attend by a strategy; return the result in float32.

        The same call over NaN goes first: it leaves NaN in the memory that the second one gets, so
        a kernel that reads what nobody wrote cannot be right by chance.
        """
        n_queries = queries.shape[2]
        n_own = (self.n_keys - n_queries) % pk.GRID
        for factor in (mx.nan, 1):
            keys, values = (
                PackedKV.of(
                    (weights, scales * factor, biases * factor),
                    side,
                    self.n_keys,
                    strategy,
                    newest=computed[:, :, -(n_own + n_queries) :] * factor,
                    n_own=n_own,
                )
                for side, computed, (weights, scales, biases) in self.sides
            )
            given = queries * factor
            mx.eval(given, keys, values, keys.newest, values.newest)
            mask = "causal" if n_queries > 1 else None
            result = keys.attend(given, values, self.scale, mask).astype(mx.float32)
            mx.eval(result)
        return result

    def _plain(self, queries: mx.array) -> mx.array:
        """Attend in float32, written out: scores, softmax, weighted sum.

        A query sees the keys of its own block of the grid as computed, older ones dequantized.
        """
        n_queries = queries.shape[2]
        queries = queries.reshape(1, self.n_heads, self.n_repeats, n_queries, self.k_dim)
        at, keys = mx.arange(self.n_keys - n_queries, self.n_keys)[:, None], mx.arange(self.n_keys)
        is_own = at // pk.GRID == keys // pk.GRID
        (own_keys, old_keys), (own_values, old_values) = (
            (
                computed.astype(mx.float32)[:, :, None],
                pk.read(pk.view(packed, 0, self.n_keys), side, mx.float32)[:, :, None],
            )
            for side, computed, packed in self.sides
        )
        scores = mx.where(is_own, queries @ own_keys.mT, queries @ old_keys.mT)
        weights = mx.softmax(mx.where(keys <= at, scores, -mx.inf), axis=-1)
        out = mx.where(is_own, weights, 0) @ own_values + mx.where(is_own, 0, weights) @ old_values
        return out.reshape(1, self.n_heads * self.n_repeats, n_queries, -1)
