"""What a chunk of a prompt takes in memory, told before it is computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load
from mlx_lm_kvpersist.cache.steps import completed

from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.live.quantized import BatchQuantizedKVCache
from mlx_lm_kvpersist.cache.measuring import prefill_memory
from mlx_lm_kvpersist.cache.measuring.prefill_memory import (
    CHECKPOINT_EVERY,
    MIN_CHUNK,
    PrefillMemory,
    measuring_prefill,
)

from ..conftest import tiny_gemma3
from ..geometry.test_spec import OddLayers

MIB = 1 << 20


def measured(model: Any, spec: ModelCacheSpec, limit_bytes: int) -> PrefillMemory:
    return PrefillMemory.of(spec, limit_bytes, completed(measuring_prefill(model, spec)))


def test_a_chunk_takes_no_more_than_was_told(tiny_model: Path) -> None:
    model = load(str(tiny_model))[0]
    spec = ModelCacheSpec.probe(model)
    memory = measured(model, spec, 64 * MIB)
    caches = [BatchQuantizedKVCache.merge([cache]) for cache in spec.make_cache()]
    for position in range(0, 2048, 256):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model(mx.array([[1] * 256]), cache=caches)
        mx.eval([cache.state for cache in caches])
        taken = mx.get_peak_memory() - max(before, mx.get_active_memory())
        assert 0 < taken <= 1.25 * memory.peak_bytes(256, position)
        assert memory.peak_bytes(256, position) <= 64 * taken


class Keeps:
    """Stands for a cache of one layer that keeps 4 MiB more with every chunk."""

    def __init__(self) -> None:
        self.state: list[mx.array] = []

    def empty(self) -> bool:
        return not self.state


def test_what_a_chunk_takes_is_neither_what_it_leaves_nor_what_was_there() -> None:
    """16 MiB come and go and 4 stay, with others before and besides."""

    def model(ids: mx.array, cache: list[Any]) -> None:
        passing = mx.arange(4 << 20, dtype=mx.float32) + ids.sum()
        cache[0].state.append(passing[: 1 << 20] + passing.sum())

    caches, others = [Keeps()], mx.arange(8 << 20)
    mx.eval(others, mx.arange(32 << 20).sum())
    for _ in range(2):
        taken = prefill_memory._peak(model, caches, 10)
        assert 14 * MIB < taken < 18 * MIB
    assert others.size == 8 << 20


@pytest.mark.parametrize("position", [0, 1000, 30_000])
def test_the_longest_chunk_stays_within_the_limit(position: int) -> None:
    memory = PrefillMemory(20_000.0, 16.0, 4096.0, 256 * MIB)
    most = memory.most_tokens(position)
    assert memory.peak_bytes(most, position) <= 256 * MIB < memory.peak_bytes(most + 1, position)


@pytest.mark.parametrize("n_tokens", [32, 33, 64, 96, 1000])
def test_the_limit_is_used_to_the_byte(n_tokens: int) -> None:
    assert PrefillMemory(100.0, 0.0, 0.0, 100 * n_tokens).most_tokens(0) == n_tokens


def test_chunks_that_take_no_memory_end_all_the_same() -> None:
    assert 1 << 16 <= PrefillMemory(0.0, 0.0, 0.0, MIB).most_tokens(0) < 1 << 20


def test_without_room_a_few_tokens_are_computed_all_the_same() -> None:
    assert PrefillMemory(20_000.0, 16.0, 4096.0, MIB).most_tokens(30_000) == MIN_CHUNK


def test_chunks_end_where_a_checkpoint_is_made() -> None:
    memory = PrefillMemory(1.0, 0.0, 0.0, 256 * MIB, 2048)
    assert [memory.most_tokens(at) for at in (0, 2047, 2048, 5000)] == [2048, 1, 2048, 1144]


KEY_BYTES = 2 * 2 * 64 * 4
"""One layer of the tiny llama: keys and values of two heads of 64 float32."""


class Device:
    """Stands for one on which chunks take so much memory, and a token so much time."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        token_bytes: float = 5000.0,
        score_bytes: float = 12.0,
        token_s: float = 0.0,
    ) -> None:
        self.per_token = token_bytes, score_bytes
        self.token_s, self.now_s = token_s, 1000.0
        self.chunks: list[tuple[int, int]] = []
        """Tokens, and tokens before them."""
        self._before: list[Any] = []
        monkeypatch.setattr(prefill_memory, "_peak", self.peak)
        monkeypatch.setattr(
            prefill_memory, "time", SimpleNamespace(perf_counter=lambda: self.now_s)
        )

    def peak(self, model: Any, caches: list[Any], n_tokens: int) -> int:
        self.now_s += n_tokens * self.token_s
        self.chunks.append((n_tokens, n_tokens if caches in self._before else 0))
        self._before.append(caches)
        return self.bytes(*self.chunks[-1])

    def bytes(self, n_tokens: int, position: int) -> int:
        token_bytes, score_bytes = self.per_token
        n_keys = position + n_tokens
        return int(n_tokens * (token_bytes + n_keys * score_bytes) + n_keys * KEY_BYTES)


