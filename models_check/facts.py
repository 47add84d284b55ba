"""Find facts about an architecture that shapes do not show, by evaluating a tiny model.

Every fact says that two runs of the same tokens agree. The models compute in float32, so runs that
agree differ only by rounding. Other runs differ by about the spread of the logits.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import methodcaller
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.cache.blocks import (
    Joiner,
    Piece,
    copy_newest,
    copy_state,
    first_cached,
    split,
)
from mlx_lm_kvpersist.cache.geometry.kinds import slots_of
from mlx_lm_kvpersist.cache.geometry.precision import FULL_BITS, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import Architecture, ModelCacheSpec, probe_model
from mlx_lm_kvpersist.cache.live.attention import forced_plan
from mlx_lm_kvpersist.cache.live.caches import batch_of
from mlx_lm_kvpersist.cache.live.packed import GRID, capacity
from mlx_lm_kvpersist.cache.live.rows import rows_of
from mlx_lm_kvpersist.cache.measuring.attention_check import packed_shapes
from mlx_lm_kvpersist.errors import ModelNotSupported

from .conversation import random_ids

logger = logging.getLogger(__name__)

QUANTIZED = PrecisionChoice()
FULL_PRECISION = PrecisionChoice(FULL_BITS, FULL_BITS)

TOLERANCE = 5e-4
"""The largest allowed difference of logits, as a share of their spread. Rounding causes differences
of up to 5e-6; the smallest difference that a fault causes in the zoo is 3e-2."""

_SIZES = ((3, 4), (40, 9), (258, 5))
"""For each prompt, the tokens that are computed alone, and the tokens of the next call. Two prompts
are longer than the zoo's windows. One is longer than a block, so its first block is quantized."""

_NEXT_IDS = (7, 11, 13)

_MORE_PADDING = 2
"""Padding after the longest prompt of a joint call, so that a lone short prompt is padded, too."""
_N_RESTORED, _CUT = 24, 16

Logits = list[mx.array]
"""Logits after each token of a reply, [n, vocab], for each prompt."""


@dataclass(frozen=True)
class Evaluated:
    """The results of one model: `differences` of runs that must agree, by fact.

    A fact without a run is unknown: the model's shapes do not allow the run.
    """

    differences: Mapping[str, float] = field(default_factory=dict)
    refused: str = ""

    def shows(self, fact: str) -> bool | None:
        """Return None if the fact is unknown."""
        differences = [x for name, x in self.differences.items() if name.split(",")[0] == fact]
        return all(x <= TOLERANCE for x in differences) if differences else None  # False for nan


def combined(several: Sequence[Evaluated]) -> Architecture:
    """Return the facts that all models of an architecture show."""
    batches, joins, packed = (
        set(map(methodcaller("shows", fact), several)) - {None} == {True}
        for fact in ("batches", "joins", "packed")
    )
    refused = next((model.refused for model in several if model.refused), "")
    return Architecture(batches, batches and joins, packed, refused)


def evaluated(model: Any) -> Evaluated:
    """Evaluate a model that computes in float32; `server_attention` must be active.

    All facts are unknown if the plugin refuses the classes of the caches.
    """
    try:
        plain = Runs(model, probe_model(model, FULL_PRECISION))
        spec = probe_model(model, QUANTIZED)
    except ModelNotSupported:
        return Evaluated()
    dequantized, ways = Runs(model, spec), {"plain": plain}
    try:
        restored = difference_of_restored(model, spec)
        assert plain.alone and dequantized.alone
    except Exception as error:
        return Evaluated(refused=f"it fails over the plugin's caches ({type(error).__name__})")
    differences = {"restored": restored}
    if spec.quantized:
        ways["dequantized"] = dequantized
    if (packed_spec := packed(model, spec)).plans:
        runs = Runs(model, packed_spec)
        differences["packed"] = _difference(dequantized.alone, lambda: runs.alone)
        if differences["packed"] <= TOLERANCE:
            ways["packed"] = runs
    for name, runs in ways.items():
        differences[f"batches, {name}"] = runs.difference(runs.decoded_together)
        if name != "dequantized":  # arrays of quantized caches are never joined
            differences[f"joins, {name}"] = runs.difference(runs.computed_together)
    is_kept = restored <= TOLERANCE
    return Evaluated(differences, "" if is_kept else "it keeps state outside its caches")


def packed(model: Any, spec: ModelCacheSpec) -> ModelCacheSpec:
    """Let groups attend over packed keys if tracing shows that they can."""
    template, plans = spec.make_cache(), {}
    slots = slots_of(template)
    for group in spec.quantized:
        shapes = packed_shapes(model, spec.make_cache, group.slots)
        if all(shapes[slot] is not None for slot in group.slots):
            plans[group.name] = forced_plan("packed")
            for slot in group.slots:
                slots[slot].plan = plans[group.name]
    return replace(spec, template=template, plans=plans)


