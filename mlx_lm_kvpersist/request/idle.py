"""When what takes time is done, step by step, so that requests hardly notice. Generation thread."""

from __future__ import annotations

import logging
import time

import mlx.core as mx

from ..cache.steps import Steps
from ..ranks import ranks

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long work waits for a moment in which nothing is served."""
_BUSY_SHARE = 0.04
"""Of the time of replies that leave no such moment: so much of it is taken from them."""
_QUIET_S = 2.0
"""How long nothing was served before what is done later: a client that goes on does not meet it."""
_LONG_S = 2.0
"""The log says of a longer step that it was one: a request may have waited for it."""
_ENDED = object()


class IdleWork:
    """Does `first` whenever nothing is served; then `later`, once nothing was for some time.

    Either is done beside replies, too, once it has waited for `PATIENCE_S`. `step_s`: how long
    steps may be done in a row while nothing is served; a request waits for these and one more.
    """

    def __init__(self, first: Steps[None], later: Steps[None], step_s: float) -> None:
        self._steps: Steps[None] | None = first
        self._later: Steps[None] | None = later
        self._step_s, self._quiet_s = step_s, 0.0
        self._next_s = time.monotonic() + PATIENCE_S
        """When the next step may be done beside replies."""

    def idle(self, seconds: float) -> None:
        """Do some steps. Nothing was served for `seconds`."""
        left_s, until_s = 1.0, time.monotonic() + self._step_s
        while self._steps is not None and left_s > 0 and seconds >= self._quiet_s:
            self._step()
            left_s = ranks().told(until_s - time.monotonic(), "an idle step")

    def busy(self) -> None:
        """Do a step between two steps of the replies, or between two requests, if it is time."""
        if self._steps is None or not ranks().first(
            lambda: time.monotonic() >= self._next_s, "a busy step"
        ):
            return
        mx.synchronize()  # a step of the replies may still run, and is no part of what is measured
        began_s = time.monotonic()
        self._step()
        ended_s = time.monotonic()
        self._next_s = max(self._next_s, ended_s + (ended_s - began_s) / _BUSY_SHARE)

    def _step(self) -> None:
        assert self._steps is not None
        began_s = time.monotonic()
        is_over = next(self._steps, _ENDED) is _ENDED
        if (seconds := time.monotonic() - began_s) > _LONG_S:
            logger.info("kvpersist: a step of what is found out took %.1f s", seconds)
        if is_over:
            self._steps, self._later = self._later, None
            self._quiet_s, self._next_s = _QUIET_S, time.monotonic() + PATIENCE_S
