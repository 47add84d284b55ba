"""Threads that run tasks. The process does not wait for them when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


class Threads:
    """Runs tasks in order on daemon threads, so that a disk that hangs keeps no process alive."""

    def __init__(self, n_threads: int, name: str) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._closed = False
        self._threads = [
            Thread(target=self._run, name=f"{name}_{n}", daemon=True) for n in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Queue a task; its future is cancelled if the threads are closed before it runs."""
        future: Future[Result] = Future()
        self._tasks.put((future, task))
        if self._closed:
            future.cancel()
        return future

    def close(self, timeout_s: float) -> bool:
        """Drop waiting tasks and stop; return False if the running task exceeds `timeout_s`."""
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        for future, task in iter(self._tasks.get, None):
            if self._closed:
                future.cancel()
            run_into(future, task)
            # An idle thread must not refer to the arrays that it read last.
            del future, task


def run_into(future: Future[Result], task: Callable[[], Result]) -> None:
    """Run a task for a future, unless the future is cancelled."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
