"""Wrong attention on this device is detected and never chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.cache.live import attention
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import (
    AttentionPlan,
    AttentionShape,
    PackedKV,
    Strategy,
    forced_plan,
    plan_by_policy,
)
from mlx_lm_kvpersist.cache.live.packed import Backend
from mlx_lm_kvpersist.cache.measuring import attention_check
from mlx_lm_kvpersist.cache.measuring.attention_check import plan_attention
from mlx_lm_kvpersist.errors import ModelNotSupported
from tests.support.pairs import every_pair

from ..conftest import tiny_gemma3

QUANTIZED = PrecisionChoice(8, 4, rotated=True)
SHAPE = AttentionShape(4, 1, 64, 64)


class Layers(nn.Module):  # type: ignore[misc]
    """Attention layers with one key head; `n_q_heads` has the query heads of each layer."""

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


def plan_of(
    choice: Strategy | Literal["auto"] = "auto", model: Layers | None = None, packed: bool = True
) -> AttentionPlan:
    """Return the plan of a model with one group of layers."""
    model = model or Layers(4, 4)
    spec = plan_attention(model, probe_model(model, QUANTIZED), choice, packed)
    assert [slot.plan for slot in spec.make_cache()] == [spec.plans["0"]] * 2
    return spec.plans["0"]


def policy_plan(backend: Backend = "cpu") -> AttentionPlan:
    return plan_by_policy(SHAPE, KVPrecision.of(8, 64).keys, backend)


DEQUANTIZES = AttentionPlan(can_take_packed=True)


@pytest.fixture(params=["cpu", "metal"])
def checked_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend to check, without its largest cases."""
    backend: Backend = request.param
    use_small_cases_of(backend, monkeypatch)
    return backend


def use_small_cases_of(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pk, "backend", lambda: backend)
    for name in ("_METAL_CASES", "_CUDA_CASES"):
        cases: Any = getattr(attention_check, name)
        small = {size: counts for size, counts in cases.items() if size[0] < 2000}
        monkeypatch.setattr(attention_check, name, small)


