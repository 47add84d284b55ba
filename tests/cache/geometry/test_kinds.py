from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlx_lm_kvpersist.cache.geometry.kinds import (
    KINDS,
    REFUSED,
    GroupKind,
    most_taken_back,
    replaced,
    slots_of,
)
from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.live.caches import (
    BatchQuantizedKVCache,
    FullPrecisionBatchKVCache,
    SequenceQuantizedKVCache,
)
from patches_check.inventory import BATCHES
from tests.support import keeps_short_chunks

NO_CACHES = {"TokenBuffer", "PromptTrie", "PromptTrieResult", "LRUPromptCache"}
"""Classes of the same module that do not store the KV of a layer."""


def classes_of_host() -> list[str]:
    return [
        name
        for name, cls in inspect.getmembers(mlx_lm_cache, inspect.isclass)
        if cls.__module__ == mlx_lm_cache.__name__ and not name.startswith("_")
    ]


@pytest.mark.parametrize("name", classes_of_host())
def test_every_mlx_lm_cache_class_has_exactly_one_category(name: str) -> None:
    supported = {cls.__name__ for cls in KINDS} | {CacheList.__name__}
    assert (name in supported) + (name in BATCHES) + (name in REFUSED) + (name in NO_CACHES) == 1, (
        f"mlx_lm.models.cache.{name} is new: cache/geometry/kinds.py must know it"
    )


def test_inventory_lists_only_existing_cache_classes() -> None:
    named = {*BATCHES, *REFUSED, *NO_CACHES}
    assert named <= set(classes_of_host())


