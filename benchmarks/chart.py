"""Draw the time to the first token over the length of the prompt."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import ttft
from .report import DeviceResults
from .runs import tokens
from .servers import OURS, STOCK

CHART = "docs/figures/first-token.svg"
CONTEXTS = (1024, 4096, 8192, 16384, 32768, 65536)
_LINES = (
    ("new prompt", STOCK, "stock, new prompt", "#d95f02"),
    ("new prompt", OURS, "plugin, new prompt", "#1b6ca8"),
    ("after a restart", OURS, "plugin, after a restart", "#2a9d4a"),
)


def points(results: DeviceResults, what: str, side: str) -> list[tuple[int, float]]:
    """Return a line of the chart: the prompt's tokens, and seconds."""
    medians = ((n, results.median(ttft.QUESTION, f"{what}, {tokens(n)}", side)) for n in CONTEXTS)
    return [(n, seconds) for n, seconds in medians if seconds is not None]


def draw(results: Sequence[DeviceResults], path: Path | None = None) -> None:
    """Write the chart as SVG, with a panel for each device."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no chart: matplotlib is not installed (dependency group `bench`)", file=sys.stderr)
        return
    # With a random salt, equal results would give different files.
    style: dict[str, Any] = {"svg.hashsalt": "kvpersist", "font.size": 9}
    with pyplot.rc_context(style):
        figure, panels = pyplot.subplots(
            1, len(results), figsize=(4.5 * len(results), 3.4), squeeze=False
        )
        for axes, each in zip(panels[0], results, strict=True):
            _draw_panel(axes, each)
        figure.tight_layout()
        path = path or Path(__file__).parents[1] / CHART
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _draw_panel(axes: Any, results: DeviceResults) -> None:
    ticks: set[int] = set()
    for what, side, label, color in _LINES:
        if line := points(results, what, side):
            axes.plot(*zip(*line, strict=True), "o-", label=label, color=color)
            ticks.update(n for n, _ in line)
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt")
    axes.set(title=results.shown_device, ylabel="seconds to the first token")
    axes.set_xticks(sorted(ticks), map(tokens, sorted(ticks)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if ticks:
        axes.legend()
