from __future__ import annotations

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlx_lm_kvpersist.cache.geometry.slots import replaced, slots_of


def test_composites_are_taken_apart_and_put_together() -> None:
    caches = [KVCache(), CacheList(ArraysCache(2), CacheList(KVCache())), RotatingKVCache(8)]
    slots = slots_of(caches)
    assert [type(slot).__name__ for slot in slots] == [
        "KVCache",
        "ArraysCache",
        "KVCache",
        "RotatingKVCache",
    ]
    fresh = [KVCache(), ArraysCache(2), KVCache(), RotatingKVCache(8)]
    again = replaced(caches, fresh)
    assert slots_of(again) == fresh and slots_of(caches) == slots
    assert [type(cache) for cache in again] == [type(cache) for cache in caches]
