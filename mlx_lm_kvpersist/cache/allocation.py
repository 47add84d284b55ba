"""Which bits each layer's keys and values get: measured on the model, kept for ever.

The divergence of single layers adds up to that of the whole within some percent. So each layer's
keys are quantized alone, bits are given to the layers that gain most from them, and the result is
measured as a whole. Values lose less and are measured together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from .divergence import MeanDivergence, Reference
from .kept_file import keep, read_kept
from .packed import OWN_BITS, KVPrecision, PrecisionChoice, parse_precision
from .probe import with_groups
from .spec import LayerGroup, ModelCacheSpec

logger = logging.getLogger(__name__)

_FORMAT = 1
_BITS = (4, 6, 8, OWN_BITS)
"""5 bits are left out: on CUDA they take longer to dequantize than 6, and they save little."""
_PER_BIT = 4.2
"""Each bit more divides the divergence by about so much: measured on SmolLM2-135M."""
_SURE_BITS = (8, 4)
"""Of keys and values that were not measured in time."""
_CHECKS = 5
_CLOSER = 0.97
"""After a miss the budget shrinks by what it missed the target by, and by so much more."""
_LEAST_TOKENS = 512
_ERROR_SHARE = 0.25
"""Of the target: most of the standard error."""

Told = Callable[[int, int], None]
"""Called with the runs that are done, and about how many there are."""
Precisions = dict[int, "KVPrecision | None"]
"""By slot; None for the model's own."""
Rotated = dict[tuple[str, "Side"], bool]
"""By group and side."""


@dataclass(frozen=True)
class PrecisionRequest:
    """What the command line asks for.

    `bits` of keys and of values; None: as few as keep the mean divergence from the model's own
    precision below `target_nats`. What is measured may take `measure_s` seconds. `rotate` "auto"
    rotates keys, and values, where that brings them nearer to the model's own.
    """

    bits: tuple[int, int] | None = None
    group_size: int | None = None
    rotate: Literal["auto", "on", "off"] = "auto"
    target_nats: float = 0.01
    measure_s: float = 60.0

    @property
    def is_own(self) -> bool:
        """Whether full precision is requested."""
        return self.bits is not None and OWN_BITS in self.bits

    @property
    def is_measured(self) -> bool:
        """Whether the model decides."""
        return not self.is_own and (self.bits is None or self.rotate == "auto")

    def choice(self) -> PrecisionChoice:
        """Return the choice of one precision for all layers, rotated unless that is off."""
        rotated = self.rotate != "off"
        key_bits, value_bits = self.bits or (4, 4)
        return PrecisionChoice(key_bits, value_bits, self.group_size, (rotated, rotated))

    def __str__(self) -> str:
        bits = f"{self.target_nats:g} nats" if self.bits is None else "{} {}".format(*self.bits)
        return f"{bits}, group {self.group_size or 'auto'}, rotate {self.rotate}"


@dataclass(frozen=True)
class Allocation:
    """The precision of each slot of the full groups, by its place in the prompt cache.

    `divergence` is what the whole was measured to have, None where there was no time for it.
    """

    precisions: Mapping[int, KVPrecision | None]
    divergence: MeanDivergence | None = None
    measured_on: str = ""
    """The day, as YYYY-MM-DD."""


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
        for slot, group in self.group_of.items():
            found = self._run(
                {**self.own, slot: _precision(group, 4, 8, rotated)}, self.request.measure_s * 0.9
            )
            if found is not None:
                at_four[slot, "keys"] = found.mean
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

    def _within_target(self, at_four: Mapping[Part, float], rotated: Rotated) -> Allocation:
        """Give bits out, and measure the whole; give out more while it is beyond the target."""
        target = self.request.target_nats
        costs = {(slot, side): _numbers(self.group_of[slot], side) for slot, side in at_four}
        budget = target
        for _ in range(_CHECKS):
            bits = allocate(at_four, costs, budget)
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


def allocate(
    at_four: Mapping[Part, float], costs: Mapping[Part, int], budget: float
) -> dict[Part, int]:
    """Give bits out so that the predicted divergence stays within `budget`.

    `at_four` has the divergence with each part alone in 4 bits, `costs` its numbers a token. The
    next bits go to the part that gains most for what they cost.
    """
    bits = dict.fromkeys(at_four, _BITS[0])
    while sum(_predicted(at_four[part], n) for part, n in bits.items()) > budget:
        steps = {part: _BITS[_BITS.index(n) + 1] for part, n in bits.items() if n != OWN_BITS}
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


# What was chosen is kept in a JSON file.


def known_allocation(file: Path, fingerprint: str, request: PrecisionRequest) -> Allocation | None:
    """Return what was chosen for this model and request before; None if it cannot be read."""
    kept = read_kept(file, _FORMAT).get(f"{fingerprint} {request}")
    if kept is None:
        return None
    try:
        precisions = {int(slot): parse_precision(name) for slot, name in kept["slots"].items()}
        found = kept["divergence"]
        divergence = None if found is None else MeanDivergence(float(found[0]), float(found[1]))
        return Allocation(precisions, divergence, str(kept["measured_on"]))
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        logger.warning("kvpersist: %s is damaged, precision is measured again: %r", file, error)
        return None


def keep_allocation(
    file: Path, fingerprint: str, request: PrecisionRequest, allocation: Allocation
) -> None:
    """Keep what was chosen; a file that cannot be written is logged."""
    found = allocation.divergence
    slots = {str(slot): str(how or "own") for slot, how in allocation.precisions.items()}
    measured = {
        "slots": slots,
        "divergence": None if found is None else [found.mean, found.standard_error],
        "measured_on": allocation.measured_on,
    }
    keep(file, _FORMAT, f"{fingerprint} {request}", measured)
