"""The canary is quiet over what the model computed, and sings over anything else."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.blocks.canary import CANARY_TOLERANCE, canary_difference
from mlx_lm_kvpersist.cache.blocks.cut_join import Piece, split
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.live.packed import arrays_of
from mlx_lm_kvpersist.round_trip import tiny_model
from tests.support.joined import Pieces, join

IDS = [(i * 37 + i // 5) % 60 + 2 for i in range(300)]


CHOICES = {
    "4": PrecisionChoice(),
    "keys plain": PrecisionChoice(16, 4, None, (True, True)),
    "values plain": PrecisionChoice(6, 16),
}


def stored(
    model: Any, ids: list[int], choice: PrecisionChoice | None = None
) -> tuple[ModelCacheSpec, list[tuple[Any, int]]]:
    """Return the blocks of ids, computed in one go."""
    spec = ModelCacheSpec.probe(model, choice)
    caches = spec.make_cache()
    mx.eval(model(mx.array([ids]), cache=caches))
    ranges = [(start, min(start + 256, len(ids))) for start in range(0, len(ids), 256)]
    blocks = split(spec.full, caches, ranges)
    return spec, [(block, b - a) for block, (a, b) in zip(blocks, ranges, strict=True)]


def pieces_of(parts: list[tuple[Any, int]]) -> Pieces:
    return Pieces(sum(n for _, n in parts), [Piece(arrays, 0, n) for arrays, n in parts])


def sing(model: Any, spec: ModelCacheSpec, parts: Any, ids: list[int]) -> float:
    return canary_difference(model, spec, join(spec, pieces_of(parts), 64), ids)


@pytest.mark.parametrize("choice", list(CHOICES))
@pytest.mark.parametrize("n_tokens", [1, 5, 8, 256, 257, 260, 300])
def test_quiet_over_what_the_model_computed(n_tokens: int, choice: str) -> None:
    model = tiny_model()
    spec, parts = stored(model, IDS[:n_tokens], CHOICES[choice])
    # Noise that computing again does not repeat: the stored values are put back, not the new ones.
    parts = [
        ({k: v if v.dtype == mx.uint32 else 1.01 * v for k, v in b.items()}, n) for b, n in parts
    ]
    caches = join(spec, pieces_of(parts), 64)

    def held() -> list[mx.array]:
        sides = (side for cache in caches for side in cache.packed(0, n_tokens))
        return [x for side in sides for x in arrays_of(side)]

    before = [mx.array(x) for x in held()]
    assert canary_difference(model, spec, caches, IDS[:n_tokens]) < CANARY_TOLERANCE / 2
    assert all(mx.array_equal(a, b) for a, b in zip(before, held(), strict=True))
    assert all(cache.size() == n_tokens for cache in caches)


def test_loud_over_other_tokens_and_other_positions() -> None:
    model = tiny_model()
    spec, parts = stored(model, IDS)
    assert sing(model, spec, parts, [*IDS[:-8], *IDS[:8]]) > CANARY_TOLERANCE
    # The same tokens, computed one place later.
    _, shifted = stored(model, [5, *IDS])
    moved = [(shifted[0][0], 256), (shifted[1][0], 45)]
    assert sing(model, spec, moved, [5, *IDS[1:], IDS[-1]]) > CANARY_TOLERANCE


def test_loud_over_another_models_blocks() -> None:
    model, other = tiny_model(), tiny_model(seed=8)
    spec, parts = stored(other, IDS)
    assert sing(model, spec, parts, IDS) > CANARY_TOLERANCE


@pytest.mark.parametrize("choice", list(CHOICES))
def test_loud_where_one_layer_is_wrong(choice: str) -> None:
    model = tiny_model()
    spec, parts = stored(model, IDS, CHOICES[choice])
    for name in {"4": ("k.scales", "v.scales"), "keys plain": ("k", "v.scales")}.get(
        choice, ("k.scales", "v")
    ):
        name = f"0.{name}"
        arrays = dict(parts[-1][0])
        arrays[name] = mx.concatenate([arrays[name][:1], -arrays[name][1:]], axis=0)
        assert sing(model, spec, [parts[0], (arrays, parts[-1][1])], IDS) > CANARY_TOLERANCE
