"""Build a tiny model of the zoo, with random weights under which every token of a prompt matters.

A wrong cache must change the logits. Therefore attention scores are large, recurrent layers forget
slowly, and the last token's embedding is not much larger than the layers' outputs.
"""

from __future__ import annotations

import copy
import importlib
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from . import standins
from .configs import CONFIGS, module_of

_BIAS_STD = 0.1

_HEAD_STD = 2.5
"""Logits then have an entropy of 3 to 4 nats, so two logits are seldom nearly equal."""


@dataclass(frozen=True)
class Tuning:
    """Parameters that differ between architectures.

    `embedding_std` is smaller if the embedding is tied to the head or multiplied; otherwise the
    model would repeat the last token. `score_gain` multiplies the norms of queries and keys. It is
    smaller if scores are not divided by the root of the head size. `gain` is the ratio of output to
    input size in other projections. `branch_gain` multiplies the norms after attention and experts.
    """

    embedding_std: float = 0.6
    score_gain: float = 2.0
    gain: float = 1.6
    branch_gain: float = 1.0


_TUNING = {
    "gear": Tuning(embedding_std=0.3),
    "gemma": Tuning(embedding_std=0.04),
    "gemma2": Tuning(embedding_std=0.04),
    "gemma3n": Tuning(embedding_std=0.04, score_gain=0.7, branch_gain=3.0),
    "gemma4": Tuning(score_gain=0.7),
    "gemma4_text": Tuning(score_gain=0.7),
    "gpt2": Tuning(embedding_std=0.2),
    "gpt_neox": Tuning(gain=2.5),
    "lfm2": Tuning(embedding_std=0.2),
    "lfm2-vl": Tuning(embedding_std=0.2),
    "lfm2_moe": Tuning(embedding_std=0.2),
    "cohere": Tuning(embedding_std=0.3),
    "cohere2": Tuning(embedding_std=0.3),
    "phi3small": Tuning(embedding_std=0.2, gain=2.2),
}

# The softplus of this is 0.02, so a state forgets half of its content within about 50 tokens.
_SLOW = -4.0

_QUERY_KEY_NORMS = {
    f"{name}_{norm}"
    for name in ("q", "k", "query", "key")
    for norm in ("norm", "layernorm", "layer_norm")
}
_EMBEDDINGS = ("embed", "wte", "tok_embeddings", "word_embeddings", "transformer.embd")
_HEADS = ("lm_head", "embed_out", "output.weight")


def build(name: str, seed: int = 0, config: Mapping[str, Any] | None = None) -> Any:
    """Return an evaluated float32 model of the zoo; equal arguments give equal weights.

    `config` replaces entries of the zoo's configuration. Raises KeyError if the zoo has no such
    name, and ImportError if the installed mlx-lm has no such module.
    """
    config = {"model_type": module_of(name), **copy.deepcopy(CONFIGS[name]), **(config or {})}
    with standins.importable():
        module = importlib.import_module(f"mlx_lm.models.{module_of(name)}")
    standins.put_in(module)
    mx.random.seed(seed)  # for values that are not drawn below
    model = module.Model(module.ModelArgs.from_dict(config))
    standins.replace_layers(model)
    tuning = _TUNING.get(module_of(name), Tuning())
    weights = [
        (path, _draw(path, value, tuning, mx.random.key(zlib.crc32(f"{seed}/{path}".encode()))))
        for path, value in tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    model.eval()
    mx.eval(model.parameters())
    return model


def _draw(path: str, value: mx.array, tuning: Tuning, key: mx.array) -> mx.array:
    *parents, leaf = path.split(".")
    parent = parents[-1] if parents else ""
    normal = mx.random.normal(value.shape, key=key)
    if not mx.issubdtype(value.dtype, mx.floating):
        return mx.random.randint(0, 1 << 31, value.shape, value.dtype, key=key)
    if leaf in ("scales", "biases"):  # a scale belongs to 128 packed weights from 0 to 3
        scale = tuning.gain / math.sqrt(value.shape[-1] * 128)
        return mx.full(value.shape, scale if leaf == "scales" else -1.5 * scale, value.dtype)
    if (special := _special(path, leaf, value, normal)) is not None:
        return special
    if leaf == "bias" or leaf.endswith("_bias"):
        return _BIAS_STD * normal
    if leaf.endswith("norm_weight") or (value.ndim < 2 and leaf == "weight"):
        if parent in _QUERY_KEY_NORMS:
            return value * tuning.score_gain
        return value * tuning.branch_gain if parent.startswith("post_") else value
    if value.ndim < 2:
        return value
    if "conv" in parent:
        return normal / math.sqrt(math.prod(value.shape[1:]))
    if any(name in path for name in _HEADS):
        return _HEAD_STD / math.sqrt(value.shape[-1]) * normal
    if any(name in path for name in _EMBEDDINGS):
        return tuning.embedding_std * normal
    return tuning.gain / math.sqrt(value.shape[-1]) * normal


def _special(path: str, leaf: str, value: mx.array, normal: mx.array) -> mx.array | None:
    """Return the new value of a special parameter, or None."""
    if leaf == "A_log":  # [heads], or [channels, states]
        n = value.shape[-1] if value.ndim == 2 else value.size
        spread = mx.linspace(math.log(0.25), math.log(2.0), n)
        return mx.broadcast_to(
            spread if value.ndim == 2 else spread.reshape(value.shape), value.shape
        )
    if leaf in ("dt_bias", "recurrent_param") or path.endswith(
        ("dt_proj.bias", "w_lora.lora.2.bias")
    ):
        return mx.full(value.shape, _SLOW)
    if leaf.startswith("x_") and len(leaf) == 3:  # rwkv7: shares of the previous token
        return mx.sigmoid(normal)
    if leaf in ("k_k", "k_a", "r_k"):
        return 1.0 + _BIAS_STD * normal
    if leaf == "correct_output_scale":
        return mx.ones(value.shape)
    if leaf in ("sinks", "attention_sink_bias"):
        return normal
    return None
