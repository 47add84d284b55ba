"""The memory that a chunk of a prompt takes, predicted before it is computed."""

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
"""How far the formula may be from the memory of 512 tokens, in either direction."""


def computed(model: Any, caches: list[Any], n_tokens: int) -> int:
    """Compute a chunk; return the memory that it took."""
    gc.collect()  # else arrays of earlier tests may be freed below
    peak_bytes = peak_memory()
    model(mx.array([[1] * n_tokens]), cache=caches)
    mx.eval([slot.state for slot in slots_of(caches) if not slot.empty()])
    return peak_bytes()


def told(model: Any, limit_bytes: int = 64 * MIB) -> tuple[PrefillMemory, ModelCacheSpec]:
    spec = probe_model(model)
    return PrefillMemory.of(model, spec, limit_bytes), spec


@pytest.mark.parametrize("name", RATIOS)
def test_a_chunk_takes_about_what_the_formula_tells(name: str) -> None:
    model = build(name)
    memory, spec = told(model)
    caches = spec.make_cache()
    for position in (0, 512):
        taken = computed(model, caches, 512)
        assert 1 / RATIOS[name] < memory.peak_bytes(512, position) / taken < RATIOS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", available())
def test_the_formula_is_plausible_for_every_architecture(name: str) -> None:
    # Its second layer uses the keys of the first: of two layers, a chunk computes only these keys.
    model = build(name, config={"num_hidden_layers": 4} if name == "hunyuan" else {})
    try:
        memory, spec = told(model)
    except ModelNotSupported as error:
        pytest.skip(f"the model is refused: {error}")
    caches = spec.make_cache()
    taken = computed(model, caches, 512)
    assert taken / 3 < memory.peak_bytes(512, 0) < 8 * taken


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


def raw(*shape: int) -> nn.Module:
    module = nn.Module()
    module.weight = mx.zeros(shape)
    return module


def test_a_packed_matrix_counts_as_what_it_makes() -> None:
    linear = nn.Linear(256, 512, bias=False)
    linear.set_dtype(mx.bfloat16)
    assert activations(linear) == activations(linear.to_quantized(64, 4)) == (2 * 512 * 2, 2)


@pytest.mark.parametrize("experts", [SwitchLinear(64, 96, 32, False), raw(32, 96, 64)])
@pytest.mark.parametrize("bits", [None, 4])
def test_experts_count_as_often_as_a_token_goes_to_them(experts: Any, bits: int | None) -> None:
    arguments = {"text_config": {"num_experts": 32, "num_experts_per_tok": 3}}
    if bits and hasattr(experts, "to_quantized"):
        experts = experts.to_quantized(64, bits)
    assert activations(experts, **arguments) == (2 * 3 * 96 * 4, 4)
    assert activations(experts, **arguments, moe_topk=40)[0] == 2 * 32 * 96 * 4


def test_heads_are_not_taken_for_experts() -> None:
    layer = nn.Module()
    layer.self_attn = raw(32, 96, 64)
    assert activations(layer, num_experts=32, num_experts_per_tok=2)[0] == 2 * 32 * 96 * 4


@pytest.mark.parametrize("on", ["cpu", "cuda", "metal"])
def test_scores_take_memory_unless_a_gpu_attends_in_one_kernel(
    monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    monkeypatch.setattr(prefill_memory, "backend", lambda: on)
    model = build("llama", config={"head_dim": 128, "num_attention_heads": 32})
    model.set_dtype(mx.bfloat16)
    memory, _ = told(model)
    assert memory.key_bytes == 2 * 2 * 128 * 2
    copies_of_keys = memory.key_bytes / 256
    assert memory.score_bytes == (32 * 3 if on == "cpu" else copies_of_keys)


def test_latent_attention_has_scores_on_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "backend", lambda: "metal")
    assert told(build("deepseek_v3"))[0].score_bytes == 2 * 4 * 5


def test_a_model_without_arguments_has_a_formula() -> None:
    model = build("llama")
    memory, spec = told(model)
    del model.args
    assert PrefillMemory.of(model, spec, MIB).score_bytes > memory.score_bytes


def test_the_largest_layer_counts() -> None:
    model = OddLayers([(2, 64, 64), (4, 128, 64), (2, 64, 64)])
    assert told(model)[0].key_bytes == 4 * (128 + 64) * 4


def test_keys_that_no_layer_sees_take_no_memory() -> None:
    memory = told(build("mamba2"))[0]
    assert memory.peak_bytes(512, 100_000) == memory.peak_bytes(512, 0)
    memory = told(build("recurrent_gemma"))[0]
    assert memory.peak_bytes(512, 100_000) == memory.peak_bytes(512, 16)
    assert memory.most_tokens(100_000) > 8 * MIN_CHUNK


def test_models_with_windows_stop_where_a_checkpoint_is_made() -> None:
    assert told(tiny_gemma3())[0].stops_every == CHECKPOINT_EVERY
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
def test_the_limit_is_used_to_the_byte(n_tokens: int) -> None:
    assert PrefillMemory(100.0, 0.0, 0.0, 100 * n_tokens).most_tokens(0) == n_tokens


