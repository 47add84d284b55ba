"""A Python process that has done a server's longest imports, and forks for each server.

Half of a start is the import of transformers. A fork then does the same as `python -m MODULE …` or
`python SCRIPT …`. MLX is not imported before the fork, which its threads would not survive.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PTH = Path(__file__).parents[2] / "mlx_lm_kvpersist.pth"
VARIABLES = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""Variables that a server has besides those of the tests."""
READ_AT_IMPORT = (
    *("DYLD_", "HF_", "HOME", "LANG", "LC_", "LD_", "OMP_", "OPENBLAS_", "PYTHON"),
    *("TRANSFORMERS_", "TZ", "XDG_"),
)
"""Beginnings of names of variables that are read before the fork."""
PR_SET_PDEATHSIG = 1


class Forked:
    """A forked process, with the subprocess.Popen methods that tests use."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self._status: int | None = None
        self._handle: int
        if sys.platform == "linux":
            self._handle = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._handle)

    def poll(self) -> int | None:
        return self.wait() if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired(["forked"], timeout or 0.0)
        if self._status is None:
            try:
                self._status = self._zygote.ask({"ended": self.pid})
            except (OSError, ValueError):  # the zygote has ended, and its forks with it
                self._status = -signal.SIGKILL
        return self._status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if sys.platform == "linux":
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def _has_ended(self, timeout: float | None) -> bool:
        ending = select.poll()
        ending.register(self._handle, select.POLLIN)
        return bool(ending.poll(None if timeout is None else timeout * 1000))


class Zygote:
    """The process that forks, started when it is first asked.

    python: an interpreter with this one's packages, and perhaps more. env: set on top
    of this process's environment.
    """

    def __init__(self, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._env = {**os.environ, **VARIABLES, **(env or {})}

    def fits(self, env: Mapping[str, str]) -> bool:
        """Say whether the zygote's imports have read the same values as `env` has."""
        return _read_at_import(env) == _read_at_import(self._env)

    def fork(
        self,
        command: Sequence[str],
        log_path: Path,
        env: Mapping[str, str],
        *,
        errors_path: Path | None = None,
        cwd: Path | None = None,
        pth: bool = True,
    ) -> Forked | None:
        """Run a command of Python, with these variables alone; its output is appended to a file.

        errors_path: where stderr goes; None for the same file. cwd: None for this process's. pth:
        whether the environment has our .pth.

        Returns None if the command needs an ordinary process: without Linux or pidfd_open, or if
        the zygote has ended or has read other variables.
        """
        if sys.platform != "linux" or not self.fits(env):
            return None
        errors_path = errors_path or log_path
        log_path.touch()
        errors_path.touch()
        order = {
            "command": list(command),
            "log": str(log_path),
            "errors": str(errors_path),
            "env": dict(env),
            "cwd": str(cwd or Path.cwd()),
            "pth": pth,
        }
        try:
            os.close(os.pidfd_open(os.getpid()))  # an old kernel refuses before there is a fork
            return Forked(self, self.ask(order))
        except (OSError, ValueError):
            return None

    def ask(self, order: dict[str, Any]) -> int:
        """Return the zygote's answer. Raises OSError or ValueError once it has ended."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [self._python, __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=self._env,
                    text=True,
                )
            assert self._process.stdin and self._process.stdout
            try:
                print(json.dumps(order), file=self._process.stdin, flush=True)
                answer = json.loads(self._process.stdout.readline())
                if type(answer) is not int:
                    raise ValueError(f"the zygote answered {answer}")
                return answer
            except BaseException:  # else the next order would get this order's answer
                self._process.kill()
                self._process.wait()
                raise

    def close(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_IMPORT)}


def _orders() -> dict[str, Any] | None:
    """Carry out orders; return an order to run in a fork, and None at the end."""
    statuses: dict[int, int] = {}
    for line in sys.stdin:
        order: dict[str, Any] = {"parent": os.getpid(), **json.loads(line)}
        if "ended" in order:
            answer: int = order["ended"]
            if answer not in statuses:
                statuses[answer] = os.waitstatus_to_exitcode(os.waitpid(answer, 0)[1])
            answer = statuses[answer]
        elif (answer := os.fork()) == 0:
            return order
        else:
            statuses.pop(answer, None)  # of an earlier process with this pid
        print(json.dumps(answer), flush=True)
    return None


def _run(order: dict[str, Any]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no fork outlives the zygote
    if os.getppid() != order["parent"]:
        os._exit(1)
    for descriptor, name in ((1, "log"), (2, "errors")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.orig_argv[:] = order["command"]
    _, first, *arguments = order["command"]
    pth = PTH.read_text(encoding="utf-8") if order["pth"] else ""
    if first == "-m":
        module, *arguments = arguments
        sys.path[0], sys.argv = order["cwd"], ["", *arguments]
        exec(pth)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(first).parent), [first, *arguments]
        exec(pth)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(PTH.parent)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    assert not [name for name in sys.modules if name.startswith("mlx")]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    gc.freeze()
    if (ordered := _orders()) is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _run(ordered)
