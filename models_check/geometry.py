"""Descriptions of a model's caches: kinds, precisions, and the positions that can be reused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.models.cache import CacheList, ChunkedKVCache

from mlx_lm_kvpersist.cache.geometry.kinds import KINDS
from mlx_lm_kvpersist.cache.geometry.spec import LayerGroup, ModelCacheSpec
from mlx_lm_kvpersist.cache.live.packed import GRID


def describe_caches(caches: Sequence[Any]) -> str:
    """Return the caches by kind, such as "2 full, 1 sliding 16"."""
    counts = Counter(_kind(cache) for cache in caches)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items())


def _kind(cache: Any) -> str:
    if isinstance(cache, CacheList):
        return f"({' + '.join(_kind(inner) for inner in cache.caches) or 'nothing'})"
    kind = KINDS.get(type(cache))
    if kind is None:
        return type(cache).__name__
    word = "chunked" if isinstance(cache, ChunkedKVCache) else kind.group.value
    return f"{word} {kind.window(cache)}" if kind.window else word


def describe_precisions(spec: ModelCacheSpec) -> str:
    """Return the slots by kind and precision, such as "2 full 4b32, 1 sliding float32"."""
    counts: Counter[str] = Counter()
    for group in spec.groups:
        counts[f"{group.kind.value} {group.precision or _own(group)}"] += len(group.slots)
    return ", ".join(f"{n} {how}" for how, n in counts.items())


def _own(group: LayerGroup) -> str:
    dtypes = [shape.dtype for shape in (group.keys, group.values) if shape]
    dtypes += [state[1] for state in group.states if state]
    return " and ".join(dict.fromkeys(dtypes))


def describe_reuse(reused: Mapping[int, int]) -> str:
    """`reused` maps the position at which a prompt diverges to the number of reused tokens."""
    if all(n == place for place, n in reused.items()):
        return "anywhere"
    if not any(reused.values()):
        return "nowhere"
    if all(n in (place, place - place % GRID) for place, n in reused.items()):
        return "by blocks"
    return ", ".join(f"{n} of {place}" for place, n in reused.items())
