"""The demo's picture: how long each request waited for its first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.bar import Bar
from rich.table import Table
from rich.text import Text

from .output import console

_WIDTH = 40
Times = Sequence[tuple[str, str, float]]
"""(server, request, seconds to the first token) of every request, in order."""


def print_bars(times: Times) -> None:
    """Print a bar for each time, the longest as wide as the picture."""
    longest = max(seconds for *_, seconds in times)
    table = Table(box=None, pad_edge=False, title="Time to the first token", title_justify="left")
    for _ in range(3):
        table.add_column()
    table.show_header = False
    for server, request, seconds in times:
        bar = Bar(longest, 0, seconds, width=_WIDTH, color="green" if server != "stock" else "red")
        table.add_row(Text(f"{server}, {request}"), bar, Text(f"{seconds:.2f} s"))
    console().print(table)


def draw(times: Times, file: Path) -> bool:
    """Write the same as a PNG; return False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(7, 0.5 * len(times) + 1.2))
    shown: Any = list(reversed(times))
    colors = ["#ff7f0e" if server == "stock" else "#1f77b4" for server, *_ in shown]
    labels = [f"{server}, {request}" for server, request, _ in shown]
    bars = axes.barh(labels, [seconds for *_, seconds in shown], color=colors)
    axes.bar_label(bars, [f" {seconds:.2f} s" for *_, seconds in shown])
    axes.set_xlabel("seconds to the first token")
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    return True
