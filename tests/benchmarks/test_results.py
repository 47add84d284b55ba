"""Results are on disk row by row; the page judges the goals by them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, store
from benchmarks.goals import reached
from benchmarks.page import make_page
from benchmarks.report import Result, kept_results, lost_commits, write_page


def result(name: str, *rows: dict[str, Any], kind: str = "cpu") -> tuple[str, dict[str, Any]]:
    made = Result(name, "About.", {})
    made.content["device"] = {**made.content["device"], "kind": kind}
    made.rows.extend(rows)
    return kind, made.content


def test_rows_are_kept_as_they_come(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Result("name", "About.", {"n": 1}, folder=tmp_path / "device")
    made.add({"a": 1})
    assert json.loads(made.path.read_text(encoding="utf-8"))["rows"] == [{"a": 1}]
    made.add({"b": 0.12345})
    made.leave_out("the rest")
    ((device, kept),) = kept_results(tmp_path)
    assert (device, kept["left_out"]) == ("device", ["the rest"])
    assert {"mlx", "mlx-lm", "python"} <= kept["versions"].keys()
    made.show()
    assert "left out, no time: the rest" in capsys.readouterr().out
    page = make_page([(device, kept)], {})
    assert "| a | b |\n| --- | --- |\n| 1 |  |\n|  | 0.123 |" in page


def test_tables_without_rich(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    made = Result("name", "About.", {}, folder=tmp_path)
    made.add({"a": 1, "b": None})
    made.show()
    assert "About.\na\tb\n1\t\n" in capsys.readouterr().out


def test_goals_are_judged_where_they_are_hardest() -> None:
    cold = {"state": "cold", "ours / its cold": 1.0}
    results = [
        result(
            "ttft-m",
            {"context": 1024, "ours / stock": 1.02, **cold},
            {"context": 8192, "ours / stock": 1.2, **cold},
            {"context": 8192, "state": "restart, disk", "ours / its cold": 0.1},
        ),
        result(
            "ttft-m",
            {"context": 8192, "state": "restart, disk", "ours / its cold": 0.1},
            kind="gpu",
        ),
        result(
            "stall-m",
            {"side": "ours", "while": "turn being written", "slowdown": None},
            {"side": "ours", "while": "the second after a cold prompt", "slowdown": 0.02},
        ),
        result("store-m", {"what": "restore, warm", "ratio": 0.5}),
    ]
    said = {(goal.what, goal.source.partition(",")[0]): goal for goal in reached(results)}
    prefill = said["cold prefill, ours over stock", "cpu"]
    assert (prefill.value, prefill.is_met, prefill.bound) == (1.2, False, "<= 1.05")
    restart = "first token after a restart over cold, 8K"
    assert not said[restart, "cpu"].is_met
    assert said[restart, "gpu"].is_met and said[restart, "gpu"].bound == "<= 0.15"
    assert said["decode slowdown while the writer runs", "cpu"].is_met
    copy = said["time of a restore over a memory copy's, page cache warm", "cpu"]
    assert (copy.value, copy.is_met) == (2.0, False)
    assert said["live KV bytes by shape, ours over stock", ""].value is None
    assert "| not measured |" in make_page(results, {})


def test_the_page_with_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = Result("store", "About.", {}, folder=tmp_path / "results" / "cpu")
    made.add({"what": "save", "GB/s": 1.0})
    write_page(tmp_path / "results", tmp_path / "RESULTS.md")
    assert "![store](results/cpu/store.png)" in (tmp_path / "RESULTS.md").read_text()
    assert (tmp_path / "results" / "cpu" / "store.png").stat().st_size > 1000


def test_results_of_lost_commits_are_marked_and_not_judged() -> None:
    _, made = result("store-m", {"what": "restore, cold", "ratio": 0.9})
    made["commit"] = "abc1234"
    mark, goal = "**Not current**", "| 0.9 | reached |"
    kept = make_page([("cpu", made)], {})
    assert mark not in kept and goal in kept
    lost = make_page([("cpu", made)], {}, {"abc1234"})
    assert mark in lost and goal not in lost and "| restore, cold | 0.9 |" in lost


def test_lost_commits_are_those_outside_of_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FOLDER", tmp_path / "results")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert lost_commits({"0" * 40}) == set() and "no history of git" in capsys.readouterr().err

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "one")
    first = git("rev-parse", "--short", "HEAD")
    git("commit", "--quiet", "--allow-empty", "--message", "two")
    second = git("rev-parse", "HEAD")
    git("reset", "--quiet", first)
    lost = {second, f"{first}-dirty", "0" * 40}
    assert lost_commits({first, *lost}) == lost


def test_the_store_benchmark(tiny_model: Path, tmp_path: Path) -> None:
    layout = store.layout_of(str(tiny_model), tmp_path)
    rows = {row["what"]: row for row in store.measure(layout, tmp_path, 600, 1).rows}
    restored = rows["restore, cold"]
    assert restored["MB"] == rows["load, cold"]["MB"] > 0
    assert restored["rate over"] == "read plain files, cold" and restored["ratio"] > 0
    # 256 tokens in 6.5 bits a number, and 44 in float32, 5 times as large.
    assert 1.5 <= rows["turn 1 of 300 tokens, written"]["over KV"] < 1.8
    per_token = rows["on disk, index included"]["bytes a token"]
    assert per_token > layout.spec.bytes_per_token
