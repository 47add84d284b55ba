"""The sweep finds no fault in the plugin, and detects injected faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from mlx_lm_kvpersist.cache.geometry.spec import Architecture, probe_model
from mlx_lm_kvpersist.request.model import LoadedModel
from models_check.__main__ import _in_a_process
from models_check.build import build
from models_check.compare import compare
from models_check.configs import available
from models_check.stock import batches_right
from models_check.stored import restored
from models_check.sweep import FINE, Finding, served, sweep

REPRESENTATIVE = [
    "gemma3_text",
    "qwen3_next",
]


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_sweep_finds_no_fault_in_representative_models(name: str) -> None:
    finding = sweep(name)
    assert finding.result in FINE, finding


@pytest.mark.parametrize("name", ["gemma2", pytest.param("jamba", marks=pytest.mark.slow)])
def test_sweep_finds_no_fault_in_a_model_without_facts(name: str) -> None:
    """Such a model is batched as in stock; all other results must be correct."""
    finding = sweep(name, unknown=True)
    assert finding.result in FINE, finding
    assert finding.batching == "replies"


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize("name", [name for name in available() if name not in REPRESENTATIVE])
def test_sweep_finds_no_fault_in_any_model(name: str, unknown: bool) -> None:
    finding = _in_a_process(name, unknown=unknown)
    assert finding.result in FINE, finding


def test_facts_decide_batching_plans_and_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = served(build("llama"))
    assert known.batching == "prompts and replies" and known.plans
    unknown = served(build("llama"), unknown=True)
    assert unknown.batching == "replies" and not unknown.plans
    alone = served(build("gemma2"))
    assert alone.batching == "nothing" and not alone.plans
    facts = Architecture(True, True, True, "it keeps state outside its caches")
    monkeypatch.setattr("models_check.sweep.architecture_of", lambda model: facts)
    finding = sweep("llama")
    assert finding.result == "refused"
    assert finding.reason == "its architecture is not supported: it keeps state outside its caches"


def test_llama_reuses_all_tokens_that_its_blocks_allow() -> None:
    finding = sweep("llama")
    assert finding.result == "equal"
    assert finding.reused == finding.possible
    assert finding.reusable == "by blocks"
    assert finding.batching == "prompts and replies"
    assert finding.stock_batches_right == "yes"
    assert Finding(**json.loads(json.dumps(finding.to_json()))) == finding


# Injected faults.


@pytest.fixture
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """End the conversation with the first turn after a restart."""
    monkeypatch.setattr("models_check.sweep.N_TURNS", 3)


@pytest.mark.parametrize("name", ["llama", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_sweep_detects_saved_caches_of_other_tokens(
    name: str, few_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = LoadedModel.save

    def save_wrong_caches(
        loaded: LoadedModel, sequence: Any, tokens: Any, caches: Any, cache_type: str, store: Any
    ) -> int:
        wrong_caches = loaded.spec.make_cache()
        loaded.model(mx.array([tokens[::-1]]), cache=wrong_caches)
        return save(loaded, sequence, tokens, wrong_caches, cache_type, store)

    monkeypatch.setattr(LoadedModel, "save", save_wrong_caches)
    finding = sweep(name)
    assert finding.result == "WRONG"
    assert "restored: logits" in finding.reason


@pytest.mark.slow
def test_sweep_detects_a_window_shifted_by_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def restored_and_rolled(*args: Any) -> Any:
        reuse = restored(*args)
        for cache in reuse.caches or []:
            if isinstance(cache, RotatingKVCache):
                cache.keys = mx.roll(cache.keys, 1, 2)
        return reuse

    monkeypatch.setattr("models_check.stored.restored", restored_and_rolled)
    finding = sweep("recurrent_gemma")
    assert finding.result == "WRONG"
    assert "restored: logits" in finding.reason
    assert "cut anywhere: logits" in finding.reason


def test_sweep_detects_that_nothing_is_saved(
    few_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModel, "save", lambda *_: 0)
    finding = sweep("llama")
    assert finding.result == "WRONG"
    assert finding.reason.startswith("turn 2 reused nothing")


@pytest.mark.slow
def test_sweep_detects_live_caches_that_differ_from_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def coarser(x: mx.array, precision: Any) -> mx.array:
        if 0 in x.shape:  # no older block
            return x
        return mx.dequantize(*mx.quantize(x, group_size=32, bits=3), group_size=32, bits=3)

    monkeypatch.setattr("models_check.rounded._round", coarser)
    finding = sweep("llama")
    assert finding.result == "WRONG"
    assert finding.reason.startswith("live: logits")


@pytest.mark.slow
def test_sweep_detects_a_batch_without_a_padding_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def blind(stock: Callable[..., Any]) -> Callable[..., Any]:
        def make_mask(self: Any, N: int, *args: Any, **kwargs: Any) -> Any:
            return stock(self, N, *args, **kwargs) if len(self.offset.tolist()) == 1 else None

        return make_mask

    cache = probe_model(build("llama")).make_cache()[0]
    batch = type(cache.merge([cache, cache]))
    monkeypatch.setattr(batch, "make_mask", blind(batch.make_mask))
    finding = sweep("llama")
    assert finding.result == "WRONG"
    assert "in a batch: logits" in finding.reason


def test_a_stock_batch_without_a_padding_mask_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    assert batches_right(model) == "yes"
    cache = make_prompt_cache(model)[0]
    batch = type(cache.merge([cache, cache]))
    monkeypatch.setattr(batch, "make_mask", lambda self, N, **_: "causal" if N > 1 else None)
    assert batches_right(model) == "no"


def test_an_error_in_stock_is_reported_as_stock_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("too many")

    monkeypatch.setattr("mlx_lm.models.llama.create_attention_mask", fail)
    finding = sweep("llama")
    assert (finding.result, finding.reason) == ("stock fails", "ValueError: too many")


def test_an_error_in_a_restore_is_reported_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("models_check.stored.restored", fail)
    finding = sweep("llama")
    assert (finding.result, finding.reason) == ("failed", "RuntimeError: no luck")


def test_a_process_that_dies_is_reported_as_failed_or_crashed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _in_a_process("no such model").result == "failed"
    monkeypatch.setattr("models_check.__main__.sys.executable", "false")
    assert _in_a_process("llama").result == "crashed"


def test_a_process_that_hangs_is_reported_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models_check.__main__._TIMEOUT_S", 0.1)
    assert _in_a_process("llama").result == "hung"


# Comparing logits.


def test_a_near_tie_does_not_count_as_another_token() -> None:
    reference = np.array([[0.0, -10.0, -0.001]], np.float32)
    near = np.array([[-0.001, -10.0, 0.0]], np.float32)
    comparison = compare(reference, near)
    assert comparison.is_equal
    assert (comparison.n_other_tokens, comparison.n_near_ties) == (0, 1)


def test_a_different_best_token_counts_as_another_token() -> None:
    reference = np.array([[0.0, -10.0, -0.5]], np.float32)
    other = np.array([[-0.5, -10.0, 0.0]], np.float32)
    comparison = compare(reference, other)
    assert not comparison.is_equal
    assert (comparison.n_other_tokens, comparison.n_near_ties) == (1, 0)


def test_differences_are_relative_to_the_range_of_the_logits() -> None:
    reference = np.array([[0.0, -10.0]], np.float32)
    assert compare(reference, reference - 0.009).is_equal
    assert not compare(reference, reference - 0.02).is_equal


def test_masked_tokens_must_be_masked_in_both() -> None:
    reference = np.array([[0.0, -10.0, -np.inf]], np.float32)
    assert compare(reference, reference).difference == 0.0
    assert not compare(reference, np.array([[0.0, -10.0, -3.0]], np.float32)).is_equal
