from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.errors import ModelNotSupported
from mlx_lm_kvpersist.kv.blocks import block_nbytes
from mlx_lm_kvpersist.kv.precision import KVPrecision
from mlx_lm_kvpersist.kv.quantized import SequenceQuantizedKVCache
from mlx_lm_kvpersist.kv.spec import LayerGroup, ModelCacheSpec

from .conftest import tiny_deepseek_v2, tiny_gemma3, tiny_llama, tiny_qwen3


class OddLayers(nn.Module):  # type: ignore[misc]
    """Layers that keep keys and values of the given shapes, and the last `n_unused` nothing."""

    def __init__(
        self, shapes: list[tuple[int, int, int]], n_unused: int = 0, dtype: mx.Dtype = mx.float32
    ) -> None:
        super().__init__()
        self.shapes, self.dtype = shapes, dtype
        self.layers = [nn.Identity() for _ in range(len(shapes) + n_unused)]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        n_rows, n_tokens = inputs.shape
        for (n_heads, k_dim, v_dim), layer in zip(self.shapes, cache, strict=False):
            layer.update_and_fetch(
                mx.ones((n_rows, n_heads, n_tokens, k_dim), self.dtype),
                mx.ones((n_rows, n_heads, n_tokens, v_dim), self.dtype),
            )
        return inputs


def test_llama_is_one_group() -> None:
    spec = ModelCacheSpec.probe(tiny_llama(n_layers=3))
    assert spec.precision == KVPrecision(4, 64)
    assert spec.groups == (LayerGroup("0", (0, 1, 2), 2, 64, 64, "float32"),)
    assert spec.n_layers == 3
    assert spec.bytes_per_token == 3 * 2 * 2 * (64 // 2 + 2 * 4)


def test_the_dtype_is_that_of_the_weights() -> None:
    model = tiny_llama()
    model.set_dtype(mx.bfloat16)
    spec = ModelCacheSpec.probe(model)
    assert spec.groups[0].dtype == "bfloat16" and spec.groups[0].mx_dtype == mx.bfloat16
    assert spec.bytes_per_token == 2 * 2 * 2 * (64 // 2 + 2 * 2)


def test_keys_and_values_may_differ() -> None:
    spec = ModelCacheSpec.probe(tiny_deepseek_v2())
    assert (spec.groups[0].k_dim, spec.groups[0].v_dim) == (64, 32)
    assert spec.precision.group_size == 32


def test_layers_of_equal_geometry_are_a_group() -> None:
    shapes = [(2, 64, 64), (4, 128, 64), (2, 64, 64)]
    spec = ModelCacheSpec.probe(OddLayers(shapes))
    assert [group.layers for group in spec.groups] == [(0, 2), (1,)]
    assert [group.name for group in spec.groups] == ["0", "1"]


@pytest.mark.parametrize(("head_dim", "group_size"), [(64, 64), (96, 32), (128, 64)])
def test_the_first_group_size_that_fits_is_taken(head_dim: int, group_size: int) -> None:
    assert ModelCacheSpec.probe(tiny_qwen3(head_dim=head_dim)).precision.group_size == group_size


def test_a_group_size_can_be_asked_for() -> None:
    assert str(ModelCacheSpec.probe(tiny_llama(), bits=8, group_size=32).precision) == "8b32"
    with pytest.raises(ModelNotSupported, match=r"no group size of 128 divides .* 64"):
        ModelCacheSpec.probe(tiny_llama(), group_size=128)
    with pytest.raises(ValueError, match="group size is 48"):
        ModelCacheSpec.probe(tiny_llama(), group_size=48)


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        (tiny_gemma3, "layer 0 keeps a RotatingKVCache"),
        (lambda: tiny_llama(head_dim=80), "no group size of 64, 32, 128 divides .* 80"),
        (lambda: OddLayers([(2, 64, 64)], n_unused=1), "layer 1 was not filled"),
        (lambda: OddLayers([(2, 64, 0)]), "no group size"),
        (lambda: OddLayers([]), "no KV cache"),
        (lambda: OddLayers([(2, 64, 64)], dtype=mx.int32), "layer 0 keeps int32"),
        (lambda: OddLayers([(2, 64)]), "forward pass of 2 tokens failed"),  # type: ignore[list-item]
    ],
    ids=["rotating", "head-80", "unfilled", "no-values", "no-layers", "integers", "fails"],
)
def test_what_cannot_be_kept_is_refused_by_reason(
    make_model: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(ModelNotSupported, match=reason):
        ModelCacheSpec.probe(make_model())


def test_a_subclass_of_a_known_cache_is_not_a_known_cache() -> None:
    class Special(KVCache):  # type: ignore[misc]
        pass

    model = tiny_llama()
    model.make_cache = lambda: [Special(), Special()]
    with pytest.raises(ModelNotSupported, match="Special"):
        ModelCacheSpec.probe(model)


def test_makes_a_cache_for_every_layer(llama_spec: ModelCacheSpec) -> None:
    caches = llama_spec.make_cache()
    assert [type(cache) for cache in caches] == [SequenceQuantizedKVCache] * 2
    assert caches[0] is not caches[1]


def test_the_description_is_json(llama_spec: ModelCacheSpec) -> None:
    described = llama_spec.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["precision"] == "4b64"
    assert described != ModelCacheSpec.probe(tiny_llama(), bits=8).describe()


def test_block_arrays_add_up_to_the_bytes_of_their_tokens() -> None:
    spec = ModelCacheSpec.probe(tiny_deepseek_v2())
    arrays = {name: mx.zeros(shape, dtype) for name, shape, dtype in spec.block_arrays(10)}
    assert spec.block_arrays_fit(arrays, 10) is None
    assert block_nbytes(arrays) == 10 * spec.bytes_per_token


def test_what_does_not_fit_is_named(llama_spec: ModelCacheSpec) -> None:
    spec = llama_spec
    arrays = {name: mx.zeros(shape, dtype) for name, shape, dtype in spec.block_arrays(10)}
    assert spec.block_arrays_fit(arrays, 9) == (
        "0.k.weights has shape (2, 2, 10, 8), expected (2, 2, 9, 8)"
    )
    extra = {**arrays, "1.k.weights": arrays["0.k.weights"]}
    assert spec.block_arrays_fit(extra, 10) == "unknown array 1.k.weights"
    half = {**arrays, "0.v.scales": arrays["0.v.scales"].astype(mx.float16)}
    assert spec.block_arrays_fit(half, 10) == "0.v.scales is float16, expected float32"
    del arrays["0.v.biases"]
    assert spec.block_arrays_fit(arrays, 10) == "no array 0.v.biases"
