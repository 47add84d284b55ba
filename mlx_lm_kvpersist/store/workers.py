"""Threads of the store's own for what may take long: they live as long as it does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workers:
    """Runs tasks in order on `n_threads` threads, which start with the first of them.

    Each thread that has evaluated MLX leaks one when it ends, so these do not end before the
    store is closed; and they are daemons, so that a disk that hangs keeps no process alive.
    """

    def __init__(self, name: str, n_threads: int) -> None:
        self.n_threads = n_threads
        self._name = name
        self._threads: list[threading.Thread] = []
        self._tasks: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._closing = False
        self._changed = threading.Condition()

    def submit(self, task: Callable[[], Result]) -> Future[Result]:
        """Have a task run; the future is cancelled when the workers are closed before."""
        future: Future[Result] = Future()
        with self._changed:
            if self._closing:
                future.cancel()
                return future
            self._tasks.append((future, task))
            if len(self._threads) < self.n_threads:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        return future

    def close(self, timeout_s: float) -> bool:
        """Drop what waits and stop; False when what runs takes longer than `timeout_s`."""
        with self._changed:
            self._closing = True
            dropped = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
        for future, _ in dropped:
            future.cancel()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._closing)
                if self._closing:
                    return
                future, task = self._tasks.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            # An idle worker must not hold the arrays that it read last.
            del future, task
