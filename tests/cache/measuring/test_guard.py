"""A model's default precision is judged by its worst part, and replaced until one is borne."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.precision import FULL_BITS, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.measuring import guard
from mlx_lm_kvpersist.cache.measuring.divergence import compared
from mlx_lm_kvpersist.cache.measuring.guard import (
    Verdict,
    is_guarded,
    judge,
    known_verdict,
    put_verdict,
)
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from tests.support.host import patched_attention

from ..conftest import VOCAB, tiny_llama

DEFAULT = replace(KV_BITS[DEFAULT_BITS], rotated=True)
IDS = [(7 * i * i + 3 * i) % VOCAB for i in range(330)]
PLACES = {"first": range(256, 290), "second": range(290, 330)}
LIMIT = 0.05
"""Random weights lose more than a trained model's."""


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    """Stock's attention cannot take keys and values of unlike precisions."""
    with patched_attention():
        yield


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "placed", lambda tokenizer: (list(IDS), PLACES))
    monkeypatch.setattr(guard, "LIMIT_NATS", LIMIT)


def made(output: float, layers: Sequence[int] = (), factor: float = 1.0) -> Any:
    """Return a model in which attention counts `output` times.

    One RoPE pair of each key head of some layers is larger by `factor`, its queries are smaller.
    """
    model = tiny_llama(seed=3, n_layers=4)
    scales = mx.ones((64,))
    scales[3] = scales[3 + 32] = factor
    for number, layer in enumerate(model.layers):
        attention = layer.self_attn
        attention.o_proj.weight = output * attention.o_proj.weight
        if number in layers:
            for projection, scale in ((attention.k_proj, scales), (attention.q_proj, 1 / scales)):
                weight = projection.weight
                scaled = weight.reshape(-1, 64, weight.shape[1]) * scale[:, None]
                projection.weight = scaled.reshape(weight.shape)
    mx.eval(model.parameters())
    return model


def judged(model: Any, spec: ModelCacheSpec, step_s: float = 60.0) -> tuple[Verdict, int]:
    """Return the verdict and the number of steps to it."""
    steps, n_steps = judge(model, None, spec, DEFAULT, step_s), 0
    try:
        while True:
            next(steps)
            n_steps += 1
    except StopIteration as ended:
        verdict: Verdict = ended.value
        return verdict, n_steps


@pytest.mark.parametrize(
    ("model", "n_tried", "bits"),
    [
        (made(0.2), 1, (6, 4, 8)),
        (made(0.2, (1, 2), 400.0), 2, (8, 4, None)),
        (made(1.0), 3, (8, 8, None)),
        (made(0.2, range(4), 400.0), 3, (FULL_BITS, FULL_BITS, None)),
    ],
    ids=["default", "k8v4", "8", "its own"],
)
def test_the_first_precision_that_is_borne_is_taken(
    model: Any, n_tried: int, bits: tuple[int, int, int | None]
) -> None:
    verdict, _ = judged(model, ModelCacheSpec.probe(model, DEFAULT))
    assert len(verdict.losses) == n_tried
    choice = verdict.choice(DEFAULT)
    assert (choice.key_bits, choice.value_bits, choice.outer_key_bits) == bits
    assert choice.rotated == DEFAULT.rotated


def test_a_loss_is_the_mean_divergence_of_a_part() -> None:
    """Whatever the chunks: those of a quick and of a slow device give the same."""
    model = made(0.2)
    spec = ModelCacheSpec.probe(model, DEFAULT)
    own = ModelCacheSpec.probe(model, PrecisionChoice(FULL_BITS, FULL_BITS))
    logits = []
    for caches in (own.make_cache(), spec.make_cache()):
        chunks = (IDS[:256], IDS[256:-1])
        logits.append(mx.concatenate([model(mx.array([x]), cache=caches) for x in chunks], axis=1))
    p, q = (mx.softmax(each[0], axis=-1) for each in logits)
    nats = (p * mx.log(p / q)).sum(axis=-1)
    means = {name: float(nats[place.start : place.stop].mean()) for name, place in PLACES.items()}
    worst = max(means, key=lambda name: means[name])
    (quick, n_quick), (slow, n_slow) = (judged(model, spec, s) for s in (60.0, 1e-9))
    assert n_slow > 4 * n_quick
    for verdict in (quick, slow):
        ((part, loss),) = verdict.losses
        assert part == worst and loss == pytest.approx(means[worst], rel=0.02)


