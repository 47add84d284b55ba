"""A process gets the system's OpenBLAS, or a line says that there is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import openblas


def test_openblas_is_added_to_other_preloaded_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(openblas, "find_library", lambda name: f"lib{name}.so.0")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    assert openblas.openblas_env() == {
        "LD_PRELOAD": "libopenblas.so.0",
        "OPENBLAS_NUM_THREADS": "1",
    }
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "8")
    assert openblas.openblas_env() == {
        "LD_PRELOAD": "libopenblas.so.0:other.so",
        "OPENBLAS_NUM_THREADS": "8",
    }


def test_missing_openblas_is_reported_on_linux(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(openblas, "find_library", lambda name: None)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert openblas.openblas_env() == {}
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "platform", "linux")
    assert openblas.openblas_env() == {}
    assert "apt-get install libopenblas0-pthread" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="preloads on Linux only")
def test_a_process_preloads_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of glibc that Python does not load replaces OpenBLAS, which may be missing."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(openblas, "find_library", lambda name: "libanl.so.1")
    command = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    for variables, is_loaded in (({}, False), (openblas.openblas_env(), True)):
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert ("libanl" in done.stdout) is is_loaded


def test_the_launcher_runs_a_command_with_openblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    shown = "import os; print(os.environ.get('LD_PRELOAD', ''))"
    launcher = [sys.executable, "-m", "tests.support.openblas", sys.executable, "-c", shown]
    done = subprocess.run(launcher, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == openblas.openblas_env().get("LD_PRELOAD", "")
