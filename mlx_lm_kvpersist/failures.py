"""Failures that come again: all are counted, and few of them are logged."""

from __future__ import annotations

import logging
import time
from collections import Counter
from threading import Lock

LOG_AGAIN_S = 3600.0
"""How long a kind of failure is not logged after it was."""


class Failures:
    """Counts failures by kind, and logs the first of a kind, then at most one an hour. Any thread.

    A kind is a few words for people and metrics: never an id, so that there are few of them.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all failures. The next one of each kind is logged."""
        with self._lock:
            self.counts: Counter[str] = Counter()
            """Failures so far, by kind."""
            self._logged: dict[str, tuple[float, int]] = {}
            """When a kind was logged last, by the monotonic clock, and its count then."""

    def add(
        self,
        kind: str,
        message: str,
        *args: object,
        level: int = logging.WARNING,
        exc_info: bool = False,
    ) -> bool:
        """Count a failure; say whether it is logged. One that is not is logged at DEBUG.

        `message` and `args` are as `logging` takes them. The line says how many of the kind came
        since the last one.
        """
        with self._lock:
            self.counts[kind] += 1
            n_failed, now_s = self.counts[kind], time.monotonic()
            since_s, n_before = self._logged.get(kind, (now_s - LOG_AGAIN_S, n_failed - 1))
            is_due = now_s - since_s >= LOG_AGAIN_S
            if is_due:
                self._logged[kind] = now_s, n_failed
        if n_more := n_failed - n_before - 1:
            message += f" ({n_more:,} more like this since the last such line)"
        self._logger.log(level if is_due else logging.DEBUG, message, *args, exc_info=exc_info)
        return is_due
