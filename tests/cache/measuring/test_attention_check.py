"""Attention that is wrong on this device is noticed, and never chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache
from mlx_lm_kvpersist.cache.steps import completed

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.live import attention
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.policy import (
    AttentionPlan,
    AttentionShape,
    Rule,
    forced_plan,
    rules_for,
)
from mlx_lm_kvpersist.cache.measuring import attention_check
from mlx_lm_kvpersist.cache.measuring.attention_check import checking_attention, planning
from mlx_lm_kvpersist.errors import ModelNotSupported

from ..conftest import tiny_gemma3

SHAPE = AttentionShape(4, 2, 64, 64)
PRECISION = KVPrecision.of(6, 64, 4, rotated=True)
PLAN = AttentionPlan((Rule("packed", most_queries=1), Rule("tiled", least_rows=9)), True)


def checked(plan: AttentionPlan = PLAN) -> AttentionPlan:
    return completed(checking_attention(plan, SHAPE, PRECISION, mx.float32))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", [PRECISION, KVPrecision.of(8, 32, 2)], ids=str)
@pytest.mark.parametrize("shape", [SHAPE, AttentionShape(3, 1, 96, 64)], ids=str)
def test_every_strategy_is_right_here(
    shape: AttentionShape, precision: KVPrecision, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_check, "backend", lambda: backend)
    cases = {backend: {(300, 0): (1, 3, 17), (1037, 243): (1, 32)}}
    monkeypatch.setattr(attention_check, "_CASES", cases)
    given = precision.fitted(shape.k_dim, shape.v_dim)
    assert completed(checking_attention(PLAN, shape, given, mx.float32)) == PLAN


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
    """A product whose first result is right, and later ones have a column of what was there."""
    stale: dict[Any, mx.array] = {}

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        right = product(x, packed, *given, transpose=transpose)
        place = (right.shape, transpose)
        before = stale.get(place, right)
        stale[place] = right
        return mx.concatenate([right[..., :-1], before[..., -1:]], axis=-1)

    return multiply


@pytest.mark.parametrize(
    "broken",
    [
        lambda product: lambda *given, **more: product(*given, **more) * mx.nan,
        lambda product: lambda *given, **more: product(*given, **more) * 0.0,
        lambda product: off_beyond(product, 1024),
        lambda product: off_for_few_rows(product),
        lambda product: off_for_odd_scales(product),
        lambda product: leaves_some_unwritten(product),
    ],
    ids=["nan", "zero", "many keys", "few rows", "alignment", "memory that nobody wrote"],
)
def test_packed_attention_that_is_wrong_is_left_out_and_named(
    broken: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pk, "matmul", broken(pk.matmul))
    with caplog.at_level(logging.WARNING):
        plan = checked()
    assert [rule.strategy for rule in plan.rules] == ["tiled"]
    assert "packed attention over k6rv4rb64 keys is wrong in" in caplog.text


@pytest.mark.parametrize("backend", ["cuda", "metal"])
@pytest.mark.parametrize("is_wrong", [lambda n: n % 4 != 0, lambda n: n % 128 == 0])
def test_each_kind_of_number_of_keys_is_tried_on_a_gpu(
    backend: str, is_wrong: Callable[[int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX takes other kernels for multiples of 4, of 128, and for all other numbers."""
    product = pk.matmul

    def multiply(x: mx.array, packed: pk.Packed, *given: Any, transpose: bool) -> mx.array:
        right = product(x, packed, *given, transpose=transpose)
        return right * 1.5 if transpose and is_wrong(packed[0].shape[2]) else right

    cases: Any = attention_check._CASES
    few = {size: counts for size, counts in cases[backend].items() if size[0] < 2000}
    monkeypatch.setattr(attention_check, "_CASES", {backend: few})
    monkeypatch.setattr(attention_check, "backend", lambda: backend)
    monkeypatch.setattr(pk, "matmul", multiply)
    assert [rule.strategy for rule in checked().rules] == ["tiled"]


def test_packed_attention_that_is_wrong_is_not_taken_if_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pk, "matmul", off_beyond(pk.matmul, 1024))
    assert checked(forced_plan("packed")).rules == ()


def test_no_number_of_queries_takes_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where cuDNN would build a kernel for each number of keys."""
    monkeypatch.setattr(pk, "matmul", off_beyond(pk.matmul, 1024))
    monkeypatch.setattr(attention, "builds_for_each_length", lambda: True)
    plan = checked(AttentionPlan(rules_for(SHAPE, PRECISION.keys, "cuda"), can_take_packed=True))
    assert {plan.choose(n, 900, rows, 1) for n in range(1, 40) for rows in (1, 9)} == {"dequantize"}


def test_a_device_that_dequantizes_wrongly_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast, "scaled_dot_product_attention", lambda *given, **more: fused(*given, **more) * 2
    )
    with pytest.raises(ModelNotSupported, match="dequantizing attention over k6rv4rb64 keys is"):
        checked()


def test_a_check_leaves_the_random_numbers_of_others_alone() -> None:
    mx.random.seed(3)
    expected = mx.random.uniform()
    mx.random.seed(3)
    checked()
    assert mx.random.uniform().item() == expected.item()


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


def test_every_quantized_group_has_the_plan_of_its_shape() -> None:
    model = tiny_gemma3()
    spec = ModelCacheSpec.probe(model, PrecisionChoice(8, 4))
    planned = completed(planning(model, spec))
    rules = rules_for(AttentionShape(2, 1, 64, 64), KVPrecision.of(8, 64, 4).keys)
    assert planned == spec and planned.plans == {"1": AttentionPlan(rules, can_take_packed=True)}
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
def test_models_that_need_plain_keys_dequantize(model: Layers, is_taken: bool) -> None:
    """So do layers of one group that attend in several ways."""
    spec = ModelCacheSpec.probe(model)
    planned = completed(planning(model, spec, "packed"))
    expected = forced_plan("packed") if is_taken else AttentionPlan()
    assert planned.plans == {"0": expected}
    assert [slot.plan for slot in planned.make_cache()] == [expected] * 2


def test_layers_in_full_precision_have_no_plan() -> None:
    model = Layers(4, 4)
    spec = ModelCacheSpec.probe(model, PrecisionChoice(16, 16))
    planned = completed(planning(model, spec))
    assert planned.plans == {}
    assert [type(slot) for slot in planned.make_cache()] == [KVCache, KVCache]
