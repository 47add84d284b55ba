"""A model is seen to go on from restored caches before it is served."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm_kvpersist.cache.steps import completed

from mlx_lm_kvpersist.cache.blocks.canary import warming_up
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
    completed(warming_up(model, ModelCacheSpec.probe(model)))


def test_a_model_that_keeps_something_outside_its_caches_is_refused(
    llama_model: Any, llama_spec: ModelCacheSpec
) -> None:
    with pytest.raises(ModelNotSupported, match="keeps state outside its caches"):
        completed(warming_up(Counting(llama_model), llama_spec))


def test_a_model_that_fails_is_refused(llama_spec: ModelCacheSpec) -> None:
    def fails(ids: mx.array, cache: Any) -> mx.array:
        raise RuntimeError("out of memory")

    with pytest.raises(ModelNotSupported, match="out of memory"):
        completed(warming_up(fails, llama_spec))
