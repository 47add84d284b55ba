"""Models of real shapes with random 4-bit weights: as big and as fast as the real models.

Their replies mean nothing. Time and memory depend on shapes and dtypes, and those are real.
"""

from __future__ import annotations

import importlib
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from tests.support.synthetic import make_tiny_model, train_tokenizer
from tests.support.synthetic.tokenizer import TokenizerFiles, token_bytes

__all__ = ["MODEL_SHAPES", "TINY", "make_shaped_model", "shaped_architecture"]

TINY = "tiny"
"""A llama of two layers in float32, a few megabytes."""

_BITS, _GROUP_SIZE = 4, 64
_TOKENIZER_SIZE = 2000
_SHARD_BYTES = 1 << 30
_QUERY_GAIN = 2.0  # sharpens attention, so that it depends on single positions
_LOGIT_GAIN = 2.5
# The standard deviation of the numbers 0 to 15, if all are equally likely.
_STD_OF_CODES = math.sqrt((16**2 - 1) / 12)
_MEAN_OF_CODES = 7.5

MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
"""Entries of config.json as the models' makers published them."""


def make_shaped_model(
    path: Path,
    shape: str,
    *,
    config: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write a model directory of the named shape that stock mlx_lm loads; return `path`.

    shape: `TINY`, or one of `MODEL_SHAPES`. The latter have 4-bit weights in groups of 64, as in
    mlx-community's conversions. Their activations and KV are bfloat16.
    config: entries of config.json that replace or extend the shape's.
    progress: called with the number of bytes written, and the total.

    Equal arguments write equal weights. A greedy reply never ends before max_tokens, and each of
    its tokens is printable text. Raises ValueError for an unknown shape.
    """
    if shape == TINY:
        size = _TOKENIZER_SIZE
        return make_tiny_model(path, n_heads=2, n_kv_heads=1, vocab_size=size, config=config)
    path.mkdir(parents=True, exist_ok=True)
    files = train_tokenizer("byte-level", _TOKENIZER_SIZE, bos=False)
    files.save(path)
    full_config = {
        **_config(shape, config),
        "bos_token_id": files.bos_token_id,
        "eos_token_id": files.eos_token_id,
        "torch_dtype": "bfloat16",
        "quantization": {"group_size": _GROUP_SIZE, "bits": _BITS},
    }
    model = shaped_architecture(shape, config)
    nn.quantize(model, _GROUP_SIZE, _BITS)
    mask = _speakable(files, full_config["vocab_size"])
    # Only parameters that the model initializes to a constant are ever evaluated.
    parameters = {
        name: value
        for name, value in tree_flatten(model.parameters())
        if not (full_config["tie_word_embeddings"] and name.startswith("lm_head"))
    }
    _write_shards(path, parameters, mask, progress)
    # Written last: a folder without it is not yet a model.
    (path / "config.json").write_text(json.dumps(full_config, indent=2), encoding="utf-8")
    return path


def shaped_architecture(shape: str, config: Mapping[str, Any] | None = None) -> Any:
    """Return the named shape's model in bfloat16, to read the shapes of its caches.

    Do not evaluate its weights: they are lazy. Raises ValueError for an unknown shape.
    """
    full_config = _config(shape, config)
    architecture = importlib.import_module(f"mlx_lm.models.{full_config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(full_config))
    model.set_dtype(mx.bfloat16)
    return model


def _config(shape: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    if shape not in MODEL_SHAPES:
        known = ", ".join((TINY, *MODEL_SHAPES))
        raise ValueError(f"there is no shape {shape!r}; choose from {known}")
    return {**MODEL_SHAPES[shape], **(config or {})}


def _speakable(files: TokenizerFiles, vocab_size: int) -> np.ndarray[Any, Any]:
    """Return 1 for each vocabulary row of visible text, 0 for all other rows."""
    mask = np.zeros(vocab_size, np.float32)
    for token_id in range(min(vocab_size, files.n_tokens)):
        if token_id in files.special_ids:
            continue
        try:
            text = token_bytes(files.tokenizer, token_id).decode()
        except UnicodeDecodeError:
            continue
        mask[token_id] = text.isprintable() and not text.isspace() and bool(text)
    return mask


def _write_shards(
    path: Path,
    parameters: Mapping[str, mx.array],
    mask: np.ndarray[Any, Any],
    progress: Callable[[int, int], None],
) -> None:
    total = sum(value.nbytes for value in parameters.values())
    shards = list(_shards(parameters))
    index: dict[str, str] = {}
    done = 0
    for n, names in enumerate(shards, 1):
        file = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        weights = {name: _random_weight(name, parameters, mask) for name in names}
        mx.eval(weights)
        mx.save_safetensors(str(path / file), weights, metadata={"format": "mlx"})
        done += sum(value.nbytes for value in weights.values())
        index.update(dict.fromkeys(names, file))
        progress(done, total)
    content = {"metadata": {"total_size": total}, "weight_map": index}
    index_path = path / "model.safetensors.index.json"
    index_path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _shards(parameters: Mapping[str, mx.array]) -> Iterator[list[str]]:
    names: list[str] = []
    n_bytes = 0
    for name, value in parameters.items():
        if names and n_bytes + value.nbytes > _SHARD_BYTES:
            yield names
            names, n_bytes = [], 0
        names.append(name)
        n_bytes += value.nbytes
    yield names


def _random_weight(
    name: str, parameters: Mapping[str, mx.array], mask: np.ndarray[Any, Any]
) -> mx.array:
    """Return random codes, and scales that keep activations near one.

    The output layer has zero rows for tokens without visible text. Such tokens are never chosen: 0
    is never the largest of two thousand random logits.
    """
    like = parameters[name]
    stem, _, part = name.rpartition(".")
    rng = np.random.Generator(np.random.SFC64(zlib.crc32(name.encode())))
    if f"{stem}.scales" in parameters and part in ("weight", "scales", "biases"):
        if part == "weight":
            return mx.array(rng.integers(0, 1 << 32, like.shape, np.uint32))
        is_tied = stem.endswith("embed_tokens") and "lm_head.weight" not in parameters
        fan_in = parameters[f"{stem}.scales"].shape[-1] * _GROUP_SIZE
        scale = _std(stem, fan_in, is_tied) / _STD_OF_CODES
        value = scale if part == "scales" else -_MEAN_OF_CODES * scale
        rows = mx.full(like.shape, value, like.dtype)
        if stem == "lm_head" or is_tied:
            rows = rows * mx.array(mask)[:, None].astype(like.dtype)
        return rows
    if like.ndim < 2:
        return like  # norms and biases keep the constants that the architecture gives them
    values = rng.standard_normal(like.shape, np.float32) / math.sqrt(like.shape[-1])
    return mx.array(values).astype(like.dtype)


def _std(stem: str, fan_in: int, is_tied: bool) -> float:
    if stem.endswith("embed_tokens") and not is_tied:
        return 1.0
    gain = 1.0
    if stem.endswith(("q_proj", "k_proj")):
        gain = _QUERY_GAIN
    elif stem == "lm_head":
        gain = _LOGIT_GAIN
    return gain / math.sqrt(fan_in)
