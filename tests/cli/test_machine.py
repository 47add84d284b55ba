"""A machine that computes slowly without a good BLAS gets a hint."""

from __future__ import annotations

import json
import re
import sys

import pytest

from mlx_lm_kvpersist.cli import doctor, machine


@pytest.mark.skipif(sys.platform != "linux", reason="MLX computes with Accelerate or Metal")
@pytest.mark.parametrize(("gflops", "is_slow"), [(7.0, True), (74.0, False)])
def test_a_slow_blas_is_named_with_its_speed(
    monkeypatch: pytest.MonkeyPatch, gflops: float, is_slow: bool
) -> None:
    """The speed is given: a measured speed depends on what else runs."""
    output = json.dumps(["Device(cpu, 0)", gflops])
    monkeypatch.setattr(doctor, "ask", lambda command: (0, output))
    finding = doctor.mlx()
    assert finding.passed and f"{gflops:.3g} GFLOP/s" in finding.found
    assert ("many times as long as with OpenBLAS" in finding.found) is is_slow
    assert ("OPENBLAS_NUM_THREADS=1 mlx_lm.server" in finding.advice) is is_slow


@pytest.mark.skipif(sys.platform != "linux", reason="MLX computes with Accelerate or Metal")
def test_a_process_measures_the_speed_of_products() -> None:
    measured = re.search(r"([\d.]+) GFLOP/s", doctor.mlx().found)
    assert measured is not None and float(measured[1]) > 0


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