@pytest.mark.parametrize("slow_from", [0, 100])
def test_a_step_takes_no_longer_where_the_text_is_longer(
    monkeypatch: pytest.MonkeyPatch, slow_from: int
) -> None:
    """A token costs ten times as much from some position on; the clock counts tokens alone."""
    model, now_s, n_read = made(0.2), 0.0, 0
    spec = ModelCacheSpec.probe(model, DEFAULT)
    steps_s: list[float] = []
    computed = compared

    def timed(model: Any, ids: list[int], *caches: Any) -> Any:
        nonlocal now_s, n_read
        places = range(n_read, n_read + len(ids) - 1)
        steps_s.append(sum(0.1 if place >= slow_from else 0.01 for place in places))
        n_read, now_s = places.stop, now_s + steps_s[-1]
        return computed(model, ids, *caches)

    monkeypatch.setattr(guard, "compared", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    judged(model, spec, step_s=1.3)
    assert n_read == len(IDS) - 1
    n_over = sum(seconds > 1.3 for seconds in steps_s)
    assert n_over <= 4  # where it becomes slow, until a step is short again
    assert max(steps_s[-5:-1]) <= 1.3 and len(steps_s) < 45


def test_no_work_is_done_twice_for_precisions_that_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two layers, all keys are of an outer layer: the default is k8v4."""
    monkeypatch.setattr(guard, "LIMIT_NATS", 0.0)
    model = tiny_llama(seed=3, n_layers=2)
    spec = ModelCacheSpec.probe(model, DEFAULT)
    read: list[Any] = []

    def seen(model: Any, ids: list[int], own: list[Any], caches: Any) -> Any:
        read.append(caches[""])
        return compared(model, ids, own, caches)

    monkeypatch.setattr(guard, "compared", seen)
    verdict, _ = judged(model, spec)
    default, next_one, eight = verdict.losses
    assert default == next_one != eight
    assert len({id(caches) for caches in read}) == 2
    assert verdict.choice(DEFAULT).is_full_precision


def test_no_position_beyond_the_models_context_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(0.2)
    spec = ModelCacheSpec.probe(model, DEFAULT)
    for limit, part in ((295, {"first", "second"}), (260, {"first"}), (256, {""}), (100, {""})):
        monkeypatch.setattr(model.args, "max_position_embeddings", limit, raising=False)
        verdict, _ = judged(model, spec)
        assert {name for name, _ in verdict.losses} <= part
        assert limit > 256 or verdict.losses == (("", 0.0),)


def test_the_model_makes_its_own_caches_though_the_server_replaced_them() -> None:
    model = made(0.2, (1, 2), 400.0)
    spec = ModelCacheSpec.probe(model, DEFAULT)
    expected, _ = judged(model, spec)
    model.make_cache = spec.make_cache
    assert judged(model, spec)[0] == expected
    assert model.make_cache == spec.make_cache


def test_predictions_that_are_no_numbers_say_nothing() -> None:
    model = made(0.2)
    spec = ModelCacheSpec.probe(model, DEFAULT)
    model.lm_head.weight = model.lm_head.weight * mx.nan
    with pytest.raises(ValueError, match="no numbers"):
        judged(model, spec)


class Kept(dict[str, Any]):
    """JSON values by key."""

    def put(self, key: str, value: Any) -> None:
        self[key] = value


def test_a_verdict_is_kept_for_a_model_and_what_was_asked_for() -> None:
    kept = Kept()
    verdict = Verdict((("far copy", 0.2), ("German", 0.01)))
    put_verdict(kept, "model", DEFAULT, verdict)
    assert known_verdict(kept, "model", DEFAULT) == verdict
    assert known_verdict(kept, "another", DEFAULT) is None
    for other in (replace(DEFAULT, group_size=32), replace(DEFAULT, rotated=False)):
        assert known_verdict(kept, "model", other) is None
    # Another server was quicker: its conversations are found.
    put_verdict(kept, "model", DEFAULT, Verdict((("far copy", 0.01),)))
    assert known_verdict(kept, "model", DEFAULT) == verdict


def test_a_verdict_in_words() -> None:
    assert str(Verdict((("German", 0.0123),))) == "checked: loses at most 0.012 nats (German)"
    refused = Verdict((("far copy", 0.2), ("German", 0.01)))
    said = "the default loses 0.2 nats (far copy), more than 0.05; this loses 0.01 nats (German)"
    assert str(refused) == said
    own = Verdict((("far copy", 0.4), ("Thai", 0.3), ("Thai", 0.1)))
    assert str(own) == "the default loses 0.4 nats (far copy), more than 0.05"


def test_what_is_asked_for_by_name_is_not_judged() -> None:
    assert [name for name, choice in KV_BITS.items() if is_guarded(choice)] == [DEFAULT_BITS]
