"""The stock server as a subprocess, and a client for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, ClassVar

from .reply import PortTaken, Reply, ServerError, read_events, read_reply, response_headers
from .zygote import VARIABLES, Forked, Zygote

HOST = "127.0.0.1"
_LISTEN = "0A"
"""The state of a listening socket in /proc/net/tcp."""


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def listens(pid: int, port: int) -> bool:
    """Tell whether this process, and no other, listens on a TCP port of this machine."""
    table = Path("/proc/net/tcp")
    if not table.exists():  # macOS
        command = ["lsof", "-nP", "-a", "-p", str(pid), f"-iTCP:{port}", "-sTCP:LISTEN"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    rows = [line.split() for line in table.read_text().splitlines()[1:]]
    sockets = {
        f"socket:[{row[9]}]"
        for row in rows
        if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port
    }
    try:
        descriptors = list(os.scandir(f"/proc/{pid}/fd"))
    except OSError:  # it has ended
        return False
    return any(_target(descriptor.path) in sockets for descriptor in descriptors)


def _target(link: str) -> str | None:
    try:
        return os.readlink(link)
    except OSError:  # closed in the meantime
        return None


class ServerProcess:
    """The stock server as a subprocess, for a `with` block.

    model: a model directory. extra: further arguments, such as ("--plugin", "kvpersist"). env: set
    on top of this process's environment. python: the Python whose mlx_lm is run. launcher: Python's
    arguments that run the server. log_path: for stdout and stderr, appended across restarts;
    without it a temporary file that `stop` removes. start_timeout_s: for /health to answer.

    Requests may be sent from several threads at once.
    """

    zygotes: ClassVar[dict[str, Sequence[Zygote]]] = {}
    """Zygotes by Python: tests fork servers from them, which saves most of a start.

    They take turns, because a restarted server must not have the string hashes of its predecessor.
    """

    def __init__(
        self,
        model: Path | str,
        *extra: str,
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        launcher: Sequence[str] = ("-m", "mlx_lm", "server"),
        cwd: Path | None = None,
        log_path: Path | None = None,
        port: int | None = None,
        start_timeout_s: float = 120.0,
        request_timeout_s: float = 300.0,
    ) -> None:
        self.model = str(model)
        self.extra = list(extra)
        self.env = dict(env or {})
        self.python = python
        self.launcher = tuple(launcher)
        self.cwd = cwd
        self.port = port
        self.start_timeout_s = start_timeout_s
        self.request_timeout_s = request_timeout_s
        self._fixed_port = port is not None
        self._owns_log = log_path is None
        if log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="mlx-lm-server-", suffix=".log")
            os.close(descriptor)
            log_path = Path(name)
        self.log_path = log_path
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._n_starts = 0

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not isinstance(error, ServerError):
            notes = [*getattr(error, "__notes__", []), self._log_report()]
            vars(error)["__notes__"] = notes  # add_note of Python 3.11
        self.stop()

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def command(self) -> list[str]:
        return [
            *(self.python, *self.launcher),
            *("--model", self.model, "--host", HOST, "--port", str(self.port)),
            *self.extra,
        ]

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Wait until the server answers. Raises ServerError with the server's log."""
        for attempt in range(3):
            try:
                self._start_once()
                return
            except PortTaken:
                # Another process may take the port between free_port() and the server's bind.
                if self._fixed_port or attempt == 2:
                    raise
                self.port = None

    def stop(self) -> None:
        if self.alive:
            self.terminate()
        self._process = None
        if self._owns_log:
            self.log_path.unlink(missing_ok=True)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """Send SIGTERM, and SIGKILL if that is not enough."""
        return self._signal(signal.SIGTERM, timeout_s)

    def kill9(self) -> int:
        return self._signal(signal.SIGKILL, 60.0)

    def restart(self, *, kill: bool = False) -> None:
        """Start the server again on the same port."""
        if self.alive:
            self._signal(signal.SIGKILL if kill else signal.SIGTERM, 60.0)
        self.start()

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait until the server has ended on its own."""
        return self._running().wait(timeout_s)

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        session: str | None = None,
        stream: bool = False,
        **params: Any,
    ) -> Reply:
        """Send a chat completion; `session` becomes X-Session-ID, `params` join the body.

        `headers` in `params` are HTTP headers. `max_tokens` is 32 by default.
        """
        body = {"messages": list(messages), **params}
        return self._generate("/v1/chat/completions", session, stream, **body)

    def complete(
        self, prompt: str, session: str | None = None, stream: bool = False, **params: Any
    ) -> Reply:
        """The arguments are those of `chat`."""
        return self._generate("/v1/completions", session, stream, prompt=prompt, **params)

    def warm_up(self) -> None:
        """Load the model before anything is timed."""
        self.complete("a", max_tokens=1)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body. `body` is sent as JSON."""
        with self._open(method, path, body, headers, timeout_s) as response:
            return response.status, response_headers(response), response.read()

    def events(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> Generator[tuple[str, str], None, None]:
        """Yield (event name, data) of every server-sent event."""
        with self._open("POST", path, body, headers) as response:
            if response.status != 200:
                raise ServerError(self._refusal(path, response))
            yield from read_events(response)

    def healthy(self) -> bool:
        """Say whether this server, not another on its port, answers /health within 2 s."""
        return self.alive and self._health() == 200 and listens(self.pid, self.port or 0)

    def _start_once(self) -> None:
        if self.alive:
            raise ServerError("the server runs already")
        if self.port is None:
            self.port = free_port()
        environment = {**os.environ, **VARIABLES, **self.env}
        log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._process = None
        zygotes = [each for each in self.zygotes.get(self.python, ()) if each.fits(environment)]
        if zygotes and self.cwd is None and self.launcher[0].endswith(("-m", ".py")):
            zygote = zygotes[self._n_starts % len(zygotes)]
            self._process = zygote.fork(self.command, self.log_path, environment)
        self._n_starts += 1
        if self._process is None:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self.cwd,
                    env=environment,
                )
        deadline = time.monotonic() + self.start_timeout_s
        while not self.healthy():
            log_text = self.log_path.read_bytes()[log_start:].decode(errors="replace")
            status = self._process.poll()
            error = ServerError
            if self._is_taken():
                # Stock's process stays although it cannot listen.
                error, problem = PortTaken, f"port {self.port} belongs to another process"
            elif status is not None:
                problem = f"exit status {status}"
                if "Address already in use" in log_text or "Couldn't bind socket" in log_text:
                    error = PortTaken
            elif time.monotonic() > deadline or ("Traceback" in log_text and self._health() == 503):
                # If a model does not load, the generation thread ends, but not the process.
                problem = "no healthy answer"
            else:
                time.sleep(0.05)
                continue
            self.kill9()
            raise error(f"{problem}\n{self._log_report(log_start)}")

    def _is_taken(self) -> bool:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, self.port or 0)) != 0:
                return False
            # If the probe got this port as its own by chance, it has connected to itself.
            is_itself = probe.getsockname() == (HOST, self.port)
        return not is_itself and not listens(self.pid, self.port or 0)

    def _health(self) -> int | None:
        """Return None without an answer."""
        try:
            return self.request("GET", "/health", timeout_s=2.0)[0]
        except (OSError, HTTPException):
            return None

    def _running(self) -> subprocess.Popen[bytes] | Forked:
        if self._process is None:
            raise ServerError("the server was not started")
        return self._process

    def _signal(self, number: signal.Signals, timeout_s: float) -> int:
        process = self._running()
        process.send_signal(number)  # does nothing once the process has ended
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _log_report(self, start: int = 0) -> str:
        text = self.log_path.read_bytes()[start:].decode(errors="replace")
        tail = "\n".join(text.splitlines()[-60:])
        return f"--- {' '.join(self.command)}\n--- {self.log_path}\n{tail}"

    def _refusal(self, path: str, response: HTTPResponse) -> str:
        answer = response.read().decode(errors="replace")
        return f"{path} answered {response.status}: {answer}\n{self._log_report()}"

    @contextmanager
    def _open(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None,
        timeout_s: float | None = None,
    ) -> Iterator[HTTPResponse]:
        payload = None if body is None else json.dumps(body).encode()
        sent = {} if payload is None else {"Content-Type": "application/json"}
        connection = HTTPConnection(HOST, self.port, timeout=timeout_s or self.request_timeout_s)
        try:
            connection.request(method, path, payload, {**sent, **(headers or {})})
            # The connection forgets a response that says "close", so close both.
            with connection.getresponse() as response:
                yield response
        finally:
            connection.close()

    def _generate(
        self,
        path: str,
        session: str | None,
        stream: bool,
        *,
        headers: Mapping[str, str] | None = None,
        **params: Any,
    ) -> Reply:
        sent = dict(headers or {})
        body = {"max_tokens": 32, **params}
        if session is not None:
            sent["X-Session-ID"] = session
        if stream:
            body = {"stream_options": {"include_usage": True}, **body, "stream": True}
        start = time.perf_counter()
        with self._open("POST", path, body, sent) as response:
            if response.status != 200:
                raise ServerError(self._refusal(path, response))
            try:
                return read_reply(response, start, stream)
            except ServerError as error:
                raise ServerError(f"{error}\n{self._log_report()}") from error