def test_chunks_that_take_no_memory_end_all_the_same() -> None:
    memory = PrefillMemory(0.0, 0.0, 0.0, MIB)
    memory.learn(512, 0, 0)
    assert 1 << 16 <= memory.most_tokens(0) < 1 << 20


def test_without_room_a_few_tokens_are_computed_all_the_same() -> None:
    assert PrefillMemory(20_000.0, 16.0, 4096.0, MIB).most_tokens(30_000) == MIN_CHUNK


# Learning.


def formula() -> PrefillMemory:
    return PrefillMemory(10_000.0, 10.0, 1000.0, 64 * MIB)


def learn(memory: PrefillMemory, n_tokens: int, position: int, factor: float) -> None:
    """Let a chunk take `factor` times the formula's bytes."""
    memory.learn(n_tokens, position, int(factor * formula_bytes(memory, n_tokens, position)))


def formula_bytes(memory: PrefillMemory, n_tokens: int, position: int) -> int:
    about = memory.token_bytes, memory.score_bytes, memory.key_bytes, memory.limit_bytes
    return PrefillMemory(*about).peak_bytes(n_tokens, position)


def test_a_prediction_rises_at_once_and_falls_slowly() -> None:
    memory, told_bytes = formula(), formula().peak_bytes(512, 512)
    learn(memory, 512, 512, 3.0)
    risen = memory.peak_bytes(512, 512) / told_bytes
    assert 3.0 <= risen < 4.0
    learn(memory, 512, 512, 0.5)
    assert 0.85 * risen < memory.peak_bytes(512, 512) / told_bytes < risen
    for _ in range(100):
        learn(memory, 512, 512, 0.5)
        assert memory.peak_bytes(512, 512) >= 0.5 * told_bytes
    assert memory.peak_bytes(512, 512) < 0.7 * told_bytes


def test_a_short_first_prompt_teaches_nothing() -> None:
    """A chunk of five tokens takes a megabyte, nearly all of it overhead."""
    memory = formula()
    for n_bytes in (MIB, 1000, 0):
        memory.learn(5, 0, n_bytes)
        assert memory.most_tokens(0) == formula().most_tokens(0)
        assert memory.peak_bytes(2048, 5000) == formula().peak_bytes(2048, 5000)


def test_a_short_chunk_that_takes_as_much_as_a_long_one_is_heard() -> None:
    memory = formula()
    memory.learn(5, 0, 32 * MIB)
    assert memory.peak_bytes(256, 0) >= 32 * MIB


def test_chunks_that_the_limit_made_short_teach() -> None:
    """A formula that predicts far too much would keep chunks short forever."""
    memory = PrefillMemory(500_000.0, 10.0, 1000.0, 64 * MIB)
    first = memory.most_tokens(0)
    assert first < 256
    for _ in range(40):
        learn(memory, memory.most_tokens(0), 0, 0.1)
    assert memory.most_tokens(0) > 6 * first


def test_a_place_where_nothing_was_computed_expects_the_worst() -> None:
    memory = formula()
    learn(memory, 512, 512, 0.5)
    assert memory.peak_bytes(512, 100_000) == formula().peak_bytes(512, 100_000)
    learn(memory, 512, 4096, 2.0)
    assert memory.peak_bytes(512, 100_000) >= 2 * formula().peak_bytes(512, 100_000)


def test_layers_that_a_gpu_has_queued_do_not_shorten_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H100 the peaks of a prompt of 32K tokens led to chunks of 32 tokens."""
    monkeypatch.setattr(prefill_memory, "backend", lambda: "cuda")
    memory, _ = told(build("llama"), 1024 * MIB)
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
    "less than told": lambda n, position: n * 2000 + n * (n + position) * 2,
    "overhead": lambda n, position: 9 * MIB + n * 10_000,
}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_no_chunk_exceeds_the_limit_once_chunks_have_taught(
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
def test_one_strange_peak_is_forgotten(n_bytes: int) -> None:
    """Other arrays were freed, or made, while the chunk was computed."""
    memory, usual = formula(), formula().most_tokens(5000)
    for _ in range(60 if not n_bytes else 1):
        memory.learn(512, 5000, n_bytes)
    for position in (5000, 20_000):
        for _ in range(100):
            n_tokens = memory.most_tokens(position)
            learn(memory, n_tokens, position, 1.0)
    assert usual / 1.5 < memory.most_tokens(5000) <= usual


def test_arguments_of_any_form_are_read() -> None:
    model = SimpleNamespace(args=None, config=None)
    own: dict[Any, Any] = {0: "label", "num_attention_heads": 4, "more": {"num_heads": [2, 8]}}
    own["itself"] = own
    model.args = own
    assert sorted(prefill_memory._arguments(model, ".*_heads")) == [2, 4, 8]
    model.args = (3,)
    assert list(prefill_memory._arguments(model, ".*_heads")) == []


@pytest.mark.parametrize("is_evaluated_within", [False, True])
def test_what_a_chunk_takes_is_neither_what_it_leaves_nor_what_was_there(
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
