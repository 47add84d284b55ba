"""The doctor measures matrix products, and advises OpenBLAS if they are slow."""

from __future__ import annotations

import json
import re
import sys

import pytest

from mlx_lm_kvpersist.cli import doctor, machine


@pytest.mark.skipif(sys.platform != "linux", reason="MLX computes with Accelerate or Metal")
@pytest.mark.parametrize(("gflops", "is_slow"), [(7.0, True), (74.0, False)])
def test_doctor_advises_openblas_if_products_are_slow(
    monkeypatch: pytest.MonkeyPatch, gflops: float, is_slow: bool
) -> None:
    """The test sets the speed, because a measured speed depends on the load."""
    output = json.dumps(["Device(cpu, 0)", gflops])
    monkeypatch.setattr(doctor, "ask", lambda command: (0, output))
    finding = doctor.mlx()
    assert finding.passed and f"{gflops:.3g} GFLOP/s" in finding.found
    assert ("many times as long as with OpenBLAS" in finding.found) is is_slow
    assert ("OPENBLAS_NUM_THREADS=1 mlx_lm.server" in finding.advice) is is_slow


@pytest.mark.skipif(sys.platform != "linux", reason="MLX computes with Accelerate or Metal")
def test_doctor_measures_the_speed_of_products() -> None:
    measured = re.search(r"([\d.]+) GFLOP/s", doctor.mlx().found)
    assert measured is not None and float(measured[1]) > 0


@pytest.mark.parametrize("library", [None, "libopenblas.so.0"])
def test_advice_installs_openblas_only_if_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, library: str | None
) -> None:
    monkeypatch.setattr(machine, "find_library", lambda name: library)
    monkeypatch.setattr(sys, "platform", "linux")
    advice = machine.openblas_advice(1.7)
    assert ("libopenblas0-pthread" in advice) is (library is None)
    assert "LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 mlx_lm.server …" in advice
    assert machine.openblas_advice(74.0) == machine.openblas_advice(None) == ""


def test_versions_omit_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PACKAGES", ("mlx", "not-installed"))
    assert machine.versions().keys() == {"python", "mlx"}
