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
from statistics import median
from typing import Any, Literal

import mlx.core as mx

from .divergence import Reference
from .packed import dequantize, quantize
from .precision import (
    OWN_BITS,
    Allocation,
    KVPrecision,
    MeanDivergence,
    PrecisionRequest,
    Quantization,
)
from .probe import with_groups
from .spec import LayerGroup, ModelCacheSpec

_BITS = (4, 5, 6, 8, OWN_BITS)
_SLOW = 1.3
"""5 bits are left out where they take so much longer to dequantize than 6, as on CUDA."""
_PER_BIT = 4.2
"""Each bit more divides the divergence by about so much: measured on SmolLM2-135M."""
_SURE_BITS = (8, 4)
"""Of keys and values that were not measured in time."""
_CHECKS = 5
_CLOSER = 0.97
"""After a miss the budget shrinks by what it missed the target by, and by so much more."""
_LEAST_TOKENS = 512
_MOST_TIMED_BYTES = 64 << 20
_MEASURE_SHARE = 0.9
_SPARED_RUNS = 3
"""For measuring the whole."""
_ERROR_SHARE = 0.25
"""Of the target: most of the standard error."""

Told = Callable[[int, int], None]
"""Called with the runs that are done, and about how many there are."""
Precisions = dict[int, "KVPrecision | None"]
"""By slot; None for the model's own."""
Rotated = dict[tuple[str, "Side"], bool]
"""By group and side."""


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
            why = group.why if precision or not group.precision else "it bears no fewer bits"
            part = replace(group, slots=tuple(members), precision=precision, why=why)
            groups.append(replace(part, name=str(len(groups))))
    return with_groups(model, spec, groups)


def measure(
    model: Any, spec: ModelCacheSpec, ids: Sequence[int], request: PrecisionRequest, told: Told
) -> Allocation:
    """Find the precision of every layer by running the model over a text. Evaluates MLX.

    `spec` has the groups that can be quantized, in any precision. `told` is called with progress.
    """
    return _Measuring(model, spec, ids, request, told).allocation()


Side = Literal["keys", "values"]
Part = tuple[int, Side]
"""The keys or the values of a slot."""


class _Measuring:
    def __init__(
        self,
        model: Any,
        spec: ModelCacheSpec,
        ids: Sequence[int],
        request: PrecisionRequest,
        told: Told,
    ) -> None:
        self.model, self.spec, self.ids, self.request, self.told = model, spec, ids, request, told
        self.groups = [group for group in spec.full if group.precision is not None]
        self.group_of = {slot: group for group in self.groups for slot in group.slots}
        self.own: Precisions = dict.fromkeys(spec.slots_of_full)
        self.ends_s = time.perf_counter() + request.measure_s
        self.run_s = 0.0
        self.spread = 0.0
        """Variance over tokens, as a share of the squared mean: the highest found."""
        self.n_runs = 4 * len(self.groups) + 2
        if request.bits is None:
            self.n_runs += len(self.group_of)
        self.n_done = 0
        self.reference = Reference(model, ids[:_LEAST_TOKENS], self._caches(self.own))

    def allocation(self) -> Allocation:
        bits = self.request.bits
        sides: dict[Side, int] = dict(zip(("keys", "values"), bits or (4, 4), strict=True))
        rotated: Rotated = {}
        at_four: dict[Part, float] = {}
        for group in self.groups:
            for side, n_bits in sides.items():
                turned, found = self._rotation(group, side, n_bits)
                rotated[group.name, side] = turned
                if found is not None and side == "values":
                    # They lose little; what they lose is taken for the same in all layers.
                    share = found.mean / len(group.slots)
                    at_four |= {(slot, side): share for slot in group.slots}
        if bits is not None:
            return self._checked(self._all(*bits, rotated))
        self._read_more()
        for slots in self._bunches():
            trial = {slot: _precision(self.group_of[slot], 4, 8, rotated) for slot in slots}
            found = self._run({**self.own, **trial}, self.request.measure_s * _MEASURE_SHARE)
            if found is not None:
                at_four |= {(slot, "keys"): found.mean / len(slots) for slot in slots}
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

    def _run(self, precisions: Precisions, within_s: float | None = None) -> MeanDivergence | None:
        """Return the divergence of these precisions; None if no time is left for it."""
        started = time.perf_counter()
        ends_s = self.ends_s
        if within_s is not None:
            ends_s += within_s - self.request.measure_s
        if started + self.run_s > ends_s:
            return None
        found = self.reference.divergence(self._caches(precisions))
        self.run_s = time.perf_counter() - started
        if found.mean > 0:
            error = found.standard_error / found.mean
            self.spread = max(self.spread, error**2 * min(len(self.ids), _LEAST_TOKENS))
        self.n_done += 1
        self.told(self.n_done, max(self.n_done, self.n_runs))
        return found

    def _rotation(
        self, group: LayerGroup, side: Side, bits: int
    ) -> tuple[bool, MeanDivergence | None]:
        """Return whether rotating brings a side nearer to the model's own, and how near it is."""
        ways = {"auto": (False, True), "on": (True,), "off": (False,)}[self.request.rotate]
        found: dict[bool, MeanDivergence] = {}
        for turned in ways:
            both: Rotated = {(group.name, "keys"): turned, (group.name, "values"): turned}
            precision = _precision(group, *((bits, 8) if side == "keys" else (8, bits)), both)
            measured = self._run({**self.own, **dict.fromkeys(group.slots, precision)})
            if measured is not None:
                found[turned] = measured
        best = min(found, key=lambda turned: found[turned].mean, default=True)
        return (best if len(found) == len(ways) else ways[-1]), found.get(best)

    def _read_more(self) -> None:
        """Take as much of the text as the target's error needs and the time allows."""
        left_s = max(0.0, self.ends_s - time.perf_counter())
        n_left = len(self.group_of) + 3
        # Twice the text takes a little more than twice the time.
        n_allowed = _LEAST_TOKENS * 0.6 * left_s / n_left / max(self.run_s, 1e-6)
        n_tokens = int(min(self.spread / _ERROR_SHARE**2, n_allowed, len(self.ids)))
        if n_tokens > 1.2 * _LEAST_TOKENS:
            self.reference = Reference(self.model, self.ids[:n_tokens], self._caches(self.own))
            self.run_s *= n_tokens / _LEAST_TOKENS

    def _bunches(self) -> list[tuple[int, ...]]:
        """Return the slots whose keys are measured together: one, or as many as the time asks for.

        They are neighbours of one group.
        """
        left_s = self.ends_s - time.perf_counter()
        n_allowed = max(1, int(_MEASURE_SHARE * left_s / max(self.run_s, 1e-6)) - _SPARED_RUNS)
        size = math.ceil(len(self.group_of) / n_allowed)
        bunches = [
            group.slots[start : start + size]
            for group in self.groups
            for start in range(0, len(group.slots), size)
        ]
        self.n_runs += len(bunches) - len(self.group_of)
        return bunches

    def _within_target(self, at_four: Mapping[Part, float], rotated: Rotated) -> Allocation:
        """Give bits out, and measure the whole; give out more while it is beyond the target."""
        target = self.request.target_nats
        costs = {(slot, side): _numbers(self.group_of[slot], side) for slot, side in at_four}
        choice = _quick_bits(self.groups[0])
        budget = target
        for _ in range(_CHECKS):
            bits = allocate(at_four, costs, budget, choice)
            trial = {
                slot: _precision(
                    group,
                    bits.get((slot, "keys"), _SURE_BITS[0]),
                    bits.get((slot, "values"), _SURE_BITS[1]),
                    rotated,
                )
                for slot, group in self.group_of.items()
            }
            allocation = self._checked({**self.own, **trial})
            if allocation.divergence is None or allocation.divergence.mean <= target:
                return allocation
            budget *= _CLOSER * target / allocation.divergence.mean
        allocation = self._checked(self._all(8, 8, rotated))
        if allocation.divergence is None or allocation.divergence.mean <= target:
            return allocation
        return self._checked(self.own)

    def _checked(self, precisions: Precisions) -> Allocation:
        return Allocation(precisions, self._run(precisions), date.today().isoformat())


