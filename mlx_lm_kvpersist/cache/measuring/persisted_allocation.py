"""What was chosen for each model, persisted for ever.

Other bits would be another root: conversations stored before would not be found. So the choice
also travels with an exported session.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..geometry.precision import Allocation, Estimate, PrecisionRequest, parse_precision
from .persisted import Persisted

if TYPE_CHECKING:
    from ..geometry.spec import ModelCacheSpec  # it needs mlx_lm, which takes seconds to import

logger = logging.getLogger(__name__)

_KEY = "precision/1/"


def known_allocation(
    persisted: Persisted, fingerprint: str, request: PrecisionRequest
) -> Allocation | None:
    """Return what was chosen for this model and request before; None if it cannot be read."""
    choice = persisted.get(f"{_KEY}{fingerprint} {request}")
    if choice is None:
        return None
    try:
        return _allocation(choice)
    except ValueError as error:
        logger.warning(
            "kvpersist: the persisted precision is damaged, it is measured again: %s", error
        )
        return None


def suits(allocation: Allocation, spec: ModelCacheSpec, request: PrecisionRequest) -> bool:
    """Say whether an allocation is of this model's layers, and needs not be measured anew.

    It needs to be where it was cut short, and there is more time now.
    """
    if allocation.cut_at_s is not None and request.measure_s > allocation.cut_at_s:
        return False
    groups = {slot: group for group in spec.full for slot in group.slots}
    if allocation.precisions.keys() != groups.keys():
        return False
    for slot, precision in allocation.precisions.items():
        group = groups[slot]
        if precision is None:
            continue
        if group.precision is None or precision.group_size != group.precision.group_size:
            return False
    return True


def put_allocation(
    persisted: Persisted, fingerprint: str, request: PrecisionRequest, allocation: Allocation
) -> None:
    """Persist what was chosen, in place of what was chosen before."""
    found = allocation.divergence
    slots = {str(slot): str(how or "full") for slot, how in allocation.precisions.items()}
    choice = {
        "slots": slots,
        "divergence": None if found is None else [found.value, found.error],
        "measured_on": allocation.measured_on,
        "cut_at_s": allocation.cut_at_s,
    }
    persisted.put(f"{_KEY}{fingerprint} {request}", choice)


def chosen_as(persisted: Persisted, fingerprint: str, layout: str) -> dict[str, Any]:
    """Return, as JSON values, the choices for this model that are stored in this layout."""
    found: dict[str, Any] = {}
    for request, choice in persisted.under(f"{_KEY}{fingerprint} ").items():
        with suppress(ValueError):
            if _is_stored_as(_allocation(choice), layout):
                found[f"{fingerprint} {request}"] = choice
    return found


def adopt_choices(
    persisted: Persisted, fingerprint: str, layout: str, choices: Mapping[str, Any]
) -> None:
    """Persist the choices that `chosen_as` found in another store, where this one has none.

    Raises ValueError if they are not that.
    """
    for name, choice in choices.items():
        if name.partition(" ")[0] != fingerprint or not _is_stored_as(_allocation(choice), layout):
            raise ValueError(f"the choice {name[:200]!r} is of another model or precision")
        if persisted.get(_KEY + name) is None:
            persisted.put(_KEY + name, choice)


def _allocation(choice: Any) -> Allocation:
    """Read a choice. Raises ValueError."""
    try:
        precisions = {int(slot): parse_precision(name) for slot, name in choice["slots"].items()}
        found = choice["divergence"]
        divergence = None if found is None else Estimate(float(found[0]), float(found[1]))
        cut_at_s = choice.get("cut_at_s")
        return Allocation(
            precisions,
            divergence,
            str(choice["measured_on"]),
            None if cut_at_s is None else float(cut_at_s),
        )
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(repr(error)) from error


def _is_stored_as(allocation: Allocation, layout: str) -> bool:
    names = [str(how or "full") for _, how in sorted(allocation.precisions.items())]
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    parts = [part for part in layout.split(",") if part[:1] != "w" and part != "state"]
    return parts == [name if len(runs) == 1 else f"{name}*{length}" for name, length in runs]
