"""RESULTS.md as text: the conditions, one table for each question, and the chart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .chart import CHART
from .goals import GOALS, QUESTIONS, Goal
from .report import DeviceResults, show_table, shown_number, warnings
from .servers import OURS, OURS_16, STOCK

_LIMITS = """\
## What the numbers do not show

Nothing was measured on Apple silicon: Metal has other kernels, and its memory is shared with the
CPU. The GPU's figures come from MLX's CUDA backend. A synthetic model has random weights in the
shape of the real model, so its times and bytes are realistic, but its replies mean nothing. A
quarter of the GPU's ratios and a fifth of the CPU's differ by more than a tenth between two runs of
the same code: mostly times below half a second, and rows with one to three samples. Some ratios
differ by a factor of 1.4 to 1.6."""
_HEADER = ("device", "row", "side", "unit", "stock", "plugin", "ratio", "goal", "result")


def make_page(results: Sequence[DeviceResults]) -> str:
    parts = ["# Results"]
    parts += [f"**Warning:** {text}" for text in warnings(results)]
    parts.append(
        "Made by `python -m benchmarks.report` from `results/`. [README.md](README.md) says how to "
        "measure. Except for 64K, both servers were up, and requests alternated. Values are "
        "medians. A ratio is the median of the repeats' ratios. Goals are for the presets `cpu` "
        "and `gpu-1` to `gpu-5`. An empty cell has no measurement or no goal."
    )
    parts += ["## Conditions", *(conditions(each) for each in results)]
    for question in QUESTIONS:
        rows = [row for each in results for row in _rows(each, question)]
        notes = [
            f"{each.folder}: {part['notes'][question]}"
            for each in results
            for part in each.parts
            if question in part["notes"]
        ]
        table = show_table(_HEADER, rows) if rows else "Nothing was measured."
        parts += [f"## {question[0].upper()}{question[1:]}", table, *dict.fromkeys(notes)]
    parts += ["## First token over context", f"![Seconds to the first token](../{CHART})", _LIMITS]
    return "\n\n".join(parts) + "\n"


def conditions(results: DeviceResults) -> str:
    first = results.parts[0]
    versions = ", ".join(f"{name} {value}" for name, value in first["versions"].items())
    days = sorted({part["date"][:10] for part in results.parts})
    model = first["model"]
    lines = [
        f"**{results.folder}**: {results.device.get('device_name', 'unknown')}, "
        f"{results.device['processors']} processors, {results.device['platform']}",
        f"- versions: {versions}",
        f"- commit: {', '.join(f'`{name}`' for name in results.commits)}; {' to '.join(days)}",
        f"- model: {model['name']}, {model['weights_bytes'] / 1e6:,.0f} MB"
        + (", random weights" if model["random_weights"] else ""),
        *(f"- {name}: `mlx_lm.server {flags}`" for name, flags in first["sides"].items()),
        *(f"- `{part['command']}`" for part in results.parts),
    ]
    return "\n".join([lines[0], "", *lines[1:]])


def _rows(results: DeviceResults, question: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the device's goals, then the rows without a goal."""
    goals = [goal for goal in GOALS if goal.question == question and goal.bound(results.kind)]
    shown = {(goal.what, goal.side) for goal in goals}
    measured = [row for row in results.rows if row["question"] == question]
    rest = dict.fromkeys(
        (row["what"], row["side"]) for row in measured if row["side"] in (OURS, OURS_16)
    )
    goals += [
        Goal(question, what, None, None, side=side)
        for what, side in rest
        if (what, side) not in shown
    ]
    units = {row["what"]: row["unit"] for row in measured}
    for goal in goals:
        if goal.what not in units and not results.is_preset:
            continue
        stock = results.median(question, goal.base or goal.what, STOCK)
        if goal.base_side != STOCK:
            stock = results.median(question, goal.what, STOCK)
        ours, ratio = results.median(question, goal.what, goal.side), goal.ratio(results)
        yield (
            *(results.folder, goal.what, goal.side, units.get(goal.what, "")),
            *map(shown_number, (stock, ours, ratio)),
            *(goal.shown_bound(results.kind) if results.is_preset else "", goal.verdict(results)),
        )
