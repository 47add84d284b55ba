"""Which bits each layer's keys and values get: measured on the model.

The divergence of single layers adds up to that of the whole within some percent. So each layer's
keys are quantized alone, or with its neighbours' where time is short; bits are given to the layers
that gain most from them, and the result is measured as a whole. Values lose less and are measured
together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Any, Literal

import mlx.core as mx

from ..geometry.precision import (
    FULL_BITS,
    Allocation,
    Estimate,
    KVPrecision,
    PrecisionRequest,
)
from ..geometry.probe import position_limit, spec_with
from ..geometry.spec import LayerGroup, ModelCacheSpec
from .divergence import Reference

_BITS = (4, 5, 6, 8, FULL_BITS)
_PER_BIT = 4.2
"""Each bit more divides the divergence by about so much: measured on SmolLM2-135M."""
_SAFE_BITS = (8, 4)
"""Keys and values get these where there is no time to measure them."""

_FEW_TOKENS = 32
"""They show how quick the model is."""
_LEAST_TOKENS, _FIRST_TOKENS = 64, 512
"""Of the text: fewer say nothing; so many are read first."""
_FIRST_SHARE, _LAYERS_SHARE = 0.1, 0.9
"""Of the time: for one run over the first tokens, and until all layers are measured."""
_SPARED_RUNS = 3
"""For measuring the whole."""
_ERROR_SHARE = 0.25
"""Of the target: most of the standard error."""
_CHECKS = 6
_CLOSER = 0.97
"""The next budget is nearer to the target by so much less than the last result asks for."""

OnProgress = Callable[[int, int], None]
"""Called with the runs that are done, and about how many there are."""
Side = Literal["keys", "values"]
Part = tuple[int, Side]
"""The keys or the values of a slot."""
Precisions = dict[int, KVPrecision | None]
"""By slot; None for the model's own."""
Rotated = dict[tuple[str, Side], bool]
"""By group and side."""


def chosen_spec(
    model: Any, request: PrecisionRequest, choose: Callable[[ModelCacheSpec], Allocation]
) -> tuple[ModelCacheSpec, Allocation | None]:
    """Return a model's spec and, if it is measured, the allocation that `choose` gives for it."""
    spec = ModelCacheSpec.probe(model, request.choice())
    if not request.is_measured or not any(group.precision for group in spec.full):
        return spec, None
    allocation = choose(spec)
    return allocated(model, spec, allocation), allocation


def allocated(model: Any, spec: ModelCacheSpec, allocation: Allocation) -> ModelCacheSpec:
    """Return the spec with its full groups taken apart by the precision of their slots.

    Raises:
        ValueError: the allocation is of another model.
    """
    if spec.slots_of_full != allocation.precisions.keys():
        raise ValueError("the allocation has other layers than the model")
    groups: list[LayerGroup] = []
    for group in spec.groups:
        parts: dict[KVPrecision | None, list[int]] = {}
        for slot in group.slots:
            precision = allocation.precisions.get(slot, group.precision)
            parts.setdefault(precision, []).append(slot)
        for precision, members in parts.items():
            why = group.why if precision or not group.precision else "fewer bits cost too much"
            part = replace(group, slots=tuple(members), precision=precision, why=why)
            groups.append(replace(part, name=str(len(groups))))
    return spec_with(model, groups, spec.batching)


def measure(
    model: Any,
    spec: ModelCacheSpec,
    ids: Sequence[int],
    request: PrecisionRequest,
    on_progress: OnProgress,
) -> Allocation:
    """Find the precision of every layer by running the model over a text. Evaluates MLX.

    `spec` has the groups that can be quantized, in any precision.
    """
    return _Measuring(model, spec, ids, request, on_progress).allocation()


def unmeasured(spec: ModelCacheSpec, request: PrecisionRequest) -> Allocation:
    """Return the precision of every layer of a model that cannot be measured."""
    turned = request.rotate != "off"
    precisions: Precisions = {}
    for group in spec.full:
        rotated: Rotated = {(group.name, "keys"): turned, (group.name, "values"): turned}
        bits = request.bits or _SAFE_BITS
        precision = _precision(group, *bits, rotated) if group.precision else None
        precisions |= dict.fromkeys(group.slots, precision)
    return Allocation(precisions)


