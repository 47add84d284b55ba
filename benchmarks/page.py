"""RESULTS.md as text: the goals against what was reached, then every result with what it names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .goals import reached
from .report import Rows, columns, shown

_INTRODUCTION = """\
# Results

Made by `python -m benchmarks.report` from `results/<device>/*.json`; [README.md](README.md) says
how to measure. Trust ratios within one table: they were measured in one run, on one machine, by
sides that took turns. Models called `synthetic:` have random weights of the real model's shape;
their replies mean nothing, their time and memory do.

## What the numbers do not show

None of this ran on Apple silicon. The CPU runs are MLX's CPU backend on shared virtual machines
with OpenBLAS preloaded (the reference BLAS of its wheel is 15 to 45 times as slow, which flatters
every cache), and which fetch memory that is used for the first time from their host at a gigabyte a
second or two: restores there pay for that more than for anything else, and vary with it by a factor
of two. MLX's product over packed keys takes 1.6 times as long there as OpenBLAS over plain ones, so
decoding is slower than stock's on a CPU, whatever the bits. The GPU runs are its CUDA backend:
other kernels than Metal's, memory of its own beside the machine's, and a disk behind a hypervisor,
not an SSD on the bus. So speedups of a restart and slowdowns of 4-bit attention have to be measured
again on a Mac before anybody relies on them; bytes do not depend on the machine. Quality was
measured on one small model, which bears less than large ones; `mlx-lm-kvpersist quality` measures
yours. Each result says what its side "ours" is: until 2026-11-22 it had 4 bits, not rotated, and
until 2026-11-26 keys of 6 bits and values of 4.

A result is "not current" if its code is not in the history of this repository. The goals do not
count such results."""


def make_page(
    results: Sequence[tuple[str, dict[str, Any]]],
    pictures: Mapping[tuple[str, str], str],
    lost_commits: Collection[str] = (),
) -> str:
    """Return the page.

    pictures: paths relative to the page, by device and result.
    lost_commits: commits that are not in the history; their results are not judged.
    """
    judged = [each for each in results if each[1]["commit"] not in lost_commits]
    parts = [_INTRODUCTION, "", "## Goals", "", *_goals(judged)]
    devices = list(dict.fromkeys(device for device, _ in results))
    for device in devices:
        parts += ["", f"## {device}"]
        for its_device, result in results:
            if its_device == device:
                picture = pictures.get((device, result["name"]))
                parts += ["", *_section(result, picture, result["commit"] in lost_commits)]
    return "\n".join(parts) + "\n"


def _goals(results: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    rows: Rows = []
    for goal in reached(results):
        verdict = "not measured" if goal.value is None else "reached" if goal.is_met else "missed"
        rows.append(
            {
                "goal": goal.what,
                "bound": goal.bound,
                "reached": goal.value,
                "verdict": verdict,
                "from": goal.source,
            }
        )
    return _markdown(rows)


def _section(result: dict[str, Any], picture: str | None, is_lost: bool) -> list[str]:
    setting = dict(result["setting"])
    sides: dict[str, str] = setting.pop("sides", {})
    facts = [f"{key} {shown(value)}" for key, value in setting.items() if value is not None]
    if model := result.get("model"):
        fingerprint = f", fingerprint {model['fingerprint']}" if "fingerprint" in model else ""
        facts.insert(0, f"model {model['name']}{fingerprint}")
    device = result["device"]
    named = f"{device.get('device_name')}, {device['platform']}"
    if processors := device.get("processors"):
        named += f", {processors} processors"
    versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
    lines = [
        f"### {result['name']}",
        "",
        f"{result['about']} {'; '.join(facts)}.",
        "",
        f"{versions}; {named}; commit {result['commit']}, {result['date']}.",
        "",
        *(["**Not current**: the history does not have this commit.", ""] if is_lost else ()),
        *_markdown(result["rows"]),
    ]
    if sides:
        lines += ["", *(f"- {name}: `mlx_lm.server {flags}`" for name, flags in sides.items())]
    if left_out := result.get("left_out"):
        lines += ["", f"There was no time for: {'; '.join(left_out)}."]
    if picture:
        lines += ["", f"![{result['name']}]({picture})"]
    return lines


def _markdown(rows: Rows) -> list[str]:
    if not rows:
        return ["Nothing was measured."]
    names = columns(rows)
    lines = [f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"]
    lines += [f"| {' | '.join(shown(row.get(name)) for name in names)} |" for row in rows]
    return lines
