"""Ending in bounded time, whatever still runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace

import pytest

from mlx_lm_kvpersist.errors import GenerationStopped
from mlx_lm_kvpersist.host.run import ending_cleanly, finishing_replies
from mlx_lm_kvpersist.host.scheduling.reply import OpenRequests
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


def test_a_second_signal_ends_at_once() -> None:
    process = start(grace_s=30)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == "interrupted\n"
    # Ours, or the system's own once our handlers are gone: what hangs is the other thread.
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_the_clock_ends_a_process_that_hangs() -> None:
    process = start(grace_s=0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert error == "not ended after 0.3 s, stopped\n"
    assert time.monotonic() - began < 5


def test_a_signal_during_the_shutdown_ends_at_once() -> None:
    code = STUBBORN.replace('print("interrupted", flush=True)', "pass\n    time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", code, "30"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGINT
    assert error == "asked twice, stopped\n"


def test_handlers_are_restored_and_an_ignored_interrupt_stays_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The clock outlives the block, as it must, and would end the test run.
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


class Serving:
    """What a server has: clients that wait, and a queue."""

    def __init__(self) -> None:
        self.open_requests = OpenRequests()
        self.requests = RequestQueue()
        self.request = SimpleNamespace()
        self.open_requests.begin(self.request)


@pytest.fixture
def ended() -> Iterator[list[int]]:
    """Signals that reach what ends the server."""
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_running_replies_end_before_the_server_does(ended: list[int]) -> None:
    serving = Serving()
    with finishing_replies(serving, 60):
        signal.raise_signal(signal.SIGTERM)
        assert not ended and serving.requests.is_closed
        with pytest.raises(GenerationStopped, match="ask again"):
            serving.requests.put((Queue(), None, None))
        serving.open_requests.end(serving.request)
        wait_until(lambda: ended == [signal.SIGTERM], "the end")


def test_the_time_for_replies_is_bounded_and_a_second_signal_ends_it(ended: list[int]) -> None:
    with finishing_replies(Serving(), 0.05):
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: ended == [signal.SIGTERM], "the end")
    ended.clear()
    serving = Serving()
    with finishing_replies(serving, 60):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert ended == [signal.SIGTERM]
        serving.open_requests.end(serving.request)  # no third signal comes of it
        time.sleep(0.2)
        assert ended == [signal.SIGTERM]


def test_without_running_replies_the_server_ends_at_once(ended: list[int]) -> None:
    serving = Serving()
    serving.open_requests.end(serving.request)
    with finishing_replies(serving, 60):
        signal.raise_signal(signal.SIGTERM)
        assert ended == [signal.SIGTERM]
