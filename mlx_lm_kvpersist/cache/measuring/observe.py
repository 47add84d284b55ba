"""Find out whether a model's attention can take packed keys, by running it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from ...ranks import ranks
from ..geometry.kinds import slots_of
from ..geometry.probe import logits_difference
from ..live.attention import PackedKV
from ..live.policy import AttentionShape, forced_plan
from ..live.quantized import SequenceQuantizedKVCache
from ..steps import Steps

logger = logging.getLogger(__name__)

_TARGET = "quantized_scaled_dot_product_attention"
_PROMPT = ((1, 2, 3), (4,))
_CUT = ((1, 2), (3,), (4,))
_TIMES_NOISE = 4
_LEAST_TOLERANCE, _MOST_TOLERANCE = 0.25, 0.8
"""Shares of the spread of logits. Rounding may send a token to another expert; a wrong read makes
a larger difference."""


@contextlib.contextmanager
def observed_attention() -> Iterator[list[tuple[AttentionShape, PackedKV]]]:
    """Yield a list that collects shape and values of each attention over our packed keys.

    This works with and without the attention patch, because our keys bring a method that attends
    to them. It applies to all threads until the context ends.
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


def probing_packed(
    model: Any, make_caches: Callable[[], Sequence[Any]], layers: Sequence[int]
) -> Steps[list[AttentionShape | None]]:
    """Find, for each slot, the shape of its layer's attention, or None if it must dequantize.

    `make_caches` returns a new prompt cache, without plans. Its quantized slots at the places
    `layers` are tried packed, together. If the model fails, or its logits differ from those over
    dequantized keys, all are None.
    """
    caches = list(make_caches())
    slots = slots_of(caches)
    refused: list[AttentionShape | None] = [None] * len(slots)
    tried = [i for i in layers if isinstance(slots[i], SequenceQuantizedKVCache)]
    for i in tried:
        slots[i].plan = forced_plan("packed")
    shapes = list(refused)
    try:
        with observed_attention() as calls:
            for tokens in _PROMPT:
                logits = model(mx.array([tokens]), cache=caches)[:, -1]
                # A model in parts replaces the keys of its last layer.
                found = {id(values[0]): shape for shape, values in calls}
                for i in tried:
                    shapes[i] = found.get(id(slots[i].values[0]))
                missing = [i for i in tried if shapes[i] is None]
                if not ranks().agree(not missing, "whether layers attend over packed keys"):
                    logger.debug("layers %s do not attend over their packed keys", missing)
                    return refused
            mx.eval(logits)
        agrees = yield from _agreeing(model, make_caches, logits)
        if not ranks().agree(agrees, "whether packed keys change the output"):
            logger.debug("packed keys change the model's output")
            return refused
    except Exception as error:
        # A model may raise anything when it gets keys that it does not expect.
        logger.debug("the model does not take packed keys: %r", error)
        return refused
    return shapes


def _agreeing(
    model: Any, make_caches: Callable[[], Sequence[Any]], logits: mx.array
) -> Steps[bool]:
    """Find whether `logits` of the last token are those over dequantized keys, but for rounding.

    The same prompt in other chunks shows how much difference rounding makes.
    """
    compared: list[mx.array] = []
    for prompt in (_PROMPT, _CUT):
        yield
        caches = list(make_caches())
        compared.append([model(mx.array([ids]), cache=caches)[:, -1] for ids in prompt][-1])
        mx.eval(compared)
    expected, cut = compared
    noise = _TIMES_NOISE * logits_difference(expected, cut)
    tolerance = min(max(noise, _LEAST_TOLERANCE), _MOST_TOLERANCE)
    return logits_difference(expected, logits) <= tolerance