def _precision(
    group: LayerGroup, key_bits: int, value_bits: int, rotated: Rotated
) -> KVPrecision | None:
    assert group.precision is not None
    if OWN_BITS in (key_bits, value_bits):
        return None
    turned = rotated[group.name, "keys"], rotated[group.name, "values"]
    return KVPrecision.of(key_bits, group.precision.group_size, value_bits, rotated=turned)


def _numbers(group: LayerGroup, side: Side) -> int:
    """Return how many numbers a token has in one slot's keys, or values."""
    shape = group.keys if side == "keys" else group.values
    return shape.n_heads * shape.dim if shape else 0


def _quick_bits(group: LayerGroup) -> tuple[int, ...]:
    """Return the bits to choose from on this device: 5 only where they are not slow."""
    precision, shape = group.precision, group.keys
    assert precision is not None and shape is not None
    of = {n: Quantization(n, precision.group_size) for n in (5, 6)}
    n_tokens = 1 << 10
    while True:
        keys = mx.zeros((1, shape.n_heads, n_tokens, shape.dim), shape.mx_dtype)
        packed = {n: quantize(keys, one) for n, one in of.items()}
        mx.eval(list(packed.values()))
        times_s: dict[int, list[float]] = {5: [], 6: []}
        for _ in range(5):
            for n, taken_s in times_s.items():
                started_s = time.perf_counter()
                mx.eval(dequantize(packed[n], of[n]))
                taken_s.append(time.perf_counter() - started_s)
        five_s, six_s = (median(taken_s) for taken_s in times_s.values())
        # A launch takes a GPU tens of microseconds, whatever it does.
        if six_s > 1e-3 or keys.nbytes > _MOST_TIMED_BYTES:
            return _BITS if five_s <= _SLOW * six_s else tuple(n for n in _BITS if n != 5)
        n_tokens *= 4


def allocate(
    at_four: Mapping[Part, float],
    costs: Mapping[Part, int],
    budget: float,
    choice: Sequence[int] = _BITS,
) -> dict[Part, int]:
    """Give bits out so that the predicted divergence stays within `budget`.

    `at_four` has the divergence with each part alone in 4 bits, `costs` its numbers a token. The
    next bits of `choice`, which begins with 4, go to the part that gains most for what they cost.
    """
    bits = dict.fromkeys(at_four, choice[0])
    while sum(_predicted(at_four[part], n) for part, n in bits.items()) > budget:
        steps = {part: choice[choice.index(n) + 1] for part, n in bits.items() if n != choice[-1]}
        if not steps:
            break
        gains = {
            part: (_predicted(at_four[part], bits[part]) - _predicted(at_four[part], more))
            / ((more - bits[part]) * max(1, costs[part]))
            for part, more in steps.items()
        }
        best = max(gains, key=lambda part: gains[part])
        bits[best] = steps[best]
    return bits


def _predicted(at_four: float, bits: int) -> float:
    return 0.0 if bits == OWN_BITS else max(0.0, at_four) / _PER_BIT ** (bits - _BITS[0])
