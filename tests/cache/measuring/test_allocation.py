from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import stdev
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.cache.blocks.cut_join import Piece, copy_newest, split
from mlx_lm_kvpersist.cache.geometry.precision import (
    Allocation,
    Estimate,
    KVPrecision,
    PrecisionRequest,
    parse_precision,
)
from mlx_lm_kvpersist.cache.geometry.spec import (
    ModelCacheSpec,
    arrays_fit,
    token_arrays,
)
from mlx_lm_kvpersist.cache.measuring import allocation
from mlx_lm_kvpersist.cache.measuring import divergence as divergence_of
from mlx_lm_kvpersist.cache.measuring.allocation import allocate, allocated, measure
from mlx_lm_kvpersist.cache.measuring.divergence import Reference
from tests.support.joined import Pieces, join

from ..conftest import VOCAB, tiny_gemma3, tiny_llama

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
    return Reference(model, IDS, own.make_cache()).divergence(caches).value


def test_the_models_own_precision_does_not_diverge(model: Any, spec: ModelCacheSpec) -> None:
    assert abs(divergence(model, spec, dict.fromkeys(spec.slots_of_full))) < 1e-6


def on_grid(model: Any, ids: list[int], caches: list[Any]) -> mx.array:
    """Return the logits of a text that is computed block after block."""
    chunks = (ids[start : start + 256] for start in range(0, len(ids), 256))
    logits = mx.concatenate([model(mx.array([c]), cache=caches)[0] for c in chunks], axis=0)
    mx.eval(logits)
    return logits


def test_divergence_is_that_of_the_definition(model: Any, spec: ModelCacheSpec) -> None:
    own = allocated(model, spec, Allocation(dict.fromkeys(spec.slots_of_full)))
    found = Reference(model, IDS, own.make_cache()).divergence(spec.make_cache())
    logits = [on_grid(model, IDS, s.make_cache()) for s in (own, spec)]
    p, q = (mx.softmax(each, axis=-1) for each in logits)
    nats = (p * mx.log(p / q)).sum(axis=-1)
    assert found.value == pytest.approx(float(nats.mean()), rel=0.02)
    expected = float(mx.sqrt(nats.var(ddof=1) / len(IDS)))
    assert found.error == pytest.approx(expected, rel=0.05)


def test_the_layer_that_bears_less_gets_more(model: Any, spec: ModelCacheSpec) -> None:
    request = PrecisionRequest(rotate="off", target_nats=0.05, measure_s=600)
    found = measure(model, spec, IDS, request, untold)
    bits = [how.keys.bits if (how := found.precisions[slot]) else 16 for slot in range(N_LAYERS)]
    assert bits[0] > max(bits[1:])
    assert found.divergence is not None and found.divergence.value <= 0.05
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
    monkeypatch.setattr("mlx_lm_kvpersist.cache.live.packed.rotate", lambda x: x @ spread)
    inverse = mx.linalg.inv(spread, stream=mx.cpu)
    monkeypatch.setattr("mlx_lm_kvpersist.cache.live.packed.rotate_back", lambda x: x @ inverse)
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


Parts = dict[tuple[int, str], float]
"""Of a slot and a side: the divergence with it alone in 4 bits."""