class Runs:
    """The same prompts and replies, computed in several ways over the caches of one spec."""

    def __init__(self, model: Any, spec: ModelCacheSpec) -> None:
        self.model, self.spec = model, spec

    @cached_property
    def _firsts(self) -> list[list[Any]]:
        firsts = []
        for first, _ in _prompts():
            firsts.append(self.spec.make_cache())
            _compute(self.model, firsts[-1], first)
        return firsts

    @cached_property
    def alone(self) -> Logits:
        """The logits of each prompt and its reply, computed without other prompts."""
        return [_reply(self.model, caches)[0] for caches in self._computed()]

    def _computed(self) -> Iterator[list[Any]]:
        for caches, (_, last) in zip(copy.deepcopy(self._firsts), _prompts(), strict=True):
            _compute(self.model, caches, last)
            yield caches

    def decoded_together(self) -> Logits:
        """Compute the prompts alone, and decode their replies in one batch."""
        batch = [_merged(caches) for caches in zip(*self._computed(), strict=True)]
        logits = list(_reply(self.model, batch, len(_SIZES)))
        for cache in batch:
            cache.extract(0)  # as the server does with a row that has ended
        return logits

    def computed_together(self) -> Logits:
        """Compute the prompts' last tokens in one call, and decode the replies alone.

        Raises ValueError if caches of these classes are not joined.
        """
        lasts = [last for _, last in _prompts()]
        n_tokens = [len(last) for last in lasts]
        rows = [[_merged([cache]) for cache in caches] for caches in copy.deepcopy(self._firsts)]
        layers = [rows_of(caches, n_tokens) for caches in zip(*rows, strict=True)]
        if None in layers:
            raise ValueError("caches of these classes are not joined")
        width = max(n_tokens) + _MORE_PADDING
        ids = [[*last, *[0] * (width - len(last))] for last in lasts]
        mx.eval(self.model(mx.array(ids, mx.int32), cache=layers))
        return [_reply(self.model, caches)[0] for caches in rows]

    def difference(self, run: Callable[[], Logits]) -> float:
        return _difference(self.alone, run)


def difference_of_restored(model: Any, spec: ModelCacheSpec) -> float:
    """Compare logits over restored caches with logits over the original caches.

    Another prompt is computed in between: state outside the caches would change the logits.
    """
    ids = random_ids(31, _N_RESTORED)
    caches = spec.make_cache()
    _compute(model, caches, ids)
    restored = _restored(spec, caches)
    expected = [_reply(model, caches)[0]]
    _compute(model, spec.make_cache(), random_ids(32, 9))
    return _difference(expected, lambda: [_reply(model, restored)[0]])


def _restored(spec: ModelCacheSpec, caches: Sequence[Any]) -> list[Any]:
    """Return caches that were cut into blocks and joined, as by a restore."""
    n_tokens = _N_RESTORED
    starts = {
        window: max(first_cached(spec, window, caches), n_tokens - window)
        for window in spec.sliding
    }
    n_held = {window: n_tokens - start for window, start in starts.items()}
    joiner = Joiner(spec, n_tokens, capacity(n_tokens), n_held, whole=False)
    cuts = [(0, _CUT), (_CUT, n_tokens)] if spec.full else []
    for (start, stop), block in zip(cuts, split(spec.full, caches, cuts), strict=True):
        joiner.add(Piece(block, 0, stop - start))
    for window, start in starts.items():
        (arrays,) = split(spec.sliding[window], caches, [(start, n_tokens)])
        joiner.add(Piece(arrays, 0, n_tokens - start), window)
    newest = copy_newest(spec.quantized, caches, n_tokens)
    joiner.add_state({**copy_state(spec, caches), **newest}, n_tokens)
    return joiner.finish()


def _prompts() -> list[tuple[list[int], list[int]]]:
    return [(random_ids(40 + n, n), random_ids(50 + n, n_last)) for n, n_last in _SIZES]


def _compute(model: Any, caches: list[Any], ids: Sequence[int]) -> None:
    for start in range(0, len(ids), GRID):
        mx.eval(model(mx.array([ids[start : start + GRID]], mx.int32), cache=caches))


def _merged(caches: Sequence[Any]) -> Any:
    """Return a batch of one layer's caches, made as the server makes it."""
    return batch_of(list(caches)) or caches[0].merge(list(caches))


def _reply(model: Any, caches: list[Any], n_rows: int = 1) -> mx.array:
    """Return the reply's logits [rows, n, vocab]."""
    steps = []
    for token in _NEXT_IDS:
        steps.append(model(mx.full((n_rows, 1), token, mx.int32), cache=caches)[:, -1])
        mx.eval(steps[-1])
    return mx.stack(steps, axis=1).astype(mx.float32)


def _difference(expected: Logits, run: Callable[[], Logits]) -> float:
    """Return the largest difference of logits, as a share of their spread (root mean squares).

    The difference is infinity if the run raises.
    """
    try:
        return max(_apart(right, logits) for right, logits in zip(expected, run(), strict=True))
    except Exception as error:
        # A model may raise anything over caches that it does not expect.
        logger.debug("a run raises: %r", error)
        return math.inf


def _apart(expected: mx.array, logits: mx.array) -> float:
    # Some architectures mask tokens with -inf.
    masked = mx.isinf(expected) & (expected == logits)
    expected, logits = (mx.where(masked, 0, x) for x in (expected, logits))
    difference = mx.sqrt(mx.square(expected - logits).mean(axis=-1))
    return float((difference / (mx.sqrt(mx.var(expected, axis=-1)) + 1e-6)).max())
