"""Can a model's attention take packed keys? Found by running it, never by its name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from .attention import PackedKV
from .attention_plan import forced_plan
from .quantized import SequenceQuantizedKVCache
from .slots import slots_of

__all__ = ["AttentionCall", "AttentionShape", "observed_attention", "probe_packed"]

logger = logging.getLogger(__name__)

_TARGET = "quantized_scaled_dot_product_attention"
_PROMPT = ((1, 2, 3), (4,))
_CUT = ((1, 2), (3,), (4,))
_TIMES_NOISE = 4
_LEAST_TOLERANCE, _MOST_TOLERANCE = 0.25, 0.8
"""Of the spread of logits: rounding may send a token to another expert; a wrong read does more."""


@dataclass(frozen=True)
class AttentionShape:
    """What decides how long attention of a layer takes, besides the number of tokens."""

    n_q_heads: int
    n_kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention over packed keys. `keys` are whatever the cache had returned."""

    shape: AttentionShape
    n_queries: int
    keys: Any


@contextlib.contextmanager
def observed_attention() -> Iterator[list[AttentionCall]]:
    """Yield a list that fills with the calls of attention over our packed keys.

    Works in a server that has the patch of attention, and in a process that has none: our keys
    are attended to by their own method. While it lasts this is so for all threads.
    """
    calls: list[AttentionCall] = []
    before = getattr(base, _TARGET)

    def observe(
        queries: mx.array,
        q_keys: Any,
        q_values: Any,
        scale: float,
        mask: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        if not isinstance(q_keys, PackedKV):
            return before(queries, q_keys, q_values, scale, mask, *args, **kw)
        out = q_keys.attend(queries, q_values, scale, mask)
        shape = AttentionShape(queries.shape[1], q_keys[0].shape[1], queries.shape[3], out.shape[3])
        calls.append(AttentionCall(shape, queries.shape[2], q_keys))
        return out

    setattr(base, _TARGET, observe)
    try:
        yield calls
    finally:
        setattr(base, _TARGET, before)


def probe_packed(
    model: Any,
    make_caches: Callable[[], Sequence[Any]],
    layers: Sequence[int] | None = None,
    evaluate: bool = True,
) -> list[AttentionShape | None]:
    """Return, for each cache, the shape of its layer's attention, None where it must stay plain.

    make_caches: returns a new prompt cache; only those of its slots that are ours, at the places
    `layers` (None: all of ours), are tried packed, all at once. If the model cannot run so, or its
    logits are others than over plain keys (looked at only with `evaluate`), all are None.
    """
    caches = list(make_caches())
    slots = slots_of(caches)
    refused: list[AttentionShape | None] = [None] * len(slots)
    tried = [
        i
        for i in (range(len(slots)) if layers is None else layers)
        if isinstance(slots[i], SequenceQuantizedKVCache)
    ]
    for i in tried:
        slots[i].plan = forced_plan("packed", can_take_packed=True)
    shapes = list(refused)
    try:
        with observed_attention() as calls:
            for tokens in _PROMPT:
                calls.clear()
                logits = _logits(model(mx.array([tokens]), cache=caches))
                found = {id(call.keys.buffers): call for call in calls}
                for i in tried:
                    call = found.get(id(slots[i].keys))
                    if call is None or call.n_queries != len(tokens):
                        logger.debug("layer %d does not attend over its packed keys", i)
                        return refused
                    shapes[i] = call.shape
            if evaluate and not _agree(model, make_caches, logits):
                logger.debug("packed keys change the model's output")
                return refused
    except Exception as error:
        # Any exception: what a model does with keys that it does not expect is up to the model.
        logger.debug("the model does not take packed keys: %r", error)
        return refused
    return shapes


def _agree(model: Any, make_caches: Callable[[], Sequence[Any]], logits: mx.array) -> bool:
    """Whether `logits` of the last token are those over plain keys, rounding aside.

    How much rounding makes of itself is seen from a prompt that is cut elsewhere.
    """
    expected, cut = (_plain_logits(model, make_caches, prompt) for prompt in (_PROMPT, _CUT))
    noise = _TIMES_NOISE * _difference(expected, cut)
    tolerance = mx.clip(noise, _LEAST_TOLERANCE, _MOST_TOLERANCE)
    return bool(_difference(expected, logits) <= tolerance)


def _plain_logits(
    model: Any, make_caches: Callable[[], Sequence[Any]], prompt: Sequence[Sequence[int]]
) -> mx.array:
    caches = list(make_caches())
    for slot in slots_of(caches):
        if isinstance(slot, SequenceQuantizedKVCache):
            slot.plan = None
    for tokens in prompt:
        logits = _logits(model(mx.array([tokens]), cache=caches))
    return logits


def _difference(one: mx.array, other: mx.array) -> mx.array:
    """Return how far logits differ, as a share of their spread (root mean squares)."""
    return mx.sqrt(mx.square(one - other).mean()) / (mx.std(one) + 1e-6)


def _logits(out: Any) -> mx.array:
    """Return the logits of the last token in float32; some models return a tuple."""
    logits: mx.array = out[0] if isinstance(out, tuple) else out
    logits = getattr(logits, "logits", logits)
    return logits[:, -1].astype(mx.float32)
