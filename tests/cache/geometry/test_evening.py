"""Large key channels become small, and what the model computes stays the same to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_kvpersist.cache.geometry.evening import even_out, evened_name
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.probe import logits_difference
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.live.packed import GRID
from tests.support.synthetic import add_outliers, make_tiny_model

IDS = mx.array([[1 + n * n % 97 for n in range(GRID + 20)]])


def loaded(path: Path) -> Any:
    model: Any = load(str(path))[0]
    return model


def weights_of(model: Any) -> dict[str, mx.array]:
    return {name: mx.array(x) for name, x in tree_flatten(model.parameters())}


def logits_of(model: Any, caches: list[Any]) -> mx.array:
    parts = IDS[:, :GRID], IDS[:, GRID:]
    return mx.concatenate([model(part, cache=caches) for part in parts], axis=1)


def computed(model: Any) -> tuple[mx.array, float]:
    """Return logits, and by what the keys' largest channel exceeds the median one."""
    caches = make_prompt_cache(model)
    logits = logits_of(model, caches)
    keys = caches[0].state[0].astype(mx.float32)
    sizes = mx.sqrt(mx.square(keys).mean(axis=(0, 2)))
    largest: Any = (sizes.max(axis=1) / mx.median(sizes, axis=1)).max()
    return logits, float(largest)


def with_outliers(tmp_path: Path, **kind: Any) -> Any:
    plain = make_tiny_model(tmp_path / "plain", **kind)
    return loaded(add_outliers(plain, tmp_path / "outliers", factors=(16.0, 32.0)))


def quantized(tmp_path: Path) -> Any:
    model = with_outliers(tmp_path)
    nn.quantize(model, group_size=64, bits=4)
    return model


def neighbouring(tmp_path: Path) -> Any:
    """RoPE turns channels 2 i and 2 i + 1."""
    model = loaded(make_tiny_model(tmp_path, config={"rope_traditional": True}))
    for layer in model.layers:
        attention = layer.self_attn
        for name, factor in (("k_proj", 20.0), ("q_proj", 1 / 20)):
            scales = mx.ones(64)
            scales[6:8] = factor
            weight = attention[name]["weight"]
            attention[name]["weight"] = weight * mx.tile(scales, len(weight) // 64)[:, None]
    return model


def normed(tmp_path: Path) -> Any:
    """Norms of keys and queries decide how large the channels are."""
    model = loaded(make_tiny_model(tmp_path, model_type="qwen3"))
    for layer in model.layers:
        for name, factor in (("k_norm", 20.0), ("q_norm", 1 / 20)):
            scales = mx.ones(64)
            scales[3::32] = factor
            layer.self_attn[name]["weight"] = layer.self_attn[name]["weight"] * scales
    return model


@pytest.mark.parametrize(
    "make",
    [
        with_outliers,
        lambda path: with_outliers(path, model_type="qwen2"),
        lambda path: with_outliers(path, dtype="bfloat16"),
        lambda path: with_outliers(path, dtype="float16"),
        quantized,
        neighbouring,
        normed,
    ],
    ids=["llama", "biases", "bfloat16", "float16", "4-bit weights", "neighbouring", "norms"],
)
def test_large_channels_go_and_the_logits_stay(make: Callable[[Path], Any], tmp_path: Path) -> None:
    model = make(tmp_path)
    logits, largest = computed(model)
    assert largest > 8 and not evened_name(model)
    even_out(model)
    evened_logits, evened_largest = computed(model)
    assert evened_largest < largest / 4
    if logits.dtype == mx.float16:  # its smallest numbers are rounded more coarsely
        assert logits_difference(logits, evened_logits) < 1e-3
    else:
        assert mx.array_equal(logits, evened_logits)
    name, weights = evened_name(model), weights_of(model)
    even_out(model)
    assert name and evened_name(model) == name
    assert all(mx.array_equal(x, weights[key]) for key, x in weights_of(model).items())


def test_quantized_keys_lose_less(tmp_path: Path) -> None:
    model, choice = with_outliers(tmp_path), PrecisionChoice(4, 8, rotated=True)
    own = computed(model)[0]
    before = ModelCacheSpec.probe(model, choice)
    lost = logits_difference(own, logits_of(model, before.make_cache()))
    even_out(model)
    spec = ModelCacheSpec.probe(model, choice)
    assert logits_difference(own, logits_of(model, spec.make_cache())) < lost / 3
    assert spec.layout == f"{before.layout},{evened_name(model)}", "other keys have another root"


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_other_models_stay_as_they_are(model_type: str, tmp_path: Path) -> None:
    model = loaded(make_tiny_model(tmp_path, model_type=model_type))
    weights = weights_of(model)
    even_out(model)
    assert not evened_name(model)
    assert all(mx.array_equal(x, weights[key]) for key, x in weights_of(model).items())


class Reads(nn.Module):  # type: ignore[misc]
    """Uses the keys' weights for something else, too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.layers = model, model.layers

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        weight = self.layers[0].self_attn.k_proj.weight
        logits: mx.array = self.model(inputs, cache=cache) + mx.abs(weight).sum()
        return logits


def test_what_would_change_the_logits_is_undone(tmp_path: Path) -> None:
    model = Reads(with_outliers(tmp_path))
    weights = weights_of(model)
    even_out(model)
    assert not evened_name(model)
    assert all(mx.array_equal(x, weights[key]) for key, x in weights_of(model).items())
