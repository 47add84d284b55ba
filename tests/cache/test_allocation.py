from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.cache import allocation
from mlx_lm_kvpersist.cache.allocation import allocate, allocated, measure
from mlx_lm_kvpersist.cache.blocks import Piece, Pieces, join, split_blocks
from mlx_lm_kvpersist.cache.divergence import Reference
from mlx_lm_kvpersist.cache.kept_allocation import (
    keep_allocation,
    known_allocation,
)
from mlx_lm_kvpersist.cache.precision import (
    Allocation,
    KVPrecision,
    MeanDivergence,
    PrecisionRequest,
    Quantization,
)
from mlx_lm_kvpersist.cache.spec import ModelCacheSpec

from .conftest import VOCAB, tiny_gemma3, tiny_llama

N_LAYERS = 4
IDS = [(7 * i * i + 3 * i) % VOCAB for i in range(303)]


def with_outliers(model: Any, layers: Sequence[int], factor: float) -> Any:
    """Scale one RoPE pair of each key head up and of its query heads down: the same function."""
    for number in layers:
        attention = model.layers[number].self_attn
        n_heads, n_kv_heads, dim = 4, 2, 64
        scales = mx.ones((dim,))
        scales[3] = scales[3 + dim // 2] = factor
        keys, queries = attention.k_proj.weight, attention.q_proj.weight
        scaled = keys.reshape(n_kv_heads, dim, -1) * scales[:, None]
        attention.k_proj.weight = scaled.reshape(keys.shape)
        scaled = queries.reshape(n_heads, dim, -1) / scales[:, None]
        attention.q_proj.weight = scaled.reshape(queries.shape)
    mx.eval(model.parameters())
    return model


def untold(n_done: int, n_runs: int) -> None:
    assert 0 < n_done <= n_runs


@pytest.fixture(scope="module")
def model() -> Any:
    return with_outliers(tiny_llama(seed=3, n_layers=N_LAYERS), [0], 40.0)


@pytest.fixture(scope="module")
def spec(model: Any) -> ModelCacheSpec:
    return ModelCacheSpec.probe(model, PrecisionRequest().choice(), evaluate=False)


def divergence(model: Any, spec: ModelCacheSpec, precisions: dict[int, Any]) -> float:
    own = allocated(model, spec, Allocation(dict.fromkeys(spec.slots_of_full)))
    caches = allocated(model, spec, Allocation(precisions)).make_cache()
    return Reference(model, IDS, own.make_cache()).divergence(caches).mean


def test_the_models_own_precision_does_not_diverge(model: Any, spec: ModelCacheSpec) -> None:
    assert abs(divergence(model, spec, dict.fromkeys(spec.slots_of_full))) < 1e-6


def test_divergence_is_that_of_the_definition(model: Any, spec: ModelCacheSpec) -> None:
    own = allocated(model, spec, Allocation(dict.fromkeys(spec.slots_of_full)))
    found = Reference(model, IDS, own.make_cache()).divergence(spec.make_cache())
    logits = [model(mx.array([IDS]), cache=s.make_cache())[0] for s in (own, spec)]
    p, q = (mx.softmax(each, axis=-1) for each in logits)
    nats = (p * mx.log(p / q)).sum(axis=-1)
    assert found.mean == pytest.approx(float(nats.mean()), rel=0.02)
    expected = float(mx.sqrt(nats.var(ddof=1) / len(IDS)))
    assert found.standard_error == pytest.approx(expected, rel=0.05)


def test_the_layer_that_bears_less_gets_more(model: Any, spec: ModelCacheSpec) -> None:
    request = PrecisionRequest(rotate="off", target_nats=0.05, measure_s=600)
    found = measure(model, spec, IDS, request, untold)
    bits = [how.keys.bits if (how := found.precisions[slot]) else 16 for slot in range(N_LAYERS)]
    assert bits[0] > max(bits[1:])
    assert found.divergence is not None and found.divergence.mean <= 0.05
    assert divergence(model, spec, dict(found.precisions)) <= 0.06
    made = allocated(model, spec, found)
    assert len(made.full) == len(set(found.precisions.values())) > 1
    assert [group.name for group in made.groups] == [str(n) for n in range(len(made.groups))]
    assert made.layout.count("*") >= 2 and made.layout != spec.layout


@pytest.mark.parametrize("target", [1e-9, 100.0])
def test_targets_out_of_reach_and_out_of_sight(
    model: Any, spec: ModelCacheSpec, target: float
) -> None:
    request = PrecisionRequest(target_nats=target, measure_s=600)
    found = measure(model, spec, IDS, request, untold)
    if target == 100.0:
        four = {how and (how.keys.bits, how.values.bits) for how in found.precisions.values()}
        assert four == {(4, 4)}
    else:
        fewest = min(how.keys.bits if how else 16 for how in found.precisions.values())
        assert fewest >= 8


def test_rotating_is_chosen_where_it_helps(model: Any, spec: ModelCacheSpec) -> None:
    """Keys with outliers in every layer gain; the negative control asks for what was measured."""
    outliers = with_outliers(tiny_llama(seed=4, n_layers=N_LAYERS), range(N_LAYERS), 8.0)
    request = PrecisionRequest((4, 4), measure_s=600)
    found = measure(outliers, spec, IDS, request, untold)
    chosen = {how and how.keys.rotated for how in found.precisions.values()}
    assert chosen == {True}
    plain = dict.fromkeys(found.precisions, KVPrecision.of(4, 64))
    rotated = dict.fromkeys(found.precisions, KVPrecision.of(4, 64, rotated=(True, False)))
    assert divergence(outliers, spec, rotated) < divergence(outliers, spec, plain)
    assert divergence(outliers, spec, dict(found.precisions)) < divergence(outliers, spec, plain)


def test_rotating_is_not_chosen_where_it_hurts(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix that makes one channel of all makes matters worse."""
    spread = mx.ones((64, 64)) / 8 + 1e-3 * mx.eye(64)
    monkeypatch.setattr("mlx_lm_kvpersist.cache.packed.rotate", lambda x: x @ spread)
    inverse = mx.linalg.inv(spread, stream=mx.cpu)
    monkeypatch.setattr("mlx_lm_kvpersist.cache.packed.rotate_back", lambda x: x @ inverse)
    request = PrecisionRequest((4, 4), measure_s=600)
    found = measure(model, spec, IDS, request, untold)
    assert {how and how.keys.rotated for how in found.precisions.values()} == {False}


@pytest.mark.parametrize("bits", [None, (6, 4)])
def test_without_time_the_sure_bits_are_taken(
    model: Any, spec: ModelCacheSpec, bits: tuple[int, int] | None
) -> None:
    found = measure(model, spec, IDS, PrecisionRequest(bits, measure_s=1e-9), untold)
    expected = KVPrecision.of((bits or (8, 4))[0], 64, 4, rotated=(True, True))
    assert set(found.precisions.values()) == {expected} and found.divergence is None


def test_neighbours_are_measured_together_where_time_is_short(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, tried = 0.0, []
    run = Reference.divergence

    def slow(self: Reference, caches: list[Any]) -> MeanDivergence:
        nonlocal now_s
        now_s += 1.0
        tried.append([getattr(cache, "precision", None) for cache in caches])
        return run(self, caches)

    monkeypatch.setattr(allocation, "time", SimpleNamespace(perf_counter=lambda: now_s))
    monkeypatch.setattr(allocation, "_quick_bits", lambda group: (4, 6, 8, 16))
    monkeypatch.setattr(Reference, "divergence", slow)
    found = measure(model, spec, IDS, PrecisionRequest(target_nats=0.05, measure_s=9.6), untold)
    together = [[slot for slot, how in enumerate(each) if how is not None] for each in tried]
    assert together[:6] == [[0, 1, 2, 3]] * 4 + [[0, 1], [2, 3]]
    bits = [how.keys.bits if (how := found.precisions[slot]) else 16 for slot in range(N_LAYERS)]
    assert min(bits[:2]) > max(bits[2:])
    assert now_s <= 9.6


def test_only_full_layers_are_measured() -> None:
    gemma = tiny_gemma3()
    spec = ModelCacheSpec.probe(gemma, PrecisionRequest().choice(), evaluate=False)
    request = PrecisionRequest(target_nats=0.05, measure_s=600)
    ids = [i % 90 for i in IDS]
    found = measure(gemma, spec, ids, request, untold)
    assert found.precisions.keys() == spec.slots_of_full != set(range(len(spec.template)))
    made = allocated(gemma, spec, found)
    assert [g for g in made.groups if g.window] == [
        g for g in made.groups if g.slots in {x.slots for x in spec.groups if x.window}
    ]


def test_a_mixed_cache_is_cut_and_joined(model: Any, spec: ModelCacheSpec) -> None:
    precisions = [
        KVPrecision.of(4, 64, rotated=(True, False)),
        KVPrecision.of(6, 64, 4, rotated=(True, True)),
        None,
        KVPrecision.of(4, 64, rotated=(True, False)),
    ]
    mixed = allocated(model, spec, Allocation(dict(enumerate(precisions))))
    assert mixed.layout == "k4rv4b64*1,k6rv4rb64*1,own*1,k4rv4b64*1"
    caches = mixed.make_cache()
    mx.eval(model(mx.array([IDS[:300]]), cache=caches))
    cuts = [(0, 256), (256, 300)]
    blocks = split_blocks(mixed, caches, cuts)
    pieces = [Piece(b, 0, stop - start) for b, (start, stop) in zip(blocks, cuts, strict=True)]
    joined = join(mixed, Pieces(300, pieces), 512)
    following = mx.array([IDS[300:303]])
    expected, found = (model(following, cache=each) for each in (caches, joined))
    assert mx.array_equal(expected, found)


parts = st.dictionaries(
    st.tuples(st.integers(0, 40), st.sampled_from(["keys", "values"])),
    st.floats(0, 1),
    min_size=1,
)


@given(parts, st.floats(1e-6, 2))
def test_bits_are_given_out_until_the_budget_is_met(at_four: Any, budget: float) -> None:
    costs = dict.fromkeys(at_four, 128)
    bits = allocate(at_four, costs, budget)
    total = sum(
        at / 4.2 ** (bits[part] - 4) if bits[part] < 16 else 0 for part, at in at_four.items()
    )
    assert total <= budget and bits.keys() == at_four.keys()
    if math.fsum(at_four.values()) <= budget:
        assert set(bits.values()) == {4}
    # With equal costs nobody who bears less gets less.
    for part, at in at_four.items():
        assert all(bits[part] >= bits[other] for other, less in at_four.items() if less < at)


@given(parts, st.floats(1e-6, 2))
def test_bits_that_are_slow_here_are_not_given_out(at_four: Any, budget: float) -> None:
    bits = allocate(at_four, dict.fromkeys(at_four, 128), budget, (4, 6, 8, 16))
    assert 5 not in bits.values()


@pytest.mark.parametrize(("slow", "expected"), [(5, (4, 6, 8, 16)), (6, (4, 5, 6, 8, 16))])
def test_five_bits_are_left_out_where_they_are_slow(
    spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch, slow: int, expected: tuple[int, ...]
) -> None:
    def slower(packed: Any, quantization: Quantization) -> mx.array:
        if quantization.bits == slow:
            time.sleep(0.02)
        return mx.zeros(1)

    monkeypatch.setattr(allocation, "dequantize", slower)
    assert allocation._quick_bits(spec.full[0]) == expected


def test_what_was_chosen_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "precision.json"
    request = PrecisionRequest()
    chosen = Allocation(
        {0: KVPrecision.of(6, 32, 4, rotated=(True, False)), 3: None},
        MeanDivergence(0.009, 0.001),
        "2026-01-02",
    )
    keep_allocation(file, "model", request, chosen)
    keep_allocation(file, "other", request, Allocation({0: None}))
    assert known_allocation(file, "model", request) == chosen
    assert known_allocation(file, "other", request) == Allocation({0: None})
    assert known_allocation(file, "third", request) is None
    assert known_allocation(file, "model", PrecisionRequest(target_nats=0.02)) is None
    assert known_allocation(file, "model", PrecisionRequest((4, 4))) is None
    assert not caplog.records
    file.write_text(file.read_text().replace("k6rv4b32", "k7"))
    assert known_allocation(file, "model", request) is None
    assert "measured again" in caplog.text
