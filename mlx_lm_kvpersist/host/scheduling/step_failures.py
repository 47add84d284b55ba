"""Failures of the model's steps: the server ends when the device computes nothing.

After some errors a device refuses all work until the process ends: macOS does so after repeated
time-outs of the GPU. Then only a new process helps, and a supervisor starts it.
"""

from __future__ import annotations

import time
from typing import Literal

import mlx.core as mx

from ...errors import ClientGone, DeviceFailed, RequestRefused

Step = Literal["prompt", "reply"]
"""A step computes a part of prompts, or the next tokens of replies."""

MOST_IN_A_ROW = 8
"""Failures of one kind of step without a success between them that end the server."""
_N_TRIES = 3
_PAUSE_S = 0.1
"""Seconds between two tries: a step's error may be reported again at the next try."""


class StepFailures:
    """Counts the failures of steps since the last success. Generation thread.

    A successful step of the replies resets all counts. A step of a prompt resets only the count of
    prompts: if each reply fails after its prompt was computed, no request is served.
    """

    def __init__(self) -> None:
        self._n: dict[Step, int] = {"prompt": 0, "reply": 0}

    def succeeded(self, step: Step) -> None:
        self._n["prompt"] = 0
        if step == "reply":
            self._n["reply"] = 0

    def failed(self, error: Exception, step: Step) -> None:
        """A step failed; its clients were told.

        Raises DeviceFailed if the device computes nothing, or too many steps failed in a row.
        """
        if isinstance(error, (ClientGone, RequestRefused)):
            return
        self._n[step] = n = self._n[step] + 1
        why = f"{type(error).__name__}: {error}"
        if not _computes():
            raise DeviceFailed(f"the server ends: its device computes nothing any more ({why})")
        if n >= MOST_IN_A_ROW:
            raise DeviceFailed(f"the server ends: {n} steps in a row failed, at last: {why}")


def _computes() -> bool:
    """Whether the device can add a few numbers."""
    for _ in range(_N_TRIES):
        try:
            total = mx.ones(8).sum()
            mx.eval(total)
            if total.item() == 8:
                return True
        except Exception:
            time.sleep(_PAUSE_S)
    return False
