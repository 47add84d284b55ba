"""The canary accepts KV that the model computed, and rejects all other KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache import blocks
from mlx_lm_kvpersist.cache.blocks import (
    CANARY_TOLERANCE,
    Piece,
    canary_difference,
    copy_newest,
    split,
)
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, probe_model
from mlx_lm_kvpersist.cache.live.packed import arrays_of
from mlx_lm_kvpersist.round_trip import tiny_model
from tests.support.joined import Pieces, join
from tests.support.pairs import every_pair

from ..conftest import packed_tokens

IDS = [(i * 37 + i // 5) % 60 + 2 for i in range(300)]


CHOICES = {
    "default": PrecisionChoice(),
    "8": PrecisionChoice(8, 8),
    "full precision": PrecisionChoice(16, 16),
}


def stored(
    model: Any, ids: list[int], choice: PrecisionChoice | None = None
) -> tuple[ModelCacheSpec, Pieces]:
    """Return the spec, and the blocks of `ids` with the newest tokens in full precision."""
    spec = probe_model(model, choice)
    caches = spec.make_cache()
    for start in range(0, len(ids), 256):
        mx.eval(model(mx.array([ids[start : start + 256]]), cache=caches))
    ranges = [(start, min(start + 256, len(ids))) for start in range(0, len(ids), 256)]
    blocks = split(spec.full, caches, ranges)
    pieces = [Piece(block, 0, b - a) for block, (a, b) in zip(blocks, ranges, strict=True)]
    return spec, Pieces(len(ids), pieces, newest=copy_newest(spec.quantized, caches, len(ids)))


def difference_over(model: Any, spec: ModelCacheSpec, pieces: Pieces, ids: list[int]) -> float:
    return canary_difference(model, spec, join(spec, pieces, 64), ids)


class Calls:
    """A model that records the number of rows of each call."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows: list[int] = []

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        self.rows.append(ids.size)
        logits: mx.array = self.model(ids, cache=cache)
        return logits


def changed(piece: Piece, change: Callable[[str, mx.array], mx.array]) -> Piece:
    return replace(piece, arrays={name: change(name, x) for name, x in piece.arrays.items()})


@pytest.fixture(params=[1, 33])
def least_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The minimum number of rows of a call: 1 on the CPU and Metal, 33 on CUDA."""
    monkeypatch.setattr(blocks, "least_rows", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("choice", ["default", "full precision"])
@pytest.mark.parametrize(
    ("n_tokens", "cpu", "cuda"),
    [
        (1, [1], [1]),
        (5, [5], [1] * 5),
        (40, [8], [33]),
        (256, [8], [33]),
        (261, [5], [1] * 5),
        (288, [8], [1] * 8),
        (289, [8], [33]),
    ],
)
def test_canary_calls_have_one_row_or_at_least_the_minimum(
    n_tokens: int, cpu: list[int], cuda: list[int], choice: str, least_rows: int
) -> None:
    """MLX's CUDA build compiles kernels for calls of 2 to 32 rows, which would delay a request."""
    ids = [i % 60 + 2 for i in range(n_tokens)]
    spec, pieces = stored(model := tiny_model(), ids, CHOICES[choice])
    calls = Calls(model)
    canary_difference(calls, spec, join(spec, pieces, 64), ids)
    expected = cpu if least_rows == 1 else cuda
    if choice == "full precision" and n_tokens > 256:  # the canary goes back into the block before
        expected = [8] if least_rows == 1 else [33]
    assert calls.rows == expected
    assert all(n == 1 or n >= least_rows for n in calls.rows)


def test_canary_calls_after_an_image_have_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "least_rows", lambda: 33)
    spec, pieces = stored(model := tiny_model(), IDS)
    calls = Calls(model)
    canary_difference(calls, spec, join(spec, pieces, 64), [*IDS[:-20], -1, *IDS[-19:]])
    assert calls.rows == [1] * 8


@every_pair(
    choice=list(CHOICES),
    n_tokens=[1, 5, 8, 40, 256, 257, 260, 300],
    least_rows=[1, 33],
    indirect=["least_rows"],
)
def test_canary_accepts_computed_kv_and_leaves_it_unchanged(
    n_tokens: int, choice: str, least_rows: int
) -> None:
    model = tiny_model()
    spec, pieces = stored(model, IDS[:n_tokens], CHOICES[choice])
    # Recomputing gives no such noise, so the test fails unless the stored values are put back.
    noisy = [
        changed(piece, lambda _, x: x if x.dtype == mx.uint32 else 1.01 * x)
        for piece in pieces.blocks
    ]
    caches = join(spec, replace(pieces, blocks=noisy), 64)

    def cached_arrays() -> list[mx.array]:
        sides = [side for cache in caches for side in packed_tokens(cache, 0, n_tokens)]
        quantized = [cache for cache in caches if hasattr(cache, "newest")]
        newest = [x for cache in quantized if n_tokens % 256 for x in cache.newest.view()]
        return [*newest, *(x for side in sides for x in arrays_of(side))]

    before = [mx.array(x) for x in cached_arrays()]
    assert canary_difference(model, spec, caches, IDS[:n_tokens]) < CANARY_TOLERANCE / (
        1 if n_tokens == 256 else 2
    )
    assert all(mx.array_equal(a, b) for a, b in zip(before, cached_arrays(), strict=True))
    assert all(cache.size() == n_tokens for cache in caches)


@pytest.mark.usefixtures("least_rows")
def test_canary_rejects_other_tokens_and_shifted_positions() -> None:
    model = tiny_model()
    spec, pieces = stored(model, IDS)
    assert difference_over(model, spec, pieces, [*IDS[:-8], *IDS[:8]]) > CANARY_TOLERANCE
    # The same tokens, computed one position later.
    _, shifted = stored(model, [5, *IDS])
    assert difference_over(model, spec, shifted, [5, *IDS[1:], IDS[-1]]) > CANARY_TOLERANCE


@pytest.mark.usefixtures("least_rows")
def test_canary_rejects_blocks_of_another_model() -> None:
    model, other = tiny_model(), tiny_model(seed=8)
    spec, pieces = stored(other, IDS)
    assert difference_over(model, spec, pieces, IDS) > CANARY_TOLERANCE


@pytest.mark.parametrize("choice", ["default", "8"])
@pytest.mark.usefixtures("least_rows")
def test_canary_rejects_one_wrong_layer(choice: str) -> None:
    model = tiny_model()
    spec, pieces = stored(model, IDS, CHOICES[choice])
    for wrong in ("0.k", "0.v"):
        newest = {
            name: mx.concatenate([x[:1], -x[1:]], axis=0) if name == wrong else x
            for name, x in pieces.newest.items()
        }
        assert difference_over(model, spec, replace(pieces, newest=newest), IDS) > CANARY_TOLERANCE
