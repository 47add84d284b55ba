"""A model's divergence over quantized caches, compared with the definitions."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.precision import FULL_BITS, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, probe_model
from mlx_lm_kvpersist.cache.measuring import divergence as divergence_of
from mlx_lm_kvpersist.cache.measuring.divergence import (
    AT_ONCE,
    Predictions,
    compared,
    part_means,
)

from ..conftest import VOCAB, tiny_llama

IDS = [(7 * i * i + 3 * i) % VOCAB for i in range(303)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(seed=3, n_layers=4)


@pytest.fixture(scope="module")
def spec(model: Any) -> ModelCacheSpec:
    return probe_model(model)


@pytest.fixture(scope="module")
def own_spec(model: Any) -> ModelCacheSpec:
    return probe_model(model, PrecisionChoice(FULL_BITS, FULL_BITS))


def predictions_of(
    model: Any, own_caches: list[Any], other_caches: list[Any], ids: list[int] = IDS
) -> Predictions:
    whole = Predictions()
    for start in range(0, len(ids) - 1, AT_ONCE):
        chunk = ids[start : start + AT_ONCE + 1]
        whole.add(compared(model, chunk, own_caches, {"other": other_caches})["other"])
    return whole


def on_grid(model: Any, caches: list[Any]) -> mx.array:
    """Return the logits of the text, computed block by block."""
    chunks = (IDS[start : start + 256] for start in range(0, len(IDS), 256))
    logits = mx.concatenate([model(mx.array([c]), cache=caches)[0] for c in chunks], axis=0)
    mx.eval(logits)
    return logits


def test_full_precision_does_not_diverge_from_itself(model: Any, own_spec: ModelCacheSpec) -> None:
    predictions = predictions_of(model, own_spec.make_cache(), own_spec.make_cache())
    assert max(map(abs, [*predictions.divergence, *predictions.above])) < 1e-6 and all(
        predictions.same
    )
    assert vars(predictions.own) == {
        **vars(predictions),
        "divergence": [0.0] * 302,
        "above": [0.0] * 302,
    }


def test_divergence_and_loss_match_their_definitions(
    model: Any, spec: ModelCacheSpec, own_spec: ModelCacheSpec
) -> None:
    predictions = predictions_of(model, own_spec.make_cache(), spec.make_cache())
    p, q = (mx.softmax(on_grid(model, s.make_cache())[:-1], axis=-1) for s in (own_spec, spec))
    expected = (p * mx.log(p / q)).sum(axis=-1)
    assert mx.allclose(mx.array(predictions.divergence), expected, rtol=0.05, atol=1e-5)
    targets = mx.array(IDS[1:])[:, None]
    nll, own_nll = (-mx.log(mx.take_along_axis(x, targets, axis=-1)[:, 0]) for x in (q, p))
    assert mx.allclose(mx.array(predictions.nll), nll, atol=1e-3)
    assert mx.allclose(mx.array(predictions.above), nll - own_nll, atol=1e-3)
    assert mx.allclose(mx.array(predictions.own.nll), own_nll, atol=1e-3)
    assert predictions.same == (p.argmax(axis=-1) == q.argmax(axis=-1)).tolist()
    # Only the second block sees quantized tokens.
    assert max(predictions.divergence[:256]) < 1e-5 < 1e-4 < min(predictions.divergence[256:])


def test_divergence_is_finite_with_masked_logits(
    model: Any, spec: ModelCacheSpec, own_spec: ModelCacheSpec
) -> None:
    """Some models mask tokens with -inf."""

    def masked(ids: mx.array, cache: Any) -> mx.array:
        logits = model(ids, cache=cache)
        return mx.where(mx.arange(logits.shape[-1]) < 5, -math.inf, logits)

    predictions = predictions_of(masked, own_spec.make_cache(), spec.make_cache())
    assert (
        math.isfinite(predictions.divergence_nats.value) and 0 < predictions.divergence_nats.value
    )


def random_logits(ids: mx.array, cache: Any) -> mx.array:
    """Stand in for a model: return random logits over 200 tokens."""
    return mx.random.normal((1, ids.shape[1], 200), key=mx.random.key(ids.shape[1] + cache[0]))


def test_comparing_in_parts_gives_the_same_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [i % 200 for i in range(300)]
    whole = predictions_of(random_logits, [1], [2], ids)
    monkeypatch.setattr(divergence_of, "_MOST_BYTES", 4 * 200 * 7)
    parts = predictions_of(random_logits, [1], [2], ids)
    assert len(whole.nll) == 299
    for name, values in vars(whole).items():
        assert getattr(parts, name) == pytest.approx(values, rel=1e-4)


def test_means_errors_and_p99_match_their_definitions() -> None:
    rng = random.Random(3)
    nll, above, nats = ([rng.gauss(mean, 0.3) for _ in range(400)] for mean in (2, 0.01, 0.1))
    predictions = Predictions(nll, above, nats, [True] * 300 + [False] * 100)
    mean, error = statistics.fmean(above), statistics.pstdev(above) / 20
    assert predictions.perplexity.value == pytest.approx(math.exp(statistics.fmean(nll)))
    assert predictions.perplexity_rise.value == pytest.approx(math.exp(mean) - 1)
    assert predictions.perplexity_rise.error == pytest.approx(math.exp(mean) * error)
    assert predictions.divergence_nats.value == pytest.approx(statistics.fmean(nats))
    assert predictions.divergence_nats.error == pytest.approx(statistics.pstdev(nats) / 20)
    assert sum(n > predictions.divergence_p99_nats for n in nats) == 4
    assert predictions.agreement.value == 0.75
    assert predictions.agreement.error == pytest.approx(math.sqrt(0.75 * 0.25 / 400))


def test_part_means_skip_parts_beyond_the_predictions() -> None:
    places = {"one": range(2, 4), "two": range(4, 6), "three": range(6, 9)}
    assert part_means([9.0, 9.0, 1.0, 3.0, 5.0], places) == {"one": 2.0, "two": 5.0}
