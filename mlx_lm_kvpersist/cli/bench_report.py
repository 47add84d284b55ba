"""The table that `bench` prints, in Markdown, to be pasted."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..cache.geometry.precision import layout_in_words
from ..units import show_bytes

_COLUMNS = ("", "stock", "kvpersist", "times as fast", "kvpersist reused")


def row(
    what: str,
    unit: str,
    stock: Sequence[float],
    ours: Sequence[float],
    *,
    reused: Sequence[float] | None = None,
    more_is_better: bool = False,
) -> dict[str, Any]:
    """Return a row: medians, and the median of the ratios of what belongs together.

    stock, ours: in the same order. reused: tokens, by side.
    """
    pairs = [(b, a) if more_is_better else (a, b) for a, b in zip(stock, ours, strict=False)]
    return {
        "what": what,
        "unit": unit,
        "stock": statistics.median(stock),
        "kvpersist": statistics.median(ours),
        "times_as_fast": statistics.median(over / under for over, under in pairs),
        "reused": dict(zip(("stock", "kvpersist"), reused, strict=True)) if reused else None,
        "samples": {"stock": list(stock), "kvpersist": list(ours)},
    }


def conditions(content: Mapping[str, Any]) -> list[str]:
    """Return the versions, the machine and the model, each in a line."""
    found, device, model = content["versions"], content["device"], content["model"]
    bits = f", {model['weight_bits']}-bit" if model["weight_bits"] else ""
    n_bytes = device.get("memory_size")
    memory = f", {show_bytes(n_bytes)}" if n_bytes else ""
    gflops = content["cpu_gflops"]
    cpu = f", {gflops:.3g} GFLOP/s" if gflops else ""
    return [
        f"mlx-lm-kvpersist {found.get('mlx-lm-kvpersist', 'not installed')}, "
        f"mlx-lm {found['mlx-lm']}, mlx {found['mlx']}, Python {found['python']}",
        f"{device.get('device_name')}, {device['kind']}{memory}{cpu}, {device['platform']}, "
        f"{device['processors']} processors, load {content['load_before']} before",
        f"{model['name']} ({model['type']}{bits}, {model['weights']})",
    ]


def as_markdown(content: Mapping[str, Any]) -> str:
    """Return what was measured, with its conditions."""
    kv, setting = content["kv"], content["setting"]
    kept = layout_in_words(kv["layout"]) if kv.get("kept") else f"nothing is kept ({kv['why_not']})"
    versions, machine, model = conditions(content)
    lines = [
        versions,
        machine,
        f"{model}; precision of kvpersist: {kept}",
        f"prompts of {setting['prompt_tokens']:,} tokens, {setting['conversations']} of each; one "
        "request and one server at a time; the system's page cache was not dropped",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for each in content["rows"]:
        reused = f"{each['reused']['kvpersist']:,.0f} tokens" if each["reused"] else ""
        cells = [
            each["what"],
            *(f"{each[side]:.3g} {each['unit']}" for side in ("stock", "kvpersist")),
            f"{each['times_as_fast']:.3g}",
            reused,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"{content['date']}, took {content['seconds']} s"]
    return "\n".join(lines)
