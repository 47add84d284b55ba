"""The sweep finds no fault in the plugin, and finds faults that are put in."""

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
def test_representative_models(name: str) -> None:
    finding = sweep(name)
    assert finding.result in FINE, finding


@pytest.mark.parametrize("name", ["gemma2", pytest.param("jamba", marks=pytest.mark.slow)])
def test_a_model_of_which_nothing_is_known_is_right(name: str) -> None:
    """Its batches are those of stock, right or wrong; all else is as right as with facts."""
    finding = sweep(name, unknown=True)
    assert finding.result in FINE, finding
    assert finding.batching == "replies"


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [False, True], ids=["known", "unknown"])
@pytest.mark.parametrize("name", [name for name in available() if name not in REPRESENTATIVE])
def test_every_model(name: str, unknown: bool) -> None:
    finding = _in_a_process(name, unknown=unknown)
    assert finding.result in FINE, finding


def test_a_model_is_served_by_the_facts_about_its_architecture(
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


def test_llama_is_kept_and_reused_up_to_the_block_where_it_is_left() -> None:
    finding = sweep("llama")
    assert finding.result == "equal"
    assert finding.reused == finding.possible
    assert finding.reusable == "by blocks"
    assert finding.batching == "prompts and replies"
    assert finding.stock_batches_right == "yes"
    assert Finding(**json.loads(json.dumps(finding.to_json()))) == finding


# The sweep's findings if the plugin had faults.


@pytest.fixture
def few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversation ends with the first turn that follows a restart."""
    monkeypatch.setattr("models_check.sweep.N_TURNS", 3)


@pytest.mark.parametrize("name", ["llama", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_what_other_tokens_left_is_found_out(
    name: str, few_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = LoadedModel.save

    def save_others(
        loaded: LoadedModel, sequence: Any, tokens: Any, caches: Any, cache_type: str, store: Any
    ) -> int:
        others = loaded.spec.make_cache()
        loaded.model(mx.array([tokens[::-1]]), cache=others)
        return save(loaded, sequence, tokens, others, cache_type, store)

    monkeypatch.setattr(LoadedModel, "save", save_others)
    finding = sweep(name)
    assert finding.result == "WRONG"
    assert "restored: logits" in finding.reason


@pytest.mark.slow
def test_a_window_that_is_one_token_off_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_store_that_finds_nothing_is_found_out(
    few_turns: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoadedModel, "save", lambda *_: 0)
    finding = sweep("llama")
    assert finding.result == "WRONG"
    assert finding.reason.startswith("turn 2 reused nothing")


@pytest.mark.slow
def test_a_live_cache_that_is_wrong_everywhere_is_found_out(
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
def test_a_batch_that_does_not_hide_its_padding_is_found_out(
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


def test_stock_that_does_not_hide_its_padding_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    assert batches_right(model) == "yes"
    cache = make_prompt_cache(model)[0]
    batch = type(cache.merge([cache, cache]))
    monkeypatch.setattr(batch, "make_mask", lambda self, N, **_: "causal" if N > 1 else None)
    assert batches_right(model) == "no"


def test_a_model_that_stock_cannot_run_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("too many")

    monkeypatch.setattr("mlx_lm.models.llama.create_attention_mask", fail)
    finding = sweep("llama")
    assert (finding.result, finding.reason) == ("stock fails", "ValueError: too many")


def test_an_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("models_check.stored.restored", fail)
    finding = sweep("llama")
    assert (finding.result, finding.reason) == ("failed", "RuntimeError: no luck")


def test_a_process_that_dies_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _in_a_process("no such model").result == "failed"
    monkeypatch.setattr("models_check.__main__.sys.executable", "false")
    assert _in_a_process("llama").result == "crashed"


def test_a_process_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models_check.__main__._TIMEOUT_S", 0.1)
    assert _in_a_process("llama").result == "hung"


# The comparisons.


def test_a_near_tie_is_no_other_token() -> None:
    reference = np.array([[0.0, -10.0, -0.001]], np.float32)
    near = np.array([[-0.001, -10.0, 0.0]], np.float32)
    found = compare(reference, near)
    assert found.is_equal
    assert (found.n_other_tokens, found.n_near_ties) == (0, 1)


def test_another_token_is_one() -> None:
    reference = np.array([[0.0, -10.0, -0.5]], np.float32)
    other = np.array([[-0.5, -10.0, 0.0]], np.float32)
    found = compare(reference, other)
    assert not found.is_equal
    assert (found.n_other_tokens, found.n_near_ties) == (1, 0)


def test_small_differences_count_as_a_share_of_the_range() -> None:
    reference = np.array([[0.0, -10.0]], np.float32)
    assert compare(reference, reference - 0.009).is_equal
    assert not compare(reference, reference - 0.02).is_equal


def test_masked_tokens_must_be_masked_in_both() -> None:
    reference = np.array([[0.0, -10.0, -np.inf]], np.float32)
    assert compare(reference, reference).difference == 0.0
    assert not compare(reference, np.array([[0.0, -10.0, -3.0]], np.float32)).is_equal
