"""Tracing shows which layers of a model attend over packed keys, and in which shapes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, Quantization
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import AttentionShape, forced_plan
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache
from mlx_lm_kvpersist.cache.measuring.attention_check import observed_attention, packed_shapes
from mlx_lm_kvpersist.cli.quality_checks import server_attention

from ..conftest import ARCHITECTURES, random_kv, tiny_gemma3

SHAPES = {
    "llama": AttentionShape(4, 2, 64, 64),
    "qwen3": AttentionShape(6, 2, 64, 64),
    "deepseek_v2": AttentionShape(4, 4, 64, 32),
}


def quantized() -> list[Any]:
    return [SequenceQuantizedKVCache(KVPrecision.of(8, 32, 4))]


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
@pytest.mark.parametrize("patch", [nullcontext, server_attention], ids=["stock", "patched"])
def test_shapes_of_models_that_attend_over_packed_keys(
    architecture: str, patch: Callable[[], AbstractContextManager[None]]
) -> None:
    model = ARCHITECTURES[architecture]()
    made = lambda: [quantized()[0] for _ in model.layers]  # noqa: E731
    with patch():
        before = vars(base).copy()
        assert packed_shapes(model, made, [0, 1]) == [SHAPES[architecture]] * 2
        assert packed_shapes(model, made, [1]) == [None, SHAPES[architecture]]
        assert vars(base) == before


def test_layers_of_which_some_are_ours() -> None:
    model = tiny_gemma3()

    def make_caches() -> list[Any]:
        caches = model.make_cache()
        return [quantized()[0] if type(cache) is KVCache else cache for cache in caches]

    shapes = [None, AttentionShape(2, 1, 64, 64)]
    assert packed_shapes(model, make_caches, [0, 1]) == shapes
    assert packed_shapes(model, make_caches, [0]) == [None, None]
    assert packed_shapes(model, make_caches, [1]) == shapes


class OneLayer:
    """Stands for a model: one layer that calls `attend` on its cache."""

    def __init__(self, attend: Callable[[Any, Any, Any, mx.array], mx.array]) -> None:
        self.attend = attend

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        n = tokens.shape[1]
        keys, values = cache[0].update_and_fetch(*random_kv(1, n))
        return self.attend(cache[0], keys, values, mx.ones((1, 4, n, 64)))


def by_the_host(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, 0.1, "causal")
    return out


def with_sinks(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    out: mx.array = base.scaled_dot_product_attention(
        queries, keys, values, cache, 0.1, "causal", sinks=mx.zeros(4)
    )
    return out


def alone(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    return queries @ mx.repeat(keys, 2, axis=1).swapaxes(-1, -2) @ mx.repeat(values, 2, axis=1)


def only_prompts(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    """A token of a reply does not look at the cache."""
    return by_the_host(cache, keys, values, queries) if queries.shape[2] > 1 else queries


def untouched(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    return queries


@pytest.mark.parametrize("attend", [with_sinks, alone, only_prompts, untouched])
def test_layers_that_need_arrays_have_no_shape(
    attend: Callable[[Any, Any, Any, mx.array], mx.array],
) -> None:
    assert packed_shapes(OneLayer(attend), quantized, [0]) == [None]
    assert packed_shapes(OneLayer(by_the_host), quantized, [0]) == [AttentionShape(4, 2, 64, 32)]


def test_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr(mx, "eval", fail)
    assert packed_shapes(OneLayer(by_the_host), quantized, [0]) == [AttentionShape(4, 2, 64, 32)]


def test_calls_are_observed_and_others_left_alone() -> None:
    (cache,) = quantized()
    cache.plan = forced_plan("packed")
    queries = mx.ones((1, 4, 1, 64))
    stock = base.quantized_scaled_dot_product_attention
    with observed_attention() as seen:
        keys, values = cache.update_and_fetch(*random_kv(1, 1))
        base.scaled_dot_product_attention(queries, keys, values, cache, 0.1, None)
        plain = pk.quantize(mx.ones((1, 2, 4, 64)), Quantization(8, 32))
        cache.precision = KVPrecision.of(8, 32)
        found = base.scaled_dot_product_attention(queries, plain, plain, cache, 0.1, None)
    assert [shape for shape, _ in seen] == [AttentionShape(4, 2, 64, 32)]
    assert mx.allclose(found, mx.ones((1, 4, 1, 64)))
    assert base.quantized_scaled_dot_product_attention is stock
