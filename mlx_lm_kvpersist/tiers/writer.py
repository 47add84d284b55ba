"""The writer: one thread that changes the store, so that generation never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Writer:
    """Runs tasks in order on one long-lived thread."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="kvpersist-writer", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def drain(self) -> None:
        """Return when everything submitted so far has run."""
        self._tasks.join()

    def close(self, timeout_s: float) -> bool:
        """Run what is waiting and stop; False when that takes longer than `timeout_s`."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            try:
                if task is None:
                    return
                task()
            except Exception:
                logger.exception("the store could not be changed; serving goes on from memory")
            finally:
                self._tasks.task_done()
