"""Runs of benchmarks with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models import BenchmarkModel
from benchmarks.report import Report
from benchmarks.runs import Run


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("smoke", {"name": "tiny"}, {}, tmp_path / "results")


@pytest.fixture
def run(tiny_model: Path, report: Report) -> Run:
    return Run(BenchmarkModel("tiny", tiny_model), report)