class _Measuring:
    def __init__(
        self,
        model: Any,
        spec: ModelCacheSpec,
        ids: Sequence[int],
        request: PrecisionRequest,
        on_progress: OnProgress,
    ) -> None:
        self.model, self.spec, self.request, self.on_progress = model, spec, request, on_progress
        self.groups = [group for group in spec.full if group.precision is not None]
        self.group_of = {slot: group for group in self.groups for slot in group.slots}
        self.own: Precisions = dict.fromkeys(spec.slots_of_full)
        self.ends_s = time.perf_counter() + request.measure_s
        self.is_cut = False
        """Whether something was left out for lack of time."""
        self.spread = 0.0
        """Variance over tokens, as a share of the squared mean: the highest found."""
        self.n_runs = 4 * len(self.groups) + 2
        if request.bits is None:
            self.n_runs += len(self.group_of)
        self.n_done = 0
        self.ids = ids[: position_limit(model)]
        self.run_s = 0.0
        self.n_read = 0
        self.reference: Reference | None = None
        """None on a device that is too slow."""
        self._read(self._first_tokens())

    def allocation(self) -> Allocation:
        if self.reference is None:
            safe = unmeasured(self.spec, self.request)
            return replace(safe, cut_at_s=self.request.measure_s)
        bits = self.request.bits
        sides: dict[Side, int] = dict(zip(("keys", "values"), bits or (4, 4), strict=True))
        rotated: Rotated = {}
        at_four: dict[Part, float] = {}
        for group in self.groups:
            for side, n_bits in sides.items():
                found = self._choose_rotation(group, side, n_bits, rotated)
                if found is not None and side == "values":
                    # They lose little; what they lose is taken for the same in all layers.
                    share = found.value / len(group.slots)
                    at_four |= {(slot, side): share for slot in group.slots}
        if bits is not None:
            chosen = self._all(*bits, rotated)
            return self._made(chosen, self._run(chosen))
        self._read_more()
        for slots in self._bunches():
            trial = {slot: _precision(self.group_of[slot], 4, FULL_BITS, rotated) for slot in slots}
            found = self._run({**self.own, **trial}, self.request.measure_s * _LAYERS_SHARE)
            if found is not None:
                at_four |= {(slot, "keys"): found.value / len(slots) for slot in slots}
        return self._within_target(at_four, rotated)

    def _caches(self, precisions: Precisions) -> list[Any]:
        return allocated(self.model, self.spec, Allocation(precisions)).make_cache()

    def _all(self, key_bits: int, value_bits: int, rotated: Rotated) -> Precisions:
        """Return one precision for all layers but those that cannot be quantized."""
        made = {
            slot: _precision(group, key_bits, value_bits, rotated)
            for slot, group in self.group_of.items()
        }
        return {**self.own, **made}

    def _first_tokens(self) -> int:
        """Return how many tokens to begin with: few on a slow device, 0 on one that is too slow."""
        few = mx.array([list(self.ids[:_FEW_TOKENS])])
        for _ in range(2):  # the first one compiles kernels
            started_s = time.perf_counter()
            logits = self.model(few, cache=self._caches(self.own))
            mx.eval(logits)
            per_token_s = (time.perf_counter() - started_s) / few.size
        self.most_tokens = min(len(self.ids), Reference.most_tokens(logits.shape[-1]))
        n_allowed = int(_FIRST_SHARE * self.request.measure_s / max(per_token_s, 1e-9))
        return min(_FIRST_TOKENS, self.most_tokens, n_allowed)

    def _read(self, n_tokens: int) -> None:
        if n_tokens < min(_LEAST_TOKENS, self.most_tokens):
            return
        self.reference = None  # there may be no room for two
        started_s = time.perf_counter()
        self.reference = Reference(self.model, self.ids[:n_tokens], self._caches(self.own))
        self.run_s, self.n_read = time.perf_counter() - started_s, n_tokens

    def _run(self, precisions: Precisions, within_s: float | None = None) -> Estimate | None:
        """Return the divergence of these precisions; None if no time is left for it.

        None also if it is no number: then the model's predictions are none either.
        """
        started = time.perf_counter()
        ends_s = self.ends_s
        if within_s is not None:
            ends_s += within_s - self.request.measure_s
        if self.reference is None or started + self.run_s > ends_s:
            self.is_cut = True
            return None
        found = self.reference.divergence(self._caches(precisions))
        self.run_s = time.perf_counter() - started
        if found.value > 0:
            error = found.error / found.value
            self.spread = max(self.spread, error**2 * self.n_read)
        self.n_done += 1
        self.on_progress(self.n_done, max(self.n_done, self.n_runs))
        return found if math.isfinite(found.value) else None

    def _choose_rotation(
        self, group: LayerGroup, side: Side, bits: int, rotated: Rotated
    ) -> Estimate | None:
        """Rotate a side if that brings it nearer to the model's own; return how near it is."""
        ways = {"auto": (False, True), "on": (True,), "off": (False,)}[self.request.rotate]
        found: dict[bool, Estimate] = {}
        for turned in ways:
            rotated[group.name, side] = turned
            key_bits, value_bits = (bits, FULL_BITS) if side == "keys" else (FULL_BITS, bits)
            precision = _precision(group, key_bits, value_bits, rotated)
            measured = self._run({**self.own, **dict.fromkeys(group.slots, precision)})
            if measured is not None:
                found[turned] = measured
        if len(found) < len(ways):
            rotated[group.name, side] = ways[-1]
            return found.get(ways[-1])
        rotated[group.name, side] = min(found, key=lambda turned: found[turned].value)
        return found[rotated[group.name, side]]

    def _read_more(self) -> None:
        """Take as much of the text as the target's error needs and the time allows."""
        left_s = max(0.0, self.ends_s - time.perf_counter())
        n_left = len(self.group_of) + _SPARED_RUNS
        # Twice the text takes a little more than twice the time.
        n_allowed = self.n_read * 0.6 * left_s / n_left / max(self.run_s, 1e-6)
        n_tokens = int(min(self.spread / _ERROR_SHARE**2, n_allowed, self.most_tokens))
        if n_tokens > 1.2 * self.n_read > 0:
            self._read(n_tokens)

    def _bunches(self) -> list[tuple[int, ...]]:
        """Return the slots whose keys are measured together: one, or as many as the time asks for.

        They are neighbours of one group.
        """
        left_s = self.ends_s - time.perf_counter()
        n_allowed = max(1, int(_LAYERS_SHARE * left_s / max(self.run_s, 1e-6)) - _SPARED_RUNS)
        size = math.ceil(len(self.group_of) / n_allowed)
        bunches = [
            group.slots[start : start + size]
            for group in self.groups
            for start in range(0, len(group.slots), size)
        ]
        self.is_cut |= size > 1
        self.n_runs += len(bunches) - len(self.group_of)
        return bunches

    def _within_target(self, at_four: Mapping[Part, float], rotated: Rotated) -> Allocation:
        """Give bits out and measure the whole, until it is just within the target.

        The standard error counts against it: another text may be as much worse.
        """
        target = self.request.target_nats
        costs = {(slot, side): _numbers(self.group_of[slot], side) for slot, side in at_four}
        budget = target
        tried: list[dict[Part, int]] = []
        best: Allocation | None = None
        while len(tried) < _CHECKS:
            bits = allocate(at_four, costs, budget)
            if bits in tried:
                break
            tried.append(bits)
            trial = {**self.own, **self._with_bits(bits, rotated)}
            found = self._run(trial)
            if found is None:
                return best or self._made(trial, None)
            at_most = found.value + found.error
            if at_most > target and best is not None:
                break
            # The next bits go by what these were predicted to have, not by what they might have.
            predicted = sum(_predicted(at_four[part], n) for part, n in bits.items())
            budget = predicted * _CLOSER * target / max(at_most, 1e-9)
            if at_most <= target:
                best = self._made(trial, found)
                if budget <= predicted:
                    break
        for key_bits in (8, FULL_BITS) if best is None else ():
            trial = self._all(key_bits, key_bits, rotated)
            found = self._run(trial)
            best = self._made(trial, found)
            if found is None or found.value + found.error <= target:
                break
        assert best is not None
        return best

    def _with_bits(self, bits: Mapping[Part, int], rotated: Rotated) -> Precisions:
        keys, values = _SAFE_BITS
        return {
            slot: _precision(
                group, bits.get((slot, "keys"), keys), bits.get((slot, "values"), values), rotated
            )
            for slot, group in self.group_of.items()
        }

    def _made(self, precisions: Precisions, found: Estimate | None) -> Allocation:
        measured_on = date.today().isoformat() if found else ""
        cut_at_s = self.request.measure_s if self.is_cut else None
        return Allocation(precisions, found, measured_on, cut_at_s)


