"""What every result says of itself, where results are kept, and the page made from them."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

PACKAGES = ("mlx", "mlx-lm", "mlx-lm-kvpersist")
FOLDER = Path(__file__).parent / "results"
Rows = list[dict[str, Any]]


def keep(name: str, about: str, setting: dict[str, Any], rows: Rows) -> Path:
    """Write a result to `results/<name>.json`, with all that it depends on; print its table."""
    result = {
        "name": name,
        "about": about,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {
            package: version(package) for package in ("mlx", "mlx-lm", "mlx-lm-kvpersist")
        },
        "device": {**mx.device_info(), "platform": platform.platform()},
        "setting": setting,
        "rows": rows,
    }
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    _print(about, rows)
    write_page()
    return path


def write_page() -> None:
    """Write RESULTS.md from all results that are kept."""
    parts = [
        "# Results",
        "",
        "Made by the commands in this folder from `results/*.json`. Trust ratios within one table: "
        "they were measured in one run on one machine. None of it ran on Apple silicon.",
    ]
    for path in sorted(FOLDER.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        setting = ", ".join(f"{key} {value}" for key, value in result["setting"].items())
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        parts += [
            "",
            f"## {result['name']}",
            "",
            f"{result['about']} {setting}. {versions}; {result['device'].get('device_name')}, "
            f"{result['device']['platform']}; commit {result['commit']}, {result['date']}.",
            "",
            *_markdown(result["rows"]),
        ]
    (FOLDER.parent / "RESULTS.md").write_text("\n".join(parts) + "\n", encoding="utf-8")


def _commit() -> str:
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() or "unknown"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _markdown(rows: Rows) -> list[str]:
    columns = list(rows[0])
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join(_shown(row[column]) for column in columns)} |" for row in rows]
    return lines


def _print(about: str, rows: Rows) -> None:
    table = Table(title=about, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_shown(value) for value in row.values()))
    Console().print(table)
