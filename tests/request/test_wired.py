"""The limit of wired memory follows from the weights and the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.request.memory import weights_bytes, wired_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("weights", "expected", "reason"),
    [
        (8 * GIB, 0, "off: weights take 8.0 GiB of 16.0 GiB recommended, half or less"),
        (9 * GIB, None, "weights take 9.0 GiB of 16.0 GiB recommended, more than half"),
    ],
)
def test_memory_is_wired_if_weights_take_more_than_half(
    weights: int, expected: int | None, reason: str
) -> None:
    limit, described = wired_bytes(weights, 16 * GIB)
    assert limit == expected
    assert reason in described


def test_the_weights_of_the_draft_model_count() -> None:
    model: Any = SimpleNamespace(
        parameters=lambda: {"a": mx.zeros((3, 4)), "layers": [{"b": mx.zeros(8, mx.uint8)}]}
    )
    assert weights_bytes(model, None) == 56
    assert weights_bytes(model, model) == 112
