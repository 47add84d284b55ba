"""What is quickest is measured in little time, kept, and never stands in the way."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.live.attention import (
    MAX_DEQUANTIZED_BYTES,
    NEAR_BYTES,
    packed_attention,
)
from mlx_lm_kvpersist.cache.live.quantized import PHASES, AttentionPlan, forced_plan
from mlx_lm_kvpersist.cache.measuring import calibration
from mlx_lm_kvpersist.cache.measuring.calibration import calibrating, planning
from mlx_lm_kvpersist.cache.measuring.observe import AttentionShape
from mlx_lm_kvpersist.cache.steps import Steps, completed

from ..conftest import tiny_gemma3

SHAPE = AttentionShape(4, 2, 64, 64)
PRECISION = KVPrecision.of(4, 32)


def measure_nothing(*args: Any) -> dict[str, float]:
    raise AssertionError("was measured")


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measuring", measure_nothing)


def found(monkeypatch: pytest.MonkeyPatch, **ms: float) -> AttentionPlan:
    """The plan of a device on which every phase takes these times."""

    def measuring(*args: Any) -> Steps[dict[str, float]]:
        yield
        return dict(ms)

    monkeypatch.setattr(calibration, "_measuring", measuring)
    return completed(calibrating(SHAPE, PRECISION, mx.float32))


@pytest.mark.parametrize(
    "shape", [SHAPE, AttentionShape(32, 8, 128, 128), AttentionShape(16, 16, 192, 128)], ids=str
)
def test_takes_about_a_second(shape: AttentionShape) -> None:
    start_s = time.perf_counter()
    plan = completed(calibrating(shape, KVPrecision.of(8, 64, 4), mx.float32))
    assert time.perf_counter() - start_s < 6  # others may be using the machine
    assert plan.can_take_packed
    for phase in PHASES:
        measured = plan.describe()[phase]["ms"]
        assert measured["dequantize"] > 0
    assert plan.measured_ms["decode"]["packed"] > 0


@pytest.mark.parametrize(
    ("ms", "expected", "tile_bytes"),
    [
        ({"dequantize": 1.0, "packed": 0.9}, "packed", MAX_DEQUANTIZED_BYTES),
        ({"dequantize": 1.0, "packed": 0.97}, "dequantize", MAX_DEQUANTIZED_BYTES),
        ({"dequantize": 1.0, "packed": 2.0}, "dequantize", MAX_DEQUANTIZED_BYTES),
        ({"dequantize": 1.0, "packed": 0.9, "tiled": 0.5}, "tiled", NEAR_BYTES),
        ({"dequantize": 1.0}, "dequantize", MAX_DEQUANTIZED_BYTES),
    ],
)
def test_a_winner_must_win_clearly(
    monkeypatch: pytest.MonkeyPatch, ms: dict[str, float], expected: str, tile_bytes: int
) -> None:
    plan = found(monkeypatch, **ms)
    assert (plan.prefill, plan.decode, plan.batch_decode) == (expected,) * 3
    assert plan.tile_bytes == tile_bytes
    assert plan.describe()["decode"] == {"strategy": expected, "ms": ms}


def test_decoding_is_measured_with_one_query_and_from_little_to_much() -> None:
    ladders = {
        use: [(work.n_rows, work.n_queries, work.n_keys) for work in ladder]
        for use, ladder in calibration._LADDERS.items()
    }
    assert {rung[:2] for rung in ladders["decode"]} == {(1, 1)}
    assert {rung[:2] for rung in ladders["batch_decode"]} == {(8, 1)}
    assert all(rungs == sorted(rungs) for rungs in ladders.values())


def test_measuring_leaves_the_random_numbers_of_others_alone() -> None:
    mx.random.seed(3)
    expected = mx.random.uniform()
    mx.random.seed(3)
    completed(calibrating(SHAPE, PRECISION, mx.float32))
    assert mx.random.uniform().item() == expected.item()


def test_slow_devices_are_measured_on_little_and_quick_ones_on_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work grows until the time is over."""
    sizes: list[int] = []

    def race(layers: Any, left_s: float) -> tuple[dict[str, float], float]:
        sizes.append(int(layers.layers[0][0].n_tokens))
        ms = speed * sizes[-1]
        return {"dequantize": ms, "packed": ms}, 6 * ms / 1e3

    monkeypatch.setattr(calibration, "_race", race)
    tried = {}
    for speed in (1e-6, 2e-3, 10.0):
        sizes.clear()
        completed(calibration._measuring(SHAPE, PRECISION, mx.float32, "decode"))
        tried[speed] = sizes[-1]
    assert tried == {1e-6: 32768, 2e-3: 2048, 10.0: 128}


