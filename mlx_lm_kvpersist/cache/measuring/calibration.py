"""Measure which attention strategy is quickest on this device for one model's shapes.

Each phase (see `AttentionPlan`) starts with few tokens and grows while its time allows, because
the same work takes microseconds on one device and seconds on another. The strategies take turns,
so that a disturbance hits all of them. A strategy that computes something else takes no part:
MLX 0.32.4 multiplies wrongly by packed float32 keys on a Hopper GPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from math import inf
from statistics import median
from typing import Any, Literal

import mlx.core as mx

from ..geometry.kinds import replaced, slots_of
from ..geometry.precision import KVPrecision, Quantization
from ..geometry.spec import ModelCacheSpec
from ..live import packed as pk
from ..live.attention import (
    MAX_DEQUANTIZED_BYTES,
    NEAR_BYTES,
    STRATEGIES,
    Mask,
    PackedKV,
    Strategy,
    dequantized_attention,
    packed_attention,
    tiled_attention,
)
from ..live.quantized import PHASES, AttentionPlan, forced_plan
from ..steps import Steps
from .observe import AttentionShape, probing_packed

logger = logging.getLogger(__name__)

_PHASE_S = 0.25
_N_ROUNDS = 5
_N_ROUNDS_AT_LEAST = 3
_LEAST_PREFILL = 64 * 512
"""Queries times keys. A device too slow for so little work cannot be measured with prompts."""

_CLEARLY = 0.95
_TOLERANCE = 0.1
"""Most that a strategy's result may differ from the fused kernel's, as a share of its norm."""
_HOPELESS = 2.0


@dataclass(frozen=True)
class _Work:
    """One call of attention: `n_rows` sequences, each with `n_queries` and `n_keys`."""

    n_rows: int
    n_queries: int
    n_keys: int

    @property
    def size(self) -> int:
        return self.n_rows * self.n_queries * self.n_keys

    @property
    def n_layers(self) -> int:
        """How many layers to time together; a single decode step is too short to time."""
        return 4 if self.n_queries == 1 else 1


_LADDERS: Mapping[str, tuple[_Work, ...]] = {
    "prefill": (
        _Work(1, 16, 128),
        _Work(1, 64, 512),
        _Work(1, 256, 2048),
        _Work(1, 512, 8192),
        _Work(1, 2048, 8192),
    ),
    "decode": tuple(_Work(1, 1, n_keys) for n_keys in (128, 512, 2048, 8192, 32768)),
    "batch_decode": tuple(_Work(8, 1, n_keys) for n_keys in (32, 128, 512, 2048, 8192)),
}


def planning(
    model: Any, spec: ModelCacheSpec, choice: Strategy | Literal["auto"] = "auto"
) -> Steps[ModelCacheSpec]:
    """Find a plan for every quantized group, measured on this device if it is "auto".

    A forward pass shows which groups the model can attend to packed, and with how many query
    heads; the others are dequantized.
    """
    plans: dict[str, AttentionPlan] = {}
    for group in spec.quantized:
        assert group.precision is not None and group.keys is not None
        found = yield from probing_packed(model, spec.make_cache, group.slots)
        shape, *others = {found[slot] for slot in group.slots}
        plan = AttentionPlan()
        if shape is not None and not others:
            if choice != "auto":
                plan = forced_plan(choice, can_take_packed=True)
            else:
                plan = yield from calibrating(shape, group.precision, group.keys.mx_dtype)
        plans[group.name] = plan
    return planned(spec, plans)


def planned(spec: ModelCacheSpec, plans: Mapping[str, AttentionPlan]) -> ModelCacheSpec:
    """Return the spec with these plans, by the names of its quantized groups."""
    slots = slots_of(spec.make_cache())
    for group in spec.quantized:
        for slot in group.slots:
            slots[slot].plan = plans[group.name]
    return replace(spec, template=replaced(spec.template, slots), plans=plans)


def read_plans(described: Any, spec: ModelCacheSpec) -> dict[str, AttentionPlan]:
    """Return the plans of a spec's groups from what `AttentionPlan.describe` said of each.

    Raises KeyError, TypeError or ValueError where that is something else.
    """
    return {
        group.name: AttentionPlan(
            **{phase: its[phase]["strategy"] for phase in PHASES},
            measured_ms={phase: its[phase]["ms"] for phase in PHASES},
            **{name: its[name] for name in ("can_take_packed", "max_dequantized_bytes")},
            tile_bytes=its["tile_bytes"],
        )
        for group in spec.quantized
        for its in [described[group.name]]
    }


def calibrating(
    shape: AttentionShape, precision: KVPrecision, dtype: mx.Dtype
) -> Steps[AttentionPlan]:
    """Measure the quickest plan for layers of `shape` that compute in `dtype` and take packed keys.

    Takes about a second. Evaluates MLX.
    """
    kernels = KVPrecision.of(precision.keys.bits, precision.group_size, precision.values.bits)
    k_width, v_width = shape.k_dim + precision.keys.padding, shape.v_dim + precision.values.padding
    shape = replace(shape, k_dim=k_width, v_dim=v_width)
    measured = {}
    for phase in PHASES:
        measured[phase] = yield from _measuring(shape, kernels, dtype, phase)
        mx.clear_cache()
    plan = _plan(measured)
    logger.debug("attention of %s, %s: %s", shape, kernels, plan.describe())
    return plan


def packed_is_right(shape: AttentionShape, precision: KVPrecision, dtype: mx.Dtype) -> bool:
    """Say whether packed attention gives what dequantizing gives in this dtype on this device."""
    layers = _Layers(shape, precision, dtype, _Work(1, 1, 512))
    return layers.agree(packed_attention)


def device_key() -> str:
    """Return a name for this device and version of MLX; results do not apply to others."""
    info = mx.device_info()
    name = info.get("device_name") or info.get("architecture")
    return f"{name} {mx.default_device()} mlx {version('mlx')}"


def _plan(measured: Mapping[str, Mapping[str, float]]) -> AttentionPlan:
    """Return the plan of the clear winners; without one, MLX's fused kernel is used."""
    prefill, decode, batch_decode = (_winner(measured[phase]) for phase in PHASES)
    is_tiled = "tiled" in (prefill, decode, batch_decode)
    return AttentionPlan(
        prefill=prefill,
        decode=decode,
        batch_decode=batch_decode,
        can_take_packed=True,
        tile_bytes=NEAR_BYTES if is_tiled else MAX_DEQUANTIZED_BYTES,
        measured_ms=measured,
    )


