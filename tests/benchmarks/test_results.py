"""Benchmark results: saved samples, goals, the page and its warnings, the chart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import chart, report
from benchmarks.goals import GOALS, Goal
from benchmarks.page import make_page
from benchmarks.report import DeviceResults, Report, kept_results, warnings
from benchmarks.run_all import PRESETS


def results(
    *rows: tuple[str, str, str, list[float]],
    kind: str = "cpu",
    part: str = "cpu",
    commits: tuple[str, ...] = ("abc",),
) -> DeviceResults:
    """Return results of a device; a row is question, what, side and values."""
    names = ("question", "what", "side", "values")
    samples = [{**dict(zip(names, row, strict=True)), "unit": "s"} for row in rows]
    model = {"name": "m", "weights_bytes": 1, "random_weights": True}
    content: dict[str, Any] = {"part": part, "versions": {}, "date": "2026-11-27", "model": model}
    content |= {"sides": {}, "command": "python", "notes": {}, "samples": samples}
    content["device"] = {"kind": kind, "processors": 2, "platform": "p"}
    return DeviceResults("device", [{**content, "commit": commit} for commit in commits])


def test_each_sample_is_saved_when_it_is_added(tmp_path: Path) -> None:
    new_report = Report("cpu", {"name": "m"}, {}, tmp_path / "device")
    new_report.add("q", "w", "ours", "s", 1.0)
    assert json.loads(new_report.path.read_text())["samples"][0]["values"] == [1.0]
    new_report.add("q", "w", "stock", "s", 3.0)
    new_report.add("q", "w", "ours", "s", 2.0)
    new_report.note("q", "How.")
    (saved,) = kept_results(tmp_path)
    assert saved.values("q", "w", "ours") == [1.0, 2.0] and saved.median("q", "w", "stock") == 3.0
    assert {"mlx", "mlx-lm", "python"} <= saved.parts[0]["versions"].keys()
    assert saved.parts[0]["notes"] == {"q": "How."} and saved.values("q", "x", "ours") == []


@pytest.mark.parametrize(
    ("ours", "at_least", "verdict"),
    [
        (1.1, False, "reached"),
        (1.2, False, "missed"),
        (1.1, True, "reached"),
        (1.0, True, "missed"),
    ],
)
def test_a_goal_is_reached_or_missed(ours: float, at_least: bool, verdict: str) -> None:
    goal = Goal("q", "w", 1.1, None, at_least=at_least)
    measured = results(("q", "w", "ours", [ours]), ("q", "w", "stock", [1.0]))
    assert goal.verdict(measured) == verdict
    assert goal.verdict(results(kind="gpu")) == "", "there is no goal for a GPU"
    assert goal.verdict(results()) == "not measured"
    smoke = results(("q", "w", "ours", [ours]), ("q", "w", "stock", [1.0]), part="smoke")
    assert goal.verdict(smoke) == "", "goals are for the presets"


def test_a_ratio_is_the_median_over_the_repeats() -> None:
    measured = results(("q", "w", "ours", [1.0, 4.0, 9.0]), ("q", "w", "stock", [1.0, 1.0, 3.0]))
    assert Goal("q", "w", 1.0, 1.0).ratio(measured) == 3.0, "the ratio of the medians is 4"
    other = Goal("q", "w", 1.0, 1.0, base="v", base_side="ours")
    assert other.ratio(measured) is None
    measured = results(("q", "w", "ours", [3.0]), ("q", "v", "ours", [2.0]))
    assert other.ratio(measured) == 1.5


def test_every_goal_has_a_row_that_the_presets_measure() -> None:
    """The goals have the names of the benchmarks' rows."""
    contexts = {"cpu": ("8K", "4K"), "gpu": ("8K", "32K", "4K", "16K")}
    names = " ".join(name for preset in PRESETS.values() for name in map(str, preset.steps))
    for goal in GOALS:
        for kind in ("cpu", "gpu"):
            size = goal.what.rpartition(" ")[2]
            if goal.bound(kind) is not None and size.endswith("K"):
                assert size in contexts[kind] and str(int(size[:-1]) * 1024) in names


