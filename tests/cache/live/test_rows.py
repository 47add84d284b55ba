"""Chunks of several prompts in one call give the same results as each chunk alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.geometry.spec import known
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import forced_plan
from mlx_lm_kvpersist.cache.live.caches import (
    BatchQuantizedKVCache,
    FullPrecisionBatchKVCache,
    SequenceQuantizedKVCache,
    batch_of,
)
from mlx_lm_kvpersist.cache.live.rows import rows_of
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.host.patching import versions
from models_check.build import build
from tests.support.pairs import every_pair

from ..conftest import K_DIM, N_HEADS, random_kv

TOLERANCE = 1e-5
SCALE = K_DIM**-0.5
GRID = 16
PRECISION = KVPrecision.of(4, 32, 4, rotated=True)


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(pk, "GRID", GRID)
    with server_attention():
        yield


def empty_row(kind: str) -> Any:
    if kind == "full precision":
        return FullPrecisionBatchKVCache.merge([KVCache()])
    plan = forced_plan(kind)  # type: ignore[arg-type]
    return BatchQuantizedKVCache.merge([SequenceQuantizedKVCache(PRECISION, plan)])


def chunk(seed: int, n_tokens: int) -> tuple[mx.array, mx.array, mx.array]:
    keys, values = random_kv(seed, n_tokens)
    queries = mx.random.normal((1, 2 * N_HEADS, n_tokens, K_DIM), key=mx.random.key(seed))
    return queries, keys, values


def attended(
    cache: Any, arrays: tuple[mx.array, mx.array, mx.array], window: int | None
) -> mx.array:
    queries, keys, values = arrays
    mask = cache.make_mask(queries.shape[2], window_size=window)
    fetched = cache.update_and_fetch(keys, values)
    out: mx.array = scaled_dot_product_attention(
        queries, *fetched, cache=cache, scale=SCALE, mask=mask
    )
    return out


def padded(arrays: list[mx.array], width: int) -> mx.array:
    """Return rows padded on the right with large numbers, which would change the results."""
    sizes = [[(0, 0), (0, 0), (0, width - x.shape[2]), (0, 0)] for x in arrays]
    pairs = zip(arrays, sizes, strict=True)
    return mx.concatenate([mx.pad(x, size, constant_values=99.0) for x, size in pairs])


@every_pair(
    window=[None, 24], kind=["full precision", "dequantize", "packed", "tiled"], seed=range(3)
)
def test_full_attention_rows_match_separate_chunks(
    kind: str, window: int | None, seed: int
) -> None:
    rng = random.Random(seed)
    n_rows = rng.randint(2, 5)
    together, alone = ([empty_row(kind) for _ in range(n_rows)] for _ in range(2))
    for row in range(n_rows):
        if n_old := rng.choice([0, 3, GRID, 50, 77]):
            for cache in (together[row], alone[row]):
                attended(cache, chunk(100 + row, n_old), window)
    for step in range(3):
        n_tokens = [rng.choice([1, 2, GRID - 1, GRID, 40]) for _ in range(n_rows)]
        chunks = [chunk(1000 * step + row, n) for row, n in enumerate(n_tokens)]
        rows: Any = rows_of(together, n_tokens)
        assert rows.offset.tolist() == [cache.size() for cache in alone]
        inputs = [padded(list(column), max(n_tokens)) for column in zip(*chunks, strict=True)]
        actual = attended(rows, (inputs[0], inputs[1], inputs[2]), window)
        assert actual.shape[0] == n_rows and actual.shape[2] == max(n_tokens)
        for row, n in enumerate(n_tokens):
            expected = attended(alone[row], chunks[row], window)
            assert float(mx.abs(actual[row : row + 1, :, :n] - expected).max()) < TOLERANCE
    for row, caches in enumerate(zip(together, alone, strict=True)):
        assert caches[0].lengths == caches[1].lengths
        actual, expected = (attended(cache, chunk(row, 1), window) for cache in caches)
        assert mx.allclose(actual, expected, atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(6))
def test_window_rows_match_separate_chunks(seed: int) -> None:
    """Some rows continue by one token, and some rings have wrapped."""
    rng = random.Random(seed)
    size, n_rows = 24, rng.randint(2, 5)
    together, alone = (
        [RotatingKVCache.merge([RotatingKVCache(size)]) for _ in range(n_rows)] for _ in range(2)
    )
    for row in range(n_rows):
        for n_old in rng.choice([[], [3], [23], [24], [60], [30, 1, 1]]):
            for cache in (together[row], alone[row]):
                attended(cache, chunk(100 + row, n_old), None)
    for step in range(3):
        n_tokens = [rng.choice([1, 2, 23, 24, 40]) for _ in range(n_rows)]
        chunks = [chunk(1000 * step + row, n) for row, n in enumerate(n_tokens)]
        rows: Any = rows_of(together, n_tokens)
        assert rows.offset.tolist() == [int(cache.offset[0]) for cache in alone]
        inputs = [padded(list(column), max(n_tokens)) for column in zip(*chunks, strict=True)]
        actual = attended(rows, (inputs[0], inputs[1], inputs[2]), None)
        for row, n in enumerate(n_tokens):
            expected = attended(alone[row], chunks[row], None)
            assert float(mx.abs(actual[row : row + 1, :, :n] - expected).max()) < TOLERANCE
    for caches in zip(together, alone, strict=True):
        actual, expected = (cache.extract(0) for cache in caches)
        n_kept = min(actual.size(), expected.size(), size)
        for x, y in zip(actual.state[:2], expected.state[:2], strict=True):
            assert mx.array_equal(x[:, :, -n_kept:], y[:, :, -n_kept:])
        assert actual.offset == expected.offset


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "qwen3_next", "lfm2", "mamba2"])
def test_models_with_windows_or_states_match_separate_chunks(name: str) -> None:
    if not known()[versions.installed("mlx-lm")][name].joins:
        pytest.skip("wrong in this mlx-lm, so its prompts are computed alone")
    model, rng = build(name), random.Random(1)
    ids = [[rng.randrange(2, 50) for _ in range(120)] for _ in range(4)]
    at = [0, 3, 60, 33]
    together, alone = (
        [
            [batch_of([cache]) or cache.merge([cache]) for cache in make_prompt_cache(model)]
            for _ in ids
        ]
        for _ in range(2)
    )
    for caches in (together, alone):
        for row, cache, n in zip(ids, caches, at, strict=True):
            if n:
                model(mx.array([row[:n]]), cache=cache)
    # The last call pads rows of equal length.
    for n_tokens, width in (([5, 40, 1, 23], 40), ([2, 1, 30, 9], 30), ([4, 4, 4, 4], 9)):
        layers = [rows_of(layer, n_tokens) for layer in zip(*together, strict=True)]
        places = list(zip(ids, at, n_tokens, strict=True))
        padding = [[7] * (width - n) for n in n_tokens]
        read = [row[a : a + n] for row, a, n in places]
        model(mx.array([x + y for x, y in zip(read, padding, strict=True)]), cache=layers)
        for row, cache in zip(read, alone, strict=True):
            model(mx.array([row]), cache=cache)
        at = [a + n for a, n in zip(at, n_tokens, strict=True)]
    for row, a, *caches in zip(ids, at, together, alone, strict=True):
        actual, expected = (model(mx.array([row[a : a + 1]]), cache=x)[0, -1] for x in caches)
        assert mx.allclose(actual, expected, atol=1e-4), "different, or not a number"


def test_caches_that_fetch_arrays_are_not_joined_as_rows() -> None:
    caches = [BatchQuantizedKVCache.merge([SequenceQuantizedKVCache(PRECISION)]) for _ in "ab"]
    assert rows_of(caches, [1, 2]) is None
    assert rows_of([caches[0], empty_row("full precision")], [1, 2]) is None


def test_short_rows_are_not_joined_with_a_much_longer_row() -> None:
    """Eight rows, one of 30,000 tokens, took eight times as long as each alone."""

    def row(n_tokens: int) -> Any:
        cache = empty_row("full precision")
        cache.update_and_fetch(*random_kv(1, n_tokens))
        return cache

    long, shorter, *short = map(row, (9000, 5000, 40, 40, 40))
    assert rows_of([long, *short], [1] * 4) is None
    assert rows_of([long, shorter], [1] * 2) is not None
    assert rows_of([row(1000), *short], [1] * 4) is not None
