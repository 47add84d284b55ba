"""Make the few key channels small that are far larger than the others in some models.

What is rotated and quantized has steps as large as its largest channels, however small the queries
are there. Such a channel is divided by a power of two in what makes keys, and multiplied by it in
what makes queries. So all products of both are as before, to the last bit but for float16's
smallest numbers. The weights alone decide, so it is the same on every machine. Generation thread.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

_LEAST = 4.0
_MOST = 1024.0
"""A channel's factor, as a multiple of the head's median, is at least and at most this; what is
smaller costs less than a bit, and many models have no other."""
_IDS = tuple(range(1, 17))
_PLACES = (1, 4097)
"""Positions at which RoPE is tried."""
_MOST_CHANGE = 0.01
"""Of the logits' spread: float16 rounds numbers below 6e-5 more coarsely than others."""


def even_out(model: Any) -> None:
    """Divide large key channels in the weights of `model`, in place; a second call does nothing.

    A channel's factor is the root of its size in keys over that in queries: then the error of
    their products is least, if the steps of all channels are equal. Two channels that RoPE turns
    share a factor. Attention is left alone unless linear layers, or norms with weights, and then
    RoPE make its keys and queries, and all is where the logits of a few tokens would change.
    """
    found = []
    for part in _attentions(model):
        if not hasattr(part, "evened"):
            part.evened = ""
            if (powers := _powers(part)) is not None:
                found.append((part, powers))
    if not found or (before := _logits(model)) is None:
        return
    changed = []
    for part, powers in found:
        part.evened = str(powers.tolist())
        factors = _factors(powers)
        for side, by in (("k", 1 / factors), ("q", factors)):
            source = _source(part, side)
            for name, x in _scaled(source, by).items():
                changed.append((source, name, source[name]))
                source[name] = x
    after = _logits(model)
    change = mx.inf if after is None else mx.sqrt(mx.square(after - before).mean())
    if not change <= _MOST_CHANGE * mx.std(before):  # nan is not
        for source, name, x in changed:
            source[name] = x
        for part, _ in found:
            part.evened = ""


def evened_name(model: Any) -> str:
    """Return a word for the factors that `even_out` has put into the weights; "" for none."""
    factors = [getattr(part, "evened", "") for part in _attentions(model)]
    return f"e{hashlib.sha256(repr(factors).encode()).hexdigest()[:8]}" if any(factors) else ""


def _attentions(model: Any) -> list[Any]:
    """Return the attentions with projections of keys and queries, and RoPE."""
    parts = model.modules() if hasattr(model, "modules") else []
    return [part for part in parts if {"k_proj", "q_proj", "rope"} <= part.keys()]


def _source(part: Any, side: str) -> Any:
    """Return what gives keys, or queries, their size: a norm where there is one, or a product."""
    return part[f"{side}_norm" if f"{side}_norm" in part else f"{side}_proj"]


def _gains(source: Any, dim: int) -> mx.array | None:
    """Return the size of each channel [heads, dim] for inputs of size one; None if not known."""
    if type(source) not in (nn.Linear, nn.QuantizedLinear, nn.RMSNorm) or "weight" not in source:
        return None
    weight = source["weight"]
    if type(source) is nn.QuantizedLinear:
        if source.mode != "affine":
            return None
        sides = weight, source["scales"], source["biases"]
        weight = mx.dequantize(*sides, group_size=source.group_size, bits=source.bits)
    squares = mx.square(weight.astype(mx.float32)).reshape(len(weight), -1).sum(axis=1)
    if "bias" in source:
        squares += mx.square(source["bias"].astype(mx.float32))
    return mx.sqrt(squares).reshape(-1, dim) if squares.size % dim == 0 else None


def _powers(part: Any) -> mx.array | None:
    """Return the power of two of each channel's factor, [heads, dim]; None where all are zero."""
    rope = part["rope"]
    dim = getattr(rope, "dims", None) or getattr(rope, "dim", None)
    if not isinstance(dim, int) or dim % 2:
        return None
    keys, queries = (_gains(_source(part, side), dim) for side in "kq")
    if keys is None or queries is None or len(queries) % len(keys):
        return None
    # Query heads of one key head follow each other.
    queries = mx.sqrt(mx.square(queries).reshape(len(keys), -1, dim).mean(axis=1))
    for axis, shape in ((1, (-1, 2, dim // 2)), (2, (-1, dim // 2, 2))):
        ratios = mx.sqrt(keys / queries).reshape(shape).mean(axis=axis, keepdims=True)
        ratios = mx.broadcast_to(ratios, (len(keys), *shape[1:])).reshape(-1, dim)
        ratios = ratios / mx.median(ratios, axis=1, keepdims=True)
        is_large = (ratios >= _LEAST) & (ratios <= _MOST)  # nan is not
        if is_large.any():
            powers = mx.where(is_large, mx.round(mx.log2(ratios)), 0).astype(mx.uint32)
            if _turns_the_same(rope, powers):
                return powers
    return None


def _factors(powers: mx.array) -> mx.array:
    return mx.left_shift(mx.array(1, mx.uint32), powers).astype(mx.float32)  # exactly


def _turns_the_same(rope: Any, powers: mx.array) -> bool:
    """Say whether RoPE of scaled channels is the scaled RoPE of channels."""
    by = _factors(powers)[None, :, None]
    x = mx.random.normal((1, *powers.shape[:1], 2, powers.shape[1]), key=mx.random.key(0))
    try:
        pairs = [(rope(x * by, offset=at), rope(x, offset=at) * by) for at in _PLACES]
    except Exception:
        return False  # it wants other arguments
    return all(mx.array_equal(*pair).item() for pair in pairs)


def _scaled(source: Any, factors: mx.array) -> dict[str, mx.array]:
    """Return the arrays of `source` that make its channels larger by `factors`."""
    names = ("scales", "biases") if type(source) is nn.QuantizedLinear else ("weight",)
    made = {}
    for name in (*names, "bias"):
        if name in source:
            x = source[name]
            by = mx.repeat(factors, len(x) // factors.size, axis=0).astype(x.dtype)
            made[name] = x * by.reshape(-1, *[1] * (x.ndim - 1))
    return made


def _logits(model: Any) -> mx.array | None:
    """Return those of a few tokens; None where the model fails, of which the probe tells more."""
    try:
        logits: mx.array = model(mx.array([_IDS]), cache=make_prompt_cache(model))
        mx.eval(logits)
    except Exception:
        return None
    return logits.astype(mx.float32)
