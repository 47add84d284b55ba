"""What a chunk of a prompt takes in memory, told before it is computed."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load

from mlx_lm_kvpersist.cache.batch import BatchQuantizedKVCache
from mlx_lm_kvpersist.cache.prefill_memory import MIN_CHUNK, PrefillMemory, measure_prefill
from mlx_lm_kvpersist.cache.spec import ModelCacheSpec

MIB = 1 << 20


def test_a_chunk_takes_no_more_than_was_told(tiny_model: Path) -> None:
    model = load(str(tiny_model))[0]
    spec = ModelCacheSpec.probe(model)
    memory = measure_prefill(model, spec, 64 * MIB)
    caches = [BatchQuantizedKVCache.merge([cache]) for cache in spec.make_cache()]
    for position in range(0, 2048, 256):
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        model(mx.array([[1] * 256]), cache=caches)
        mx.eval([cache.state for cache in caches])
        taken = mx.get_peak_memory() - max(before, mx.get_active_memory())
        assert 0 < taken <= 1.25 * memory.peak_bytes(256, position)
        assert memory.peak_bytes(256, position) <= 64 * taken


@pytest.mark.parametrize("position", [0, 1000, 30_000])
def test_the_longest_chunk_stays_within_the_limit(position: int) -> None:
    memory = PrefillMemory(20_000.0, 16.0, 4096.0, 256 * MIB)
    most = memory.most_tokens(position)
    assert memory.peak_bytes(most, position) <= 256 * MIB < memory.peak_bytes(most + 1, position)


def test_without_room_a_few_tokens_are_computed_all_the_same() -> None:
    assert PrefillMemory(20_000.0, 16.0, 4096.0, MIB).most_tokens(30_000) == MIN_CHUNK


def test_chunks_end_where_a_checkpoint_is_made() -> None:
    memory = PrefillMemory(1.0, 0.0, 0.0, 256 * MIB, 2048)
    assert [memory.most_tokens(at) for at in (0, 2047, 2048, 5000)] == [2048, 1, 2048, 1144]