class Additive:
    """Stands for a model's divergence: a sum over layers and sides, `times` what it should be.

    It keeps what was tried, and takes a second of `now_s` for each run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at_four: Parts, times: float = 1.0) -> None:
        self.at_four, self.times, self.now_s = at_four, times, 0.0
        self.tried: list[list[KVPrecision | None]] = []
        monkeypatch.setattr(allocation, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(Reference, "divergence", lambda _, caches: self.measure(caches))

    def measure(self, caches: list[Any]) -> Estimate:
        self.now_s += 1.0
        self.tried.append([getattr(cache, "precision", None) for cache in caches])
        return Estimate(self.of(self.tried[-1]), 1e-6)

    def of(self, precisions: Sequence[KVPrecision | None]) -> float:
        n_quantized = sum(one is not None for one in precisions)
        nats: float = sum(
            self.at_four[slot, side]
            * (self.times if n_quantized > 1 else 1.0)
            / 4.2 ** (getattr(one, side).bits - 4)
            for slot, one in enumerate(precisions)
            if one is not None
            for side in ("keys", "values")
            if not getattr(one, side).is_full_precision
        )
        return nats

    def bits(self, found: Allocation) -> list[tuple[int, int]]:
        return [
            (how.keys.bits, how.values.bits) if (how := found.precisions[slot]) else (16, 16)
            for slot in range(N_LAYERS)
        ]


LOSSES: Parts = {
    **{(slot, "keys"): nats for slot, nats in enumerate((0.4, 0.02, 0.03, 0.01))},
    **{(slot, "values"): 0.0004 for slot in range(N_LAYERS)},
}


@pytest.mark.parametrize("times", [0.3, 0.8, 1.0, 1.02, 1.5, 4.0])
def test_the_whole_is_just_within_the_target(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    """Whatever layers do together: no trial is run twice, and no layer gets far too much."""
    loss = Additive(monkeypatch, LOSSES, times)
    request = PrecisionRequest(rotate="off", target_nats=0.02, measure_s=1000)
    found = measure(model, spec, IDS, request, untold)
    assert found.divergence is not None and found.cut_at_s is None
    assert loss.of([found.precisions[slot] for slot in range(N_LAYERS)]) <= 0.02
    checks = [tuple(map(str, each)) for each in loss.tried[2 + N_LAYERS :]]
    assert len(checks) == len(set(checks)) <= allocation._CHECKS
    # The keys of one layer fewer bits: that would be too much, or nearly so.
    bits = loss.bits(found)
    assert bits[0][0] == max(keys for keys, _ in bits)
    cheaper = {5: 4, 6: 5, 8: 6, 16: 8}
    for slot, (keys, values) in enumerate(bits):
        if keys > 4:
            less: list[KVPrecision | None] = [found.precisions[n] for n in range(N_LAYERS)]
            less[slot] = KVPrecision.of(cheaper[keys], 64, values if values < 16 else 8)
            assert loss.of(less) > 0.02 * 0.9


def test_the_standard_error_counts_against_the_target(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss = Additive(monkeypatch, LOSSES)

    def unsure(_: Reference, caches: list[Any]) -> Estimate:
        return replace(loss.measure(caches), error=0.012)

    monkeypatch.setattr(Reference, "divergence", unsure)
    request = PrecisionRequest(rotate="off", target_nats=0.02, measure_s=1000)
    found = measure(model, spec, IDS, request, untold)
    assert found.divergence is not None and 0 < found.divergence.value <= 0.008


def test_a_layer_that_cannot_be_predicted_ends_in_its_own_precision(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither 8 bits for all nor what was predicted suffice."""
    Additive(monkeypatch, LOSSES, times=1e6)
    found = measure(model, spec, IDS, PrecisionRequest(target_nats=0.02, measure_s=1000), untold)
    assert set(found.precisions.values()) == {None}


@pytest.mark.parametrize(("error", "bits"), [(1e-6, 8), (0.03, 16)])
def test_where_predictions_fail_eight_bits_are_tried_for_all(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch, error: float, bits: int
) -> None:
    loss = Additive(monkeypatch, LOSSES)
    alone = loss.of

    def of(precisions: Sequence[KVPrecision | None]) -> float:
        if set(map(str, precisions)) == {"8b64"}:
            return 0.001
        return 0.021 if any(one and one.is_packed for one in precisions) else alone(precisions)

    monkeypatch.setattr(loss, "of", of)
    monkeypatch.setattr(
        Reference, "divergence", lambda _, caches: replace(loss.measure(caches), error=error)
    )
    request = PrecisionRequest(rotate="off", target_nats=0.02, measure_s=1000)
    found = measure(model, spec, IDS, request, untold)
    assert loss.bits(found) == [(bits, bits)] * N_LAYERS


