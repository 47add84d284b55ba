"""A model is seen to go on from restored caches before it is served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.blocks.canary import CANARY_TOKENS, warm_up
from mlx_lm_kvpersist.cache.geometry.kinds import slots_of
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.errors import ModelNotSupported
from models_check.build import build

from ..conftest import VOCAB


class Counting:
    """A model that goes by how often it was asked, which no cache holds."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.n_calls = 0

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        self.n_calls += 1
        logits: mx.array = self.model((ids + self.n_calls) % VOCAB, cache=cache)
        return logits


@pytest.mark.parametrize(
    "name", ["llama", "deepseek_v2", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1", "mamba2"]
)
def test_what_every_family_computes_can_be_restored(name: str) -> None:
    model = build(name)
    warm_up(model, ModelCacheSpec.probe(model))


def test_a_model_that_keeps_something_outside_its_caches_is_refused(
    llama_model: Any, llama_spec: ModelCacheSpec
) -> None:
    with pytest.raises(ModelNotSupported, match="keeps state outside its caches"):
        warm_up(Counting(llama_model), llama_spec)


def test_a_model_that_fails_is_refused(llama_spec: ModelCacheSpec) -> None:
    def fails(ids: mx.array, cache: Any) -> mx.array:
        raise RuntimeError("out of memory")

    with pytest.raises(ModelNotSupported, match="out of memory"):
        warm_up(fails, llama_spec)


class Recording:
    """Notes, for each call of a model, how many tokens it gets and how many are cached before."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.args = model.args
        self.calls: list[tuple[int, int]] = []

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        self.calls.append((ids.shape[1], slots_of(cache)[0].size()))
        logits: mx.array = self.model(ids, cache=cache)
        return logits


def test_the_canary_is_warm_for_short_and_for_long_prompts(
    llama_model: Any, llama_spec: ModelCacheSpec
) -> None:
    model = Recording(llama_model)
    warm_up(model, llama_spec)
    canaries = model.calls[1:]
    assert canaries == [(CANARY_TOKENS, 24 - CANARY_TOKENS), (CANARY_TOKENS, 8192 - CANARY_TOKENS)]


@pytest.mark.parametrize(
    ("max_bytes", "n_positions", "n_tokens"),
    [(1 << 20, None, 3584), (1 << 30, 1024, 1024), (1 << 10, None, None), (1 << 30, 100, None)],
)
def test_a_long_warm_up_is_bounded_by_memory_and_by_positions(
    llama_model: Any,
    llama_spec: ModelCacheSpec,
    monkeypatch: pytest.MonkeyPatch,
    max_bytes: int,
    n_positions: int | None,
    n_tokens: int | None,
) -> None:
    assert llama_spec.bytes_per_token == 288
    monkeypatch.setattr("mlx_lm_kvpersist.cache.blocks.canary._LONG_BYTES", max_bytes)
    model = Recording(llama_model)
    model.args = SimpleNamespace(n_positions=n_positions)
    warm_up(model, llama_spec)
    long = model.calls[2:]
    assert long == ([(CANARY_TOKENS, n_tokens - CANARY_TOKENS)] if n_tokens else [])


def test_a_long_warm_up_that_fails_costs_nothing_but_its_use(
    llama_model: Any, llama_spec: ModelCacheSpec
) -> None:
    class NoLongPrompts(Recording):
        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            logits = super().__call__(ids, cache)
            if self.calls[-1][1] > 1000:
                raise RuntimeError("out of memory")
            return logits

    model = NoLongPrompts(llama_model)
    warm_up(model, llama_spec)
    assert len(model.calls) == 3
