"""Run a model for a few tokens to learn its caches' geometry, and which of them can be quantized.

Nothing is decided by a model's name. The caches that it makes are filled first, to learn their
geometry. Then ours take their place, and a forward pass shows whether the model works with them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from ...errors import ModelNotSupported
from ...ranks import ranks
from ..live.quantized import SequenceQuantizedKVCache, batch_of
from ..live.rows import rows_of
from ..steps import Steps
from .kinds import KINDS, REFUSED, GroupKind, replaced, slots_of
from .precision import KVPrecision, PrecisionChoice
from .spec import LayerGroup, ModelCacheSpec, TensorShape, dtype_name

logger = logging.getLogger(__name__)

_PROBE_IDS = tuple(range(1, 17))
"""Longer than the context of any convolution or n-gram, so that states have their final shape."""

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Fields of a model's arguments that can give the length of a table of position embeddings."""

_SCALE_DTYPES = ("float16", "bfloat16", "float32")
_ROWS = ((1, 2, 3), (5, 4, 6, 2, 3, 1, 4))
_NEXT_ID = 1
_BATCH_TOLERANCE, _MOST_TOLERANCE = 0.08, 0.5
_TIMES_NOISE = 4
"""The most that logits of a batch may differ from those of each sequence alone: this share of their
spread, or this many times the difference between two cuts of a prompt (some percent in bfloat16).
"""


def probing(
    model: Any,
    choice: PrecisionChoice,
    *,
    evaluate: bool,
    refused: Mapping[tuple[int, ...], str] | None = None,
) -> Steps[ModelCacheSpec]:
    """Find the spec of a model for the requested precision. In each step it makes its own caches.

    Full groups get the precision whose group size needs the least padding, if it saves memory and a
    forward pass works with it; the others stay in full precision. Without `evaluate` nothing is
    computed but shapes, which takes no time and no weights; batching then is not tested. `refused`
    has the slots of groups that were found to fail in that precision, and why.

    Raises:
        ModelNotSupported: a layer's cache is of a class that is not supported, or has another
            form than its class should have; or the model fails on a few tokens.
        ValueError: MLX cannot quantize to these bits, or in groups of this size.
    """
    choice.candidates()  # its ValueError is about the choice, not about the model
    try:
        return (yield from _probing(model, choice, evaluate, refused or {}))
    except ModelNotSupported:
        raise
    except Exception as error:
        # Stock may still be able to serve the model, whatever it raised.
        raise ModelNotSupported(f"the model cannot be probed: {error!r}") from error


def _probing(
    model: Any, choice: PrecisionChoice, evaluate: bool, refused: Mapping[tuple[int, ...], str]
) -> Steps[ModelCacheSpec]:
    caches = make_prompt_cache(model)
    _check_classes(caches)
    logits = _forward(model, caches)
    if evaluate:
        mx.eval(logits)
    groups = _groups(caches, choice)
    if not groups:
        raise ModelNotSupported("the model keeps no cache")
    plain = [replace(group, precision=None) for group in groups]
    working = list(plain)
    for place, group in enumerate(groups):
        if group.precision is not None:
            trial = spec_with(model, [*working[:place], group])
            yield
            why = refused.get(group.slots) or _why_not(model, trial, evaluate=evaluate)
            if evaluate and not ranks().agree(not why, "whether a precision works"):
                why = why or "another rank's attention does not take it"
            working[place] = replace(working[place], why=why) if why else group
    spec = spec_with(model, working)
    if not evaluate:
        return spec
    batches, joins = yield from _batching(model, spec, spec_with(model, plain))
    return replace(spec, batches=batches, joins=joins)


def spec_with(model: Any, groups: Sequence[LayerGroup]) -> ModelCacheSpec:
    """Return a model's spec with its slots in these groups, and live caches of their precision."""
    caches = make_prompt_cache(model)  # new ones: an emptied one may keep traces of its use
    slots = slots_of(caches)
    for group in groups:
        if group.precision is not None:
            for number in group.slots:
                assert type(slots[number]) is KVCache
                slots[number] = SequenceQuantizedKVCache(group.precision)
    return ModelCacheSpec(tuple(groups), replaced(caches, slots))


