"""`mlx-lm-kvpersist spec`: a model's caches, their stored form, and what can be reused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from mlx_lm.utils import load
from rich.table import Table

from ..cache.geometry.precision import FULL_BITS, layout_in_words
from ..cache.geometry.spec import ModelCacheSpec, architecture_of, spec_of
from ..cache.live.packed import GRID
from ..config import precision_of
from ..errors import ModelNotSupported
from ..host.scheduling.model_provider import cannot_load
from ..units import show_bytes
from .output import Report, records


def load_named(name: str, adapter_path: str | None = None) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder or a hub name. Raises ConfigError."""
    try:
        loaded: Any = load(name, adapter_path=adapter_path)
    except Exception as error:
        # The hub, tokenizers and damaged files raise exceptions of many classes.
        raise cannot_load(name, error) from error
    return loaded[0], loaded[1]


def run(args: argparse.Namespace) -> Report:
    model, _ = load_named(args.model, args.adapter_path)
    try:
        spec = spec_of(model, precision_of(args), architecture_of(model))
    except ModelNotSupported as error:
        text = f"{args.model} is served as stock does, nothing is kept: {error}"
        content = {"model": args.model, "kept": False, "why_not": str(error)}
        return Report(content, text, status=1)
    words = layout_in_words(spec.layout)
    content = {"model": args.model, "kept": True, "precision": words, **spec.describe()}
    return Report(content, *_explained(spec), f"Precision: {words}.")


def _explained(spec: ModelCacheSpec) -> Iterator[str | Table]:
    rows = []
    for group in spec.groups:
        described = {"layers": len(group.slots), **group.describe()}
        for side, shape in (("keys", group.keys), ("values", group.values)):
            described[side] = f"{shape.n_heads} x {shape.dim} {shape.dtype}" if shape else None
        rows.append(described)
    columns = ("layers", "cache", "kind", "keys", "values", "window", "bits")
    yield records(rows, *columns, "bytes_per_token", "state_bytes")
    for group in spec.full:
        if group.why:
            yield f"{group.name}, {len(group.slots)} {group.cache}: not quantized, {group.why}"
    if full_bytes := sum(group.full_precision_bytes for group in spec.full):
        n_bytes = spec.bytes_per_token
        yield (
            f"A token takes {show_bytes(n_bytes)} live and on disk, {n_bytes / full_bytes:.2f} of "
            f"{show_bytes(full_bytes)} in full precision."
        )
    if spec.quantized:
        most = show_bytes((GRID - 1) * spec.newest_bytes)
        yield f"The newest tokens, {GRID - 1} at most, are kept as computed: up to {most}."
    for side in ("keys", "values") if spec.quantized else ():
        bits = [getattr(how, side).bits if how else FULL_BITS for how in spec.precisions.values()]
        picture = "".join("." if n == FULL_BITS else f"{n}" for n in bits)
        yield f"Bits of the {side} by layer: {picture}"
    if spec.any_prefix:
        any_place = (
            f"up to any multiple of {GRID} tokens" if spec.quantized else "any beginning of it"
        )
        yield f"Reusable: a conversation to its end, or {any_place}."
    else:
        yield (
            "Reusable: up to the checkpoints at the ends of the system prompt, of the last turns "
            f"and of their replies. Each takes up to {show_bytes(spec.bytes_per_checkpoint)}."
        )
    if spec.joins:
        yield "Batching: prompts of several clients are computed, and replies decoded, together."
    elif spec.batches:
        yield "Batching: the replies of several clients are decoded together."
    else:
        yield "Batching: none; this model's output is wrong in a batch, also without the plugin."
