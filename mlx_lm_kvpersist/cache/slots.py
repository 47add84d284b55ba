"""The slots of live prompt caches: which tokens they hold, reading them and filling them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ChunkedKVCache, RotatingKVCache

from . import packed as pk
from .quantized import SequenceQuantizedKVCache

Fields = tuple[mx.array, ...]
"""Keys or values of one slot: one array, or weights, scales and biases, each [1, H, T, ...]."""

COMPOSITE = CacheList
"""Stored by its parts."""


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


def window_of(cache: Any) -> int:
    """Return how many of its last tokens a sliding cache needs to continue."""
    return int(cache.chunk_size if isinstance(cache, ChunkedKVCache) else cache.max_size)


def cached_positions(cache: Any) -> tuple[int, int]:
    """Return the positions [start, stop) whose keys and values a cache holds.

    In a ring extracted from a batch, positions before its window may be padding.
    """
    if cache.keys is None:
        return 0, 0
    stop = int(cache.offset)
    if isinstance(cache, RotatingKVCache):
        # One that still grows has room for more than the tokens that it has seen.
        return max(0, stop - int(cache.keys.shape[2])), stop
    if isinstance(cache, ChunkedKVCache):
        return int(cache.start_position), stop
    return 0, stop


def tokens(cache: Any, start: int, stop: int) -> tuple[Fields, Fields]:
    """Return keys and values of positions [start, stop) in temporal order, as lazy views.

    Raises:
        ValueError: the cache does not hold them all.
    """
    first, end = cached_positions(cache)
    if not first <= start <= stop <= end:
        raise ValueError(f"positions {start} to {stop} of a cache that holds {first} to {end}")
    if isinstance(cache, SequenceQuantizedKVCache):
        keys, values = cache.packed(start, stop)
        return pk.arrays_of(keys), pk.arrays_of(values)
    keys, values = cache.keys, cache.values
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(keys), cache._temporal_order(values)
        first = end - keys.shape[2]
    at = slice(start - first, stop - first)
    return (keys[:, :, at],), (values[:, :, at],)


def refill(cache: Any, keys: Fields, values: Fields, start: int, stop: int) -> None:
    """Make an empty cache hold positions [start, stop), as if it had seen all tokens before.

    The arrays become its own. Those of a full cache may have spare room; those of a sliding cache
    hold exactly these positions.
    """
    cache.keys, cache.values = pk.held_of(keys), pk.held_of(values)
    cache.offset = stop
    if isinstance(cache, RotatingKVCache):
        cache._idx = stop - start
    if isinstance(cache, ChunkedKVCache):
        cache.start_position = start
