"""Parameters of which tests cover all pairs of values, and slow tests all combinations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def every_pair(*, indirect: Sequence[str] = (), **values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with a few combinations that contain each pair of values.

    All other combinations are slow. `indirect` names the parameters that are fixtures.
    """
    combined = list(product(*values.values()))
    chosen = pair_cover([len(each) for each in values.values()])
    cases = [
        pytest.param(*each, marks=() if n in chosen else pytest.mark.slow)
        for n, each in enumerate(combined)
    ]
    return pytest.mark.parametrize(list(values), cases, indirect=list(indirect))


def pair_cover(sizes: Sequence[int]) -> set[int]:
    """Return combinations that contain each pair of values, by their number in the product.

    sizes: the number of values of each parameter.
    """
    pairs = [
        {(i, j, case[i], case[j]) for i, j in combinations(range(len(sizes)), 2)}
        for case in product(*map(range, sizes))
    ]
    left: set[tuple[int, int, int, int]] = set().union(*pairs)
    chosen = set[int]()
    while left:
        best = max(range(len(pairs)), key=lambda n: len(pairs[n] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen
