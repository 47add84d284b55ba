"""The zygote forks processes, which end with it; without transformers it forks nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.zygote import VARIABLES, Forked, Zygote

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")


def _fork_sleeping(zygote: Zygote, log: Path, seconds: float = 60.0, **env: str) -> Forked | None:
    code = f"import time; time.sleep({seconds})"
    command = [sys.executable, "-m", "timeit", "-n1", "-r1", code]
    return zygote.fork(command, log, {**os.environ, **VARIABLES, **env})


def test_forks_run_until_they_exit_or_the_zygote_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zygote, log = Zygote(), tmp_path / "log"
    assert _fork_sleeping(zygote, log, XDG_CACHE_HOME=str(tmp_path)) is None, "it has read another"
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            short = _fork_sleeping(zygote, log, 0.02)
            assert short
            assert {*threads.map(short.wait, [20.0] * 4)} == {0}, log.read_text()
    killed, left = _fork_sleeping(zygote, log), _fork_sleeping(zygote, log)
    assert killed and left
    with pytest.raises(subprocess.TimeoutExpired):
        killed.wait(timeout=0)
    assert killed.poll() is None
    killed.kill()
    assert killed.wait(60) == killed.poll() == -signal.SIGKILL

    def interrupted(answer: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("tests.support.zygote.json.loads", interrupted)
        _fork_sleeping(zygote, log)
    assert left.wait(60) == -signal.SIGKILL
    left.send_signal(signal.SIGTERM)
    assert _fork_sleeping(zygote, log) is None
    zygote.close()


def test_without_transformers_nothing_is_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    zygote = Zygote()
    assert _fork_sleeping(zygote, tmp_path / "log") is None
    assert _fork_sleeping(zygote, tmp_path / "log") is None
    zygote.close()