def position_limit(model: Any) -> int | None:
    """Return the number of tokens that a model has positions for; None if it is not known.

    Beyond the end of a table of position embeddings MLX reads other memory.
    """
    limits = [getattr(getattr(model, "args", None), name, None) for name in _POSITIONS]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _check_classes(caches: Sequence[Any], place: str = "layer") -> None:
    for i, cache in enumerate(caches):
        where = f"{place} {i}"
        if isinstance(cache, CacheList):
            _check_classes(cache.caches, f"{where} part")
            continue
        name = type(cache).__name__
        if type(cache) in KINDS:
            reason = KINDS[type(cache)].refusal(cache)
        else:
            reason = REFUSED.get(name, "the plugin does not support this class")
        if reason:
            raise ModelNotSupported(f"{where} has a {name}: {reason}")


def _forward(model: Any, caches: list[Any]) -> mx.array:
    """Feed a prompt and then one token, as prefill and decode do; return the last logits, lazy."""
    model(mx.array([_PROBE_IDS[:-1]], mx.int32), cache=caches)
    logits: mx.array = model(mx.array([_PROBE_IDS[-1:]], mx.int32), cache=caches)[:, -1]
    return logits


def _groups(caches: Sequence[Any], choice: PrecisionChoice) -> list[LayerGroup]:
    """Group the slots of a filled prompt cache by their form; those left empty are in no group."""
    slots_by_form: dict[tuple[int, type, Any], list[int]] = {}
    part_of = [part for cache in caches for part in range(len(slots_of([cache])))]
    for number, slot in enumerate(slots_of(caches)):
        form = _form(number, slot)
        if form is not None:
            slots_by_form.setdefault((part_of[number], type(slot), form), []).append(number)
    groups = []
    for number, ((_, cls, form), slots) in enumerate(slots_by_form.items()):
        kind, name, cache = KINDS[cls].group, str(number), cls.__name__
        if kind is GroupKind.RECURRENT:
            groups.append(LayerGroup(name, kind, cache, tuple(slots), states=form))
            continue
        keys, values, window = form
        precision, why = None, "windows stay in full precision"
        if kind is GroupKind.FULL:
            precision, why = _fitting(keys, values, choice)
        group = LayerGroup(name, kind, cache, tuple(slots), keys, values, precision, why, window)
        if precision and group.bytes_per_token >= group.full_precision_bytes:
            why = f"quantized in whole groups of {precision.group_size} it takes no less memory"
            group = replace(group, precision=None, why=why)
        groups.append(group)
    return groups


def _form(number: int, slot: Any) -> tuple[Any, ...] | None:
    """Return a filled slot's shapes, dtypes and window; None for one that the model left empty."""
    kind = KINDS[type(slot)]
    if kind.group is GroupKind.RECURRENT:
        states = []
        for x in kind.states(slot):
            if x is not None and (not isinstance(x, mx.array) or x.shape[0] != 1):
                raise ModelNotSupported(
                    f"cache {number} has a state that is not an array with one row"
                )
            states.append(None if x is None else (tuple(x.shape[1:]), dtype_name(x.dtype)))
        return tuple(states) if any(states) else None
    if slot.keys is None and slot.values is None:
        return None
    if slot.offset != len(_PROBE_IDS):
        raise ModelNotSupported(
            f"cache {number} holds {slot.offset} tokens after a forward pass of {len(_PROBE_IDS)}"
        )
    shapes = []
    for name, x in (("keys", slot.keys), ("values", slot.values)):
        if not isinstance(x, mx.array) or x.ndim != 4 or x.shape[0] != 1:
            raise ModelNotSupported(
                f"cache {number} has {name} of shape {getattr(x, 'shape', None)}, expected "
                "(1, heads, tokens, dim)"
            )
        shapes.append(TensorShape(x.shape[1], x.shape[3], dtype_name(x.dtype)))
    return shapes[0], shapes[1], kind.window(slot) if kind.window else None


def _fitting(
    keys: TensorShape, values: TensorShape, choice: PrecisionChoice
) -> tuple[KVPrecision | None, str]:
    """Return the precision with the least padding, the first of several, or why there is none."""
    if choice.is_full_precision:
        return None, "full precision is requested"
    for shape in (keys, values):
        if shape.dtype not in _SCALE_DTYPES:
            return None, f"MLX does not quantize {shape.dtype}"
    if 0 in (keys.dim, values.dim):
        return None, "keys without values are an index, which decides what is seen"
    fitted = [precision.fitted(keys.dim, values.dim) for precision in choice.candidates()]
    return min(fitted, key=lambda one: one.keys.padding + one.values.padding), ""


