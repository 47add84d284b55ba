"""Models of real shapes with random 4-bit weights: as big and as fast as the real ones.

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

from models_check.configs import CONFIGS
from tests.support.synthetic import make_tiny_model, train_tokenizer
from tests.support.synthetic.tokenizer import TokenizerFiles, token_bytes

__all__ = ["MODEL_SHAPES", "TINY", "make_shaped_model", "shaped_architecture"]

TINY: dict[str, dict[str, Any]] = {
    "tiny": {},
    "tiny-sliding": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 256,
    },
    "tiny-hybrid": {"model_type": "qwen3_next", **CONFIGS["qwen3_next"], "vocab_size": 2048},
}
"""Models of 2 to 4 layers in float32, a few megabytes: for CPUs, and for trying things out. All but
the last are llamas; it has recurrent layers."""

_BITS, _GROUP_SIZE = 4, 64
_TOKENIZER_SIZE = 2000
_SHARD_BYTES = 1 << 30
_QUERY_GAIN = 2.0  # as in `model`: attention sharp enough to depend on single places
_LOGIT_GAIN = 2.5
# The standard deviation of the numbers 0 to 15, each as likely as the others.
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
    "qwen3-8b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "gemma-3-12b": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "deepseek-coder-v2-lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_shared_experts": 2,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "max_position_embeddings": 163840,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
}
"""Entries of config.json as the models' makers published them."""


def make_shaped_model(
    path: Path,
    shape: str,
    *,
    config: Mapping[str, Any] | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Write a model directory of the named shape that stock mlx_lm loads as it is; return `path`.

    shape: one of `TINY`, or of `MODEL_SHAPES`: weights quantized to 4 bits in groups of 64, as in
        mlx-community's conversions, activations and KV in bfloat16.
    config: entries of config.json that replace or join those of the shape, for smaller ones.
    told: is told how many bytes of how many are written.

    Weights are made and written a gigabyte at a time. Equal arguments write equal weights. A greedy
    reply never ends before max_tokens, and each of its tokens is printable text of its own.

    Raises ValueError where there is no such shape.
    """
    if shape in TINY:
        its = {**TINY[shape], **(config or {})}
        model_type = its.pop("model_type", "llama")
        size = _TOKENIZER_SIZE
        return make_tiny_model(
            path, n_heads=2, n_kv_heads=1, vocab_size=size, model_type=model_type, config=its
        )
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
    # Nothing of the model is ever evaluated but for what it initializes to a constant.
    parameters = {
        name: value
        for name, value in tree_flatten(model.parameters())
        if not (full_config["tie_word_embeddings"] and name.startswith("lm_head"))
    }
    _write_shards(path, parameters, mask, told)
    # Last: a folder without it is not a model, whatever interrupted us.
    (path / "config.json").write_text(json.dumps(full_config, indent=2), encoding="utf-8")
    return path


def shaped_architecture(shape: str, config: Mapping[str, Any] | None = None) -> Any:
    """Return mlx_lm's model of the named shape in bfloat16, its weights lazy and never needed.

    Good for asking what its caches look like; do not evaluate it. Raises ValueError where there is
    no such shape.
    """
    full_config = _config(shape, config)
    architecture = importlib.import_module(f"mlx_lm.models.{full_config['model_type']}")
    model = architecture.Model(architecture.ModelArgs.from_dict(full_config))
    model.set_dtype(mx.bfloat16)
    return model


def _config(shape: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    if shape not in MODEL_SHAPES:
        known = ", ".join((*TINY, *MODEL_SHAPES))
        raise ValueError(f"there is no shape {shape!r}; known are {known}")
    return {**MODEL_SHAPES[shape], **(config or {})}


def _speakable(files: TokenizerFiles, vocab_size: int) -> np.ndarray[Any, Any]:
    """Return which of the vocabulary's rows are visible text, as 1 or 0."""
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
    told: Callable[[int, int], None],
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
        told(done, total)
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
    """Return a parameter's values: codes at random, scales that keep activations near one.

    Rows of the output layer that are no visible text are zero: with some two thousand random
    logits beside it, 0 is never the largest.
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
    """Return the standard deviation that a layer's weights are to have."""
    if stem.endswith("embed_tokens") and not is_tied:
        return 1.0
    gain = 1.0
    if stem.endswith(("q_proj", "k_proj")):
        gain = _QUERY_GAIN
    elif stem == "lm_head":
        gain = _LOGIT_GAIN
    return gain / math.sqrt(fan_in)
