"""A process gets the system's OpenBLAS, or a line says that there is none."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys

import pytest

from tests.support import openblas


def test_it_joins_what_is_preloaded(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_line_says_where_it_is_missing(
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
@pytest.mark.skipif(not ctypes.util.find_library("openblas"), reason="OpenBLAS is not installed")
def test_a_command_runs_with_it() -> None:
    command = [sys.executable, "-c", "print(open('/proc/self/maps').read())"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    plain = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "openblas" not in plain.stdout
    launcher = [sys.executable, "-m", "tests.support.openblas", *command]
    done = subprocess.run(launcher, env=environment, capture_output=True, text=True, check=True)
    assert "openblas" in done.stdout
