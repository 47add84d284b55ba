"""A picture for each result that has one to show. Needs matplotlib; without it, none are drawn."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .report import Rows

_COLORS = {
    "ours": "#1f77b4",
    "ours-4": "#9467bd",
    "ours-8": "#17becf",
    "stock": "#ff7f0e",
    "stock-4": "#2ca02c",
}


def draw_all(
    folder: Path, results: Sequence[tuple[str, dict[str, Any]]]
) -> dict[tuple[str, str], str]:
    """Draw beside the results; return paths relative to the page, by device and result."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no pictures: matplotlib is not installed (group `bench`)", file=sys.stderr)
        return {}
    drawn = {}
    for device, result in results:
        draw = _DRAW.get(result["name"].partition("-")[0])
        if draw is None or not result["rows"]:
            continue
        figure = draw(pyplot, result["rows"])
        figure.suptitle(f"{result['name']}, {device}")
        figure.tight_layout()
        path = folder / device / f"{result['name']}.png"
        # No software, no date: equal numbers make equal files.
        figure.savefig(path, dpi=100, metadata={"Software": None})
        pyplot.close(figure)
        drawn[device, result["name"]] = path.relative_to(folder.parent).as_posix()
    return drawn


def _sides(rows: Rows, unit: str) -> list[str]:
    names = dict.fromkeys(column for row in rows for column in row)
    return [name.removesuffix(unit) for name in names if name.endswith(unit) and " " in name]


def _draw_ttft(pyplot: Any, rows: Rows) -> Any:
    states = list(dict.fromkeys(row["state"] for row in rows))
    figure, panels = pyplot.subplots(1, len(states), figsize=(3.2 * len(states), 3.6), sharey=True)
    for state, axes in zip(states, _listed(panels), strict=True):
        of_state = sorted((row for row in rows if row["state"] == state), key=_context)
        for side in _sides(rows, " s"):
            points = [
                (row["context"], row[f"{side} s"]) for row in of_state if row.get(f"{side} s")
            ]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=side, color=_COLORS.get(side))
        axes.set(title=state, xscale="log", yscale="log", xlabel="tokens of the prompt")
        axes.grid(alpha=0.3)
    _listed(panels)[0].set_ylabel("seconds to the first token")
    _listed(panels)[0].legend()
    return figure


def _draw_decode(pyplot: Any, rows: Rows) -> Any:
    contexts = sorted({row["context"] for row in rows})
    figure, panels = pyplot.subplots(
        2, len(contexts), figsize=(3.6 * len(contexts), 6), sharex=True, sharey="row", squeeze=False
    )
    for column, context in enumerate(contexts):
        of_context = sorted(
            (row for row in rows if row["context"] == context), key=lambda row: row["batch"]
        )
        for unit, axes in ((" tokens/s", panels[0][column]), (" peak MB", panels[1][column])):
            for side in _sides(rows, unit):
                points = [
                    (row["batch"], row[side + unit]) for row in of_context if side + unit in row
                ]
                axes.plot(*zip(*points, strict=True), "o-", label=side, color=_COLORS.get(side))
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        panels[0][column].set_title(f"{context:,} tokens")
        panels[1][column].set_xlabel("conversations at a time")
    panels[0][0].set_ylabel("tokens a second")
    panels[1][0].set_ylabel("peak memory, MB")
    panels[0][0].legend()
    return figure


def _draw_stall(pyplot: Any, rows: Rows) -> Any:
    labels = [f"{row['side']}: {row['while']}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(rows) + 1.5))
    for name, marker in (("p50 ms", "o"), ("p95 ms", "s"), ("max ms", "x")):
        axes.plot([row[name] for row in rows], labels, marker, label=name.removesuffix(" ms"))
    axes.set(xscale="log", xlabel="ms between two tokens")
    axes.grid(alpha=0.3)
    axes.invert_yaxis()
    axes.legend()
    return figure


def _draw_store(pyplot: Any, rows: Rows) -> Any:
    rated = [row for row in rows if row.get("GB/s")]
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(rated) + 1.2))
    axes.barh([row["what"] for row in rated], [row["GB/s"] for row in rated])
    axes.set_xlabel("GB/s")
    axes.invert_yaxis()
    return figure


def _context(row: dict[str, Any]) -> int:
    return int(row["context"])


def _listed(panels: Any) -> list[Any]:
    return list(panels.flat) if hasattr(panels, "flat") else [panels]


_DRAW: dict[str, Callable[[Any, Rows], Any]] = {
    "ttft": _draw_ttft,
    "decode": _draw_decode,
    "stall": _draw_stall,
    "store": _draw_store,
}