def _winner(ms: Mapping[str, float]) -> Strategy:
    quickest = min(STRATEGIES, key=lambda name: ms.get(name, inf))
    return quickest if ms[quickest] < _CLEARLY * ms["dequantize"] else "dequantize"


def _measuring(
    shape: AttentionShape, precision: KVPrecision, dtype: mx.Dtype, phase: str
) -> Steps[dict[str, float]]:
    """Find the median ms of each strategy for the largest work that fits into the time."""
    measured: dict[str, float] = {}
    left_s, size = _PHASE_S, 0
    token_bytes = shape.n_kv_heads * (shape.k_dim + shape.v_dim) * dtype.size
    for work in _LADDERS[phase]:
        if size:
            expected_s = sum(measured.values()) / 1e3 * work.n_layers * work.size / size
            n_bytes = work.n_rows * work.n_keys * token_bytes
            if expected_s * _N_ROUNDS_AT_LEAST > left_s or n_bytes > MAX_DEQUANTIZED_BYTES:
                break
        yield
        measured, took_s = _race(_Layers(shape, precision, dtype, work), left_s)
        left_s -= took_s
        size = work.size
    if phase == "prefill" and size < _LEAST_PREFILL:
        return {"dequantize": measured["dequantize"]}
    return measured


class _Layers:
    """Random layers of one model, each with buffers of its own, so that none is in a cache of the
    device because another was just read."""

    def __init__(
        self, shape: AttentionShape, precision: KVPrecision, dtype: mx.Dtype, work: _Work
    ) -> None:
        self.mask: Mask = "causal" if work.n_queries > 1 else None
        self.scale = shape.k_dim**-0.5
        lead = (work.n_rows, shape.n_q_heads, work.n_queries)
        self.queries = _random((*lead, shape.k_dim)).astype(dtype)
        self.layers = []
        for _ in range(work.n_layers):
            lead = (work.n_rows, shape.n_kv_heads, work.n_keys)
            held = (
                self._held(work, (*lead, dim), side, dtype)
                for dim, side in ((shape.k_dim, precision.keys), (shape.v_dim, precision.values))
            )
            self.layers.append(tuple(held))
        token_bytes = shape.n_kv_heads * (shape.k_dim + shape.v_dim) * dtype.size
        self.dequantized_bytes = work.n_rows * work.n_keys * token_bytes
        mx.eval(self.queries, self.layers)

    def _held(
        self, work: _Work, shape: tuple[int, ...], side: Quantization, dtype: mx.Dtype
    ) -> PackedKV:
        """Return a few random keys or values, repeated to save time.

        Those of the queries' own block are as computed besides.
        """
        n_own = (work.n_keys - work.n_queries) % pk.GRID
        newest = _random((*shape[:2], n_own + work.n_queries, shape[3])).astype(dtype)
        mx.eval(newest)
        some = _random((1, shape[1], min(shape[2], 64), shape[3])).astype(dtype)
        times = (shape[0], 1, -(-shape[2] // some.shape[2]), 1)
        packed = pk.each(
            lambda x: mx.contiguous(mx.tile(x, times)[:, :, : shape[2]]), pk.quantize(some, side)
        )
        return PackedKV.of(packed, side, work.n_keys, newest=newest, n_own=n_own)

    def agree(self, attention: Callable[..., mx.array]) -> bool:
        """Say whether the first layer's result is what dequantizing gives; compiles kernels."""
        given = (self.queries, *self.layers[0], self.scale, self.mask)
        expected = dequantized_attention(*given).astype(mx.float32)
        error = attention(*given).astype(mx.float32) - expected
        return bool((mx.linalg.norm(error) <= _TOLERANCE * mx.linalg.norm(expected)).item())

    def attend(self, attention: Callable[..., mx.array]) -> float:
        """Attend layer by layer; return the ms per layer."""
        start_s = time.perf_counter()
        queries = self.queries
        for keys, values in self.layers:
            out = attention(queries, keys, values, self.scale, self.mask)
            (queries,) = mx.depends([queries], [out])
        mx.eval(out)
        return (time.perf_counter() - start_s) * 1e3 / len(self.layers)


def _race(layers: _Layers, left_s: float) -> tuple[dict[str, float], float]:
    """Return the median ms of each strategy that is right, and the seconds that measuring took.

    Stops after `left_s` seconds; a strategy that is much slower drops out before.
    """
    racing: dict[str, Callable[..., mx.array]] = {
        "dequantize": dequantized_attention,
        "packed": packed_attention,
    }
    if layers.dequantized_bytes > NEAR_BYTES:
        racing["tiled"] = partial(tiled_attention, tile_bytes=NEAR_BYTES)
    # The first call may compile, so it is not timed.
    racing = {name: attention for name, attention in racing.items() if layers.agree(attention)}
    start_s = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in racing}
    for n_round in range(1, _N_ROUNDS + 1):
        for name, attention in racing.items():
            times[name].append(layers.attend(attention))
        if n_round >= _N_ROUNDS_AT_LEAST and time.perf_counter() - start_s > left_s:
            break
        quickest = min(min(times[name]) for name in racing)
        racing = {
            name: attention
            for name, attention in racing.items()
            if name == "dequantize"
            or n_round == 1  # a disturbance may have hit the first round
            or min(times[name]) < _HOPELESS * quickest
        }
    took_s = time.perf_counter() - start_s
    return {name: round(median(ms), 4) for name, ms in times.items()}, took_s


def _random(shape: tuple[int, ...]) -> mx.array:
    # With a key of its own, because measuring must not change what the server samples.
    return mx.random.normal(shape, key=mx.random.key(0))
