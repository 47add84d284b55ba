"""`mlx-lm-kvpersist spec`: a model's caches, how they are kept, and what can be reused."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mlx_lm.utils import load

from ..cache.geometry.fingerprint import content_hash, local_path, model_fingerprint
from ..cache.geometry.kinds import GroupKind
from ..cache.geometry.precision import FULL_BITS, Allocation, PrecisionRequest
from ..cache.geometry.spec import Batching, ModelCacheSpec, TensorShape
from ..cache.measuring.allocation import chosen_spec, measure
from ..cache.measuring.persisted_allocation import known_allocation, suits
from ..cache.measuring.sample import sample_ids
from ..config import KV_BITS
from ..errors import KVPersistError, ModelNotSupported
from ..host.scheduling.model_provider import check_model_name
from ..store.folder import INDEX_FILES
from ..units import show_bytes
from .opening import folder_of, reading
from .output import console, print_json, print_table, progress, tell

_BATCHING = {
    Batching.REPLIES: "the replies of several clients are decoded together",
    Batching.NONE: "one request at a time (this model's output is wrong in a batch, also without "
    "the plugin, or its caches cannot be batched)",
}


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
    request = request_of(args, args.bits)
    try:
        known = _known(args, request) if request.is_measured else None
        spec, allocation = measured_spec(model, tokenizer, request, known)
    except ModelNotSupported as error:
        said = f"{args.model} is served as stock does, nothing is kept: {error}"
        tell(args, {"model": args.model, "kept": False, "why_not": str(error)}, said)
        return 1
    if args.json:
        print_json({"model": args.model, "kept": True, **spec.describe()})
    else:
        _print(args.model, spec)
        if allocation is not None and allocation.measured_on:
            where = "now, the server does so at its first start"
            if allocation is known:
                where = f"on {allocation.measured_on} by the server"
            console().print(f"Bits were measured {where}.")
    return 0


def request_of(args: argparse.Namespace, bits: str) -> PrecisionRequest:
    """Return what the options ask for, with these bits."""
    return PrecisionRequest(
        KV_BITS[bits], args.group_size, args.rotate, args.target, args.measure_s
    )


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
    """Return what a server chose, if its store has it."""
    folder = folder_of(args)
    if not (folder / INDEX_FILES[0]).exists():
        return None
    adapter = Path(args.adapter_path) if args.adapter_path else None
    fingerprint = model_fingerprint(local_path(args.model), adapter, content_hash)
    with reading(folder) as index:
        return known_allocation(index.state, fingerprint, request)


def _print(model: str, spec: ModelCacheSpec) -> None:
    out = console()
    out.print(f"{model}: {len(spec.template)} layers")
    rows = [
        [
            f"{len(group.slots)}",
            group.cache,
            group.kind.value,
            _shape(group.keys),
            _shape(group.values),
            "" if group.window is None else f"{group.window:,}",
            str(group.precision or "full"),
            show_bytes(group.bytes_per_token) if group.bytes_per_token else "",
            show_bytes(group.full_precision_bytes) if group.full_precision_bytes else "",
            show_bytes(group.state_bytes) if group.state_bytes else "",
        ]
        for group in spec.groups
    ]
    columns = ["layers", "cache", "kind", "keys", "values", "window", "bits"]
    columns += ["a token", "unquantized", "a state"]
    print_table(columns, rows, right="layers window")
    for group in spec.groups:
        if group.why and group.kind is GroupKind.FULL:
            names = f"The {len(group.slots)} {group.cache} of group {group.name}"
            out.print(f"{names} not quantized: {group.why}")
    full_bytes = sum(group.full_precision_bytes for group in spec.full)
    if full_bytes:
        share = spec.bytes_per_token / full_bytes
        out.print(
            f"A token takes {show_bytes(spec.bytes_per_token)} live and on disk, {share:.2f} of "
            f"{show_bytes(full_bytes)} in full precision."
        )
    for side, picture in pictures(spec).items():
        out.print(f"Bits of the {side} by layer: {picture}")
    for line in _reuse(spec):
        out.print(line)
    out.print(f"Batching: {_BATCHING[spec.batching]}.")


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


def _reuse(spec: ModelCacheSpec) -> list[str]:
    """Return what can be reused of a conversation, in sentences."""
    if spec.any_prefix:
        return ["Reusable: any beginning of a conversation, to the token."]
    lines = []
    if spec.sliding and not spec.recurrent:
        windows = " and ".join(f"{window:,}" for window in spec.sliding)
        lines.append(
            f"Reusable: up to any place whose last {windows} tokens are stored. They are stored "
            "for the ends of the system prompt, of the last turns and of their replies."
        )
    else:
        lines.append(
            "Reusable: up to the ends of the system prompt, of the last turns and of their "
            "replies, where the state of the recurrent layers is stored."
        )
    lines.append(
        f"Each such checkpoint takes up to {show_bytes(spec.bytes_per_checkpoint)} on disk."
    )
    lines.append(
        "Restored blocks are verified by checksum. Computing the last tokens again (the canary) is "
        "not possible"
        + (f" beyond {min(spec.sliding):,} tokens." if spec.sliding and not spec.recurrent else ".")
    )
    return lines


def _shape(shape: TensorShape | None) -> str:
    return f"{shape.n_heads} x {shape.dim} {shape.dtype}" if shape else ""
