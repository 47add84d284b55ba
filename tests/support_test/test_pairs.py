"""A few combinations cover every pair of values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairs import every_pair, pair_cover


@pytest.mark.parametrize(
    ("sizes", "max_chosen"),
    [((7, 7, 2), 49), ((5, 4, 3), 20), ((2, 2, 2), 4), ((3, 4), 12), ((6, 8, 2), 48)],
)
def test_pair_cover_has_every_pair_of_values(sizes: tuple[int, ...], max_chosen: int) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[n] for n in pair_cover(sizes)]
    for i, j in combinations(range(len(sizes)), 2):
        covered = {(case[i], case[j]) for case in chosen}
        assert covered == set(product(range(sizes[i]), range(sizes[j])))
    assert len(chosen) <= max_chosen


def test_every_pair_marks_other_combinations_slow() -> None:
    mark = every_pair(a=[1, 2], b="xy", c=[True, False]).mark
    names, cases = mark.args
    assert names == ["a", "b", "c"] and len(cases) == 8
    assert sum(not case.marks for case in cases) == 4
