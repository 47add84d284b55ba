"""The functions of muse_spark's fused Metal kernels, in plain MLX, for machines without Metal.

Each function has the name and the arguments of the function in `mlx_lm.kernels` that it replaces.
The docstrings there have the shapes.
"""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx


def expert_routing(
    logits: mx.array,
    expert_bias: mx.array,
    *,
    top_k: int,
    multiplier: float,
    score_eps: float,
    route_scale: float,
) -> list[mx.array]:
    """Return the experts with the best biased scores, and their weights from unbiased scores."""
    scores = mx.sigmoid(logits * multiplier)
    experts = mx.argsort(-(scores + expert_bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    total = weights.sum(axis=-1, keepdims=True) + score_eps
    return [experts.astype(mx.uint32), weights / total * route_scale]


def norm_add_norm(
    branch: mx.array,
    stream: mx.array,
    *,
    alpha: mx.array,
    beta: mx.array,
    post_weight: mx.array | None,
    post_eps: float,
    next_norm: Any | None,
) -> tuple[mx.array, mx.array | None]:
    """Return the stream with the branch added, plain and normalized."""
    scaled = branch if post_weight is None else post_weight.astype(branch.dtype) * branch
    stream = alpha * stream + beta * mx.fast.rms_norm(scaled, None, post_eps)
    if next_norm is None:
        return stream, None
    return stream, pre_norm(stream, next_norm, dtype=branch.dtype)


def pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    return mx.fast.rms_norm(stream, norm.weight.astype(stream.dtype), norm.eps).astype(dtype)


def post_expert_norm_combine(
    experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float
) -> mx.array:
    normed = mx.fast.rms_norm(experts * norm_weight, None, eps)
    return (normed * weights[..., None]).sum(axis=-2).astype(experts.dtype)


def qk_norm(
    qkvg: mx.array,
    *,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    eps: float,
    query_scale: float,
) -> list[mx.array]:
    """Return normed and scaled queries and normed keys from the first parts of `qkvg`."""
    n_query, n_key = n_heads * head_dim, n_kv_heads * head_dim
    tokens = qkvg.shape[:-1]
    queries = qkvg[..., :n_query].reshape(*tokens, n_heads, head_dim)
    keys = qkvg[..., n_query : n_query + n_key].reshape(*tokens, n_kv_heads, head_dim)
    return [
        mx.fast.rms_norm(queries, None, eps) * query_scale,
        mx.fast.rms_norm(keys, None, eps),
    ]


def qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: int | mx.array, **kwargs: Any
) -> list[mx.array]:
    n_tokens, head_dim = qkvg.shape[1], kwargs["head_dim"]
    first = mx.array(offset).reshape(-1, 1).astype(mx.float32)
    places = first + mx.arange(n_tokens, dtype=mx.float32)
    speeds = mx.exp(-mx.arange(0, head_dim, 2) / head_dim * math.log(rope_base))
    angles = places[..., None, None] * speeds
    cos, sin = mx.cos(angles), mx.sin(angles)
    rotated = []
    for x in qk_norm(qkvg, **kwargs):
        even, odd = x[..., ::2], x[..., 1::2]
        pairs = mx.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
        rotated.append(pairs.reshape(x.shape))
    return rotated


def rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    """Return the normed attention output, its heads joined, times the sigmoid of the gate."""
    normed = mx.fast.rms_norm(x, None, eps).transpose(0, 2, 1, 3).reshape(gate.shape)
    return normed * mx.sigmoid(gate)