def test_what_is_told_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, llama_spec: ModelCacheSpec
) -> None:
    device = Device(monkeypatch)
    memory = measured(None, llama_spec, 64 * MIB)
    assert device.chunks[-1][0] >= 512 and memory.key_bytes == KEY_BYTES
    for n_tokens, position in ((1, 0), (700, 0), (700, 30_000), (2048, 100)):
        told = memory.peak_bytes(n_tokens, position)
        assert told == pytest.approx(device.bytes(n_tokens, position), rel=1e-6)
    assert memory.limit_bytes == 64 * MIB and memory.stops_every is None


def test_a_slow_device_is_measured_on_little(
    monkeypatch: pytest.MonkeyPatch, llama_spec: ModelCacheSpec
) -> None:
    """Short chunks do not tell what scores take: more than usual is assumed."""
    device = Device(monkeypatch, token_s=1.0)
    memory = measured(None, llama_spec, 64 * MIB)
    assert len(device.chunks) == 2
    assert memory.peak_bytes(512, 30_000) > 4 * device.bytes(512, 30_000)


@pytest.mark.parametrize("score_bytes", [-3.0, 1e6])
def test_memory_that_is_none_of_the_scores_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch, llama_spec: ModelCacheSpec, score_bytes: float
) -> None:
    device = Device(monkeypatch, score_bytes=score_bytes)
    memory = measured(None, llama_spec, 64 * MIB)
    assert memory.score_bytes == (0 if score_bytes < 0 else 512)
    n_tokens = device.chunks[-1][0]
    assert memory.peak_bytes(n_tokens, 0) >= min(device.bytes(n_tokens, 0), n_tokens * KEY_BYTES)


@pytest.mark.parametrize("limit", [10, 20, 33, 100, 1024])
def test_no_position_beyond_the_table_is_measured(
    monkeypatch: pytest.MonkeyPatch, llama_spec: ModelCacheSpec, limit: int
) -> None:
    device = Device(monkeypatch)
    model = SimpleNamespace(args=SimpleNamespace(n_positions=limit))
    measured(model, llama_spec, 64 * MIB)
    n_read = max(n_tokens + position for n_tokens, position in device.chunks)
    assert limit / 2 < n_read <= limit


def test_the_largest_layer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    spec = ModelCacheSpec.probe(OddLayers([(2, 64, 64), (4, 128, 64), (2, 64, 64)]))
    assert measured(None, spec, 64 * MIB).key_bytes == 4 * (128 + 64) * 4


def test_models_with_windows_stop_where_a_checkpoint_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Device(monkeypatch)
    memory = measured(None, ModelCacheSpec.probe(tiny_gemma3()), 64 * MIB)
    assert memory.stops_every == CHECKPOINT_EVERY
