"""What was chosen for each model, in a JSON file of the store's folder: kept for ever.

Other bits would be another root: conversations stored before would not be found. So the choice
also travels with an exported session.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .kept_file import keep, read_kept
from .precision import Allocation, Estimate, PrecisionRequest, parse_precision

if TYPE_CHECKING:
    from .spec import ModelCacheSpec  # it needs mlx_lm, which takes seconds to import

logger = logging.getLogger(__name__)

PRECISION_FILE = "precision.json"
_FORMAT = 1


def known_allocation(file: Path, fingerprint: str, request: PrecisionRequest) -> Allocation | None:
    """Return what was chosen for this model and request before; None if it cannot be read."""
    kept = read_kept(file, _FORMAT).get(f"{fingerprint} {request}")
    if kept is None:
        return None
    try:
        return _allocation(kept)
    except ValueError as error:
        logger.warning("kvpersist: %s is damaged, precision is measured again: %s", file, error)
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


def keep_allocation(
    file: Path, fingerprint: str, request: PrecisionRequest, allocation: Allocation
) -> None:
    """Keep what was chosen; a file that cannot be written is logged."""
    found = allocation.divergence
    slots = {str(slot): str(how or "own") for slot, how in allocation.precisions.items()}
    measured = {
        "slots": slots,
        "divergence": None if found is None else [found.value, found.error],
        "measured_on": allocation.measured_on,
        "cut_at_s": allocation.cut_at_s,
    }
    keep(file, _FORMAT, f"{fingerprint} {request}", measured)


def chosen_as(file: Path, fingerprint: str, layout: str) -> dict[str, Any]:
    """Return, as JSON values, the choices for this model that are stored in this layout."""
    found: dict[str, Any] = {}
    for name, kept in read_kept(file, _FORMAT).items():
        with suppress(ValueError):
            if name.partition(" ")[0] == fingerprint and _is_stored_as(_allocation(kept), layout):
                found[name] = kept
    return found


def adopt_choices(file: Path, fingerprint: str, layout: str, choices: Mapping[str, Any]) -> None:
    """Keep the choices that `chosen_as` found for another store, where this one has none.

    Raises ValueError if they are not that.
    """
    known = read_kept(file, _FORMAT)
    for name, kept in choices.items():
        if name.partition(" ")[0] != fingerprint or not _is_stored_as(_allocation(kept), layout):
            raise ValueError(f"the choice {name[:200]!r} is of another model or precision")
        if name not in known:
            keep(file, _FORMAT, name, kept)


def _allocation(kept: Any) -> Allocation:
    """Read what was kept. Raises ValueError."""
    try:
        precisions = {int(slot): parse_precision(name) for slot, name in kept["slots"].items()}
        found = kept["divergence"]
        divergence = None if found is None else Estimate(float(found[0]), float(found[1]))
        cut_at_s = kept.get("cut_at_s")
        return Allocation(
            precisions,
            divergence,
            str(kept["measured_on"]),
            None if cut_at_s is None else float(cut_at_s),
        )
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(repr(error)) from error


def _is_stored_as(allocation: Allocation, layout: str) -> bool:
    names = [str(how or "own") for _, how in sorted(allocation.precisions.items())]
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    parts = [part for part in layout.split(",") if part[:1] != "w" and part != "state"]
    return parts == [name if len(runs) == 1 else f"{name}*{length}" for name, length in runs]
