"""Caches with groups of several precisions are stored, restored, merged and filtered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.blocks import Piece, copy_newest, split
from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.geometry.spec import (
    ModelCacheSpec,
    arrays_fit,
    probe_model,
    spec_with,
    token_arrays,
)
from tests.support.joined import Pieces, join

from ..conftest import VOCAB, tiny_llama

N_LAYERS = 4
IDS = [(7 * i * i + 3 * i) % VOCAB for i in range(303)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(seed=3, n_layers=N_LAYERS)


@pytest.fixture(scope="module")
def spec(model: Any) -> ModelCacheSpec:
    return probe_model(model)


def on_grid(model: Any, ids: list[int], caches: list[Any]) -> mx.array:
    """Compute `ids` block by block and return the logits."""
    chunks = (ids[start : start + 256] for start in range(0, len(ids), 256))
    logits = mx.concatenate([model(mx.array([c]), cache=caches)[0] for c in chunks], axis=0)
    mx.eval(logits)
    return logits


LAYOUTS = ("k8rv4rb64", "k8rv4rb64*2,k8rv4rb32*2", "k8rv4rb64*1,full*2,k8rv4rb64*1")


NAMED = {
    "k8rv4rb64": KVPrecision.of(8, 64, 4, rotated=True),
    "k8rv4rb32": KVPrecision.of(8, 32, 4, rotated=True),
    "full": None,
}


def spec_of_layout(model: Any, spec: ModelCacheSpec, layout: str) -> ModelCacheSpec:
    precisions: list[KVPrecision | None] = []
    for entry in layout.split(","):
        name, _, length = entry.partition("*")
        precisions += [NAMED[name]] * int(length or N_LAYERS)
    (group,) = spec.full
    groups = [
        replace(group, name=str(number), slots=tuple(slots), precision=precision)
        for number, precision in enumerate(dict.fromkeys(precisions))
        for slots in [[slot for slot, other in enumerate(precisions) if other == precision]]
    ]
    mixed = spec_with(model, groups)
    assert mixed.layout == f"{layout},c256"
    return mixed


def cut_into_pieces(mixed: ModelCacheSpec, caches: list[Any]) -> Pieces:
    cuts = [(0, 256), (256, 300)]
    blocks = split(mixed.full, caches, cuts)
    pieces = [Piece(b, 0, stop - start) for b, (start, stop) in zip(blocks, cuts, strict=True)]
    for piece in pieces:
        assert arrays_fit(token_arrays(mixed.full, piece.stop), piece.arrays) is None
    return Pieces(300, pieces, newest=copy_newest(mixed.quantized, caches, 300))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("whole", [True, False])
def test_restored_mixed_caches_give_the_same_bits(
    model: Any, spec: ModelCacheSpec, layout: str, whole: bool
) -> None:
    """Arrays of other tokens give different logits."""
    mixed = spec_of_layout(model, spec, layout)
    caches = mixed.make_cache()
    on_grid(model, IDS[:300], caches)
    pieces = cut_into_pieces(mixed, caches)
    following = mx.array([IDS[300:303]])
    expected = model(following, cache=caches)
    assert mx.array_equal(expected, model(following, cache=join(mixed, pieces, 512, whole=whole)))
    for name, array in pieces.blocks[0].arrays.items():
        wrong = {**pieces.blocks[0].arrays, name: mx.roll(array, 1, 2)}
        blocks = [Piece(wrong, 0, 256), pieces.blocks[1]]
        actual = model(
            following, cache=join(mixed, replace(pieces, blocks=blocks), 512, whole=whole)
        )
        assert not mx.allclose(expected, actual, atol=1e-4), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_batch_rows_match_sequences_alone(
    model: Any, spec: ModelCacheSpec, layout: str
) -> None:
    """Restored rows are merged and filtered, a row joins, and one row continues alone."""
    mixed = spec_of_layout(model, spec, layout)

    def filled(n_tokens: int) -> list[Any]:
        caches = mixed.make_cache()
        on_grid(model, IDS[:n_tokens], caches)
        return caches

    def merged(rows: list[list[Any]]) -> list[Any]:
        return [caches[0].merge(list(caches)) for caches in zip(*rows, strict=True)]

    restored = join(mixed, cut_into_pieces(mixed, filled(300)), 64)
    batch = merged([restored, filled(7), filled(40)])
    steps = [5, 9, 2, 3]
    alone = {n: filled(n) for n in (300, 40, 25)}
    model(mx.array([[steps[0]]] * 3), cache=batch)
    for cache, other in zip(batch, merged([filled(25)]), strict=True):
        cache.filter([0, 2])
        cache.extend(other)
    for n in (300, 40):
        model(mx.array([[steps[0]]]), cache=alone[n])
    for step in steps[1:3]:
        actual = model(mx.array([[step]] * 3), cache=batch)
        for row, caches in enumerate(alone.values()):
            expected = model(mx.array([[step]]), cache=caches)
            assert mx.allclose(actual[row : row + 1], expected, atol=1e-3), (layout, row)
    last = [cache.extract(0) for cache in batch]
    expected = model(mx.array([[steps[3]]]), cache=alone[300])
    assert mx.allclose(model(mx.array([[steps[3]]]), cache=last), expected, atol=1e-3)
