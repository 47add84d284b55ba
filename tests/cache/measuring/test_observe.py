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
def test_packed_shapes_match_the_architecture(
    architecture: str, patch: Callable[[], AbstractContextManager[None]]
) -> None:
    model = ARCHITECTURES[architecture]()
    make_quantized = lambda: [quantized()[0] for _ in model.layers]  # noqa: E731
    with patch():
        before = vars(base).copy()
        assert packed_shapes(model, make_quantized, [0, 1]) == [SHAPES[architecture]] * 2
        assert packed_shapes(model, make_quantized, [1]) == [None, SHAPES[architecture]]
        assert vars(base) == before


def test_only_requested_quantized_layers_have_shapes() -> None:
    model = tiny_gemma3()

    def make_caches() -> list[Any]:
        caches = model.make_cache()
        return [quantized()[0] if type(cache) is KVCache else cache for cache in caches]

    shapes = [None, AttentionShape(2, 1, 64, 64)]
    assert packed_shapes(model, make_caches, [0, 1]) == shapes
    assert packed_shapes(model, make_caches, [0]) == [None, None]
    assert packed_shapes(model, make_caches, [1]) == shapes


class OneLayer:
    """A stand-in for a model: one layer that calls `attend` on its cache."""

    def __init__(self, attend: Callable[[Any, Any, Any, mx.array], mx.array]) -> None:
        self.attend = attend

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        n = tokens.shape[1]
        keys, values = cache[0].update_and_fetch(*random_kv(1, n))
        return self.attend(cache[0], keys, values, mx.ones((1, 4, n, 64)))


def host_attention(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, 0.1, "causal")
    return out


def with_sinks(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    out: mx.array = base.scaled_dot_product_attention(
        queries, keys, values, cache, 0.1, "causal", sinks=mx.zeros(4)
    )
    return out


def own_attention(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    return queries @ mx.repeat(keys, 2, axis=1).swapaxes(-1, -2) @ mx.repeat(values, 2, axis=1)


def only_prompts(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    """Attend for prompts only; a token of a reply does not read the cache."""
    return host_attention(cache, keys, values, queries) if queries.shape[2] > 1 else queries


def no_attention(cache: Any, keys: Any, values: Any, queries: mx.array) -> mx.array:
    return queries


@pytest.mark.parametrize("attend", [with_sinks, own_attention, only_prompts, no_attention])
def test_layers_that_cannot_take_packed_keys_have_no_shape(
    attend: Callable[[Any, Any, Any, mx.array], mx.array],
) -> None:
    assert packed_shapes(OneLayer(attend), quantized, [0]) == [None]
    assert packed_shapes(OneLayer(host_attention), quantized, [0]) == [AttentionShape(4, 2, 64, 32)]


def test_tracing_shapes_evaluates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("evaluated")

    monkeypatch.setattr(mx, "eval", fail)
    assert packed_shapes(OneLayer(host_attention), quantized, [0]) == [AttentionShape(4, 2, 64, 32)]


def test_only_calls_with_packed_keys_are_observed() -> None:
    (cache,) = quantized()
    cache.plan = forced_plan("packed")
    queries = mx.ones((1, 4, 1, 64))
    stock = base.quantized_scaled_dot_product_attention
    with observed_attention() as seen:
        keys, values = cache.update_and_fetch(*random_kv(1, 1))
        base.scaled_dot_product_attention(queries, keys, values, cache, 0.1, None)
        stock_quantized = pk.quantize(mx.ones((1, 2, 4, 64)), Quantization(8, 32))
        cache.precision = KVPrecision.of(8, 32)
        actual = base.scaled_dot_product_attention(
            queries, stock_quantized, stock_quantized, cache, 0.1, None
        )
    assert [shape for shape, _ in seen] == [AttentionShape(4, 2, 64, 32)]
    assert mx.allclose(actual, mx.ones((1, 4, 1, 64)))
    assert base.quantized_scaled_dot_product_attention is stock