def kv(n_tokens: int, start: int = 0) -> tuple[mx.array, mx.array]:
    """Return keys [1, 2, n, 4] of positions, and values [1, 2, n, 3] of negated positions."""
    at = mx.arange(start, start + n_tokens, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(at, (1, 2, n_tokens, 4)), mx.broadcast_to(-at, (1, 2, n_tokens, 3))


def feed(cache: Any, chunks: list[int]) -> int:
    position = 0
    for n_tokens in chunks:
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        cache.update_and_fetch(*kv(n_tokens, position))
        position += n_tokens
    return position


MAKERS: dict[type, Callable[[], Any]] = {
    KVCache: KVCache,
    RotatingKVCache: lambda: RotatingKVCache(16),
    ChunkedKVCache: lambda: ChunkedKVCache(16),
}
"""A cache of each class that stores tokens; windows have 16 tokens."""
TESTED = [cls for cls in MAKERS if cls is not ChunkedKVCache or keeps_short_chunks()]


def test_makers_cover_every_class_that_stores_tokens() -> None:
    with_tokens = {cls for cls, kind in KINDS.items() if kind.group is not GroupKind.RECURRENT}
    assert with_tokens - {SequenceQuantizedKVCache} == MAKERS.keys()


@settings(max_examples=60)
@given(
    cls=st.sampled_from(TESTED),
    chunks=st.lists(st.sampled_from([1, 1, 1, 2, 5, 16, 40]), min_size=1, max_size=12),
)
def test_cached_positions_and_tokens_are_read_in_order(cls: type, chunks: list[int]) -> None:
    cache, kind = MAKERS[cls](), KINDS[cls]
    n_tokens = feed(cache, chunks)
    start, stop = kind.positions(cache)
    assert stop == n_tokens
    needed = min(n_tokens, kind.window(cache)) if kind.window else n_tokens
    assert start <= n_tokens - needed
    (keys,), (values,) = kind.tokens(cache, start, stop)
    assert keys[0, 0, :, 0].tolist() == list(range(start, stop))
    assert values[0, 1, :, 2].tolist() == [-n for n in range(start, stop)]


@settings(max_examples=60)
@given(
    cls=st.sampled_from([cls for cls in TESTED if KINDS[cls].window]),
    chunks=st.lists(st.sampled_from([1, 1, 2, 5, 16, 40]), min_size=1, max_size=12),
    after=st.lists(st.sampled_from([1, 1, 1, 3, 20]), min_size=1, max_size=24),
)
def test_refilled_window_continues_like_the_original(
    cls: type, chunks: list[int], after: list[int]
) -> None:
    cache, refilled, kind = MAKERS[cls](), MAKERS[cls](), KINDS[cls]
    assert kind.window is not None
    n_tokens = feed(cache, chunks)
    start = max(0, n_tokens - kind.window(cache))
    (keys,), (values,) = kind.tokens(cache, start, n_tokens)
    kind.refill(refilled, (mx.array(keys),), (mx.array(values),), start, n_tokens)
    assert kind.positions(refilled) == (start, n_tokens)
    position = n_tokens
    for n_new in after:
        seen = []
        for live in (cache, refilled):
            if isinstance(live, ChunkedKVCache):
                live.maybe_trim_front()
            fetched, _ = live.update_and_fetch(*kv(n_new, position))
            # A ring may have any order, but attention must see the same tokens.
            window = [n for n in fetched[0, 0, :, 0].tolist() if n > position - 16]
            seen.append((sorted(window), live.offset))
        assert seen[0] == seen[1]
        position += n_new


def test_reading_tokens_outside_a_window_raises_an_error() -> None:
    cache = RotatingKVCache(16)
    feed(cache, [20, *[1] * 10])
    kind = KINDS[type(cache)]
    with pytest.raises(ValueError, match="positions 3 to 30 of a cache that holds 14 to 30"):
        kind.tokens(cache, 3, 30)
    for start, stop in ((13, 30), (14, 31), (20, 19)):
        with pytest.raises(ValueError, match=f"positions {start} to {stop} of a cache"):
            kind.tokens(cache, start, stop)
    (keys,), (values,) = kind.tokens(cache, 20, 20)
    assert keys.shape[2] == values.shape[2] == 0


def test_composite_caches_are_split_into_slots_and_rebuilt() -> None:
    caches = [KVCache(), CacheList(ArraysCache(2), CacheList(KVCache())), RotatingKVCache(8)]
    slots = slots_of(caches)
    assert [type(slot).__name__ for slot in slots] == [
        "KVCache",
        "ArraysCache",
        "KVCache",
        "RotatingKVCache",
    ]
    fresh = [KVCache(), ArraysCache(2), KVCache(), RotatingKVCache(8)]
    rebuilt = replaced(caches, fresh)
    assert slots_of(rebuilt) == fresh and slots_of(caches) == slots
    assert [type(cache) for cache in rebuilt] == [type(cache) for cache in caches]


TRIMMABLE: dict[str, Callable[[], Any]] = {
    "KVCache": MAKERS[KVCache],
    "RotatingKVCache": MAKERS[RotatingKVCache],
    "KeepingKVCache": lambda: RotatingKVCache(16, keep=4),
    "BatchKVCache": lambda: BatchKVCache([3]),
    "BatchRotatingKVCache": lambda: BatchRotatingKVCache(16, [3]),
    "FullPrecisionBatchKVCache": lambda: FullPrecisionBatchKVCache([3]),
}
"""Caches that can be trimmed. The batches have one row, with padding."""


@settings(max_examples=200)
@given(
    name=st.sampled_from(list(TRIMMABLE)),
    chunks=st.lists(st.sampled_from([1, 1, 1, 2, 3, 5]), max_size=8),
    n_new=st.integers(2, 17),
    n_trimmed=st.integers(0, 17),
    after=st.lists(st.sampled_from([1, 1, 1, 3, 20]), min_size=1, max_size=24),
)
def test_trimmed_cache_continues_as_if_tokens_were_never_added(
    name: str, chunks: list[int], n_new: int, n_trimmed: int, after: list[int]
) -> None:
    cache = TRIMMABLE[name]()
    position = feed(cache, chunks)
    n_new = min(n_new, most_taken_back([cache]))
    assume(n_new >= 2)
    n_trimmed = min(n_trimmed, n_new - 1)
    reference = copy.deepcopy(cache)
    for live, n in ((cache, n_new), (reference, n_new - n_trimmed)):
        live.update_and_fetch(*kv(n, position))
    assert cache.trim(n_trimmed) == n_trimmed
    position += n_new - n_trimmed
    for n in after:
        seen = []
        for live in (cache, reference):
            fetched, _ = live.update_and_fetch(*kv(n, position))
            window = [at for at in fetched[0, 0, :, 0].tolist() if at > position - 16]
            seen.append((sorted(window), live.make_mask(n).tolist() if "Batch" in name else None))
        assert seen[0] == seen[1]
        position += n


@pytest.mark.parametrize(
    ("cache", "chunks", "expected"),
    [
        (KVCache(), [3], 256),
        (BatchKVCache([0, 2]), [3], 256),
        (FullPrecisionBatchKVCache([0, 2]), [3], 256),
        (SequenceQuantizedKVCache(KVPrecision.of(4, 32)), [], 256),
        (BatchQuantizedKVCache([0, 0], KVPrecision.of(4, 32)), [], 256),
        (RotatingKVCache(16), [12], 3),
        (RotatingKVCache(16), [15], 0),
        (RotatingKVCache(16), [40, 1], 0),
        (BatchRotatingKVCache(16, [0, 2]), [12], 3),
        (BatchRotatingKVCache(16, [0, 2]), [*[1] * 16], 0),
        (ChunkedKVCache(16), [12], 0),
        (CacheList(KVCache(), CacheList(RotatingKVCache(16))), [], 15),
        (CacheList(KVCache(), ArraysCache(2)), [], 0),
        (ArraysCache(2), [], 0),
        (ConcatenateKVCache(), [3], 0),
        (QuantizedKVCache(), [], 0),
        (object(), [], 0),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int | list) else str(value),
)
def test_trim_limit_is_the_smallest_limit_of_all_caches(
    cache: Any, chunks: list[int], expected: int
) -> None:
    """mlx-lm can trim a ConcatenateKVCache, but the cache still returns all keys."""
    position = 0
    for n in chunks:
        keys, values = kv(n, position)
        rows = len(getattr(cache, "left_padding", [0]))
        cache.update_and_fetch(mx.repeat(keys, rows, axis=0), mx.repeat(values, rows, axis=0))
        position += n
    assert most_taken_back([KVCache(), cache]) == expected


def test_trim_limit_without_caches_is_zero() -> None:
    assert most_taken_back([]) == 0