def _why_not(model: Any, spec: ModelCacheSpec, *, evaluate: bool) -> str | None:
    """Return why the model cannot work with these live caches, or None if it can."""
    try:
        caches = spec.make_cache()
        logits = _forward(model, caches)
        if evaluate:
            mx.eval(logits, [slot.state for slot in slots_of(caches) if not slot.empty()])
    except Exception as error:
        return f"the model's attention does not take it: {type(error).__name__}: {error}"
    return None


def _batching(
    model: Any, spec: ModelCacheSpec, full_precision: ModelCacheSpec
) -> Steps[tuple[bool, bool]]:
    """Find out whether replies of unequal length can be decoded together, and prompts computed.

    Caches in full precision, without the noise of quantizing, show whether the results are right.
    Those of `spec` need only not fail.
    """
    alone, cut = [], []
    for row in _ROWS:
        yield
        alone.append(_alone(model, full_precision, [row]))
        yield
        cut.append(_alone(model, full_precision, [row[:2], row[2:]]))
    noise = max(map(logits_difference, alone, cut))
    tolerance = min(max(_BATCH_TOLERANCE, _TIMES_NOISE * noise), _MOST_TOLERANCE)
    try:
        yield
        together = _decoded_together(model, full_precision)
        yield
        _decoded_together(model, spec)
    except Exception as error:
        logger.debug("a batch fails: %s", error)
        together = []
    if not ranks().agree(bool(together), "whether a batch works"):
        return False, False
    yield
    joined = _computed_together(model, full_precision)
    differences = [list(map(logits_difference, alone, rows)) for rows in (together, joined)]
    logger.debug("a batch differs by %s, noise is %.3f", differences, noise)
    batches, joins = (
        bool(rows) and all(difference <= tolerance for difference in rows)  # nan is not
        for rows in differences
    )
    return batches, batches and joins


def _alone(model: Any, spec: ModelCacheSpec, chunks: Sequence[Sequence[int]]) -> mx.array:
    """Prefill one row in chunks; return its logits after one more token."""
    caches = spec.make_cache()
    for chunk in chunks:
        model(mx.array([list(chunk)], mx.int32), cache=caches)
    logits: mx.array = model(mx.array([[_NEXT_ID]], mx.int32), cache=caches)[0, -1]
    mx.eval(logits)
    return logits


def _decoded_together(model: Any, spec: ModelCacheSpec) -> list[mx.array]:
    """Prefill rows alone and merge them; return each one's logits after one more token."""
    rows = []
    for row in _ROWS:
        caches = spec.make_cache()
        model(mx.array([list(row)], mx.int32), cache=caches)
        rows.append(caches)
    batch = [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]
    logits = list(model(mx.full((len(_ROWS), 1), _NEXT_ID, mx.int32), cache=batch)[:, -1])
    for cache in batch:
        cache.extract(0)  # as the server does with a row that has ended
    mx.eval(logits)
    return logits


def _computed_together(model: Any, spec: ModelCacheSpec) -> list[mx.array]:
    """Compute all but the first token of rows in one call; return each one's logits after one more.

    Return none where that fails, or caches of this class stay apart.
    """
    starts = [spec.make_cache() for _ in _ROWS]
    n_tokens = [len(row) - 1 for row in _ROWS]
    try:
        for row, caches in zip(_ROWS, starts, strict=True):
            model(mx.array([row[:1]], mx.int32), cache=caches)
        batches = [[batch_of([one]) or one.merge([one]) for one in caches] for caches in starts]
        layers = [rows_of(caches, n_tokens) for caches in zip(*batches, strict=True)]
        if None in layers:
            return []
        ids = [
            [*row[1:], *[0] * (max(n_tokens) - n)] for row, n in zip(_ROWS, n_tokens, strict=True)
        ]
        model(mx.array(ids, mx.int32), cache=layers)
        next_id = mx.array([[_NEXT_ID]], mx.int32)
        logits = [model(next_id, cache=caches)[0, -1] for caches in batches]
        mx.eval(logits)
    except Exception as error:
        logger.debug("prompts cannot be computed together: %s", error)
        return []
    return logits


def logits_difference(one: mx.array, other: mx.array) -> float:
    """Return how far logits differ, as a share of their spread (root mean squares)."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    return float(mx.sqrt(mx.square(one - other).mean()) / (mx.std(one) + 1e-6))
