"""The ids after an earlier run, compared with a plain search from the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from mlx_lm_kvpersist.block import pack_ids
from mlx_lm_kvpersist.image_ids import GOES_ON
from mlx_lm_kvpersist.store.runs import N_LAST, Runs


def ids_after(ids: Sequence[int], run: Sequence[int], n: int) -> list[int]:
    """Return the ids after the last occurrence of a run before the end."""
    for end in range(len(ids) - 1, N_LAST - 1, -1):
        if list(ids[end - N_LAST : end]) == list(run[-N_LAST:]):
            return list(ids[end : end + n])
    return []


@pytest.mark.parametrize("seed", range(8))
def test_ids_after_the_last_occurrence_are_returned(seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.choice((0, 1, 2, 151_000)) for _ in range(rng.choice((6, 7, 90, 3000)))]
    runs, n_found = Runs(pack_ids(ids)), 0
    for _ in range(300):
        start = rng.randrange(len(ids))
        run = [*ids[start : start + N_LAST + 3]] if rng.random() < 0.8 else rng.choices(ids, k=9)
        if len(run) < N_LAST:
            assert runs.after(run, 5) == []
            continue
        expected = ids_after(ids, run, 5)
        assert runs.after(run, 5) == expected
        n_found += bool(expected)
    assert n_found > 100 or len(ids) < 20


@pytest.mark.parametrize("n", [0, 1, N_LAST - 1, N_LAST])
def test_short_sequence_has_no_continuation(n: int) -> None:
    assert Runs(pack_ids([7] * n)).after([7] * N_LAST, 4) == []


def test_runs_with_equal_hashes_are_distinguished() -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8]
    runs = Runs(pack_ids(ids))
    first_hash = int(runs._hashes[list(runs._order).index(0)])
    other = [9, 9, 9, 9, 9, 9]
    runs._hashes = runs._hashes.copy()
    forged_hash = Runs(pack_ids([*other, 1]))._hashes[0]
    runs._hashes[list(runs._hashes).index(first_hash)] = forged_hash
    runs._hashes.sort()
    assert runs.after(other, 2) == []


def test_continuation_ends_before_an_image() -> None:
    image = [-(1 << 256) - 5, GOES_ON, GOES_ON]
    runs = Runs(pack_ids([1, 2, 3, 4, 5, 6, 7, *image, 1, 2, 3]))
    assert runs.after([1, 2, 3, 4, 5, 6], 5) == [7]
    assert runs.after([2, 3, 4, 5, 6, 7], 5) == []
    assert runs.after([6, 7, *image, 1], 5) == []
