"""Model directories with random weights that stock mlx_lm loads and serves.

The weights are random, the rest is real: a configuration of a known architecture, a trained
tokenizer, a chat template. A reply depends on the whole prompt, so a wrong cache shows in it.
"""

from __future__ import annotations

import importlib
import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .tokenizer import TokenizerFiles, TokenizerKind, token_bytes, train_tokenizer

_NEVER = -40.0  # added to a logit, so that its token is never sampled
# Measured over 54 combinations, 2 and 4 layers: with these a greedy reply of 100 tokens has 96
# to 98 different triples; with a query gain of 1 and attention output times 4, as few as 1.
_QUERY_GAIN = 2.0
_LOGIT_SCALE = 2.5  # an entropy of 3 to 4 nats at temperature 1
_STEADY = 6.0  # the constant number of the residual stream
_READERS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))


def make_tiny_model(
    path: Path,
    *,
    tokenizer: TokenizerKind = "byte-level",
    seed: int = 0,
    n_layers: int = 2,
    n_heads: int = 2,
    n_kv_heads: int = 1,
    head_dim: int = 64,
    hidden_size: int = 64,
    intermediate_size: int | None = None,
    dtype: str = "float32",
    vocab_size: int = 600,
    bos: bool = False,
    model_type: str = "llama",
    eos_bias: float = _NEVER,
    whole_characters: bool = True,
    chat_template: str | None = None,
    extra_special_tokens: tuple[str, ...] = (),
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model directory that stock mlx_lm loads as it is; return `path`.

    tokenizer: the family, see `train_tokenizer`. "byte-level" has a ChatML template and ends a
        reply with `<|im_end|>`, "sentencepiece" has `[INST]` and ends it with `</s>`.
    seed: equal arguments write equal weights.
    hidden_size: width of the residual stream. With 256 most tests take 3 times as long, because
        mlx's BLAS for the CPU is slow.
    intermediate_size: width inside the MLP; twice hidden_size when None.
    dtype: of the weights and so of the KV: "float32", "bfloat16" or "float16". Comparisons of
        replies want float32: bfloat16 on the CPU is slow and coarse.
    vocab_size: tokens of the tokenizer and rows of the embedding.
    bos: the tokenizer's encode() puts a begin token first, and the template renders it.
    model_type: any module of mlx_lm.models that reads these names from config.json; further fields
    go into `config`.
    eos_bias: added to the logit of the end token. The default never ends a reply before
        max_tokens; at about 3.0 a reply of temperature 1 ends within some tens of tokens.
    whole_characters: replies use only tokens that are whole printable characters (or newlines).
        False lets random bytes through, which clients see as U+FFFD.
    chat_template: Jinja source to use instead of the kind's own.
    extra_special_tokens: further special tokens, for example "<think>" and "</think>".
    config: entries of config.json that replace or join those made here. A tied embedding makes
        the model repeat its last token.

    Raises ValueError if mlx_lm has no such model_type, or the kind is unknown.
    """
    path.mkdir(parents=True, exist_ok=True)
    files = train_tokenizer(
        tokenizer,
        vocab_size,
        bos=bos,
        chat_template=chat_template,
        extra_special_tokens=extra_special_tokens,
    )
    files.save(path)
    full_config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": ["LlamaForCausalLM"] if model_type == "llama" else [],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size or 2 * hidden_size,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "vocab_size": max(vocab_size, files.n_tokens),
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "bos_token_id": files.bos_token_id,
        "eos_token_id": files.eos_token_id,
        "torch_dtype": dtype,
        **(config or {}),
    }
    (path / "config.json").write_text(json.dumps(full_config, indent=2), encoding="utf-8")
    token_bias = _token_bias(files, full_config["vocab_size"], eos_bias, whole_characters)
    weights = _random_weights(full_config, seed, token_bias)
    dtypes = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
    weights = {name: value.astype(dtypes[dtype]) for name, value in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def _token_bias(
    files: TokenizerFiles, vocab_size: int, eos_bias: float, whole_characters: bool
) -> list[float]:
    bias = [0.0] * vocab_size
    for token_id in range(vocab_size):
        if token_id == files.eos_token_id:
            bias[token_id] = eos_bias
        elif token_id in files.special_ids or token_id >= files.n_tokens:
            bias[token_id] = _NEVER
        elif whole_characters and not _is_printable(token_bytes(files.tokenizer, token_id)):
            bias[token_id] = _NEVER
    return bias


def _is_printable(piece: bytes) -> bool:
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return False
    return text.replace("\n", "").isprintable() and bool(text)


def _random_weights(
    config: dict[str, Any], seed: int, token_bias: list[float]
) -> dict[str, mx.array]:
    """Return weights by name, in float32.

    Sharp attention makes a logit depend on single positions of the prompt as much as on the last
    token. Greedy replies then seldom repeat themselves, and a wrong cache shows. If the layers have
    llama's names, the first number of the residual stream is constant, and the first column of
    lm_head acts as a bias per token.
    """
    try:
        architecture = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    except ImportError as error:
        raise ValueError(f"mlx_lm has no model type {config['model_type']!r}") from error
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    weights: dict[str, mx.array] = dict(tree_flatten(model.parameters()))
    steady = {"model.embed_tokens.weight", "lm_head.weight"} <= weights.keys()
    for name, value in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = value * _QUERY_GAIN
        if value.ndim < 2 or not mx.issubdtype(value.dtype, mx.floating):
            continue  # norms and biases keep the values that the architecture gives them
        key = mx.random.key(zlib.crc32(f"{seed}/{name}".encode()))
        weight = mx.random.normal(value.shape, key=key) / math.sqrt(value.shape[-1])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = weight * _QUERY_GAIN
        elif name.endswith("embed_tokens.weight"):
            weight = weight * math.sqrt(value.shape[-1])
        elif name == "lm_head.weight":
            weight = weight * _LOGIT_SCALE
        weights[name] = weight
    if steady:
        _add_token_bias(weights, token_bias)
    mx.eval(weights)
    return weights


def _add_token_bias(weights: dict[str, mx.array], token_bias: list[float]) -> None:
    """Make residual number 0 constant and lm_head's column 0 a bias, in place."""
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = mx.concatenate([mx.zeros_like(weight[:1]), weight[1:]], axis=0)
        elif name.endswith(_READERS):
            # Only lm_head may read number 0: a constant in every query would make replies alike.
            weights[name] = mx.concatenate([mx.zeros_like(weight[:, :1]), weight[:, 1:]], axis=1)
        elif name == "model.embed_tokens.weight":
            steady = mx.full((weight.shape[0], 1), _STEADY)
            weights[name] = mx.concatenate([steady, weight[:, 1:]], axis=1)
    # The final norm divides the constant by the stream's size, so the bias is approximate; only its
    # sign and order of magnitude matter.
    head = weights["lm_head.weight"]
    column = mx.array(token_bias)[:, None]
    weights["lm_head.weight"] = mx.concatenate([column, head[:, 1:]], axis=1)
