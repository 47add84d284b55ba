"""When what takes time is done, step by step, so that requests hardly notice. Generation thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

import mlx.core as mx

from ..cache.steps import Steps

PATIENCE_S = 60.0
"""How long what must be done waits for a moment in which nothing is served."""
_BUSY_SHARE = 0.04
"""Of the time of replies that leave no such moment: so much of it is taken from them."""
_QUIET_S = 2.0
"""How long nothing was served before what need not be done: a client that goes on does not meet
it."""
_ENDED = object()


class IdleWork:
    """Does `first` whenever nothing is served; then `later()`, once nothing was for some time.

    What is done later holds memory that requests need, so each request ends it, and it begins anew.
    That little is done in vain, it waits twice as long from then on. `step_s`: how long steps may
    be done in a row; a request waits for these and the one after. With `is_urgent`, `first` is done
    beside replies too once it has waited for `PATIENCE_S`.
    """

    def __init__(
        self,
        first: Steps[None],
        later: Callable[[], Steps[None]],
        step_s: float,
        *,
        is_urgent: bool = False,
    ) -> None:
        self._steps: Steps[None] | None = first
        self._later, self._step_s = later, step_s
        self._quiet_s, self._is_begun = 0.0, False
        self._next_s = time.monotonic() + (PATIENCE_S if is_urgent else inf)
        """When the next step may be done beside replies."""

    def idle(self, seconds: float) -> None:
        """Do some steps. Nothing was served for `seconds`."""
        until_s = time.monotonic() + self._step_s
        while self._steps is not None and seconds >= self._quiet_s:
            self._step()
            if time.monotonic() >= until_s:
                return

    def busy(self) -> None:
        """Do a step between two steps of the replies, or between two requests, if it is time."""
        if self._quiet_s or time.monotonic() < self._next_s:
            return
        mx.synchronize()  # a step of the replies may still run, and is no part of what is measured
        began_s = time.monotonic()
        self._step()
        ended_s = time.monotonic()
        self._next_s = ended_s + (ended_s - began_s) / _BUSY_SHARE

    def pause(self) -> None:
        """End what is being done later: a request comes."""
        if self._quiet_s and self._is_begun:
            self._steps, self._quiet_s, self._is_begun = self._later(), 2 * self._quiet_s, False

    def _step(self) -> None:
        assert self._steps is not None
        self._is_begun = True
        if next(self._steps, _ENDED) is not _ENDED:
            return
        is_first = not self._quiet_s
        self._steps, self._is_begun = self._later() if is_first else None, False
        self._quiet_s = self._quiet_s or _QUIET_S
