"""Wait for what another thread or process does."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep  # a test may replace those of the module


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Return as soon as `condition()` holds; raise AssertionError naming `what` otherwise."""
    deadline = monotonic() + timeout_s
    while not condition():
        if monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        sleep(0.02)
