"""Attention that is wrong on this device is noticed, and never chosen."""

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
    Backend,
    Strategy,
    forced_plan,
    plan_by_policy,
)
from mlx_lm_kvpersist.cache.measuring import attention_check
from mlx_lm_kvpersist.cache.measuring.attention_check import plan_attention
from mlx_lm_kvpersist.errors import ModelNotSupported
from tests.support.pairs import every_pair

from ..conftest import tiny_gemma3

KEPT = PrecisionChoice(8, 4, rotated=True)
SHAPE = AttentionShape(4, 1, 64, 64)


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


def planned(
    choice: Strategy | Literal["auto"] = "auto", model: Layers | None = None, packed: bool = True
) -> AttentionPlan:
    """Return the plan of a model whose layers are one group."""
    model = model or Layers(4, 4)
    spec = plan_attention(model, probe_model(model, KEPT), choice, packed)
    assert [slot.plan for slot in spec.make_cache()] == [spec.plans["0"]] * 2
    return spec.plans["0"]


def by_policy(on: Backend = "cpu") -> AttentionPlan:
    return plan_by_policy(SHAPE, KVPrecision.of(8, 64).keys, on)


DEQUANTIZES = AttentionPlan(can_take_packed=True)


@pytest.fixture(params=["cpu", "metal"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend whose cases are tried, without the largest."""
    backend: Backend = request.param
    computed_on(backend, monkeypatch)
    return backend


def computed_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_check, "backend", lambda: backend)
    for name in ("_METAL_CASES", "_CUDA_CASES"):
        cases: Any = getattr(attention_check, name)
        few = {size: counts for size, counts in cases.items() if size[0] < 2000}
        monkeypatch.setattr(attention_check, name, few)


@every_pair(
    precision=[KVPrecision.of(8, 64, 4, rotated=True), "6, 2"],
    shape=[SHAPE, AttentionShape(3, 1, 96, 64)],
    backend=["cpu", "cuda", "metal"],
)
def test_every_strategy_is_right_here(
    shape: AttentionShape,
    precision: KVPrecision | str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computed_on(backend, monkeypatch)
    given = KVPrecision.of(6, 32, 2) if isinstance(precision, str) else precision
    fitted = given.fitted(shape.k_dim, shape.v_dim)
    wrong = attention_check.wrong_strategies(forced_plan("packed"), shape, fitted, mx.float32)
    assert not wrong


Product = Callable[..., mx.array]


def off_beyond(product: Product, n_keys: int) -> Product:
    """A product with keys that is wrong beyond a length, as MLX 0.31.2 has on some Macs."""

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        right = product(x, packed, *given, transpose=transpose)
        return right * 1.5 if packed[0].shape[2] > n_keys and transpose else right

    return multiply


def off_for_few_rows(product: Product) -> Product:
    """A product with values that is wrong for two and three rows, as MLX 0.31.2 on some Macs."""

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        right = product(x, packed, *given, transpose=transpose)
        return right * 0.5 if not transpose and x.shape[2] in (2, 3) else right

    return multiply


def off_for_odd_scales(product: Product) -> Product:
    """A product that is wrong if rows of scales are not a multiple of 16 bytes."""

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        right = product(x, packed, *given, transpose=transpose)
        return right + 1.0 if packed[1].shape[2] % 8 == 4 else right

    return multiply


def leaves_some_unwritten(product: Product) -> Product:
    """A product whose first result is right, and later ones have a column of old memory."""
    stale: dict[Any, mx.array] = {}

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        right = product(x, packed, *given, transpose=transpose)
        place = (right.shape, transpose)
        before = stale.get(place, right)
        stale[place] = right
        return mx.concatenate([right[..., :-1], before[..., -1:]], axis=-1)

    return multiply


FAULTS: dict[str, tuple[str, Any]] = {
    "nan": ("cpu", lambda product: lambda *given, **more: product(*given, **more) * mx.nan),
    "zero": ("cpu", lambda product: lambda *given, **more: product(*given, **more) * 0.0),
    "memory that nobody wrote": ("cpu", leaves_some_unwritten),
    "many keys": ("metal", lambda product: off_beyond(product, 1024)),
    "few rows": ("metal", off_for_few_rows),
    "alignment": ("cuda", off_for_odd_scales),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_packed_attention_that_is_wrong_is_left_out_and_named(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if it is requested."""
    backend, broken = FAULTS[fault]
    computed_on(backend, monkeypatch)
    monkeypatch.setattr(pk, "matmul", broken(pk.matmul))
    with caplog.at_level(logging.WARNING):
        assert planned("packed", Layers(1, 1)) == DEQUANTIZES
    assert "packed attention over k8rv4rb64 keys is wrong on" in caplog.text


def test_by_the_policy_too_all_dequantize_where_packed_attention_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert planned() == by_policy() != DEQUANTIZES
    monkeypatch.setattr(pk, "matmul", off_beyond(pk.matmul, 10))
    assert planned() == DEQUANTIZES


@pytest.mark.parametrize("is_wrong", [lambda n: n % 4 != 0, lambda n: n % 128 == 0])
@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_each_kind_of_number_of_keys_is_tried_on_a_gpu(
    backend: str, is_wrong: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX takes other kernels for multiples of 4, of 128, and for all other numbers."""
    product = pk.matmul

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        right = product(x, packed, *given, transpose=transpose)
        return right * 1.5 if transpose and is_wrong(packed[0].shape[2]) else right

    computed_on(backend, monkeypatch)
    monkeypatch.setattr(pk, "matmul", multiply)
    assert planned("packed") == DEQUANTIZES


@pytest.mark.parametrize("n_keys", [301, 1037, 33_000])
def test_a_fault_of_the_fused_kernel_is_found_at_each_length_that_metal_distinguishes(
    n_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = mx.fast.scaled_dot_product_attention

    def off(queries: mx.array, keys: mx.array, *others: Any, **more: Any) -> mx.array:
        return fused(queries, keys, *others, **more) * (2 if keys.shape[2] == n_keys else 1)

    monkeypatch.setattr(attention_check, "backend", lambda: "metal")
    counts = {size: counts[:1] for size, counts in attention_check._METAL_CASES.items()}
    monkeypatch.setattr(attention_check, "_METAL_CASES", counts)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", off)
    with pytest.raises(ModelNotSupported):
        planned("dequantize")


def test_cuda_computes_no_packed_product_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kernel is compiled when it is first used, which takes seconds."""
    model = Layers(4, 4)
    spec = probe_model(model, KEPT)
    attend, product = mx.fast.scaled_dot_product_attention, pk.matmul
    queries_of: dict[str, list[int]] = {"fused": [], "packed": []}

    def fused(queries: mx.array, *given: Any, **more: Any) -> mx.array:
        queries_of["fused"].append(queries.shape[2])
        return attend(queries, *given, **more)

    def multiplied(x: mx.array, *given: Any, **more: Any) -> mx.array:
        queries_of["packed"].append(x.shape[2])
        return product(x, *given, **more)

    computed_on("cuda", monkeypatch)
    monkeypatch.setattr(attention, "backend", lambda: "cuda")
    monkeypatch.setattr(attention, "builds_for_each_length", lambda: True)
    monkeypatch.setattr(attention_check, "packed_shapes", lambda *given: [SHAPE] * 2)
    monkeypatch.setattr(pk, "matmul", multiplied)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    assert plan_attention(model, spec).plans == {"0": DEQUANTIZES}
    # Each case runs over NaN first; a step also with two rows.
    assert queries_of == {"fused": [1, 1, 1, 1, 4, 4], "packed": []}
    assert plan_attention(model, spec, "packed").plans == {"0": forced_plan("packed")}
    assert queries_of["packed"]


@pytest.mark.parametrize("packed", [True, False])
def test_a_device_that_dequantizes_wrongly_keeps_nothing(
    packed: bool, on: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the model takes no packed keys."""
    fused = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda *given, **more: fused(*given, **more) * 2
    )
    with pytest.raises(ModelNotSupported, match="dequantizing attention over k8rv4rb64 keys is"):
        planned(packed=packed)


def test_a_probe_leaves_the_random_numbers_of_others_alone() -> None:
    mx.random.seed(3)
    expected = mx.random.uniform()
    mx.random.seed(3)
    planned()
    assert mx.random.uniform().item() == expected.item()


def test_groups_that_are_alike_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(4, 4, 2)
    spec = probe_model(model, KEPT)
    (group,) = spec.groups
    parts = [replace(group, name=str(slot), slots=(slot,)) for slot in group.slots]
    probed = []
    layer = attention_check._Layer

    def noted(shape: AttentionShape, *given: Any) -> Any:
        probed.append(shape)
        return layer(shape, *given)

    monkeypatch.setattr(attention_check, "_Layer", noted)
    found = plan_attention(model, replace(spec, groups=tuple(parts)))
    assert list(found.plans) == ["0", "1", "2"] and len(set(found.plans.values())) == 1
    assert probed == [SHAPE, AttentionShape(2, 1, 64, 64)]


def test_the_processes_of_a_model_agree_once_and_plan_alike() -> None:
    model = Layers(4, 4)
    spec = probe_model(model, KEPT)
    for n_right_elsewhere, expected in ((2, by_policy()), (1, DEQUANTIZES)):
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
    found = plan_attention(model, spec)
    expected = plan_by_policy(AttentionShape(2, 1, 64, 64), KVPrecision.of(8, 64, 4).keys, "cpu")
    assert found == spec and found.plans == {"1": expected}
    window, full = found.make_cache()
    assert full.plan is found.plans["1"] and not hasattr(window, "plan")


@pytest.mark.parametrize("choice", ["auto", "packed"])
@pytest.mark.parametrize(
    ("model", "packed"),
    [
        (Layers(4, 4, takes_packed=False), True),
        (Layers(4, 2), True),
        (Layers(4, 4), False),
    ],
    ids=["plain-only", "unlike-layers", "by-its-architecture"],
)
def test_models_that_need_plain_keys_dequantize(
    model: Layers, packed: bool, choice: Literal["auto", "packed"]
) -> None:
    """So do layers of one group that attend in several ways."""
    assert planned(choice, model, packed) == AttentionPlan()


@pytest.mark.parametrize("choice", ["dequantize", "packed", "tiled"])
def test_a_strategy_that_is_asked_for_overrides_the_policy(choice: Strategy) -> None:
    assert planned(choice) == forced_plan(choice)


def test_layers_in_full_precision_have_no_plan() -> None:
    model = Layers(4, 4)
    found = plan_attention(model, probe_model(model, PrecisionChoice(16, 16)))
    assert found.plans == {}
    assert [type(slot) for slot in found.make_cache()] == [KVCache, KVCache]
