"""Outlier variants of a model have larger keys and the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from tests.support.synthetic import add_outliers, make_tiny_model

TEXT = "The lock was finished in November, filled in December, and used by forty-one boats."


def logits_and_keys(path: Path) -> tuple[mx.array, list[mx.array]]:
    """Return logits [T, vocabulary], and of each layer the keys [heads, T, head_dim]."""
    model, tokenizer = load(str(path))
    caches: list[Any] = make_prompt_cache(model)
    logits = model(mx.array([tokenizer.encode(TEXT)]), cache=caches)[0]
    return logits, [cache.state[0][0] for cache in caches]


def weights_of(path: Path) -> dict[str, mx.array]:
    weights: Any = mx.load(str(path / "model.safetensors"))
    mx.eval(weights)  # evaluate the arrays before a test overwrites their file
    return dict(weights)


def scaled_channels(plain: mx.array, scaled: mx.array) -> list[dict[int, float]]:
    """Return the factors of at least 2 by which channels of each head are larger."""
    ratios: Any = (mx.linalg.norm(scaled, axis=1) / mx.linalg.norm(plain, axis=1)).tolist()
    return [{i: ratio for i, ratio in enumerate(head) if ratio > 2} for head in ratios]


def largest_difference(a: mx.array, b: mx.array) -> float:
    share: Any = mx.abs(a - b).max() / mx.abs(a).max()
    return float(share)


def test_outliers_enlarge_keys_and_keep_logits(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "plain", n_heads=8, n_kv_heads=2, n_layers=3)
    logits, keys = logits_and_keys(model)
    variant = add_outliers(model, tmp_path / "variant", factors=(8, 16), n_pairs=3)
    variant_logits, variant_keys = logits_and_keys(variant)
    assert largest_difference(logits, variant_logits) < 1e-5
    chosen = [scaled_channels(*pair) for pair in zip(keys, variant_keys, strict=True)]
    heads = [head for layer in chosen for head in layer]
    assert len(heads) == 3 * 2
    for head in heads:
        assert len(head) == 6 and {(i + 32) % 64 for i in head} == set(head)
        assert all(7.9 < factor < 16.1 for factor in head.values())
    assert len(set(map(tuple, heads))) > 1, "each head has pairs of its own"


def test_outliers_change_only_the_given_layers(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "plain", n_layers=3)
    variant = add_outliers(model, tmp_path / "variant", factors=(32, 64), layers=(0, -1))
    before, after = weights_of(model), weights_of(variant)
    changed = {name for name in before if not mx.array_equal(before[name], after[name])}
    assert changed == {
        f"model.layers.{layer}.self_attn.{name}.weight"
        for layer in (0, 2)
        for name in ("q_proj", "k_proj")
    }


def test_outliers_keep_logits_of_a_model_with_biases(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "plain", model_type="qwen2")
    weights = weights_of(model)
    for name, value in weights.items():
        if name.endswith("proj.bias"):
            weights[name] = mx.random.normal(value.shape, key=mx.random.key(len(name)))
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    logits, _ = logits_and_keys(model)
    variant_logits, _ = logits_and_keys(add_outliers(model, tmp_path / "variant"))
    assert largest_difference(logits, variant_logits) < 1e-5


def test_the_seed_determines_the_variant(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "plain")
    first, second, other = (
        (add_outliers(model, tmp_path / str(n), seed=seed) / "model.safetensors").read_bytes()
        for n, seed in enumerate((3, 3, 4))
    )
    assert first == second != other


@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        ("qwen3", {}, "normalizes queries or keys"),
        ("llama", {"rope_traditional": True}, "pairs neighbouring channels"),
    ],
)
def test_a_model_whose_logits_would_change_is_refused(
    model_type: str, config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "plain", model_type=model_type, config=config)
    with pytest.raises(ValueError, match=problem):
        add_outliers(model, tmp_path / "variant")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("factors", "layers"), [((4.0, 8.0), None), ((8.0, 16.0), None), ((32.0, 64.0), (0, -1))]
)
def test_outliers_keep_logits_of_smollm2(
    factors: tuple[float, float], layers: tuple[int, ...] | None, smollm2: Path, tmp_path: Path
) -> None:
    logits, keys = logits_and_keys(smollm2)
    variant = add_outliers(smollm2, tmp_path / "variant", factors=factors, layers=layers)
    variant_logits, variant_keys = logits_and_keys(variant)
    (variant / "model.safetensors").unlink()
    assert largest_difference(logits, variant_logits) < 1e-4
    for layer in (0, 29):
        chosen = scaled_channels(keys[layer], variant_keys[layer])
        assert [len(head) for head in chosen] == [4, 4, 4]
