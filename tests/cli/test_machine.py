"""A machine that computes slowly without a good BLAS gets a hint, in a real process."""

from __future__ import annotations

import re
import sys

import pytest

from mlx_lm_kvpersist.cli import doctor, machine
from mlx_lm_kvpersist.cli.doctor import Finding
from tests.support.openblas import openblas_env


def gflops(finding: Finding) -> float:
    """Return the measured speed; other work makes both measurements of a test slower."""
    measured = re.search(r"([\d.]+) GFLOP/s", finding.found)
    assert measured is not None
    return float(measured[1])


@pytest.mark.skipif(sys.platform != "linux", reason="MLX computes with Accelerate or Metal")
def test_the_wheels_reference_blas_is_told_from_a_preloaded_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    finding = doctor.mlx()
    assert finding.passed and "many times as long as with OpenBLAS" in finding.found
    assert "OPENBLAS_NUM_THREADS=1 mlx_lm.server" in finding.advice
    preloading = openblas_env()
    if not preloading:
        pytest.skip("OpenBLAS is not installed: apt-get install libopenblas0-pthread")
    for name, value in preloading.items():
        monkeypatch.setenv(name, value)
    preloaded = doctor.mlx()
    assert preloaded.passed and gflops(preloaded) > 2 * gflops(finding)


@pytest.mark.parametrize("found", [None, "libopenblas.so.0"])
def test_the_advice_installs_openblas_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, found: str | None
) -> None:
    monkeypatch.setattr(machine, "find_library", lambda name: found)
    monkeypatch.setattr(sys, "platform", "linux")
    advice = machine.openblas_advice(1.7)
    assert ("libopenblas0-pthread" in advice) is (found is None)
    assert "LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 mlx_lm.server …" in advice
    assert machine.openblas_advice(74.0) == machine.openblas_advice(None) == ""


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PACKAGES", ("mlx", "not-installed"))
    assert machine.versions().keys() == {"python", "mlx"}
