"""Ending in bounded time, whatever still runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from mlx_lm_kvpersist.host.run import ending_cleanly

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
