"""Trace which layers of a model attend over packed keys, and in which shapes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from ..geometry.kinds import slots_of
from ..live.attention import PackedKV
from ..live.policy import AttentionShape, forced_plan
from ..live.quantized import SequenceQuantizedKVCache

logger = logging.getLogger(__name__)

_TARGET = "quantized_scaled_dot_product_attention"
_PROMPT = ((1, 2, 3), (4,))
"""A prompt's number of tokens, and a reply's one: a model may attend differently to each."""


@contextlib.contextmanager
def observed_attention() -> Iterator[list[tuple[AttentionShape, PackedKV]]]:
    """Yield a list that collects the shape and the values of each attention over our packed keys.

    It needs no attention patch, and applies to all threads until the context ends.
    """
    calls: list[tuple[AttentionShape, PackedKV]] = []
    before = getattr(base, _TARGET)

    def observe(
        queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, *a: Any, **kw: Any
    ) -> Any:
        if not isinstance(q_keys, PackedKV):
            return before(queries, q_keys, q_values, scale, mask, *a, **kw)
        out = q_keys.attend(queries, q_values, scale, mask)
        shape = AttentionShape(queries.shape[1], q_keys[0].shape[1], queries.shape[3], out.shape[3])
        calls.append((shape, q_values))
        return out

    setattr(base, _TARGET, observe)
    try:
        yield calls
    finally:
        setattr(base, _TARGET, before)


def packed_shapes(
    model: Any, make_caches: Callable[[], Sequence[Any]], slots: Sequence[int]
) -> list[AttentionShape | None]:
    """Return, for each slot of a prompt cache, the shape of its layer's attention over packed keys.

    The quantized caches at `slots` of a new prompt cache are read packed. Nothing is evaluated. The
    shape is None for every other slot, for a slot whose layer does not call attention over its
    packed keys, and for all slots of a model that raises.
    """
    caches = list(make_caches())
    all_slots = slots_of(caches)
    tried = {i: all_slots[i] for i in slots if isinstance(all_slots[i], SequenceQuantizedKVCache)}
    for cache in tried.values():
        cache.plan = forced_plan("packed")
    shapes: list[AttentionShape | None] = [None] * len(all_slots)
    try:
        for n, tokens in enumerate(_PROMPT):
            with observed_attention() as calls:
                model(mx.array([tokens]), cache=caches)
            # A model in parts replaces the keys of its last layer.
            traced = {id(values[0]): shape for shape, values in calls}
            for i, cache in tried.items():
                shape = traced.get(id(cache.values[0]))
                shapes[i] = shape if n == 0 or shape == shapes[i] else None
    except Exception as error:
        logger.debug("kvpersist: the model does not take packed keys: %r", error)
        return [None] * len(all_slots)
    return shapes
