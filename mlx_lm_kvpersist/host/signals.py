"""Ending the server by signal: cleanly, and in bounded time."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

GRACE_S = 30.0
"""How long a signalled server may take to end by itself."""


@contextmanager
def ending_cleanly(grace_s: float = GRACE_S) -> Iterator[list[int]]:
    """Make SIGTERM end the server as Ctrl-C does; a second signal, or `grace_s`, forces the end.

    Stock dies of SIGTERM without ending its threads. KeyboardInterrupt is what it catches to
    stop listening and to join the generation thread. Main thread; elsewhere nothing changes.
    Yields the signals that came. The clock of `grace_s` runs on when the block has ended: threads
    that are left can keep a process alive.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            end_now(number, "asked twice")
        clock = threading.Timer(grace_s, end_now, (number, f"not ended after {grace_s:g} s"))
        clock.daemon = True
        clock.start()
        raise KeyboardInterrupt

    previous: dict[signal.Signals, Any] = {signal.SIGTERM: signal.signal(signal.SIGTERM, handler)}
    # A shell starts background jobs with SIGINT ignored, and so it stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        previous[signal.SIGINT] = signal.signal(signal.SIGINT, handler)
    try:
        yield received
    finally:
        for number, former in previous.items():
            signal.signal(number, former)


def end_now(number: int, reason: str) -> NoReturn:
    """End the process without waiting for any thread."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{reason}, stopped\n".encode())
    os._exit(128 + number)


def end_process(status: int) -> NoReturn:
    """End the process as the end of `main` would, but for C++ destructors.

    A thread that computed with MLX leaves a C++ thread behind that aborts the process in its
    destructor, after all is done: stock ends every second time with SIGABRT, and macOS reports
    a crash (mlx 0.31.2 to 0.32.4, Linux).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
