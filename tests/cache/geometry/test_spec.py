from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    CacheList,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import (
    LayerGroup,
    ModelCacheSpec,
    TensorShape,
    arrays_fit,
    as_computed,
    probe_model,
    token_arrays,
)
from mlx_lm_kvpersist.cache.live.attention import AttentionPlan
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache
from mlx_lm_kvpersist.errors import ModelNotSupported
from tests.support.joined import n_bytes

from ..conftest import tiny_deepseek_v2, tiny_gemma3, tiny_llama, tiny_qwen3


class OddLayers(nn.Module):  # type: ignore[misc]
    """Layers that store KV of the given shapes; the last `n_unused` layers store nothing."""

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


class ReadsItsCache(OddLayers):
    """A model that reads its caches from layer `reads` on, like models with their own index."""

    def __init__(self, shapes: list[tuple[int, int, int]], reads: int = 0) -> None:
        super().__init__(shapes)
        self.reads = reads

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        super().__call__(inputs, cache)
        for layer in cache[self.reads :]:
            layer.values = mx.zeros_like(layer.keys)
        return inputs


DEFAULT = KVPrecision.of(8, 64, 4, rotated=True)


def with_caches(*caches: Any) -> Any:
    model = tiny_llama()
    model.make_cache = lambda: list(caches)
    return model


