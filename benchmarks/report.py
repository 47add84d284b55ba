"""Results: their conditions, the folder that keeps them, and the page made from them.

    python -m benchmarks.report

makes RESULTS.md and the pictures anew from `results/<device>/<name>.json`. Measuring needs none of
rich, matplotlib and git: a machine may have only MLX, and the page be made on another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.cli.machine import device, versions

FOLDER = Path(__file__).parent / "results"
COMMIT = "BENCHMARK_COMMIT"
"""The environment variable that names the commit where there is no git."""

Rows = list[dict[str, Any]]


class Result:
    """A result that grows: each row is on disk as soon as it is known."""

    def __init__(
        self,
        name: str,
        about: str,
        setting: dict[str, Any],
        *,
        model: dict[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.path = (folder or FOLDER / device_slug()) / f"{name}.json"
        self.content: dict[str, Any] = {
            "name": name,
            "about": about,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": _commit(),
            "versions": versions(),
            "device": device(),
            "model": model,
            "setting": setting,
            "rows": [],
            "left_out": [],
        }

    @property
    def rows(self) -> Rows:
        rows: Rows = self.content["rows"]
        return rows

    def add(self, *rows: dict[str, Any]) -> None:
        """Add rows, and write the result."""
        self.rows.extend(rows)
        self.write()

    def leave_out(self, what: str) -> None:
        """Note what there was no time for."""
        self.content["left_out"].append(what)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        content = json.dumps(self.content, indent=2, default=str) + "\n"
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, self.path)

    def show(self) -> None:
        """Print the table."""
        show(self.content["about"], self.rows)
        for what in self.content["left_out"]:
            print(f"left out, no time: {what}")
        print(f"kept in {self.path}", flush=True)


def device_slug() -> str:
    """Return the device as the name of a folder, such as amd-epyc-cpu."""
    name = f"{device().get('device_name', platform.machine())} {device()['kind']}".lower()
    words = "".join(char if char.isalnum() else " " for char in name).split()
    return "-".join(words)


@cache
def _commit() -> str:
    if given := os.environ.get(COMMIT):
        return given
    return _git("describe", "--always", "--dirty") or "unknown"


def lost_commits(commits: Iterable[str]) -> set[str]:
    """Return the commits that are not in the history of HEAD, such as one with `-dirty`.

    Without git, or outside of a checkout, say so and return none.
    """
    if _git("rev-parse", "HEAD") is None:
        print("no history of git: results of lost commits are not marked", file=sys.stderr)
        return set()
    return {each for each in commits if _git("merge-base", "--is-ancestor", each, "HEAD") is None}


def _git(*arguments: str) -> str | None:
    """Return the output of a git command in this folder; None if the command fails."""
    command = ["git", "-C", str(FOLDER.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def shown(value: Any) -> str:
    """Return a cell of a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def columns(rows: Rows) -> list[str]:
    """Return all columns of rows that need not have the same."""
    return list(dict.fromkeys(column for row in rows for column in row))


def show(about: str, rows: Rows) -> None:
    """Print a table, with rich where it is installed."""
    cells = [[shown(row.get(column)) for column in columns(rows)] for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(about)
        print("\t".join(columns(rows)))
        for line in cells:
            print("\t".join(line))
        return
    table = Table(title=about, title_justify="left", box=None, pad_edge=False)
    for column in columns(rows):
        table.add_column(column, justify="right", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    # As wide as it has to be: cut off, a table says nothing.
    Console(width=400, soft_wrap=True).print(table, crop=False)


def kept_results(folder: Path = FOLDER) -> list[tuple[str, dict[str, Any]]]:
    """Return all results that are kept, as (device's folder, content), in order."""
    found = []
    for path in sorted(folder.glob("*/*.json")):
        found.append((path.parent.name, json.loads(path.read_text(encoding="utf-8"))))
    return found


def write_page(folder: Path = FOLDER, page: Path | None = None) -> None:
    """Write RESULTS.md, and the pictures where matplotlib is installed."""
    from .page import make_page
    from .pictures import draw_all

    results = kept_results(folder)
    lost = lost_commits({result["commit"] for _, result in results})
    text = make_page(results, draw_all(folder, results), lost)
    (page or folder.parent / "RESULTS.md").write_text(text, encoding="utf-8")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    write_page()


if __name__ == "__main__":
    main()