@every_pair(
    precision=[KVPrecision.of(8, 64, 4, rotated=True), "6, 2"],
    shape=[SHAPE, AttentionShape(3, 1, 96, 64)],
    backend=["cpu", "cuda", "metal"],
)
def test_every_strategy_matches_plain_arithmetic(
    shape: AttentionShape,
    precision: KVPrecision | str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_small_cases_of(backend, monkeypatch)
    given = KVPrecision.of(6, 32, 2) if isinstance(precision, str) else precision
    fitted = given.fitted(shape.k_dim, shape.v_dim)
    wrong = attention_check.wrong_strategies(forced_plan("packed"), shape, fitted, mx.float32)
    assert not wrong


Product = Callable[..., mx.array]


def wrong_beyond(product: Product, n_keys: int) -> Product:
    """Return a product with keys that is wrong for longer keys, as in MLX 0.31.2 on some Macs."""

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        correct = product(x, packed, *given, transpose=transpose)
        return correct * 1.5 if packed[0].shape[2] > n_keys and transpose else correct

    return multiply


def wrong_for_few_rows(product: Product) -> Product:
    """Return a product with values that is wrong for 2 or 3 rows, as in MLX 0.31.2 on some Macs."""

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        correct = product(x, packed, *given, transpose=transpose)
        return correct * 0.5 if not transpose and x.shape[2] in (2, 3) else correct

    return multiply


def wrong_for_unaligned_scales(product: Product) -> Product:
    """Return a product that is wrong if rows of scales are not a multiple of 16 bytes."""

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        correct = product(x, packed, *given, transpose=transpose)
        return correct + 1.0 if packed[1].shape[2] % 8 == 4 else correct

    return multiply


def with_unwritten_column(product: Product) -> Product:
    """Return a product whose later results have a column of an earlier result."""
    stale: dict[Any, mx.array] = {}

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        correct = product(x, packed, *given, transpose=transpose)
        key = (correct.shape, transpose)
        before = stale.get(key, correct)
        stale[key] = correct
        return mx.concatenate([correct[..., :-1], before[..., -1:]], axis=-1)

    return multiply


FAULTS: dict[str, tuple[str, Any]] = {
    "nan": ("cpu", lambda product: lambda *given, **more: product(*given, **more) * mx.nan),
    "zero": ("cpu", lambda product: lambda *given, **more: product(*given, **more) * 0.0),
    "unwritten memory": ("cpu", with_unwritten_column),
    "many keys": ("metal", lambda product: wrong_beyond(product, 1024)),
    "few rows": ("metal", wrong_for_few_rows),
    "alignment": ("cuda", wrong_for_unaligned_scales),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_packed_attention_is_excluded_and_logged(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if packed attention is requested."""
    backend, broken = FAULTS[fault]
    use_small_cases_of(backend, monkeypatch)
    monkeypatch.setattr(pk, "matmul", broken(pk.matmul))
    with caplog.at_level(logging.WARNING):
        assert plan_of("packed", Layers(1, 1)) == DEQUANTIZES
    assert "packed attention over k8rv4rb64 keys is wrong on" in caplog.text


def test_policy_dequantizes_if_packed_attention_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert plan_of() == policy_plan() != DEQUANTIZES
    monkeypatch.setattr(pk, "matmul", wrong_beyond(pk.matmul, 10))
    assert plan_of() == DEQUANTIZES


@pytest.mark.parametrize("is_wrong", [lambda n: n % 4 != 0, lambda n: n % 128 == 0])
@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_gpu_check_detects_kernels_that_fail_for_some_key_counts(
    backend: str, is_wrong: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX has different kernels for multiples of 4, for multiples of 128, and for other numbers."""
    product = pk.matmul

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        correct = product(x, packed, *given, transpose=transpose)
        return correct * 1.5 if transpose and is_wrong(packed[0].shape[2]) else correct

    use_small_cases_of(backend, monkeypatch)
    monkeypatch.setattr(pk, "matmul", multiply)
    assert plan_of("packed") == DEQUANTIZES


@pytest.mark.parametrize("n_keys", [301, 1037, 1280, 33_000])
def test_metal_check_detects_fused_kernel_faults_in_each_length_range(
    n_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = mx.fast.scaled_dot_product_attention

    def wrong_for_n_keys(queries: mx.array, keys: mx.array, *others: Any, **more: Any) -> mx.array:
        return fused(queries, keys, *others, **more) * (2 if keys.shape[2] == n_keys else 1)

    monkeypatch.setattr(pk, "backend", lambda: "metal")
    counts = {size: counts[:1] for size, counts in attention_check._METAL_CASES.items()}
    monkeypatch.setattr(attention_check, "_METAL_CASES", counts)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", wrong_for_n_keys)
    with pytest.raises(ModelNotSupported):
        plan_of("dequantize")


def test_cuda_check_runs_packed_products_only_if_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel is compiled at its first use, which takes seconds."""
    model = Layers(4, 4)
    spec = probe_model(model, QUANTIZED)
    attend, product = mx.fast.scaled_dot_product_attention, pk.matmul
    queries_of: dict[str, list[int]] = {"fused": [], "packed": []}

    def fused(queries: mx.array, *given: Any, **more: Any) -> mx.array:
        queries_of["fused"].append(queries.shape[2])
        return attend(queries, *given, **more)

    def multiplied(x: mx.array, *given: Any, **more: Any) -> mx.array:
        queries_of["packed"].append(x.shape[2])
        return product(x, *given, **more)

    use_small_cases_of("cuda", monkeypatch)
    monkeypatch.setattr(attention, "builds_for_each_length", lambda *arrays: True)
    monkeypatch.setattr(attention_check, "packed_shapes", lambda *given: [SHAPE] * 2)
    monkeypatch.setattr(pk, "matmul", multiplied)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    assert plan_attention(model, spec).plans == {"0": DEQUANTIZES}
    # Each case first runs over NaN. A decoding step also runs with two rows. Prompts are padded.
    assert queries_of == {"fused": [1, 1, 1, 1, 64, 64], "packed": []}
    assert plan_attention(model, spec, "packed").plans == {"0": forced_plan("packed")}
    assert queries_of["packed"]


@pytest.mark.parametrize("packed", [True, False])
def test_wrong_dequantizing_attention_refuses_the_model(
    packed: bool, checked_backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the model takes no packed keys."""
    fused = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda *given, **more: fused(*given, **more) * 2
    )
    with pytest.raises(ModelNotSupported, match="dequantizing attention over k8rv4rb64 keys is"):
        plan_of(packed=packed)


def test_wrong_sums_of_rows_that_differ_refuse_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = PackedKV.placed

    def without_sums(side: PackedKV, packed: mx.array, own: mx.array, at: Any) -> mx.array:
        return packed if side.rows_differ else placed(side, packed, own, at)

    monkeypatch.setattr(PackedKV, "placed", without_sums)
    with pytest.raises(ModelNotSupported, match="dequantizing attention over k8rv4rb64 keys is"):
        plan_of(packed=True)


def test_attention_check_preserves_the_random_state() -> None:
    mx.random.seed(3)
    expected = mx.random.uniform()
    mx.random.seed(3)
    plan_of()
    assert mx.random.uniform().item() == expected.item()


def test_groups_with_equal_shapes_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(4, 4, 2)
    spec = probe_model(model, QUANTIZED)
    (group,) = spec.groups
    groups = [replace(group, name=str(slot), slots=(slot,)) for slot in group.slots]
    checked_shapes = []
    layer = attention_check._Layer

    def recorded_layer(shape: AttentionShape, *given: Any) -> Any:
        checked_shapes.append(shape)
        return layer(shape, *given)

    monkeypatch.setattr(attention_check, "_Layer", recorded_layer)
    planned = plan_attention(model, replace(spec, groups=tuple(groups)))
    assert list(planned.plans) == ["0", "1", "2"]
    assert planned.plans["0"] == planned.plans["1"] == policy_plan()
    assert checked_shapes == [SHAPE, AttentionShape(2, 1, 64, 64)]


def test_ranks_exchange_results_once_and_get_equal_plans() -> None:
    model = Layers(4, 4)
    spec = probe_model(model, QUANTIZED)
    for n_right_elsewhere, expected in ((2, policy_plan()), (1, DEQUANTIZES)):
        numbers: list[int] = []

        def least(n_right: int, others: int = n_right_elsewhere, sent: list[int] = numbers) -> int:
            sent.append(n_right)
            return min(n_right, others)

        assert plan_attention(model, spec, least=least).plans == {"0": expected}
        assert numbers == [2]
    with pytest.raises(ModelNotSupported):
        plan_attention(model, spec, least=lambda n_right: 0)


def test_every_quantized_group_has_the_plan_of_its_shape() -> None:
    model = tiny_gemma3()
    spec = probe_model(model, PrecisionChoice(8, 4))
    planned = plan_attention(model, spec)
    expected = plan_by_policy(AttentionShape(2, 1, 64, 64), KVPrecision.of(8, 64, 4).keys, "cpu")
    assert planned == spec and planned.plans == {"1": expected}
    window, full = planned.make_cache()
    assert full.plan is planned.plans["1"] and not hasattr(window, "plan")


@pytest.mark.parametrize("choice", ["auto", "packed"])
@pytest.mark.parametrize(
    ("model", "packed"),
    [
        (Layers(4, 4, takes_packed=False), True),
        (Layers(4, 2), True),
        (Layers(4, 4), False),
    ],
    ids=["no-packed-keys", "unequal-layers", "excluded-architecture"],
)
def test_models_that_cannot_take_packed_keys_dequantize(
    model: Layers, packed: bool, choice: Literal["auto", "packed"]
) -> None:
    """Layers of one group with different attention also dequantize."""
    assert plan_of(choice, model, packed) == AttentionPlan()


@pytest.mark.parametrize("choice", ["dequantize", "packed", "tiled"])
def test_requested_strategy_overrides_the_policy(choice: Strategy) -> None:
    assert plan_of(choice) == forced_plan(choice)


def test_layers_in_full_precision_have_no_plan() -> None:
    model = Layers(4, 4)
    planned = plan_attention(model, probe_model(model, PrecisionChoice(16, 16)))
    assert planned.plans == {}
    assert [type(slot) for slot in planned.make_cache()] == [KVCache, KVCache]
