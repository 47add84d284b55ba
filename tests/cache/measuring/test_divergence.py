"""The divergence of a model's predictions over quantized caches, against its definition."""

from __future__ import annotations

import math
from statistics import stdev
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.precision import FULL_BITS, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.measuring import divergence as divergence_of
from mlx_lm_kvpersist.cache.measuring.divergence import Reference

from ..conftest import VOCAB, tiny_llama

IDS = [(7 * i * i + 3 * i) % VOCAB for i in range(303)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(seed=3, n_layers=4)


@pytest.fixture(scope="module")
def spec(model: Any) -> ModelCacheSpec:
    return ModelCacheSpec.probe(model, evaluate=False)


@pytest.fixture(scope="module")
def own(model: Any) -> ModelCacheSpec:
    return ModelCacheSpec.probe(model, PrecisionChoice(FULL_BITS, FULL_BITS), evaluate=False)


def on_grid(model: Any, ids: list[int], caches: list[Any]) -> mx.array:
    """Return the logits of a text that is computed block after block."""
    chunks = (ids[start : start + 256] for start in range(0, len(ids), 256))
    logits = mx.concatenate([model(mx.array([c]), cache=caches)[0] for c in chunks], axis=0)
    mx.eval(logits)
    return logits


def test_the_models_own_precision_does_not_diverge(model: Any, own: ModelCacheSpec) -> None:
    reference = Reference(model, IDS, own.make_cache())
    assert abs(reference.divergence(own.make_cache()).value) < 1e-6


def test_divergence_is_that_of_the_definition(
    model: Any, spec: ModelCacheSpec, own: ModelCacheSpec
) -> None:
    found = Reference(model, IDS, own.make_cache()).divergence(spec.make_cache())
    logits = [on_grid(model, IDS, s.make_cache()) for s in (own, spec)]
    p, q = (mx.softmax(each, axis=-1) for each in logits)
    nats = (p * mx.log(p / q)).sum(axis=-1)
    assert found.value == pytest.approx(float(nats.mean()), rel=0.02)
    expected = float(mx.sqrt(nats.var(ddof=1) / len(IDS)))
    assert found.error == pytest.approx(expected, rel=0.05)


def test_masked_logits_are_compared(model: Any, spec: ModelCacheSpec, own: ModelCacheSpec) -> None:
    """Some models mask tokens with -inf."""

    def masked(ids: mx.array, cache: Any) -> mx.array:
        logits = model(ids, cache=cache)
        return mx.where(mx.arange(logits.shape[-1]) < 5, -math.inf, logits)

    found = Reference(masked, IDS, own.make_cache()).divergence(spec.make_cache())
    assert math.isfinite(found.value) and 0 < found.value


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


def test_the_error_of_a_few_tokens(model: Any, spec: ModelCacheSpec, own: ModelCacheSpec) -> None:
    one, two, three = (
        Reference(model, IDS[:n], own.make_cache()).divergence(spec.make_cache()) for n in (1, 2, 3)
    )
    nats = [one.value, 2 * two.value - one.value, 3 * three.value - 2 * two.value]
    assert one.error == 0
    assert two.error == pytest.approx(stdev(nats[:2]) / math.sqrt(2), rel=1e-3)
    assert three.error == pytest.approx(stdev(nats) / math.sqrt(3), rel=1e-3)
