"""A clock that a test moves, for code that decides by the time, instead of the machine's clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

Result = TypeVar("Result")


class Clock:
    """Seconds, for all threads, that stand still until a thread sleeps or advances them.

    `monotonic`, `perf_counter` and `sleep` replace those of the module `time`.
    """

    def __init__(self) -> None:
        # Times measured earlier are in this clock's past.
        self._now_s = monotonic()
        self._conditions: list[ClockCondition] = []
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self._now_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Advance, and end the waits that are over by then."""
        with self._lock:
            self._now_s += max(0.0, seconds)
        for condition in self._conditions:
            with condition:
                condition.notify_all()

    advance = sleep

    def condition(self) -> ClockCondition:
        """Return a condition whose timed waits end by this clock."""
        self._conditions.append(made := ClockCondition(self))
        return made

    def waits_s(self) -> list[float]:
        """Return the remaining seconds of the conditions' timed waits, the shortest first."""
        ends_s = [end_s for condition in self._conditions for end_s in condition.ends_s]
        return sorted(end_s - self._now_s for end_s in ends_s if end_s > self._now_s)


class ClockCondition(threading.Condition):
    """A condition whose timed waits end when its clock has advanced far enough."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self.ends_s: list[float] = []
        """The times at which the present timed waits end."""

    def wait(self, timeout: float | None = None) -> bool:
        end_s = float("inf") if timeout is None else self._clock.monotonic() + timeout
        if self._clock.monotonic() >= end_s:
            return False
        if timeout is None:
            return super().wait()
        self.ends_s.append(end_s)
        try:
            return super().wait()
        finally:
            self.ends_s.remove(end_s)

    def wait_for(self, predicate: Callable[[], Result], timeout: float | None = None) -> Result:
        end_s = float("inf") if timeout is None else self._clock.monotonic() + timeout
        while not (is_so := predicate()) and self._clock.monotonic() < end_s:
            self.wait(None if timeout is None else end_s - self._clock.monotonic())
        return is_so
