"""The caches of a model one by one: which of mlx-lm's classes we keep, and what a live one holds.

A model's prompt cache is a list with a cache per layer; a CacheList is several in one place. Its
slots are the caches that are none, in order. This module alone knows mlx-lm's cache classes from
inside. Generation thread.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from .quantized import SequenceQuantizedKVCache

__all__ = [
    "BATCH_FORMS",
    "COMPOSITE",
    "KEPT",
    "REFUSED",
    "Fields",
    "GroupKind",
    "cached_positions",
    "refill",
    "replaced",
    "slots_of",
    "tokens",
    "window_of",
]

Fields = tuple[mx.array, ...]
"""Keys or values of one slot: (plain,) or (weights, scales, biases), each [1, H, T, ...]."""


class GroupKind(Enum):
    """What of a prefix a cache can be put back to."""

    FULL = "full"
    """Any prefix: every token is held."""
    SLIDING = "sliding"
    """A prefix whose last tokens, as many as the window has, are there."""
    RECURRENT = "recurrent"
    """A prefix whose state was copied when it ended there."""


KEPT: dict[type, GroupKind] = {
    SequenceQuantizedKVCache: GroupKind.FULL,
    KVCache: GroupKind.FULL,
    RotatingKVCache: GroupKind.SLIDING,
    ChunkedKVCache: GroupKind.SLIDING,
    ArraysCache: GroupKind.RECURRENT,
}
"""The caches that can be cut into files and made again from them."""

COMPOSITE = CacheList
"""Kept by its parts."""

BATCH_FORMS = ("BatchKVCache", "BatchRotatingKVCache")
"""Live forms of several sequences: merged from kept classes, and extracted to them."""

REFUSED = {
    "ConcatenateKVCache": "it has no form for a batch and stands in for KVCache in tests",
    "QuantizedKVCache": "it has no form for a batch; the plugin quantizes KVCache itself",
}
"""Classes of mlx-lm that no model is known to make, and why they are not kept."""


def slots_of(caches: Sequence[Any]) -> list[Any]:
    """Return the slots of a prompt cache."""
    return list(_slots(caches))


def _slots(caches: Sequence[Any]) -> Iterator[Any]:
    for cache in caches:
        if isinstance(cache, COMPOSITE):
            yield from _slots(cache.caches)
        else:
            yield cache


def replaced(caches: Sequence[Any], slots: Sequence[Any]) -> list[Any]:
    """Return a prompt cache built as `caches` is, of these slots."""
    rest = iter(slots)
    return [_replaced(cache, rest) for cache in caches]


def _replaced(cache: Any, rest: Iterator[Any]) -> Any:
    # Not a closure: one that calls itself is a cycle, and would keep the caches until it is found.
    if not isinstance(cache, COMPOSITE):
        return next(rest)
    again = copy.copy(cache)
    again.caches = tuple(_replaced(part, rest) for part in cache.caches)
    return again


def window_of(cache: Any) -> int:
    """Return how many tokens a sliding cache needs to go on as if it had seen all."""
    return int(cache.chunk_size if isinstance(cache, ChunkedKVCache) else cache.max_size)


def cached_positions(cache: Any) -> tuple[int, int]:
    """Return the positions [start, stop) whose keys and values a cache holds.

    Of a ring that was taken out of a batch, what is before its window may be padding.
    """
    if cache.keys is None:
        return 0, 0
    stop = int(cache.offset)
    if isinstance(cache, RotatingKVCache):
        size = int(cache.keys.shape[2])
        # Behind its end a ring holds its oldest tokens, a buffer that still grows nothing.
        n_tokens = size if cache._idx == size or cache._idx < stop else int(cache._idx)
        return max(0, stop - n_tokens), stop
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
        return cache.packed(start, stop)
    keys, values = cache.keys, cache.values
    if isinstance(cache, RotatingKVCache):
        keys, values = cache._temporal_order(keys), cache._temporal_order(values)
        first = end - keys.shape[2]
    at = slice(start - first, stop - first)
    return (keys[:, :, at],), (values[:, :, at],)


def refill(cache: Any, keys: Fields, values: Fields, start: int, stop: int) -> None:
    """Make an empty cache hold positions [start, stop), as if it had seen all before them.

    The arrays become its own. Those of a full cache may be longer than it is to hold; those of a
    sliding one hold exactly these positions.
    """
    if isinstance(cache, SequenceQuantizedKVCache):
        assert len(keys) == len(values) == 3
        cache.keys, cache.values = keys, values
    else:
        (cache.keys,), (cache.values,) = keys, values
    cache.offset = stop
    if isinstance(cache, RotatingKVCache):
        cache._idx = stop - start
    if isinstance(cache, ChunkedKVCache):
        cache.start_position = start