def test_llama_is_one_group() -> None:
    spec = probe_model(tiny_llama(n_layers=3))
    shape = TensorShape(2, 64, "float32")
    assert spec.groups == (
        LayerGroup("0", GroupKind.FULL, "KVCache", (0, 1, 2), shape, shape, DEFAULT),
    )
    assert spec.layout == "k8rv4rb64,c256" and spec.any_prefix and spec.batches
    assert spec.bytes_per_token == 3 * 2 * (64 + 64 // 2 + 2 * 2 * 2)
    assert spec.bits_per_number == 6.5


def test_kv_dtype_follows_the_weights() -> None:
    model = tiny_llama()
    model.set_dtype(mx.bfloat16)
    spec = probe_model(model)
    assert spec.groups[0].keys == spec.groups[0].values == TensorShape(2, 64, "bfloat16")
    assert spec.bytes_per_token == 2 * 2 * (64 + 64 // 2 + 2 * 2 * 2)


def test_keys_and_values_may_have_different_head_sizes() -> None:
    spec = probe_model(tiny_deepseek_v2())
    (group,) = spec.groups
    assert group.keys and group.values and (group.keys.dim, group.values.dim) == (64, 32)
    assert spec.layout == "k8rv4rb32,c256"


def test_layers_of_equal_geometry_form_a_group() -> None:
    shapes = [(2, 64, 64), (4, 128, 64), (2, 64, 64)]
    spec = probe_model(OddLayers(shapes))
    assert [group.slots for group in spec.groups] == [(0, 2), (1,)]
    assert [group.name for group in spec.groups] == ["0", "1"]


@pytest.mark.parametrize(
    ("head_dim", "form"),
    [
        *((64, "k8rv4rb64"), (96, "k8rv4rb32"), (128, "k8rv4rb64"), (160, "k8rv4rb32")),
        *((40, "k8rp24v4rp24b64"), (72, "k8rp24v4rp24b32"), (80, "k8rp16v4rp16b32")),
        *((100, "k8rp28v4rp28b64"), (112, "k8rp16v4rp16b64"), (192, "k8rv4rb64")),
    ],
)
def test_group_size_with_the_least_padding_is_chosen(head_dim: int, form: str) -> None:
    """The first of equal sizes is chosen. Without padding, names must match existing stores."""
    assert probe_model(tiny_qwen3(head_dim=head_dim)).layout == f"{form},c256"


def test_keys_and_values_are_padded_separately() -> None:
    (group,) = probe_model(OddLayers([(2, 80, 64)]), PrecisionChoice(6, 4)).groups
    assert str(group.precision) == "k6rp16v4rb32"
    assert {name: shape for name, shape, _ in token_arrays([group], 10)} == {
        "0.k.weights": (1, 2, 10, 18),
        "0.k.scales": (1, 2, 10, 3),
        "0.k.biases": (1, 2, 10, 3),
        "0.v.weights": (1, 2, 10, 8),
        "0.v.scales": (1, 2, 10, 2),
        "0.v.biases": (1, 2, 10, 2),
    }
    computed = token_arrays(as_computed([group]), 3)
    assert [shape for _, shape, _ in computed] == [(1, 2, 3, 80), (1, 2, 3, 64)]


def test_requested_group_size_is_used() -> None:
    assert probe_model(tiny_llama(), PrecisionChoice(8, 8, 32)).layout == "8rb32,c256"
    wide = probe_model(tiny_llama(), PrecisionChoice(group_size=128))
    assert wide.layout == "k8rp64v4rp64b128,c256"


def test_keys_may_have_more_bits_than_values() -> None:
    spec = probe_model(tiny_llama(), PrecisionChoice(8, 4, rotated=False))
    assert spec.layout == "k8v4b64,c256"
    arrays = {name: shape for name, shape, _ in token_arrays(spec.full, 10)}
    assert arrays["0.k.weights"] == (2, 2, 10, 16) and arrays["0.v.weights"] == (2, 2, 10, 8)


@pytest.mark.parametrize(
    ("shapes", "layout"),
    [
        ([(2, 64, 64), (4, 128, 64)], "k8rv4rb64,c256"),
        ([(2, 64, 64), (2, 64, 64), (2, 96, 96)], "k8rv4rb64*2,k8rv4rb32*1,c256"),
        ([(2, 4, 4), (2, 64, 64)], "full*1,k8rv4rb64*1,c256"),
        ([(2, 4, 4)] * 2, "full"),
    ],
)
def test_layout_counts_layers_only_if_their_precisions_differ(
    shapes: list[tuple[int, int, int]], layout: str
) -> None:
    assert probe_model(OddLayers(shapes)).layout == layout


def test_requested_full_precision_quantizes_nothing() -> None:
    spec = probe_model(tiny_llama(), PrecisionChoice(16, 16))
    assert spec.layout == "full" and spec.groups[0].why == "full precision is requested"
    assert [type(cache) for cache in spec.make_cache()] == [KVCache, KVCache]
    assert [name for name, _, _ in token_arrays(spec.full, 10)] == ["0.k", "0.v"]


@pytest.mark.parametrize(
    ("make_model", "why"),
    [
        (lambda: tiny_llama(head_dim=4), "quantized in whole groups of 32 it takes no less memory"),
        (lambda: OddLayers([(2, 64, 0)]), "keys without values are an index"),
        (lambda: OddLayers([(2, 64, 64)], dtype=mx.int32), "MLX does not quantize int32"),
        (lambda: ReadsItsCache([(2, 64, 64)]), "the model's attention does not take it"),
    ],
    ids=["head-4", "no-values", "integers", "reads-its-cache"],
)
def test_groups_that_cannot_be_quantized_stay_in_full_precision(
    make_model: Callable[[], Any], why: str
) -> None:
    (group,) = probe_model(make_model()).groups
    assert group.precision is None and group.why.startswith(why)


def test_only_groups_that_reject_quantized_caches_stay_in_full_precision() -> None:
    spec = probe_model(ReadsItsCache([(2, 64, 64), (1, 128, 128)], reads=1))
    assert [str(group.precision) for group in spec.groups] == ["k8rv4rb64", "None"]
    assert [type(cache) for cache in spec.make_cache()] == [SequenceQuantizedKVCache, KVCache]


def test_layer_without_kv_is_in_no_group() -> None:
    spec = probe_model(OddLayers([(2, 64, 64)], n_unused=1))
    assert [group.slots for group in spec.groups] == [(0,)]
    assert [type(cache) for cache in spec.make_cache()] == [SequenceQuantizedKVCache, KVCache]


def test_window_layers_form_a_separate_group() -> None:
    spec = probe_model(tiny_gemma3())
    sliding, full = spec.groups
    assert (sliding.kind, sliding.window, sliding.slots) == (GroupKind.SLIDING, 16, (0,))
    assert sliding.precision is None and full.precision == DEFAULT
    assert list(spec.sliding) == [16] and not spec.any_prefix
    assert spec.layout == "k8rv4rb64,c256,w16"
    # The window of the first layer, and the newest tokens of the second.
    assert spec.bytes_per_checkpoint == (16 + 255) * 2 * 64 * 4


@pytest.mark.parametrize(
    ("make_model", "reason"),
    [
        (lambda: OddLayers([]), "keeps no cache"),
        (lambda: OddLayers([(2, 64)]), "cannot be probed"),  # type: ignore[list-item]
        (
            lambda: with_caches(RotatingKVCache(16, keep=4)),
            "layer 0 has a RotatingKVCache: it never drops its first 4 tokens",
        ),
        (lambda: with_caches(QuantizedKVCache()), "layer 0 has a QuantizedKVCache: it has no"),
        (
            lambda: with_caches(CacheList(KVCache(), ConcatenateKVCache())),
            "layer 0 part 1 has a ConcatenateKVCache",
        ),
    ],
    ids=["no-layers", "fails", "pinned-tokens", "quantized", "composite"],
)
def test_unsupported_models_are_refused_with_the_reason(
    make_model: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(ModelNotSupported, match=reason):
        probe_model(make_model())


def test_subclass_of_a_known_cache_class_is_refused() -> None:
    class Special(KVCache):  # type: ignore[misc]
        pass

    model = tiny_llama()
    model.make_cache = lambda: [Special(), Special()]
    with pytest.raises(ModelNotSupported, match="Special"):
        probe_model(model)


def test_spec_makes_a_separate_cache_for_every_layer(llama_spec: ModelCacheSpec) -> None:
    caches = llama_spec.make_cache()
    assert [type(cache) for cache in caches] == [SequenceQuantizedKVCache] * 2
    assert caches[0] is not caches[1] and caches[0].newest is not caches[1].newest
    again = llama_spec.make_cache()
    assert again[0] is not caches[0] and again[0].plan is caches[0].plan


def test_a_quantized_cache_is_made_without_a_deep_copy(
    llama_spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(copy, "deepcopy")
    assert len(llama_spec.make_cache()) == 2


def test_spec_description_is_json(llama_spec: ModelCacheSpec) -> None:
    described = llama_spec.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["layout"] == "k8rv4rb64,c256"
    assert described != probe_model(tiny_llama(), PrecisionChoice(8, 8)).describe()


def test_block_arrays_have_the_predicted_bytes_per_token() -> None:
    spec = probe_model(tiny_deepseek_v2())
    arrays = {name: mx.zeros(shape, dtype) for name, shape, dtype in token_arrays(spec.full, 10)}
    assert arrays_fit(token_arrays(spec.full, 10), arrays) is None
    assert n_bytes(arrays) == 10 * spec.bytes_per_token


def test_mismatched_block_arrays_are_named(llama_spec: ModelCacheSpec) -> None:
    spec = llama_spec
    arrays = {name: mx.zeros(shape, dtype) for name, shape, dtype in token_arrays(spec.full, 10)}
    assert arrays_fit(token_arrays(spec.full, 9), arrays) == (
        "0.k.weights has shape (2, 2, 10, 16), expected (2, 2, 9, 16)"
    )
    extra = {**arrays, "1.k.weights": arrays["0.k.weights"]}
    assert arrays_fit(token_arrays(spec.full, 10), extra) == "unknown array 1.k.weights"
    half = {**arrays, "0.v.scales": arrays["0.v.scales"].astype(mx.float16)}
    assert (
        arrays_fit(token_arrays(spec.full, 10), half) == "0.v.scales is float16, expected bfloat16"
    )
    del arrays["0.v.biases"]
    assert arrays_fit(token_arrays(spec.full, 10), arrays) == "no array 0.v.biases"


def test_all_kinds_of_groups_are_described() -> None:
    """The output of `mlx-lm-kvpersist spec --json`, and the sums of its sizes."""
    keys, values = TensorShape(3, 64, "float16"), TensorShape(3, 32, "float16")
    mixed = KVPrecision.of(8, 32, 4)
    full = LayerGroup("0", GroupKind.FULL, "KVCache", (0, 2), keys, values, mixed)
    window = TensorShape(1, 64, "float32")
    why = "windows stay in full precision"
    sliding = LayerGroup(
        "1", GroupKind.SLIDING, "RotatingKVCache", (1,), window, window, None, why, 16
    )
    states = (((3, 8), "float32"), None)
    recurrent = LayerGroup("2", GroupKind.RECURRENT, "ArraysCache", (3, 4), states=states)
    spec = ModelCacheSpec((full, sliding, recurrent), [None] * 5, False)
    assert spec.describe() == {
        "layout": "k8v4b32,c256,w16,state",
        "n_layers": 5,
        "bytes_per_token": 552,
        "bytes_per_checkpoint": 16 * 512 + 255 * 1152 + 192,
        "batching": "nothing",
        "groups": [
            {
                "name": "0",
                "kind": "full",
                "cache": "KVCache",
                "slots": [0, 2],
                "bits": "k8v4b32",
                "why_not_quantized": None,
                "bytes_per_token": 2 * 3 * (64 + 2 * 2 * 2) + 2 * 3 * (32 // 2 + 2 * 2),
                "keys": {"n_heads": 3, "dim": 64, "dtype": "float16"},
                "values": {"n_heads": 3, "dim": 32, "dtype": "float16"},
            },
            {
                "name": "1",
                "kind": "sliding",
                "cache": "RotatingKVCache",
                "slots": [1],
                "bits": None,
                "why_not_quantized": why,
                "bytes_per_token": 2 * 64 * 4,
                "keys": {"n_heads": 1, "dim": 64, "dtype": "float32"},
                "values": {"n_heads": 1, "dim": 64, "dtype": "float32"},
                "window": 16,
            },
            {
                "name": "2",
                "kind": "recurrent",
                "cache": "ArraysCache",
                "slots": [3, 4],
                "bits": None,
                "why_not_quantized": None,
                "bytes_per_token": 0,
                "state_bytes": 2 * 3 * 8 * 4,
            },
        ],
    }
    assert full.full_precision_bytes == 2 * 3 * (64 + 32) * 2
    assert spec.bits_per_number == 8 * 552 / (2 * 3 * (64 + 32))
    assert spec.precisions == {0: full.precision, 2: full.precision} and not spec.any_prefix
    for others, any_prefix in (((), True), ((sliding,), False), ((recurrent,), False)):
        assert ModelCacheSpec((full, *others), []).any_prefix is any_prefix
    assert spec == replace(spec, template=[], plans={"0": AttentionPlan()})
    assert spec != replace(spec, batches=True) and "plate" not in repr(spec)


def test_different_precisions_of_layers_give_different_layouts() -> None:
    """Also if each group has its own geometry."""
    shapes = [TensorShape(2, dim, "float32") for dim in (64, 128, 192)]

    def layout(*bits: int) -> str:
        groups = [
            LayerGroup(
                str(n), GroupKind.FULL, "KVCache", (n,), shape, shape, KVPrecision.of(n_bits, 64)
            )
            for n, (shape, n_bits) in enumerate(zip(shapes, bits, strict=True))
        ]
        return ModelCacheSpec(tuple(groups), []).layout

    layouts = {layout(*bits) for bits in ((4, 6, 6), (4, 6, 4), (4, 4, 6), (4, 4, 4), (6, 4, 4))}
    assert len(layouts) == 5 and layout(4, 4, 4) == "4b64,c256"
