"""Failures that come again: all are counted, and few of them are logged."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from threading import Lock
from typing import Any

LOG_AGAIN_S = 3600.0
"""How long a kind of failure is not logged after it was."""


class Failures:
    """Counts failures by kind, and logs the first of a kind, then at most one an hour. Any thread.

    The kind is the message without its values, unless it is given. There must be few kinds.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()
        self._logger, self._lock = logger, Lock()
        self._logged: dict[str, tuple[float, int]] = {}
        """When a kind was logged last, by the monotonic clock, and its count then."""

    def add(self, message: str, *args: object, kind: str = "", **how: Any) -> None:
        """Count a failure and log it, at DEBUG if its kind was logged within the last hour.

        `how` may have a `level` (WARNING by default), and other arguments of `Logger.log`. A line
        says how many failures of its kind were not logged before it.
        """
        kind, level = kind or message.replace("%s", "…"), how.pop("level", logging.WARNING)
        with self._lock:
            self.counts[kind] += 1
            count, now_s = self.counts[kind], time.monotonic()
            logged_s, n_logged = self._logged.get(kind, (-math.inf, count - 1))
            if is_due := now_s >= logged_s + LOG_AGAIN_S:
                self._logged[kind] = now_s, count
        if is_due and count > n_logged + 1:
            message += f" ({count - n_logged - 1} more like this since the last such line)"
        level = level if is_due else logging.DEBUG
        self._logger.log(level, f"kvpersist: {message}", *args, stacklevel=2, **how)
