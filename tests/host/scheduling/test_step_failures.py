"""Many failed steps in a row end the server; a few do not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.errors import ClientGone, DeviceFailed, RequestRefused
from mlx_lm_kvpersist.host.scheduling import model_provider
from mlx_lm_kvpersist.host.scheduling.model_provider import MOST_IN_A_ROW, Step, StepFailures


def fail(
    failures: StepFailures, n: int, error: Exception | None = None, step: Step = "prompt"
) -> None:
    for _ in range(n):
        failures.failed(error or RuntimeError("no memory"), step)


def test_failures_in_a_row_end_the_server() -> None:
    failures = StepFailures()
    fail(failures, MOST_IN_A_ROW - 1)
    with pytest.raises(DeviceFailed, match="8 steps in a row failed, at last: Run"):
        fail(failures, 1)


@pytest.mark.parametrize(
    ("failed", "succeeded"), [("prompt", "prompt"), ("prompt", "reply"), ("reply", "reply")]
)
def test_successful_step_resets_the_count_of_failures(failed: Step, succeeded: Step) -> None:
    failures = StepFailures()
    fail(failures, MOST_IN_A_ROW - 1, step=failed)
    failures.succeeded(succeeded)
    fail(failures, MOST_IN_A_ROW - 1, step=failed)
    with pytest.raises(DeviceFailed, match="8 steps in a row failed"):
        fail(failures, 1, step=failed)


def test_successful_prompts_do_not_reset_the_count_of_failed_replies() -> None:
    failures = StepFailures()
    with pytest.raises(DeviceFailed, match="8 steps in a row failed"):
        for _ in range(MOST_IN_A_ROW):
            failures.succeeded("prompt")
            failures.failed(RuntimeError("no kernel"), "reply")


@pytest.mark.parametrize(
    "error", [ClientGone(), RequestRefused("too long")], ids=["gone", "refused"]
)
def test_refused_requests_and_lost_clients_are_not_counted(error: Exception) -> None:
    failures = StepFailures()
    fail(failures, MOST_IN_A_ROW - 1)
    fail(failures, MOST_IN_A_ROW, error)
    with pytest.raises(DeviceFailed, match="8 steps in a row failed"):
        fail(failures, 1)


@pytest.mark.parametrize("n_refused", [1, 2, 3])
def test_a_device_is_tried_three_times(n_refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX may report an error again in the next step."""
    refusals, evaluate = [True] * n_refused, mx.eval

    def refuse(*arrays: Any) -> None:
        if refusals:
            refusals.pop()
            raise RuntimeError("[METAL] Command buffer execution failed")
        evaluate(*arrays)

    monkeypatch.setattr(model_provider, "_PAUSE_S", 0)
    monkeypatch.setattr(mx, "eval", refuse)
    if n_refused < 3:
        return fail(StepFailures(), 1)
    with pytest.raises(DeviceFailed, match="computes nothing any more"):
        fail(StepFailures(), 1)
