"""A model that reads arrays gives equal results for all chunk sizes and after a restore."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlx_lm_kvpersist.cache.blocks import Piece, copy_newest, split
from mlx_lm_kvpersist.cache.geometry import kinds
from mlx_lm_kvpersist.cache.geometry.kinds import end_on_grid, slots_of
from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache
from models_check.build import build
from models_check.conversation import random_ids
from tests.support.joined import Pieces, join

IDS = random_ids(5, 700)


@pytest.fixture(params=["gemma2", "deepseek_v3"])
def model(request: pytest.FixtureRequest) -> Any:
    """Models that stock serves one request at a time: deepseek_v3 only for requests with a seed."""
    model = build(request.param)
    spec = probe_model(model)
    assert not any(hasattr(slot, "bits") for slot in slots_of(spec.make_cache()))
    end_on_grid(model)
    return model


def logprobs(model: Any, ids: Sequence[int], caches: list[Any], step: int) -> mx.array:
    """Return the next token's log-probabilities, from stock's code for single requests."""
    ((_, next_logprobs),) = generate_step(
        mx.array(list(ids)), model, max_tokens=1, prompt_cache=caches, prefill_step_size=step
    )
    assert isinstance(next_logprobs, mx.array)
    return next_logprobs


def test_chunk_size_does_not_change_logprobs(model: Any) -> None:
    spec = probe_model(model)
    expected = logprobs(model, IDS, spec.make_cache(), 256)
    for step in (2048, 300, 100):
        actual = logprobs(model, IDS, spec.make_cache(), step)
        np.testing.assert_allclose(actual, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("n_before", "n_tokens", "rows"),
    [
        (0, 256, [256]),
        (250, 10, [1] * 10),
        (250, 300, [1] * 6 + [256] + [38]),
        (200, 60, [56] + [1] * 4),
        (3, 20, [20]),
    ],
)
def test_short_chunks_run_token_by_token_if_few_rows_compile_kernels(
    n_before: int, n_tokens: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that ends within its block has the same number of rows as in stock."""
    monkeypatch.setattr(kinds, "least_rows", lambda: 33)
    calls: list[int] = []

    class Model:
        def __call__(self, ids: mx.array, cache: Any) -> mx.array:
            calls.append(ids.shape[1])
            new = mx.ones((1, 1, ids.shape[1], 64))
            cache[0].update_and_fetch(new, new)
            return ids

    model, caches = Model(), [SequenceQuantizedKVCache(KVPrecision.of(8))]
    end_on_grid(model)
    if n_before:
        model(mx.ones((1, n_before)), cache=caches)
        calls.clear()
    assert model(mx.array([list(range(n_tokens))]), cache=caches).tolist() == [
        list(range(n_tokens))
    ]
    assert calls == rows


@pytest.mark.parametrize("n_restored", [256, 300, 511])
def test_restored_caches_continue_like_computed_caches(model: Any, n_restored: int) -> None:
    spec = probe_model(model)
    expected = logprobs(model, IDS, spec.make_cache(), 2048)
    filled = spec.make_cache()
    model(mx.array([IDS[:n_restored]]), cache=filled)
    ranges = [(n, min(n + 256, n_restored)) for n in range(0, n_restored, 256)]
    arrays = split(spec.full, filled, ranges)
    blocks = [Piece(x, 0, stop - start) for x, (start, stop) in zip(arrays, ranges, strict=True)]
    newest = copy_newest(spec.quantized, filled, n_restored)
    caches = join(spec, Pieces(n_restored, blocks, newest=newest), 0)
    actual = logprobs(model, IDS[n_restored:], caches, 2048)
    np.testing.assert_allclose(actual, expected, atol=1e-3)


def test_batches_stay_whole_and_embeddings_are_cut_with_their_tokens() -> None:
    shapes = []

    class Model:
        def __call__(self, ids: mx.array, cache: Any = None, **others: mx.array) -> mx.array:
            shapes.append([ids.shape, *(x.shape for x in others.values())])
            return ids

    model = Model()
    before = signature(model.__call__)
    end_on_grid(model)
    assert signature(model.__call__) == before  # mlx-lm reads it to find models with images
    caches: list[Any] = [SequenceQuantizedKVCache(KVPrecision.of())]
    assert model(mx.zeros((2, 600)), cache=caches).shape == (2, 600)
    assert model(mx.zeros((1, 300)), cache=caches, embeddings=mx.zeros((1, 300, 8))).shape[1] == 300
    assert shapes == [[(2, 600)], [(1, 256), (1, 256, 8)], [(1, 44), (1, 44, 8)]]
