"""How much may be wired follows from the option, the weights and the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.request.memory import weights_bytes
from mlx_lm_kvpersist.request.wired import wired_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("choice", "weights", "expected", "says"),
    [
        ("auto", 8 * GIB, 0, "off: the weights are 8.0 GiB of 16.0 GiB, at most half"),
        ("auto", 9 * GIB, None, "9.0 GiB of 16.0 GiB, more than half; if this Mac panics, try"),
        ("stock", 1 * GIB, None, "as stock, up to 16.0 GiB, as --kvpersist-wired says"),
        ("off", 9 * GIB, 0, "off, as --kvpersist-wired says"),
        (99 * GIB, 9 * GIB, 16 * GIB, "up to 16.0 GiB, as --kvpersist-wired says"),
        (5 * GIB, 9 * GIB, 5 * GIB, "up to 5.0 GiB, as --kvpersist-wired says"),
    ],
)
def test_the_limit_and_its_reason(
    choice: str | int, weights: int, expected: int | None, says: str
) -> None:
    limit, why = wired_bytes(choice, weights, 16 * GIB)
    assert limit == expected
    assert says in why


def test_the_weights_of_the_draft_model_count() -> None:
    model: Any = SimpleNamespace(
        parameters=lambda: {"a": mx.zeros((3, 4)), "layers": [{"b": mx.zeros(8, mx.uint8)}]}
    )
    assert weights_bytes(model, None) == 56
    assert weights_bytes(model, model) == 112