def test_the_page_shows_reached_missed_and_missing_rows() -> None:
    rows = [
        ("first token", "new prompt, 8K", side, [s]) for side, s in (("ours", 1.0), ("stock", 2.0))
    ]
    again = [("first token", "same prompt again, 8K", side, [2.0]) for side in ("ours", "stock")]
    extra = [("first token", "new prompt, 1K", side, [3.0]) for side in ("ours", "stock")]
    page = make_page([results(*rows, *again, *extra)])
    assert "| new prompt, 8K | ours | s | 2 | 1 | 0.5 | at most 1.05 | reached |" in page
    assert "| same prompt again, 8K | ours | s | 2 | 2 | 1 | at most 0.8 | missed |" in page
    assert "| next turn, 8K | ours |  |  |  |  | at most 0.9 | not measured |" in page
    assert "| new prompt, 1K | ours | s | 3 | 3 | 1 |  |  |" in page
    assert "Warning" not in page


@pytest.mark.parametrize(
    ("saved", "warning"),
    [
        ([results(commits=("a", "b"))], "device mixes results of a, b"),
        ([results(commits=("a-dirty",))], "measured with changed files (a-dirty)"),
        ([results(commits=("unknown",))], "measured with changed files (unknown)"),
        ([results(commits=("a",)), results(commits=("b",))], "at different commits: a, b"),
    ],
)
def test_the_page_warns_of_mixed_or_changed_commits(
    saved: list[DeviceResults], warning: str
) -> None:
    assert any(warning in message for message in warnings(saved))
    top = make_page(saved).partition("## ")[0]
    assert "**Warning:**" in top and warning in top


def test_saved_results_of_a_device_have_one_clean_commit() -> None:
    saved = kept_results()
    assert saved, "no results are kept"
    for device in saved:
        assert len(device.commits) == 1, f"{device.folder}: measure all parts at one commit"
        assert not device.commits[0].endswith("-dirty") and device.commits[0] != "unknown"


def test_the_saved_page_matches_the_saved_results() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert page == make_page(kept_results()), "run: python -m benchmarks.report"
    assert len(page.splitlines()) <= 250


def test_the_largest_page_has_at_most_250_lines() -> None:
    """Every goal on both kinds of device, and the same number of rows without a goal."""
    devices = [
        results(
            *(
                (goal.question, goal.what + extra, side, [1.0])
                for goal in GOALS
                for side in ("ours", "stock")
                for extra in ("", ", too")
            ),
            kind=kind,
            part=kind,
        )
        for kind in ("cpu", "gpu")
    ]
    assert 100 < len(make_page(devices).splitlines()) <= 250


def test_the_chart_has_a_line_for_each_kind_of_prompt(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        ("first token", f"{prompt}, {size}", side, [seconds, 3 * seconds])
        for prompt, side in (
            ("new prompt", "stock"),
            ("new prompt", "ours"),
            ("after a restart", "ours"),
        )
        for size, seconds in (("1K", 1.0), ("64K", 20.0))
        if (side, size) != ("stock", "64K")
    ]
    measured = results(*rows)
    assert chart.points(measured, "new prompt", "stock") == [(1024, 2.0)]
    for name in ("a.svg", "b.svg"):
        chart.draw([measured], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "a.svg").read_text()
    lines = ("stock, new prompt", "plugin, new prompt", "plugin, after a restart")
    for label in (*lines, "64K", "10", "device (CPU)"):
        assert f"<!-- {label} -->" in text


def test_without_git_the_commit_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.COMMIT, "abc1234")
    assert report.commit() == "abc1234"
    monkeypatch.delenv(report.COMMIT)
    monkeypatch.setattr(report, "FOLDER", Path("/nowhere/results"))
    assert report.commit() == "unknown"
