"""Sends requests to servers; runs servers in subprocesses to measure or kill."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ..api.admin import KEY_VARIABLE, STATS_PATH
from ..apis import message_of
from ..errors import KVPersistError

_HOST = "127.0.0.1"
_START_S, _REPLY_S = 300.0, 300.0
_LEAST_TOKENS = 16
_QUIET_S, _MOST_ASKED = 0.5, 200
Message = dict[str, str]
OWN_TEXT = Path(__file__).with_name("quality_text.txt")
"""A story that `demo`, `bench` and `quality` give a model to read."""


def answer(
    url: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> HTTPResponse:
    """Open the answer to a GET request, or to a POST request if there is a body.

    Raises KVPersistError if the server refuses or does not answer. The caller handles errors while
    it reads the answer.
    """
    url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    key = os.environ.get(KEY_VARIABLE, "").strip()
    # urllib sends headers as Latin-1. The server expects UTF-8.
    sent = {"Authorization": f"Bearer {key}".encode().decode("latin-1")} if key else {}
    sent |= {"Content-Type": "application/json", **(headers or {})}
    payload = None if body is None else json.dumps(body).encode()
    opener = build_opener(ProxyHandler({}))  # never a proxy: it would see the key
    try:
        reply: HTTPResponse = opener.open(Request(f"{url}{path}", payload, sent), timeout=timeout_s)
        return reply
    except HTTPError as error:
        with error:
            if why := message_of(error.read()):
                raise KVPersistError(f"{url} refused: {why}") from error
            raise KVPersistError(
                f"{url} answered {error.code} to {path}; "
                "is it mlx_lm.server with --plugin kvpersist?"
            ) from error
    except (OSError, ValueError, HTTPException) as error:
        raise _no_answer(url, error) from error


def ask(url: str, path: str, body: Any = None, timeout_s: float = 10.0) -> Any:
    """Return a server's JSON; arguments and errors as for `answer`."""
    with answer(url, path, body, timeout_s=timeout_s) as reply:
        try:
            return json.load(reply)
        except (OSError, ValueError, HTTPException) as error:
            raise _no_answer(url, error) from error


def _no_answer(url: str, error: Exception) -> KVPersistError:
    reason = getattr(error, "reason", error)  # the cause of a URLError
    return KVPersistError(
        f"no answer from {url} ({reason}); start the server, or give a running server's URL"
    )


def document(n_chars: int) -> str:
    """Return the first `n_chars` characters of the story, repeated if it is too short."""
    text = OWN_TEXT.read_text(encoding="utf-8")
    return (text * (n_chars // len(text) + 1))[:n_chars]


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a folder for the files of started servers; remove it at the end. Main thread.

    In the block, SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does; its argument is the
    signal. Later signals do not interrupt the end of the servers and the removal.
    """
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:  # a closed terminal sends SIGHUP twice
            raise KeyboardInterrupt(number)

    former: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            former[number] = signal.signal(number, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as name:
            yield Path(name)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Reply:
    """A streamed reply.

    `ttft_s` is the time to the first token, or the total time if the reply is empty. `decode_s` is
    the time from the first token to the last. `outcome` is the header X-KVPersist, or "".
    """

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    outcome: str
    completion_tokens: int
    decode_s: float

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None for fewer than 16 tokens."""
        if self.completion_tokens < _LEAST_TOKENS or not self.decode_s:
            return None
        return (self.completion_tokens - 1) / self.decode_s

    def said(self, field: str) -> str:
        value = re.search(rf"\b{field}=([^;]*)", self.outcome)
        return value[1] if value else ""


class StartedServer:
    """The stock server with `options`, for a `with` block. Its log is appended to a file.

    Raises KVPersistError, with the end of the log, if the server does not start or answer.
    """

    def __init__(self, model: str, *options: str, log_path: Path) -> None:
        self._command = [sys.executable, "-m", "mlx_lm", "server", "--model", model, *options]
        self._log_path = log_path
        self.start()

    def __enter__(self) -> StartedServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(15.0)
        finally:  # also after a signal
            self.kill9()

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self._port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill9(self) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        """Start on a free port, and wait for a first token. `start_s` is the time until then."""
        started_s = time.monotonic()
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            self._port = probe.getsockname()[1]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, "--host", _HOST, "--port", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            )
        try:
            self._wait_for_model()
        except BaseException:
            self.kill9()
            raise
        self.start_s = time.monotonic() - started_s

    def _wait_for_model(self) -> None:
        deadline, is_ready = time.monotonic() + _START_S, False
        while not is_ready:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self.failure("it did not start")
            time.sleep(0.05)
            with suppress(KVPersistError):
                is_ready = bool(ask(self.url, "/health", timeout_s=2.0))
        try:
            ask(self.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}, _REPLY_S)
        except KVPersistError as error:
            raise self.failure(str(error)) from error

    def wait_until_written(self) -> None:
        """Wait until the writer thread is idle, or about 10 s: kill -9 loses unwritten turns."""
        time.sleep(_QUIET_S)  # a turn is queued right after its reply
        for _ in range(_MOST_ASKED):
            if not ask(self.url, STATS_PATH)["store"]["queue"]["tasks"]:
                return
            time.sleep(0.05)

    def chat(self, messages: Sequence[Message], session: str | None, max_tokens: int) -> Reply:
        body = {
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"X-Session-ID": session} if session else {}
        start = time.perf_counter()
        try:
            with answer(self.url, "/v1/chat/completions", body, headers, _REPLY_S) as response:
                return _read(response, start)
        except (KVPersistError, OSError, ValueError, HTTPException) as error:
            raise self.failure(str(error)) from error

    def failure(self, problem: str) -> KVPersistError:
        log = self._log_path.read_text(encoding="utf-8", errors="replace")
        tail = "\n".join(log.splitlines()[-60:])
        command = " ".join(self._command)
        return KVPersistError(f"the server failed: {problem}\n--- {command}\n{tail}")


def _read(response: HTTPResponse, start_s: float) -> Reply:
    """Return a streamed reply; raises KVPersistError if it ends early."""
    usage: dict[str, Any] = {}
    text, ttft_s, last_s = "", 0.0, 0.0
    for line in response:
        kind, _, content = line.decode().strip().partition(": ")
        if kind != "data":
            continue
        if content == "[DONE]":
            break
        chunk = json.loads(content)
        if "error" in chunk:
            raise KVPersistError(f"a reply ended early: {chunk['error']}")
        usage = chunk.get("usage") or usage
        if chunk["choices"]:
            last_s = time.perf_counter() - start_s
        for delta in (choice["delta"] for choice in chunk["choices"]):
            text += delta.get("content") or ""
            # Some models begin with reasoning, or write nothing else within `max_tokens`.
            if any(delta.get(name) for name in ("content", "reasoning", "tool_calls")):
                ttft_s = ttft_s or time.perf_counter() - start_s
    else:
        raise KVPersistError("a reply ended early")
    outcome = response.getheader("X-KVPersist", "")
    ttft_s = ttft_s or time.perf_counter() - start_s
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    n_prompt, n_reply = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return Reply(text, ttft_s, n_prompt, cached, outcome, n_reply, max(0.0, last_s - ttft_s))
