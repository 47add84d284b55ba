"""Tiny models and random keys and values, all in float32: fast, and exact enough to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import deepseek_v2, gemma3_text, llama, qwen3

from mlx_lm_kvpersist.cache.geometry.kinds import kind_of
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, probe_model
from mlx_lm_kvpersist.cache.live.packed import Packed, arrays_of

VOCAB = 97
N_HEADS, K_DIM, V_DIM = 2, 64, 32


def _with_large_weights(model: Any, seed: int) -> Any:
    """Give `model` random weights so large that attention decides the next token."""
    keys = iter(mx.random.split(mx.random.key(seed), 200))

    def draw(weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return weight
        scale: float = 1.6 / weight.shape[-1] ** 0.5
        return scale * mx.random.normal(weight.shape, key=next(keys))

    model.update(tree_map(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


def tiny_llama(seed: int = 0, head_dim: int = 64, n_layers: int = 2) -> Any:
    """A llama with 4 query heads over 2 key heads."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=n_layers,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    return _with_large_weights(llama.Model(args), seed)


def tiny_qwen3(seed: int = 0, head_dim: int = 64) -> Any:
    args = qwen3.ModelArgs(
        model_type="qwen3",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        rope_theta=10000.0,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return _with_large_weights(qwen3.Model(args), seed)


def tiny_deepseek_v2(seed: int = 0) -> Any:
    """A model with keys of 64 numbers per head, and values of 32."""
    args = deepseek_v2.ModelArgs(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        rope_scaling={
            "factor": 1.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    return _with_large_weights(deepseek_v2.Model(args), seed)


def tiny_gemma3() -> Any:
    """A model with a RotatingKVCache in one of two layers."""
    args = gemma3_text.ModelArgs(
        model_type="gemma3_text",
        hidden_size=64,
        num_hidden_layers=2,
        intermediate_size=96,
        num_attention_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        num_key_value_heads=1,
        sliding_window=16,
        sliding_window_pattern=2,
    )
    return _with_large_weights(gemma3_text.Model(args), 0)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "qwen3": tiny_qwen3,
    "deepseek_v2": tiny_deepseek_v2,
}


@pytest.fixture(scope="session")
def llama_model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="session")
def llama_spec(llama_model: Any) -> ModelCacheSpec:
    return probe_model(llama_model)


def random_kv(
    seed: int,
    n_tokens: int,
    n_rows: int = 1,
    dtype: mx.Dtype = mx.float32,
    dims: tuple[int, int] = (K_DIM, V_DIM),
) -> tuple[mx.array, mx.array]:
    """Return random keys and values [n_rows, 2, n_tokens, dim] with head sizes `dims`."""
    keys, values = (
        mx.random.normal((n_rows, N_HEADS, n_tokens, dim), key=key).astype(dtype)
        for dim, key in zip(dims, mx.random.split(mx.random.key(seed)), strict=True)
    )
    return keys, values


def rounded(x: mx.array, group_size: int, bits: int) -> mx.array:
    """Return `x` quantized and dequantized by MLX, with scales and biases of 16 bits."""
    weights, scales, biases = mx.quantize(x, group_size=group_size, bits=bits)
    if x.dtype == mx.float32:
        scales, biases = (y.astype(mx.bfloat16).astype(mx.float32) for y in (scales, biases))
    return mx.dequantize(weights, scales, biases, group_size=group_size, bits=bits)


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(mx.array_equal(a, b))


def same_packed(a: Packed | mx.array, b: Packed | mx.array) -> bool:
    return all(same_bits(x, y) for x, y in zip(arrays_of(a), arrays_of(b), strict=True))


def packed_tokens(cache: Any, start: int, stop: int) -> tuple[Any, Any]:
    """Return the keys and values of tokens [start, stop) as a cache of one sequence has them."""
    return kind_of(cache).tokens(cache, start, stop)


def address(array: mx.array) -> int:
    """Evaluate an array and return its memory address."""
    mx.eval(array)
    view = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array  # numpy has no bfloat16
    mx.eval(view)
    return int(np.asarray(view).__array_interface__["data"][0])
