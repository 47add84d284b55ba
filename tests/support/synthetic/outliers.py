"""Copies of a model that compute the same function with a few much larger key channels.

Models such as Qwen2 have key channels that are many times larger than the rest, and quantized keys
lose most there. The copies have such channels in any model, at any size.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx


def add_outliers(
    model: Path,
    path: Path,
    *,
    factors: tuple[float, float] = (4.0, 8.0),
    n_pairs: int = 2,
    layers: Sequence[int] | None = None,
    seed: int = 0,
) -> Path:
    """Write a copy of a Llama-like model with large key channels into `path`; return `path`.

    A channel is multiplied in the keys and divided in the queries by the same factor, so products
    of queries and keys do not change. RoPE rotates channels i and i + D/2 of a head of D channels
    together, so such a pair has one factor. The query heads of a key head have the same factors.

    model: a directory with plain weights in model.safetensors and split q_proj and k_proj.
    factors: the range from which each pair's factor is drawn, uniformly.
    n_pairs: how many pairs of each key head are scaled; each head has other pairs.
    layers: which layers are scaled: all when None, the first and the last with (0, -1).

    Raises ValueError for a model whose function would not stay the same: quantized weights,
    norms of queries or keys, or a RoPE that pairs other channels.
    """
    loaded: Any = mx.load(str(model / "model.safetensors"))
    weights: dict[str, mx.array] = dict(loaded)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    _check(config, weights)
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    n_layers = config["num_hidden_layers"]
    rng = random.Random(seed)
    for layer in layers if layers is not None else range(n_layers):
        prefix = f"model.layers.{range(n_layers)[layer]}.self_attn"
        head_dim = weights[f"{prefix}.k_proj.weight"].shape[0] // n_kv_heads
        scales = [_channel_scales(head_dim, n_pairs, factors, rng) for _ in range(n_kv_heads)]
        keys = mx.array(scales)  # [n_kv_heads, head_dim]
        queries = mx.repeat(1 / keys, n_heads // n_kv_heads, axis=0)
        for name, scale in (("k_proj", keys), ("q_proj", queries)):
            for kind, shape in (("weight", (-1, 1)), ("bias", (-1,))):
                if (value := weights.get(f"{prefix}.{name}.{kind}")) is not None:
                    scaled = value * scale.reshape(shape)
                    weights[f"{prefix}.{name}.{kind}"] = scaled.astype(value.dtype)
    others = shutil.ignore_patterns("*.safetensors*")
    shutil.copytree(model, path, ignore=others, dirs_exist_ok=True)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def _channel_scales(
    head_dim: int, n_pairs: int, factors: tuple[float, float], rng: random.Random
) -> list[float]:
    half = [1.0] * (head_dim // 2)
    for pair in rng.sample(range(len(half)), n_pairs):
        half[pair] = rng.uniform(*factors)
    return half + half


def _check(config: dict[str, Any], weights: dict[str, mx.array]) -> None:
    norms = ("q_norm.weight", "k_norm.weight")
    obstacles = {
        "its weights are quantized": "quantization" in config,
        "its RoPE pairs neighbouring channels": config.get("rope_traditional", False),
        "its RoPE turns a part of each head": config.get("partial_rotary_factor", 1.0) != 1.0,
        "it normalizes queries or keys": any(name.endswith(norms) for name in weights),
    }
    found = [what for what, is_so in obstacles.items() if is_so]
    if found:
        raise ValueError(f"{config['model_type']} takes no outliers: {', '.join(found)}")
