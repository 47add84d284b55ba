"""A Python that has imported what takes longest in a server's start, and forks for each server.

Half of a start is the import of transformers. What a fork does from there is what
`python -m MODULE …` does. MLX is not imported before: its threads would not survive the fork.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PTH = Path(__file__).parents[2] / "mlx_lm_kvpersist.pth"
READ_AT_IMPORT = ("HF_", "LD_", "DYLD_", "OPENBLAS_", "PYTHON", "TRANSFORMERS_")
"""Beginnings of variables that are read before the fork."""


class Forked:
    """A process that the zygote has forked, with what is used of subprocess.Popen."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            self._status = self._zygote.ask({"poll": self.pid})
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or float("inf"))
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(["forked"], timeout or 0.0)
            time.sleep(0.01)
        return status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Zygote:
    """The process that forks, started when it is first asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def fork(self, command: Sequence[str], log_path: Path, env: Mapping[str, str]) -> Forked:
        """Run `python -m …`, with these variables alone; its output is appended to a file."""
        log_path.touch()
        order = {"command": list(command), "log": str(log_path), "env": dict(env)}
        pid = self.ask({**order, "cwd": os.getcwd()})
        assert pid > 1, pid
        return Forked(self, pid)

    def ask(self, order: dict[str, Any]) -> Any:
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                    text=True,
                )
            assert self._process.stdin and self._process.stdout
            try:
                print(json.dumps(order), file=self._process.stdin, flush=True)
                return json.loads(self._process.stdout.readline())
            except BaseException:  # the next answer would be that of this order
                self._process.kill()
                raise

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def _orders() -> dict[str, Any] | None:
    """Do what is asked; return in a fork, with what it is to run, and None at the end."""
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        answer: int | None
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            return order
        print(json.dumps(answer), flush=True)
    return None


def _run(order: dict[str, Any]) -> None:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[0] = order["cwd"]
    sys.orig_argv[:] = order["command"]
    python, dash_m, module, *arguments = order["command"]
    assert dash_m == "-m", python
    sys.argv = ["", *arguments]
    exec(PTH.read_text(encoding="utf-8"))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.path[0] = str(PTH.parent)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    assert not [name for name in sys.modules if name.startswith("mlx")]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    gc.freeze()
    if (ordered := _orders()) is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(ordered)
