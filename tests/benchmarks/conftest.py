"""Runs of benchmarks with a tiny model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.models import BenchmarkModel
from benchmarks.report import Report
from benchmarks.runs import Run


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets that a test does not close leave their folders in `tmp_path`, not in /tmp."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("smoke", {"name": "tiny"}, {}, tmp_path / "results")


@pytest.fixture
def run(tiny_model: Path, report: Report) -> Run:
    return Run(BenchmarkModel("tiny", tiny_model), report)
