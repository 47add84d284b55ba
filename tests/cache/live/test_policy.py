"""The policy chooses the attention strategy of each call on each backend."""

from __future__ import annotations

import json

import pytest

from mlx_lm_kvpersist.cache.geometry.precision import Quantization
from mlx_lm_kvpersist.cache.live.attention import (
    AttentionPlan,
    AttentionShape,
    forced_plan,
    plan_by_policy,
)
from mlx_lm_kvpersist.cache.live.packed import Backend

LLAMA = AttentionShape(32, 8, 128, 128)
MHA = AttentionShape(16, 16, 64, 64)
PHI3 = AttentionShape(32, 32, 96, 96)
GEMMA = AttentionShape(8, 4, 256, 256)


@pytest.mark.parametrize(
    ("backend", "shape", "key_bits", "decode", "batch"),
    [
        ("cpu", LLAMA, 8, "packed", "packed"),
        ("cpu", LLAMA, 6, "packed", "packed"),
        ("cuda", LLAMA, 8, "dequantize", "dequantize"),
        ("cuda", MHA, 8, "dequantize", "dequantize"),
        ("metal", LLAMA, 8, "dequantize", "packed"),
        ("metal", MHA, 8, "packed", "packed"),
        ("metal", MHA, 6, "dequantize", "packed"),
        ("metal", PHI3, 8, "dequantize", "packed"),
        ("metal", GEMMA, 8, "packed", "packed"),
        ("metal", GEMMA, 6, "packed", "packed"),
    ],
)
def test_the_policy_decides_by_backend_heads_and_bits(
    backend: Backend, shape: AttentionShape, key_bits: int, decode: str, batch: str
) -> None:
    keys = Quantization(key_bits, 32).fitted(shape.k_dim)
    plan = plan_by_policy(shape, keys, backend)
    for n_queries in (1, 2, 4 if backend == "cpu" else 17):  # draft tokens, too
        assert plan.choose(n_queries, 100, 1, 100) == decode
        assert plan.choose(n_queries, 100, 8, 100) == batch
    for n_queries in (18, 256):  # a chunk of a prompt
        assert plan.choose(n_queries, 100, 1, 100) == "dequantize"
    assert plan.choose(1, 1 << 20, 1, 1000) in ("packed", "tiled")
    assert str(plan) == f"prefill dequantize, decode {decode}, batches {batch}"


@pytest.mark.parametrize(
    ("shape", "most_queries"),
    [(MHA, 16), (AttentionShape(9, 3, 64, 64), 5), (LLAMA, 4), (AttentionShape(64, 1, 64, 64), 1)],
)
def test_on_a_cpu_few_queries_of_each_key_head_are_packed(
    shape: AttentionShape, most_queries: int
) -> None:
    plan = plan_by_policy(shape, Quantization(8, 32), "cpu")
    chosen = [plan.choose(n, 100, 1, 100) for n in (most_queries, most_queries + 1)]
    assert chosen == ["packed", "dequantize"]


@pytest.mark.parametrize(
    ("n_queries", "n_keys", "n_rows", "expected"),
    [
        (1, 10, 3, "packed"),
        (1, 1000, 4, "packed"),
        (1, 10, 2, "dequantize"),
        (1, 51, 2, "tiled"),
        (2, 100, 1, "dequantize"),
        (2, 101, 1, "tiled"),
        (2, 26, 4, "tiled"),
    ],
)
def test_plan_applies_its_rule_and_its_memory_limit(
    n_queries: int, n_keys: int, n_rows: int, expected: str
) -> None:
    plan = AttentionPlan("packed", 1, 3, can_take_packed=True, max_dequantized_bytes=10_000)
    assert plan.choose(n_queries, n_keys, n_rows, token_bytes=100) == expected
    described = json.loads(json.dumps(plan.describe(), allow_nan=False))
    rule = {"strategy": "packed", "most_queries": 1, "least_rows": 3}
    assert described["rules"] == [rule] and not AttentionPlan().describe()["rules"]


def test_a_model_that_takes_no_packed_keys_dequantizes_everything() -> None:
    assert AttentionPlan(max_dequantized_bytes=1).choose(1, 1000, 8, 1000) == "dequantize"


def test_requested_dequantize_strategy_is_never_tiled() -> None:
    plan = forced_plan("dequantize")
    assert plan.choose(2, 1 << 30, 8, 1000) == "dequantize"
