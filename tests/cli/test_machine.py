"""Which BLAS computes is what the dynamic linker decided, in a real process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cli import doctor, machine
from mlx_lm_kvpersist.cli.machine import Blas
from tests.support.openblas import openblas_env


def asked(monkeypatch: pytest.MonkeyPatch, **env: str) -> Any:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "mlx_lm_kvpersist.cli.machine"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="MLX computes with Accelerate or Metal")
def test_the_wheels_reference_blas_is_told_from_a_preloaded_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = asked(monkeypatch)
    assert own["is_reference"] and "mlx_cpu.libs/libblas" in own["file"]
    (finding,) = doctor.blas()
    assert finding.passed and "the reference BLAS" in finding.found
    assert "OPENBLAS_NUM_THREADS=1 mlx_lm.server" in finding.advice
    preloading = openblas_env()
    if not preloading:
        pytest.skip("OpenBLAS is not installed: apt-get install libopenblas0-pthread")
    preloaded = asked(monkeypatch, **preloading)
    assert not preloaded["is_reference"] and "openblas" in preloaded["file"]
    assert preloaded["gflops"] > 0 and own["gflops"] > 0
    (finding,) = doctor.blas()
    assert finding.passed and not finding.advice and "reference" not in finding.found


def test_a_blas_is_shown_by_its_file() -> None:
    assert str(Blas("/a/libblas.so.3", True, 1.66)) == (
        "libblas.so.3, the reference BLAS, 1.66 GFLOP/s"
    )
    assert str(Blas("/a/libopenblas.so.0", False, 74.2)) == "libopenblas.so.0, 74.2 GFLOP/s"


@pytest.mark.parametrize("found", [None, "libopenblas.so.0"])
def test_the_advice_installs_openblas_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr(machine, "find_library", lambda name: found)
    advice = machine.openblas_advice()
    assert ("libopenblas0-pthread" in advice) is (found is None)
    assert "LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 mlx_lm.server …" in advice


def test_elsewhere_than_on_linux_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.blas() is None


def test_mapped_files_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    if sys.platform == "linux":
        spans = machine._mapped()
        assert all(begin < end for begin, end, _ in spans)
        assert any(name.endswith(".so") or ".so." in name for *_, name in spans)
