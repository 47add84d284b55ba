"""Saved samples: one JSON file for each device and part of a run, and the page made from them.

    python -m benchmarks.report

makes RESULTS.md and the chart from `results/DEVICE/PART.json`. Measuring needs neither rich,
matplotlib nor git.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.cli.machine import device, versions

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER.parent / "RESULTS.md"
COMMIT = "BENCHMARK_COMMIT"
"""The environment variable that names the commit on a machine without git."""


class Report:
    """The samples of one part of a run, on disk after each sample."""

    def __init__(
        self, part: str, model: dict[str, Any], sides: dict[str, str], folder: Path | None = None
    ) -> None:
        self.path = (folder or FOLDER / device_folder()) / f"{part}.json"
        self.content: dict[str, Any] = {
            "part": part,
            "command": shown_command(sys.argv),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": commit(),
            "versions": versions(),
            "device": device(),
            "model": model,
            "sides": sides,
            "notes": {},
            "samples": [],
        }

    def add(self, question: str, what: str, side: str, unit: str, value: float) -> None:
        name = {"question": question, "what": what, "side": side, "unit": unit}
        rows: list[dict[str, Any]] = self.content["samples"]
        row = next((row for row in rows if name.items() <= row.items()), None)
        if row is None:
            rows.append(row := {**name, "values": []})
        row["values"].append(value)
        print(f"{question}: {what}, {side}: {value:.4g} {unit}", file=sys.stderr, flush=True)
        self._write()

    def note(self, question: str, text: str) -> None:
        self.content["notes"][question] = text
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.content, indent=1, default=str) + "\n", "utf-8")
        os.replace(temporary, self.path)


@dataclass(frozen=True)
class DeviceResults:
    folder: str
    parts: Sequence[dict[str, Any]]
    _rows: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            key = row["question"], row["what"], row["side"]
            self._rows[key] = row["values"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for part in self.parts for row in part["samples"]]

    @property
    def commits(self) -> list[str]:
        return list(dict.fromkeys(part["commit"] for part in self.parts))

    @property
    def device(self) -> dict[str, Any]:
        found: dict[str, Any] = self.parts[0]["device"]
        return found

    @property
    def kind(self) -> str:
        """Whether MLX computes on the "cpu" or the "gpu"."""
        return str(self.device["kind"])

    @property
    def shown_device(self) -> str:
        """Return a name such as NVIDIA H100 (GPU)."""
        # NVIDIA's names end with the memory: NVIDIA H100 80GB HBM3.
        name = re.sub(r" \d+GB\b.*", "", self.device.get("device_name", self.folder))
        return f"{name} ({self.kind.upper()})"

    @property
    def is_preset(self) -> bool:
        """All parts were measured with presets that have goals."""
        return all(part["part"].partition("-")[0] in ("cpu", "gpu") for part in self.parts)

    def values(self, question: str, what: str, side: str) -> list[float]:
        """Return samples in the order of the repeats; empty if not measured."""
        return self._rows.get((question, what, side), [])

    def median(self, question: str, what: str, side: str) -> float | None:
        values = self.values(question, what, side)
        return statistics.median(values) if values else None


def ratio(over: Sequence[float], under: Sequence[float]) -> float | None:
    """Return the median of the repeats' ratios; None without samples."""
    pairs = [a / b for a, b in zip(over, under, strict=False) if b]
    return statistics.median(pairs) if pairs else None


def device_folder() -> str:
    """Return a name such as amd-epyc-cpu."""
    name = f"{device().get('device_name', platform.machine())} {device()['kind']}".lower()
    words = "".join(char if char.isalnum() else " " for char in name).split()
    return "-".join(words)


def shown_command(argv: Sequence[str]) -> str:
    """Return the command line for the page, without this machine's folders.

    >>> shown_command(["/home/me/benchmarks/run_all.py", "--preset", "cpu", "--out", "/tmp/x"])
    'python -m benchmarks.run_all --preset cpu --out x'
    """
    words = [Path(word).name if word.startswith("/") else word for word in argv[1:]]
    command = f"python -m benchmarks.{Path(argv[0]).stem} {' '.join(words)}"
    is_openblas = "openblas" in os.environ.get("LD_PRELOAD", "")
    return f"python -m tests.support.openblas {command}" if is_openblas else command


def commit() -> str:
    """Return the measured commit, with "-dirty" at the end if files were changed."""
    return os.environ.get(COMMIT) or commit_of(FOLDER.parent)


def commit_of(folder: Path) -> str:
    describe = ("describe", "--always", "--abbrev=10", "--exclude=*", "--dirty")
    return _git(folder, *describe) or "unknown"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if the command fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def kept_results(folder: Path = FOLDER) -> list[DeviceResults]:
    """Return the saved results of all devices, GPUs first."""
    devices = [
        DeviceResults(
            each.name, [json.loads(path.read_text("utf-8")) for path in sorted(each.glob("*.json"))]
        )
        for each in sorted(folder.iterdir())
        if any(each.glob("*.json"))
    ]
    return sorted(devices, key=lambda results: results.kind, reverse=True)


def warnings(results: Iterable[DeviceResults]) -> list[str]:
    found = []
    for each in results:
        if len(each.commits) > 1:
            found.append(f"{each.folder} mixes results of {', '.join(each.commits)}.")
        for name in each.commits:
            if name.endswith("-dirty") or name == "unknown":
                found.append(f"{each.folder} was measured with changed files ({name}).")
    commits = {name for each in results for name in each.commits}
    if not found and len(commits) > 1:
        found.append(
            f"The devices were measured at different commits: {', '.join(sorted(commits))}."
        )
    return found


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def compare(results: DeviceResults, base: str) -> str:
    """Return a Markdown table of the rows that both `ours` and the side `base` have.

    A ratio is `ours` divided by `base`, as the median of the repeats.
    """
    rows = []
    for row in results.rows:
        question, what = row["question"], row["what"]
        under = results.values(question, what, base)
        if row["side"] == "ours" and under:
            medians = (results.median(question, what, side) for side in (base, "ours"))
            numbers = map(shown_number, (*medians, ratio(row["values"], under)))
            rows.append((question, what, row["unit"], *numbers))
    return show_table(("question", "row", "unit", base, "ours", f"ours / {base}"), rows)


def shown_number(value: float | None) -> str:
    """Return a number with three digits, or a whole number from 100 on; "" for None.

    >>> shown_number(0.12345), shown_number(1234.5)
    ('0.123', '1,234')
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_page() -> None:
    from .chart import draw
    from .page import make_page

    results = kept_results()
    draw(results)
    PAGE.write_text(make_page(results), encoding="utf-8")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.parse_args()
    write_page()


if __name__ == "__main__":
    main()
