"""The slots of a prompt cache: its caches in order, with each CacheList taken apart."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from .kinds import COMPOSITE, kind_of


def slots_of(caches: Sequence[Any]) -> list[Any]:
    """Return the slots of a prompt cache."""
    slots: list[Any] = []
    for cache in caches:
        slots += slots_of(cache.caches) if isinstance(cache, COMPOSITE) else [cache]
    return slots


def replaced(caches: Sequence[Any], slots: Sequence[Any]) -> list[Any]:
    """Return a prompt cache of the same structure as `caches` with these slots."""
    rest = iter(slots)
    return [_replaced(cache, rest) for cache in caches]


def _replaced(cache: Any, rest: Iterator[Any]) -> Any:
    # A closure that calls itself is a reference cycle: it would keep the caches alive.
    if not isinstance(cache, COMPOSITE):
        return next(rest)
    again = copy.copy(cache)
    again.caches = tuple(_replaced(part, rest) for part in cache.caches)
    return again


def cached_positions(cache: Any) -> tuple[int, int]:
    """Return the positions [start, stop) whose keys and values a slot holds (see `CacheKind`)."""
    return kind_of(cache).positions(cache)


def states_of(cache: Any) -> list[Any]:
    """Return the list of the states that a recurrent slot holds; what is put there is held."""
    states = kind_of(cache).states
    assert states is not None
    return states(cache)
