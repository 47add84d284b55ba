"""Predictions of the memory that a chunk of a prompt takes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_lm_kvpersist.cache.geometry.kinds import slots_of
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, probe_model
from mlx_lm_kvpersist.cache.measuring import prefill_memory
from mlx_lm_kvpersist.cache.measuring.prefill_memory import (
    CHECKPOINT_EVERY,
    MIN_CHUNK,
    PrefillMemory,
)
from mlx_lm_kvpersist.errors import ModelNotSupported
from mlx_lm_kvpersist.host.scheduling.prefill import peak_memory
from models_check.build import build
from models_check.configs import available

from ..conftest import tiny_gemma3
from ..geometry.test_spec import OddLayers

MIB = 1 << 20

RATIOS = {
    "llama": 2,
    "gemma3": 2,
    "gpt2": 2,
    "mixtral": 2,
    "deepseek_v3": 2,
    "qwen3_next": 4,
    "mamba": 6,
    "mamba2": 4,
    "rwkv7": 3,
    "recurrent_gemma": 3,
    "jamba": 4,
}
"""The largest factor between the formula and the memory of 512 tokens, in either direction."""


def measured_bytes(model: Any, caches: list[Any], n_tokens: int) -> int:
    """Compute a chunk; return the bytes that it took."""
    gc.collect()  # arrays of earlier tests must not be freed below
    peak_bytes = peak_memory()
    model(mx.array([[1] * n_tokens]), cache=caches)
    mx.eval([slot.state for slot in slots_of(caches) if not slot.empty()])
    return peak_bytes()


def memory_and_spec(
    model: Any, limit_bytes: int = 64 * MIB
) -> tuple[PrefillMemory, ModelCacheSpec]:
    spec = probe_model(model)
    return PrefillMemory.of(model, spec, limit_bytes), spec


@pytest.mark.parametrize("name", RATIOS)
def test_formula_predicts_the_memory_of_a_chunk(name: str) -> None:
    model = build(name)
    memory, spec = memory_and_spec(model)
    caches = spec.make_cache()
    for position in (0, 512):
        measured = measured_bytes(model, caches, 512)
        assert 1 / RATIOS[name] < memory.peak_bytes(512, position) / measured < RATIOS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", available())
def test_the_formula_is_plausible_for_every_architecture(name: str) -> None:
    # Hunyuan's second layer reuses the keys of the first: two layers would compute only keys.
    model = build(name, config={"num_hidden_layers": 4} if name == "hunyuan" else {})
    try:
        memory, spec = memory_and_spec(model)
    except ModelNotSupported as error:
        pytest.skip(f"the model is refused: {error}")
    caches = spec.make_cache()
    measured = measured_bytes(model, caches, 512)
    assert measured / 3 < memory.peak_bytes(512, 0) < 8 * measured


class Layers(nn.Module):  # type: ignore[misc]
    """A model with these modules in its only layer."""

    def __init__(self, *modules: nn.Module, **arguments: Any) -> None:
        super().__init__()
        layer = nn.Module()
        layer.parts = list(modules)
        self.layers = [layer, None]
        self.args = SimpleNamespace(**arguments)


def activations(*modules: nn.Module, **arguments: Any) -> tuple[int, int]:
    return prefill_memory._activation_bytes(Layers(*modules, **arguments))


def module_with_weight(*shape: int) -> nn.Module:
    module = nn.Module()
    module.weight = mx.zeros(shape)
    return module


def test_quantized_matrix_counts_like_its_full_precision_form() -> None:
    linear = nn.Linear(256, 512, bias=False)
    linear.set_dtype(mx.bfloat16)
    assert activations(linear) == activations(linear.to_quantized(64, 4)) == (2 * 512 * 2, 2)


@pytest.mark.parametrize(
    "experts", [SwitchLinear(64, 96, 32, False), module_with_weight(32, 96, 64)]
)
@pytest.mark.parametrize("bits", [None, 4])
def test_expert_activations_scale_with_experts_per_token(experts: Any, bits: int | None) -> None:
    arguments = {"text_config": {"num_experts": 32, "num_experts_per_tok": 3}}
    if bits and hasattr(experts, "to_quantized"):
        experts = experts.to_quantized(64, bits)
    assert activations(experts, **arguments) == (2 * 3 * 96 * 4, 4)
    assert activations(experts, **arguments, moe_topk=40)[0] == 2 * 32 * 96 * 4


def test_attention_heads_do_not_count_as_experts() -> None:
    layer = nn.Module()
    layer.self_attn = module_with_weight(32, 96, 64)
    assert activations(layer, num_experts=32, num_experts_per_tok=2)[0] == 2 * 32 * 96 * 4


@pytest.mark.parametrize("backend", ["cpu", "cuda", "metal"])
def test_scores_take_memory_unless_a_gpu_fuses_attention(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    monkeypatch.setattr(prefill_memory, "backend", lambda: backend)
    model = build("llama", config={"head_dim": 128, "num_attention_heads": 32})
    model.set_dtype(mx.bfloat16)
    memory, _ = memory_and_spec(model)
    assert memory.key_bytes == 2 * 2 * 128 * 2
    copies_of_keys = memory.key_bytes / 256
    assert memory.score_bytes == (32 * 3 if backend == "cpu" else copies_of_keys)


def test_latent_attention_scores_take_memory_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "backend", lambda: "metal")
    assert memory_and_spec(build("deepseek_v3"))[0].score_bytes == 2 * 4 * 5


def test_formula_works_without_model_arguments() -> None:
    model = build("llama")
    memory, spec = memory_and_spec(model)
    del model.args
    assert PrefillMemory.of(model, spec, MIB).score_bytes > memory.score_bytes


def test_key_bytes_follow_the_largest_layer() -> None:
    model = OddLayers([(2, 64, 64), (4, 128, 64), (2, 64, 64)])
    assert memory_and_spec(model)[0].key_bytes == 4 * (128 + 64) * 4


def test_positions_beyond_every_window_take_no_more_memory() -> None:
    memory = memory_and_spec(build("mamba2"))[0]
    assert memory.peak_bytes(512, 100_000) == memory.peak_bytes(512, 0)
    memory = memory_and_spec(build("recurrent_gemma"))[0]
    assert memory.peak_bytes(512, 100_000) == memory.peak_bytes(512, 16)
    assert memory.most_tokens(100_000) > 8 * MIN_CHUNK


def test_chunks_of_windowed_models_end_at_checkpoints() -> None:
    assert memory_and_spec(tiny_gemma3())[0].stops_every == CHECKPOINT_EVERY
    memory = PrefillMemory(1.0, 0.0, 0.0, 256 * MIB, 2048)
    assert [memory.most_tokens(at) for at in (0, 2047, 2048, 5000)] == [2048, 1, 2048, 1144]


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("position", [0, 1000, 30_000])
def test_the_longest_chunk_stays_within_the_limit(position: int, factor: float) -> None:
    memory = PrefillMemory(20_000.0, 16.0, 4096.0, 256 * MIB)
    learn(memory, 600, position, factor)
    most = memory.most_tokens(position)
    assert memory.peak_bytes(most, position) <= 256 * MIB < memory.peak_bytes(most + 1, position)


@pytest.mark.parametrize("n_tokens", [32, 33, 64, 96, 1000])
def test_chunk_length_uses_the_whole_memory_limit(n_tokens: int) -> None:
    assert PrefillMemory(100.0, 0.0, 0.0, 100 * n_tokens).most_tokens(0) == n_tokens


def test_chunks_without_memory_cost_have_a_length_limit() -> None:
    memory = PrefillMemory(0.0, 0.0, 0.0, MIB)
    memory.learn(512, 0, 0)
    assert 1 << 16 <= memory.most_tokens(0) < 1 << 20


def test_without_enough_memory_chunks_have_the_minimum_length() -> None:
    assert PrefillMemory(20_000.0, 16.0, 4096.0, MIB).most_tokens(30_000) == MIN_CHUNK


# --- learning from measured chunks


def formula() -> PrefillMemory:
    return PrefillMemory(10_000.0, 10.0, 1000.0, 64 * MIB)


def learn(memory: PrefillMemory, n_tokens: int, position: int, factor: float) -> None:
    """Report a chunk that took `factor` times the formula's bytes."""
    memory.learn(n_tokens, position, int(factor * formula_bytes(memory, n_tokens, position)))


def formula_bytes(memory: PrefillMemory, n_tokens: int, position: int) -> int:
    terms = memory.token_bytes, memory.score_bytes, memory.key_bytes, memory.limit_bytes
    return PrefillMemory(*terms).peak_bytes(n_tokens, position)


def test_predictions_rise_at_once_and_fall_slowly() -> None:
    memory, initial_bytes = formula(), formula().peak_bytes(512, 512)
    learn(memory, 512, 512, 3.0)
    risen = memory.peak_bytes(512, 512) / initial_bytes
    assert 3.0 <= risen < 4.0
    learn(memory, 512, 512, 0.5)
    assert 0.85 * risen < memory.peak_bytes(512, 512) / initial_bytes < risen
    for _ in range(100):
        learn(memory, 512, 512, 0.5)
        assert memory.peak_bytes(512, 512) >= 0.5 * initial_bytes
    assert memory.peak_bytes(512, 512) < 0.7 * initial_bytes


def test_short_chunk_with_usual_overhead_changes_no_prediction() -> None:
    """A chunk of five tokens takes a megabyte, which is nearly all overhead."""
    memory = formula()
    for n_bytes in (MIB, 1000, 0):
        memory.learn(5, 0, n_bytes)
        assert memory.most_tokens(0) == formula().most_tokens(0)
        assert memory.peak_bytes(2048, 5000) == formula().peak_bytes(2048, 5000)


