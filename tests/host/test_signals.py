"""After a signal the process ends in bounded time, even if threads or replies still run."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import subprocess
import sys
from queue import Queue
from socketserver import BaseServer
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import GenerationStopped
from mlx_lm_kvpersist.host import run
from mlx_lm_kvpersist.host.http import clients as http_clients
from mlx_lm_kvpersist.host.http.clients import Clients, PluginHTTPServer
from mlx_lm_kvpersist.host.run import ending_cleanly
from mlx_lm_kvpersist.host.scheduling.response_generator import RequestQueue
from tests.support.waiting import wait_until

STUBBORN = """
import sys, threading, time
from mlx_lm_kvpersist.host.run import ending_cleanly
threading.Thread(target=time.sleep, args=(60,)).start()
with ending_cleanly(grace_s=float(sys.argv[1])):
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""

HANGING = 'print("shutdown", flush=True)\n        time.sleep(600)'
"""Code that replaces the last line of `STUBBORN`."""


def start(grace_s: float) -> subprocess.Popen[str]:
    """Start a process whose other thread does not end."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN, str(grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_second_signal_ends_the_process_immediately() -> None:
    process = start(grace_s=30)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "interrupted\n"
    # Our status, or the system's if our handlers are already removed: the other thread hangs.
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_the_end_needs_no_open_stream() -> None:
    program = f"from {run.__name__} import end_process; end_process(3)"
    command = shlex.join([sys.executable, "-c", program])
    assert subprocess.run(["sh", "-c", f"{command} >&- 2>&-"], check=False).returncode == 3


def test_timer_ends_a_process_that_hangs() -> None:
    process = start(grace_s=0.3)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert error == "not ended after 0.3 s, stopped\n"


def test_closed_terminal_ends_the_process_in_bounded_time() -> None:
    """The kernel and the shell each send SIGHUP, and nothing reads the process's output."""
    code = STUBBORN.replace('print("interrupted", flush=True)', HANGING)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code, "1"])
    with open(terminal, "rb", buffering=0) as output:
        assert output.readline() == b"ready\r\n"
        os.kill(pid, signal.SIGHUP)
        assert output.readline() == b"shutdown\r\n"
        os.kill(pid, signal.SIGHUP)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP


@pytest.mark.parametrize("numbers", [(1, 1), (1, 15), (15, 1), (1, 2)])
def test_hangup_and_another_signal_do_not_force_an_end(
    numbers: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    monkeypatch.setattr(run, "end_now", lambda number, reason: pytest.fail(reason))
    with ending_cleanly():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(numbers[0])
        signal.raise_signal(numbers[1])


def test_second_signal_during_shutdown_ends_the_process_immediately() -> None:
    code = STUBBORN.replace('print("interrupted", flush=True)', HANGING)
    process = subprocess.Popen(
        [sys.executable, "-c", code, "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "shutdown\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert error == "asked twice, stopped\n"


def test_handlers_are_restored_and_an_ignored_interrupt_stays_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The timer must outlive the block; here it would end the test run.
    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with ending_cleanly() as received:
        assert signal.getsignal(signal.SIGTERM) is not before[0]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert received == [signal.SIGTERM]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ending_cleanly():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before[1])


def test_signal_waits_until_a_connection_is_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    accept = PluginHTTPServer._handle_request_noblock
    assert accept.__name__ in BaseServer.serve_forever.__code__.co_names, "a private name of Python"
    accepted: list[str] = []

    class Accepting:
        def _handle_request_noblock(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            accepted.append("whole")

    class Server(PluginHTTPServer, Accepting):
        pass

    with ending_cleanly(), pytest.raises(KeyboardInterrupt) as interrupt:
        object.__new__(Server)._handle_request_noblock()
    assert (accepted, interrupt.value.args) == (["whole"], (signal.SIGTERM,))


def test_fatal_error_during_shutdown_is_not_a_second_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("threading.Timer.start", lambda timer: None)
    ended: list[str] = []
    monkeypatch.setattr(run, "end_now", lambda number, reason: ended.append(reason))
    provider = SimpleNamespace(fatal_error=None)
    with ending_cleanly(provider):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        provider.fatal_error = RuntimeError("the generation thread failed")
        signal.raise_signal(signal.SIGTERM)
        assert not ended
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert ended == ["asked twice"]


class Listening:
    """A server: the first `serve_forever` is interrupted, the second runs until `shutdown`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.n_serve_calls = 0
        self.is_shut_down = Event()

    def serve_forever(self) -> None:
        self.n_serve_calls += 1
        if self.n_serve_calls == 1:
            raise KeyboardInterrupt(self.number)
        assert self.is_shut_down.wait(60)

    def shutdown(self) -> None:
        self.is_shut_down.set()


class WaitingClient:
    """A connected client that waits for its reply."""

    def has_left(self) -> bool:
        return False

    def keep_alive(self) -> None: ...


class Serving(PluginHTTPServer, Listening):
    """A server with one client that waits for its reply."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        Listening.__init__(self, number)
        self.clients = Clients()
        self.client: Any = WaitingClient()
        self.generator = SimpleNamespace(requests=RequestQueue())
        self.clients.begin(self.client, SimpleNamespace())  # type: ignore[arg-type]

    def serve(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self.serve_forever()


def test_server_waits_for_running_replies_and_refuses_new_requests() -> None:
    server = Serving()
    thread = Thread(target=server.serve)
    thread.start()
    wait_until(lambda: server.n_serve_calls == 2, "the second serve_forever")
    with pytest.raises(GenerationStopped, match="ask again"):
        server.generator.requests.put((Queue(), None, None))
    assert not server.is_shut_down.is_set()
    server.clients.end(server.client)
    thread.join(60)
    assert server.is_shut_down.is_set()


def test_wait_for_running_replies_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_clients, "DRAIN_S", 0.05)
    server = Serving()
    server.serve()
    assert server.n_serve_calls == 2


def test_server_ends_immediately_on_ctrl_c_or_without_running_replies() -> None:
    (keyboard := Serving(signal.SIGINT)).serve()
    (idle := Serving()).clients.end(idle.client)
    idle.serve()
    assert keyboard.n_serve_calls == idle.n_serve_calls == 1