@pytest.mark.parametrize("phase", PHASES)
def test_no_more_is_measured_than_is_dequantized_at_once(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    shape, dtype = AttentionShape(64, 64, 1024, 512), mx.float32
    tried: list[calibration._Work] = []
    monkeypatch.setattr(calibration, "_Layers", lambda *given: tried.append(given[-1]))
    monkeypatch.setattr(calibration, "_race", lambda *_: ({"dequantize": 1e-9}, 0.0))
    completed(calibration._measuring(shape, PRECISION, dtype, phase))
    n_bytes = [
        work.n_rows * work.n_keys * 64 * (1024 + 512) * dtype.size
        for work in calibration._LADDERS[phase]
    ]
    assert len(tried) == sum(each <= MAX_DEQUANTIZED_BYTES for each in n_bytes) < len(n_bytes)


def test_times_are_those_of_one_layer_in_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = calibration._Layers(SHAPE, PRECISION, mx.float32, calibration._Work(1, 1, 128))
    assert len(layers.layers) == 4
    times = iter([1.0, 1.008])
    monkeypatch.setattr(calibration, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    assert layers.attend(packed_attention) == pytest.approx(2.0)


class Scripted:
    """Stands for layers whose ways take the times it is given, call by call."""

    dequantized_bytes = 0

    def __init__(self, **ms: list[float]) -> None:
        self.ms = ms
        self.n_calls = dict.fromkeys(ms, 0)

    def agree(self, attention: Any) -> bool:
        self.attend(attention)
        return True

    def attend(self, attention: Any) -> float:
        name = attention.__name__.removesuffix("d_attention").removesuffix("_attention")
        name = {"packe": "packed"}.get(name, name)
        times = self.ms[name]
        n = self.n_calls[name]
        self.n_calls[name] += 1
        return times[min(n, len(times) - 1)]


def test_one_disturbance_does_not_decide() -> None:
    layers: Any = Scripted(dequantize=[9.0, 2.0], packed=[9.0, 90.0, 1.0])
    ms, _ = calibration._race(layers, left_s=10)
    assert ms == {"dequantize": 2.0, "packed": 1.0}


def test_what_is_far_behind_drops_out() -> None:
    layers: Any = Scripted(dequantize=[9.0, 2.0], packed=[9.0, 90.0, 80.0])
    ms, _ = calibration._race(layers, left_s=10)
    assert ms["packed"] == 85.0
    assert layers.n_calls == {"dequantize": 6, "packed": 3}


def test_measuring_ends_with_its_time() -> None:
    layers: Any = Scripted(dequantize=[2.0], packed=[2.0])
    calibration._race(layers, left_s=0)
    assert layers.n_calls == {"dequantize": 4, "packed": 4}


def test_a_prompt_that_is_too_slow_to_measure_is_dequantized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def race(layers: Any, left_s: float) -> tuple[dict[str, float], float]:
        return {"dequantize": 500.0, "packed": 100.0}, 1.0

    monkeypatch.setattr(calibration, "_race", race)
    ms = completed(calibration._measuring(SHAPE, PRECISION, mx.float32, "prefill"))
    assert ms == {"dequantize": 500.0}


@pytest.mark.parametrize("wrong", [0.0, 2.0, math.nan])
def test_a_strategy_that_computes_something_else_never_wins(
    monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """As MLX 0.32.4 does for packed float32 keys on a Hopper GPU."""
    right = packed_attention
    assert calibration.packed_is_right(SHAPE, PRECISION, mx.float32)
    monkeypatch.setattr(calibration, "packed_attention", lambda *given: right(*given) * wrong)
    assert not calibration.packed_is_right(SHAPE, PRECISION, mx.float32)
    plan = completed(calibrating(SHAPE, PRECISION, mx.float32))
    assert all("packed" not in ms for ms in plan.measured_ms.values())
    assert "packed" not in (plan.prefill, plan.decode, plan.batch_decode)


class Layers(nn.Module):  # type: ignore[misc]
    """Layers of attention over one key head, each with as many query heads as `n_q_heads` says."""

    def __init__(self, *n_q_heads: int, takes_packed: bool = True) -> None:
        super().__init__()
        self.layers = [nn.Identity() for _ in n_q_heads]
        self.n_q_heads, self.takes_packed = n_q_heads, takes_packed

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        x = mx.random.normal((20, 64), key=mx.random.key(0))[inputs]
        for slot, n_heads in zip(cache, self.n_q_heads, strict=True):
            mask = create_attention_mask(x, slot)
            keys, values = slot.update_and_fetch(x[:, None], x[:, None])
            if not self.takes_packed:
                keys = keys + 0.0
            queries = mx.repeat(x[:, None], n_heads, axis=1)
            out = scaled_dot_product_attention(queries, keys, values, slot, 0.1, mask)
            x = x + out.mean(axis=1)
        return x


def test_every_quantized_group_has_the_plan_of_its_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[Any, ...]] = []

    def measuring(*args: Any) -> Steps[dict[str, float]]:
        yield
        measured.append(args)
        return {"dequantize": 1.0, "packed": 0.5}

    monkeypatch.setattr(calibration, "_measuring", measuring)
    model = tiny_gemma3()
    spec = ModelCacheSpec.probe(model, PrecisionChoice(8, 4))
    planned = completed(planning(model, spec))
    assert planned == spec and list(planned.plans) == ["1"]
    assert planned.plans["1"].prefill == planned.plans["1"].decode == "packed"
    precision = KVPrecision.of(8, 64, 4)
    expected = [(AttentionShape(2, 1, 64, 64), precision, mx.float32, phase) for phase in PHASES]
    assert measured == expected
    window, full = planned.make_cache()
    assert full.plan is planned.plans["1"] and not hasattr(window, "plan")


@pytest.mark.parametrize(
    ("model", "is_taken"),
    [
        (Layers(4, 4), True),
        (Layers(4, 4, takes_packed=False), False),
        (Layers(4, 2), False),
    ],
    ids=["takes-packed", "plain-only", "unlike-layers"],
)
def test_models_that_need_plain_keys_are_not_measured(
    no_measuring: None, model: Layers, is_taken: bool
) -> None:
    """Nor layers of one group that attend in several ways."""
    spec = ModelCacheSpec.probe(model, evaluate=False)
    planned = completed(planning(model, spec, "packed"))
    expected = forced_plan("packed", can_take_packed=True) if is_taken else AttentionPlan()
    assert planned.plans == {"0": expected}
    assert [slot.plan for slot in planned.make_cache()] == [expected] * 2


def test_layers_in_full_precision_have_no_plan(no_measuring: None) -> None:
    model = Layers(4, 4)
    spec = ModelCacheSpec.probe(model, PrecisionChoice(16, 16), evaluate=False)
    planned = completed(planning(model, spec))
    assert planned.plans == {}
    assert [type(slot) for slot in planned.make_cache()] == [KVCache, KVCache]