def _precision(
    group: LayerGroup, key_bits: int, value_bits: int, rotated: Rotated
) -> KVPrecision | None:
    assert group.precision is not None
    if key_bits == value_bits == FULL_BITS:
        return None
    turned = rotated.get((group.name, "keys"), False), rotated.get((group.name, "values"), False)
    return KVPrecision.of(key_bits, group.precision.group_size, value_bits, rotated=turned)


def _numbers(group: LayerGroup, side: Side) -> int:
    """Return how many numbers a token has in one slot's keys, or values."""
    shape = group.keys if side == "keys" else group.values
    return shape.n_heads * shape.dim if shape else 0


def allocate(
    at_four: Mapping[Part, float], costs: Mapping[Part, int], budget: float
) -> dict[Part, int]:
    """Give bits out so that the predicted divergence stays within `budget`.

    `at_four` has the divergence with each part alone in 4 bits, `costs` its numbers a token. The
    next bits go to the part that gains most for what they cost.
    """
    bits = dict.fromkeys(at_four, _BITS[0])
    while sum(_predicted(at_four[part], n) for part, n in bits.items()) > budget:
        steps = {part: _BITS[_BITS.index(n) + 1] for part, n in bits.items() if n != FULL_BITS}
        if not steps:
            break
        gains = {
            part: (_predicted(at_four[part], bits[part]) - _predicted(at_four[part], more))
            / ((more - bits[part]) * costs[part])
            for part, more in steps.items()
        }
        best = max(gains, key=lambda part: gains[part])
        bits[best] = steps[best]
    return bits


def _predicted(at_four: float, bits: int) -> float:
    return 0.0 if bits == FULL_BITS else max(0.0, at_four) / _PER_BIT ** (bits - _BITS[0])
