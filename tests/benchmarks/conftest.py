"""Runs of benchmarks with a tiny model: small enough for a test, real servers all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.models import BenchmarkModel
from benchmarks.runs import Run


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Run:
    return Run(BenchmarkModel("tiny", tiny_model), tmp_path / "results", ("ours", "stock"))
