"""Evaluating a model finds the faults of its code, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache

from mlx_lm_kvpersist.cache.geometry.spec import Architecture, known
from mlx_lm_kvpersist.cache.live.caches import BatchQuantizedKVCache, FullPrecisionBatchKVCache
from mlx_lm_kvpersist.cache.live.rows import ArrayRows, PackedRows
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.host.patching import versions
from models_check.build import build
from models_check.configs import CONFIGS, module_of
from models_check.facts import TOLERANCE, Evaluated, combined, evaluated

VOCAB, DIM = 256, 64
TABLE, KEYS = mx.random.normal((2, VOCAB, DIM), key=mx.random.key(0))
TRUE = Architecture(batches=True, joins=True, packed=True)


@pytest.fixture(autouse=True, scope="module")
def attention() -> Iterator[None]:
    with server_attention():
        yield


class Attention(nn.Module):  # type: ignore[misc]
    """One layer of attention; its logits are the attention's result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Identity()]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        x = TABLE[inputs]
        mask = create_attention_mask(x, cache[0])
        keys_and_values = cache[0].update_and_fetch(KEYS[inputs][:, None], x[:, None])
        out = scaled_dot_product_attention(
            x[:, None], *keys_and_values, cache[0], scale=0.1, mask=mask
        )
        return self.logits(out[:, 0], cache[0])

    def logits(self, out: mx.array, cache: Any) -> mx.array:
        return out


def facts(model: Any) -> Architecture:
    return combined([evaluated(model)])


def test_a_correct_model_batches_joins_and_takes_packed_keys() -> None:
    assert facts(Attention()) == TRUE


@pytest.mark.parametrize("share", [0.05, 1.0, float("nan")])
def test_a_model_that_mixes_rows_neither_batches_nor_joins(share: float) -> None:
    class Mixes(Attention):
        def logits(self, out: mx.array, cache: Any) -> mx.array:
            return (1 - share) * out + share * out.mean(axis=0) if out.shape[0] > 1 else out

    assert facts(Mixes()) == Architecture(batches=False, joins=False, packed=True)


class FailsWithCaches(Attention):
    """A model that raises for several rows with caches of one class."""

    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls

    def logits(self, out: mx.array, cache: Any) -> mx.array:
        if isinstance(cache, self.cls):
            if out.shape[0] > 1:
                raise RuntimeError("one row at a time")
        return out


@pytest.mark.parametrize(
    ("cls", "batches", "joins"),
    [
        (FullPrecisionBatchKVCache, False, False),
        (BatchQuantizedKVCache, False, False),
        (ArrayRows, True, False),
        (PackedRows, True, False),
        (ArraysCache, True, True),
    ],
)
def test_errors_with_a_cache_class_change_only_the_affected_facts(
    cls: type, batches: bool, joins: bool
) -> None:
    assert facts(FailsWithCaches(cls)) == Architecture(batches, joins, packed=True)


def test_caches_without_merge_or_extract_are_not_batched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Chunked(Attention):
        def make_cache(self) -> list[Any]:
            return [ChunkedKVCache(64)]

    assert not facts(Chunked()).batches

    def raises(self: Any, row: int) -> None:
        raise RuntimeError("no row")

    monkeypatch.setattr(BatchQuantizedKVCache, "extract", raises)
    assert not facts(Attention()).batches


def half(out: mx.array) -> mx.array:
    return out / 2


def backwards(out: mx.array) -> mx.array:
    return out[..., ::-1]


@pytest.mark.parametrize("change", [half, backwards])
def test_a_model_that_misreads_packed_keys_gets_arrays(
    change: Callable[[mx.array], mx.array],
) -> None:
    class MisreadsPackedKeys(Attention):
        def logits(self, out: mx.array, cache: Any) -> mx.array:
            return change(out) if hasattr(cache, "bits") else out

    assert facts(MisreadsPackedKeys()) == Architecture(batches=True, joins=True, packed=False)


class CountsCalls(Attention):
    """A model whose logits depend on the number of calls, which no cache stores."""

    n_calls = 0

    def logits(self, out: mx.array, cache: Any) -> mx.array:
        self.n_calls += 1
        return out + mx.sin(mx.arange(DIM) * self.n_calls)


class RemembersLength(Attention):
    """A model whose logits depend on the length of the last prompt that it computed."""

    n_tokens = 0

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if inputs.shape[1] > 1:
            self.n_tokens = inputs.shape[1]
        return super().__call__(inputs, cache) + mx.sin(mx.arange(DIM) * self.n_tokens)


@pytest.mark.parametrize("cls", [CountsCalls, RemembersLength])
def test_a_model_that_keeps_state_outside_its_caches_is_refused(cls: type[Attention]) -> None:
    assert facts(cls()).refused == "it keeps state outside its caches"


def test_a_model_that_fails_with_our_caches_is_refused() -> None:
    class Fails(Attention):
        def logits(self, out: mx.array, cache: Any) -> mx.array:
            if cache.offset > 20:
                raise RuntimeError("too long")
            return out

    assert facts(Fails()) == Architecture(
        False, False, False, "it fails over the plugin's caches (RuntimeError)"
    )


def test_a_combined_fact_holds_for_every_model_that_measured_it() -> None:
    right = Evaluated({"batches, plain": 0.0, "joins, plain": 0.0, "packed": 0.0})
    silent = Evaluated({"batches, plain": 0.0, "joins, plain": 0.0})
    wrong = Evaluated({"batches, plain": 0.0, "joins, plain": 1.0, "packed": 2 * TOLERANCE})
    assert combined([right, silent]) == TRUE
    assert combined([right, wrong]) == Architecture(batches=True, joins=False, packed=False)
    assert combined([silent]) == Architecture(batches=True, joins=True, packed=False)
    assert combined([Evaluated()]) == Architecture(False, False, False)
    assert combined([right, Evaluated(refused="why")]).refused == "why"


@pytest.mark.parametrize(
    "module", ["llama", "deepseek_v2", "gemma2", "gpt_oss", "mamba", "minimax_m3_vl", "falcon_h1"]
)
def test_shipped_facts_match_an_evaluation_with_another_seed(module: str) -> None:
    """The file was made with another seed."""
    pytest.importorskip(f"mlx_lm.models.{module}", reason="newer than this mlx-lm")
    names = [name for name in CONFIGS if module_of(name) == module]
    evaluated_facts = combined([evaluated(build(name, seed=1)) for name in names])
    assert evaluated_facts == known()[versions.installed("mlx-lm")][module]
