"""A process gets the system's OpenBLAS, or a line says that there is none."""

from __future__ import annotations

import ctypes.util
import os
import runpy
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
    run: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(sys, "argv", ["openblas.py", "a", "command"])
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    monkeypatch.setattr(os, "execvpe", lambda *call: run.append(call))
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    runpy.run_path(openblas.__file__, run_name="__main__")
    ((program, command, environment),) = run
    assert (program, command) == ("a", ["a", "command"])
    assert environment.items() >= {**os.environ, "LD_PRELOAD": "libopenblas.so.0:other.so"}.items()