def test_short_chunk_with_large_peak_raises_predictions() -> None:
    memory = formula()
    memory.learn(5, 0, 32 * MIB)
    assert memory.peak_bytes(256, 0) >= 32 * MIB


def test_chunks_shortened_by_the_limit_lower_predictions() -> None:
    """Otherwise a formula that predicts far too much would keep chunks short forever."""
    memory = PrefillMemory(500_000.0, 10.0, 1000.0, 64 * MIB)
    first = memory.most_tokens(0)
    assert first < 256
    for _ in range(40):
        learn(memory, memory.most_tokens(0), 0, 0.1)
    assert memory.most_tokens(0) > 6 * first


def test_unmeasured_positions_use_the_worst_known_factor() -> None:
    memory = formula()
    learn(memory, 512, 512, 0.5)
    assert memory.peak_bytes(512, 100_000) == formula().peak_bytes(512, 100_000)
    learn(memory, 512, 4096, 2.0)
    assert memory.peak_bytes(512, 100_000) >= 2 * formula().peak_bytes(512, 100_000)


def test_cuda_peaks_of_queued_layers_keep_chunks_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H100, such peaks shortened the chunks of a 32K prompt to 32 tokens."""
    monkeypatch.setattr(prefill_memory, "backend", lambda: "cuda")
    memory, _ = memory_and_spec(build("llama"), 1024 * MIB)
    usual = memory.most_tokens(30_000)
    assert usual > 8 * MIN_CHUNK
    for _ in range(20):
        memory.learn(memory.most_tokens(30_000), 30_000, 20 * memory.limit_bytes)
    assert memory.most_tokens(30_000) > usual / 4
    assert memory.most_tokens(100_000) > MIN_CHUNK


DEVICES: dict[str, Callable[[int, int], float]] = {
    "activations": lambda n, position: n * 70_000 + (n + position) * 1000,
    "scores": lambda n, position: n * 10_000 + n * (n + position) * 150,
    "keys": lambda n, position: n * 10_000 + (n + position) * 2000,
    "less than predicted": lambda n, position: n * 2000 + n * (n + position) * 2,
    "overhead": lambda n, position: 9 * MIB + n * 10_000,
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_after_the_first_chunk_no_chunk_exceeds_the_limit(
    device: Callable[[int, int], float],
) -> None:
    memory, position, n_chunks = formula(), 0, 0
    while position < 20_000:
        n_tokens = min(512 if not n_chunks else 4096, memory.most_tokens(position))
        n_bytes = int(device(n_tokens, position))
        assert n_bytes <= memory.limit_bytes or n_tokens == MIN_CHUNK or not n_chunks
        memory.learn(n_tokens, position, n_bytes)
        position, n_chunks = position + n_tokens, n_chunks + 1


@pytest.mark.parametrize("n_bytes", [0, 640 * MIB])
def test_unusual_peaks_are_forgotten(n_bytes: int) -> None:
    """Other arrays can be freed or made while a chunk is computed."""
    memory, usual = formula(), formula().most_tokens(5000)
    for _ in range(60 if not n_bytes else 1):
        memory.learn(512, 5000, n_bytes)
    for position in (5000, 20_000):
        for _ in range(100):
            n_tokens = memory.most_tokens(position)
            learn(memory, n_tokens, position, 1.0)
    assert usual / 1.5 < memory.most_tokens(5000) <= usual


def test_head_counts_are_found_in_nested_and_cyclic_arguments() -> None:
    model = SimpleNamespace(args=None, config=None)
    args: dict[Any, Any] = {0: "label", "num_attention_heads": 4, "more": {"num_heads": [2, 8]}}
    args["itself"] = args
    model.args = args
    assert sorted(prefill_memory._arguments(model, ".*_heads")) == [2, 4, 8]
    model.args = (3,)
    assert list(prefill_memory._arguments(model, ".*_heads")) == []


@pytest.mark.parametrize("is_evaluated_within", [False, True])
def test_peak_memory_excludes_kept_and_earlier_arrays(
    is_evaluated_within: bool,
) -> None:
    """16 MiB are temporary and 4 stay; other arrays exist before and at the same time."""
    kept, others = list[mx.array](), mx.arange(8 << 20)
    mx.eval(others, mx.arange(32 << 20).sum())

    def call() -> None:
        passing = mx.arange(4 << 20, dtype=mx.float32) + len(kept)
        kept.append(passing[: 1 << 20] + passing.sum())
        if is_evaluated_within:
            mx.eval(kept)

    for _ in range(2):
        peak_bytes = peak_memory()
        call()
        mx.eval(kept)
        assert 14 * MIB < peak_bytes() < 18 * MIB
    assert others.size == 8 << 20
