"""`mlx-lm-kvpersist spec`: a model's caches, how they are kept, and what can be reused."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_lm.utils import load
from rich.table import Table

from ..cache.geometry.fingerprint import content_hash, local_path, model_fingerprint
from ..cache.geometry.precision import FULL_BITS, Allocation, PrecisionRequest
from ..cache.geometry.spec import Batching, ModelCacheSpec
from ..cache.measuring.allocation import chosen_spec, measure
from ..cache.measuring.persisted_allocation import known_allocation, suits
from ..cache.measuring.sample import sample_ids
from ..config import precision_of
from ..errors import KVPersistError, ModelNotSupported
from ..host.scheduling.model_provider import check_model_name
from ..store.folder import INDEX_FILES
from ..units import show_bytes
from .opening import folder_of, reading
from .output import progress, records, tell


def load_named(name: str, adapter_path: str | None = None) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder, or of a name on the hub.

    Raises:
        ConfigError: the folder does not exist.
        KVPersistError: the model cannot be loaded.
    """
    check_model_name(name)
    try:
        loaded: Any = load(name, adapter_path=adapter_path)
    except Exception as error:
        # The hub, tokenizers and damaged files raise exceptions of many classes.
        reason = " ".join(str(error).split())[:300] or repr(error)
        raise KVPersistError(f"the model {name} cannot be loaded: {reason}") from error
    return loaded[0], loaded[1]


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status, 1 for a model that is not kept.

    Raises KVPersistError when the model cannot be loaded.
    """
    model, tokenizer = load_named(args.model, args.adapter_path)
    request = precision_of(args)
    try:
        known = _known(args, request) if request.is_measured else None
        spec, allocation = measured_spec(model, tokenizer, request, known)
    except ModelNotSupported as error:
        said = f"{args.model} is served as stock does, nothing is kept: {error}"
        tell(args, {"model": args.model, "kept": False, "why_not": str(error)}, said)
        return 1
    if allocation is None or not allocation.measured_on:
        measured = "not measured"
    elif allocation is known:
        measured = f"measured on {allocation.measured_on} by the server"
    else:
        measured = "measured now, as the server does at its first start"
    content = {"model": args.model, "kept": True, **spec.describe()}
    tell(args, content, *_explained(spec), f"Bits: {measured}.")
    return 0


def request_of(args: argparse.Namespace, bits: str) -> PrecisionRequest:
    """Return what the options ask for, with these bits."""
    args.kvpersist_kv_bits = bits
    return precision_of(args)


def measured_spec(
    model: Any, tokenizer: Any, request: PrecisionRequest, known: Allocation | None = None
) -> tuple[ModelCacheSpec, Allocation | None]:
    """Return a model's spec as the server finds it, and its allocation: `known`, or measured now.

    Raises:
        KVPersistError: MLX cannot quantize so, or the model cannot be measured.
        ModelNotSupported: nothing of this model is kept.
    """

    def choose(spec: ModelCacheSpec) -> Allocation:
        if known is not None and suits(known, spec, request):
            return known
        try:
            with progress("precision") as on_progress:
                return measure(model, spec, sample_ids(tokenizer), request, on_progress)
        except Exception as error:
            raise KVPersistError(f"its precision cannot be measured: {error!r}") from error

    try:
        return chosen_spec(model, request, choose)
    except ValueError as error:
        raise KVPersistError(str(error)) from error


def _known(args: argparse.Namespace, request: PrecisionRequest) -> Allocation | None:
    """Return what a server chose, if its store has it and may be read."""
    folder = folder_of(args)
    try:
        if not (folder / INDEX_FILES[0]).exists():
            return None
        adapter = Path(args.adapter_path) if args.adapter_path else None
        fingerprint = model_fingerprint(local_path(args.model), adapter, content_hash)
        with reading(folder) as index:
            return known_allocation(index.state, fingerprint, request)
    except PermissionError:
        return None


def _explained(spec: ModelCacheSpec) -> Iterator[str | Table]:
    """Yield how a model's caches are kept, for people."""
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
    for side, picture in pictures(spec).items():
        yield f"Bits of the {side} by layer: {picture}"
    if spec.any_prefix:
        yield "Reusable: any beginning of a conversation, to the token."
    else:
        yield (
            "Reusable: up to the checkpoints at the ends of the system prompt, of the last turns "
            f"and of their replies. Each takes up to {show_bytes(spec.bytes_per_checkpoint)}."
        )
    if spec.batching is Batching.REPLIES:
        yield "Batching: the replies of several clients are decoded together."
    else:
        yield "Batching: none; this model's output is wrong in a batch, also without the plugin."


def pictures(spec: ModelCacheSpec) -> dict[str, str]:
    """Return the bits of the full layers' keys and values, a digit each; "." for full precision."""
    pairs = ((slot, group.precision) for group in spec.full for slot in group.slots)
    by_slot = sorted(pairs, key=lambda pair: pair[0])
    if not any(precision for _, precision in by_slot):
        return {}
    bits = {
        side: [getattr(how, side).bits if how else FULL_BITS for _, how in by_slot]
        for side in ("keys", "values")
    }
    return {
        side: "".join("." if n == FULL_BITS else f"{n}" for n in each)
        for side, each in bits.items()
    }
