"""Choose, for each quantized group of a model, how its layers attend."""

from __future__ import annotations

from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any, Literal

from .attention import Strategy
from .calibration import calibrate
from .observe import probe_packed
from .plan import AttentionPlan
from .slots import replaced, slots_of
from .spec import ModelCacheSpec

__all__ = ["with_plans"]


def with_plans(
    model: Any,
    spec: ModelCacheSpec,
    cache_file: Path | None,
    choice: Strategy | Literal["auto"] = "auto",
) -> ModelCacheSpec:
    """Return the spec with a plan for every quantized group, measured on this device if need be.

    A probe forward says which groups the model can attend to packed, and with how many query
    heads; the others are dequantized. See `calibrate` for `cache_file` and `choice`.
    """
    plans: dict[str, AttentionPlan] = {}
    slots = slots_of(spec.make_cache())
    for group in spec.full:
        if group.precision is None or group.keys is None:
            continue
        found = probe_packed(model, spec.make_cache, group.slots)
        shapes = {found[slot] for slot in group.slots}
        shape = shapes.pop() if len(shapes) == 1 else None
        if shape is None:
            plan = AttentionPlan()
        else:
            plan = calibrate(shape, group.precision, group.keys.mx_dtype, True, cache_file, choice)
        plans[group.name] = plan
        for slot in group.slots:
            slots[slot].plan = plan
    return replace_fields(spec, template=replaced(spec.template, slots), plans=plans)