@pytest.mark.parametrize(("rotate", "measure_s"), [("auto", 4.5), ("off", 0.5)])
def test_keys_that_were_not_measured_get_safe_bits(
    model: Any,
    spec: ModelCacheSpec,
    monkeypatch: pytest.MonkeyPatch,
    rotate: Any,
    measure_s: float,
) -> None:
    loss = Additive(monkeypatch, LOSSES)
    told: list[int] = []
    request = PrecisionRequest(rotate=rotate, target_nats=0.02, measure_s=measure_s)
    found = measure(model, spec, IDS, request, lambda n_done, n_runs: told.append(n_done))
    assert loss.bits(found) == [(8, 4)] * N_LAYERS and found.cut_at_s == measure_s
    assert told == list(range(1, len(loss.tried) + 1))


def test_a_side_is_tried_alone(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what the other side loses would count as its own."""
    loss = Additive(monkeypatch, LOSSES)

    def of(precisions: Sequence[KVPrecision | None]) -> float:
        return sum(
            (0.1 if one.keys.rotated else 1.0) + (0.001 if one.values.rotated else 0.0001)
            for one in precisions
            if one is not None
        )

    monkeypatch.setattr(loss, "of", of)
    found = measure(model, spec, IDS, PrecisionRequest((4, 4), measure_s=1000), untold)
    assert [str(each[0]) for each in loss.tried[:4]] == [
        *("k4v16b64", "k4rv16b64"),
        *("k16v4b64", "k16v4rb64"),
    ]
    assert set(map(str, found.precisions.values())) == {"k4rv4b64"}


def test_one_side_alone_gets_the_models_own(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of one layer ruin everything; its values, and all other layers, are cheap."""
    losses = {part: 1e-5 for part in LOSSES} | {(1, "keys"): 1e4}
    loss = Additive(monkeypatch, losses)
    request = PrecisionRequest(rotate="off", target_nats=0.02, measure_s=1000)
    found = measure(model, spec, IDS, request, untold)
    assert loss.bits(found) == [(4, 4), (16, 4), (4, 4), (4, 4)]
    assert allocated(model, spec, found).layout == "4b64*1,k16v4b64*1,4b64*2,n256"


def test_values_get_more_where_they_lose(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {part: 0.0001 if part[1] == "keys" else 0.1 for part in LOSSES}
    loss = Additive(monkeypatch, losses)
    request = PrecisionRequest(rotate="off", target_nats=0.02, measure_s=1000)
    bits = loss.bits(measure(model, spec, IDS, request, untold))
    assert {keys for keys, _ in bits} == {4} and min(values for _, values in bits) > 4


@pytest.mark.parametrize(
    ("measure_s", "cut"), [(1.0, True), (3.5, True), (9.6, True), (60.0, False)]
)
def test_the_time_is_kept(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch, measure_s: float, cut: bool
) -> None:
    loss = Additive(monkeypatch, LOSSES)
    request = PrecisionRequest(target_nats=0.02, measure_s=measure_s)
    found = measure(model, spec, IDS, request, untold)
    assert loss.now_s <= measure_s + 1  # the first run shows how long one takes
    assert found.cut_at_s == (measure_s if cut else None)
    assert bool(found.measured_on) is (found.divergence is not None)


def test_on_a_slow_device_little_is_read(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten tokens a second: six seconds are for one run, which is less than says anything."""
    now_s, n_read = 0.0, []

    class Slow:
        args = model.args
        layers = model.layers

        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            nonlocal now_s
            now_s += ids.size / 10
            n_read.append(ids.size)
            out: mx.array = model(ids, cache=cache)
            return out

    monkeypatch.setattr(allocation, "time", SimpleNamespace(perf_counter=lambda: now_s))
    found = measure(Slow(), spec, IDS, PrecisionRequest(measure_s=60), untold)
    assert sum(n_read) <= 64 and found.cut_at_s == 60 and found.divergence is None
    assert set(map(str, found.precisions.values())) == {"k8rv4rb64"}


def test_masked_logits_are_compared(model: Any, spec: ModelCacheSpec) -> None:
    """Some models mask tokens with -inf."""

    def masked(ids: mx.array, cache: Any) -> mx.array:
        logits = model(ids, cache=cache)
        return mx.where(mx.arange(logits.shape[-1]) < 5, -math.inf, logits)

    own = allocated(model, spec, Allocation(dict.fromkeys(spec.slots_of_full)))
    found = Reference(masked, IDS, own.make_cache()).divergence(spec.make_cache())
    assert math.isfinite(found.value) and 0 < found.value


def test_predictions_that_are_no_numbers_decide_nothing(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Reference, "divergence", lambda *_: Estimate(math.nan, math.nan))
    found = measure(model, spec, IDS, PrecisionRequest(measure_s=600), untold)
    assert found.divergence is None and found.cut_at_s is None
    assert set(map(str, found.precisions.values())) == {"k8rv4rb64"}


def test_no_position_beyond_the_table_is_read(
    spec: ModelCacheSpec, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.args, "max_position_embeddings", 100, raising=False)
    read = []
    init = Reference.__init__

    def noted(self: Reference, model: Any, ids: Sequence[int], caches: list[Any]) -> None:
        read.append(len(ids))
        init(self, model, ids, caches)

    monkeypatch.setattr(Reference, "__init__", noted)
    measure(model, spec, IDS, PrecisionRequest((4, 4), measure_s=600), untold)
    assert read == [100]


def at_random(ids: mx.array, cache: Any) -> mx.array:
    """Stands for a model of 200 tokens."""
    return mx.random.normal((1, ids.shape[1], 200), key=mx.random.key(ids.shape[1] + cache[0]))


def test_a_large_vocabulary_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Reference(at_random, IDS, [1]).divergence([2])
    monkeypatch.setattr(divergence_of, "_MOST_CHUNK_BYTES", 4 * 200 * 7)
    some = Reference(at_random, IDS, [1])
    n_rows = [each.shape[0] for each in some._expected]
    assert max(n_rows) == 7 and sum(n_rows) == len(IDS)
    assert some.divergence([2]).value == pytest.approx(whole.value, rel=1e-4)
    assert some.divergence([2]).error == pytest.approx(whole.error, rel=1e-3)
    assert Reference.most_tokens(262_144) == 512


def test_predictions_that_need_too_much_memory_are_held_in_half_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Reference(at_random, IDS, [1]).divergence([2])
    monkeypatch.setattr(divergence_of, "_MOST_BYTES", 4 * 200 * len(IDS))
    assert Reference(at_random, IDS, [1]).divergence([2]) == whole
    monkeypatch.setattr(divergence_of, "_MOST_BYTES", 2 * 200 * len(IDS))
    assert Reference.most_tokens(200) == len(IDS)
    half = Reference(at_random, IDS, [1])
    assert sum(each.nbytes for each in half._expected) <= 2 * 200 * len(IDS)
    assert half.divergence([2]).value == pytest.approx(whole.value, abs=1e-4)


def test_the_error_of_a_few_tokens(model: Any, spec: ModelCacheSpec) -> None:
    own = allocated(model, spec, Allocation(dict.fromkeys(spec.slots_of_full)))
    one, two, three = (
        Reference(model, IDS[:n], own.make_cache()).divergence(spec.make_cache()) for n in (1, 2, 3)
    )
    nats = [one.value, 2 * two.value - one.value, 3 * three.value - 2 * two.value]
    assert one.error == 0
    assert two.error == pytest.approx(stdev(nats[:2]) / math.sqrt(2), rel=1e-3)
    assert three.error == pytest.approx(stdev(nats) / math.sqrt(3), rel=1e-3)


def test_neighbours_are_measured_together_where_time_is_short(
    model: Any, spec: ModelCacheSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, tried = 0.0, []
    run = Reference.divergence

    def slow(self: Reference, caches: list[Any]) -> Estimate:
        nonlocal now_s
        now_s += 1.0
        tried.append([getattr(cache, "precision", None) for cache in caches])
        return run(self, caches)

    monkeypatch.setattr(allocation, "time", SimpleNamespace(perf_counter=lambda: now_s))
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


LAYOUTS = (
    "k4rv4b64*1,k6rv4rb64*1,full*1,k4rv4b64*1",
    "k16v4rb64*1,k4rv16b64*1,full*1,k16v4rb64*1",
    "k16v4b64*2,4rb64*2",
    "k6v16b64",
)


def of_layout(model: Any, spec: ModelCacheSpec, layout: str) -> ModelCacheSpec:
    precisions: list[KVPrecision | None] = []
    for part in layout.split(","):
        name, _, length = part.partition("*")
        precisions += [parse_precision(name)] * int(length or N_LAYERS)
    mixed = allocated(model, spec, Allocation(dict(enumerate(precisions))))
    assert mixed.layout == f"{layout},n256"
    return mixed


def cut(mixed: ModelCacheSpec, caches: list[Any]) -> Pieces:
    cuts = [(0, 256), (256, 300)]
    blocks = split(mixed.full, caches, cuts)
    pieces = [Piece(b, 0, stop - start) for b, (start, stop) in zip(blocks, cuts, strict=True)]
    for piece in pieces:
        assert arrays_fit(token_arrays(mixed.full, piece.stop), piece.arrays) is None
    return Pieces(300, pieces, newest=copy_newest(mixed, caches, 300))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whole", [True, False])
def test_a_mixed_cache_is_cut_and_joined(
    model: Any, spec: ModelCacheSpec, layout: str, whole: bool
) -> None:
    """Bit for bit what an uninterrupted one gives; arrays of other tokens give something else."""
    mixed = of_layout(model, spec, layout)
    caches = mixed.make_cache()
    on_grid(model, IDS[:300], caches)
    pieces = cut(mixed, caches)
    following = mx.array([IDS[300:303]])
    expected = model(following, cache=caches)
    assert mx.array_equal(expected, model(following, cache=join(mixed, pieces, 512, whole=whole)))
    for name, array in pieces.blocks[0].arrays.items():
        wrong = {**pieces.blocks[0].arrays, name: mx.roll(array, 1, 2)}
        blocks = [Piece(wrong, 0, 256), pieces.blocks[1]]
        found = model(
            following, cache=join(mixed, replace(pieces, blocks=blocks), 512, whole=whole)
        )
        assert not mx.allclose(expected, found, atol=1e-4), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_mixed_batch_give_what_they_give_alone(
    model: Any, spec: ModelCacheSpec, layout: str
) -> None:
    """Restored rows are merged, filtered, joined by others and go on, one of them alone again."""
    mixed = of_layout(model, spec, layout)

    def filled(n_tokens: int) -> list[Any]:
        caches = mixed.make_cache()
        on_grid(model, IDS[:n_tokens], caches)
        return caches

    def merged(rows: list[list[Any]]) -> list[Any]:
        return [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]

    restored = join(mixed, cut(mixed, filled(300)), 64)
    batch = merged([restored, filled(7), filled(40)])
    steps = [5, 9, 2, 3]
    alone = {n: filled(n) for n in (300, 40, 25)}
    model(mx.array([[steps[0]]] * 3), cache=batch)
    for cache, other in zip(batch, merged([filled(25)]), strict=True):
        cache.filter([0, 2])
        cache.extend(other)
    for n in (300, 40):
        model(mx.array([[steps[0]]]), cache=alone[n])
    for step in steps[1:3]:
        found = model(mx.array([[step]] * 3), cache=batch)
        for row, caches in enumerate(alone.values()):
            expected = model(mx.array([[step]]), cache=caches)
            assert mx.allclose(found[row : row + 1], expected, atol=1e-3), (layout, row)
    last = [cache.extract(0) for cache in batch]
    expected = model(mx.array([[steps[3]]]), cache=alone[300])
    assert mx.allclose(model(mx.array([[steps[3]]]), cache=last), expected, atol=1e-3)


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


def test_what_costs_more_gets_bits_later() -> None:
    at_four: Any = {(0, "keys"): 0.1, (1, "keys"): 0.1}
    bits = allocate(at_four, {(0, "keys"): 128, (1, "keys"): 512}, 0.15)
    assert bits == {(0, "keys"): 5, (1, "keys"): 4}
    # From 8 bits on, eight more gain 0.008: more than eight times what one gains the other.
    at_four = {(0, "keys"): 0.001, (1, "keys"): 2.489}
    assert allocate(at_four, dict.fromkeys(at_four, 128), 0.0085) == {
        (0, "keys"): 4,
        (1, "keys"): 16,
    }
