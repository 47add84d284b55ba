"""The cache classes of mlx-lm, one entry each: how a slot is read, filled and continued.

Code that stores or restores caches uses their internals only through this module. The canary
(`canary_difference`) is an exception: it also writes into a cache's buffers. A CacheList is taken
apart: its leaves, in order, are the slots. Generation thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)

from ..live import packed as pk
from ..live.attention import least_rows
from ..live.caches import (
    BatchQuantizedKVCache,
    FullPrecisionBatchKVCache,
    PackedCache,
    SequenceQuantizedKVCache,
)

Fields = tuple[mx.array, ...]
"""Keys or values of one slot: one array, or weights, scales and biases, each [1, H, T, ...]."""


_MARK = "ends_on_grid"


class GroupKind(Enum):
    """Which prefixes a group's caches can be restored to."""

    FULL = "full"
    """The cache holds every token. In full precision: any prefix. Quantized: multiples of 256
    tokens, and prefixes whose newest tokens are stored in full precision."""
    SLIDING = "sliding"
    """A prefix whose last window of tokens is stored."""
    RECURRENT = "recurrent"
    """A prefix at whose end the state was copied."""


@dataclass(frozen=True)
class CacheKind:
    """How caches of a class are read and filled; the defaults fit a cache that holds every token.

    A recurrent cache holds a list, `states`. Each item is an array with one row, or None. Any other
    cache holds keys and values [1, H, S, ...], possibly quantized, of the positions from `first`
    on. `in_order` sorts an array of keys or values by position. `window` is the number of last
    tokens that a sliding cache needs to continue. `filled` returns the attributes to set, besides
    `offset`, in a cache refilled with positions [start, stop). `refusal` says why a cache is not
    supported, or "". `can_be_quantized`: whether a SequenceQuantizedKVCache can replace the cache.
    `most_taken_back` is described at the function of this name. Its argument may also be a batch,
    of a class in `batches`.
    """

    group: GroupKind
    first: Callable[[Any], int] = lambda cache: 0
    in_order: Callable[[Any, mx.array], mx.array] = lambda cache, x: x
    window: Callable[[Any], int] | None = None
    filled: Callable[[int, int], dict[str, int]] = lambda start, stop: {}
    states: Callable[[Any], list[Any]] = lambda cache: []
    refusal: Callable[[Any], str] = lambda cache: ""
    can_be_quantized: bool = False
    most_taken_back: Callable[[Any], int] = lambda cache: 0
    batches: tuple[type, ...] = ()

    def positions(self, cache: Any) -> tuple[int, int]:
        """Return the positions [start, stop) that a cache holds.

        In a ring cache extracted from a batch, positions before the window may be padding.
        """
        return (0, 0) if cache.keys is None else (self.first(cache), int(cache.offset))

    def tokens(self, cache: Any, start: int, stop: int) -> tuple[Fields, Fields]:
        """Return keys and values of positions [start, stop), as lazy views.

        Raises ValueError unless the cache holds all these positions.
        """
        first, end = self.positions(cache)
        if not first <= start <= stop <= end:
            raise ValueError(f"positions {start} to {stop} of a cache that holds {first} to {end}")
        if isinstance(cache, SequenceQuantizedKVCache):
            return cache.packed(start, stop)
        at = slice(start - first, stop - first)
        keys, values = (self.in_order(cache, x)[:, :, at] for x in (cache.keys, cache.values))
        return (keys,), (values,)

    def refill(self, cache: Any, keys: Fields, values: Fields, start: int, stop: int) -> None:
        """Fill an empty cache with positions [start, stop), as if it had seen all before `stop`.

        The cache then owns the arrays. Only a cache of kind `FULL` may get arrays with spare room.
        """
        cache.keys, cache.values = (x if len(x) > 1 else x[0] for x in (keys, values))
        cache.offset = stop
        vars(cache).update(self.filled(start, stop))


KINDS: dict[type, CacheKind] = {
    SequenceQuantizedKVCache: CacheKind(
        GroupKind.FULL,
        # Tokens can be removed until the next block begins; then their block is packed.
        most_taken_back=lambda cache: min(pk.GRID - n % pk.GRID for n in cache.lengths),
        batches=(BatchQuantizedKVCache,),
    ),
    KVCache: CacheKind(
        GroupKind.FULL,
        can_be_quantized=True,
        most_taken_back=lambda cache: pk.GRID,
        batches=(BatchKVCache, FullPrecisionBatchKVCache),
    ),
    RotatingKVCache: CacheKind(
        GroupKind.SLIDING,
        # The difference is negative in a growing ring, which has room for unseen tokens.
        first=lambda cache: max(0, int(cache.offset) - int(cache.keys.shape[2])),
        in_order=lambda cache, x: cache._temporal_order(x),
        window=lambda cache: int(cache.max_size),
        filled=lambda start, stop: {"_idx": stop - start},
        refusal=lambda cache: (
            f"it never drops its first {cache.keep} tokens, which mlx-lm loses in a batch"
            if cache.keep
            else ""
        ),
        # A full ring drops a token for each new token; `trim` cannot restore dropped tokens.
        most_taken_back=lambda cache: int(cache.max_size - 1 - cache.size()),
        batches=(BatchRotatingKVCache,),
    ),
    ChunkedKVCache: CacheKind(
        GroupKind.SLIDING,
        first=lambda cache: int(cache.start_position),
        window=lambda cache: int(cache.chunk_size),
        filled=lambda start, stop: {"start_position": start},
    ),
    ArraysCache: CacheKind(GroupKind.RECURRENT, states=lambda cache: cache.cache),
}
REFUSED = {
    "ConcatenateKVCache": "it has no form for a batch and stands in for KVCache in tests",
    "QuantizedKVCache": "it has no form for a batch; the plugin quantizes KVCache itself",
}
"""Classes that no known model uses, and why they are not supported."""


def most_taken_back(caches: Sequence[Any]) -> int:
    """Return the most tokens that a call may append if `trim` must be able to remove all of them.

    Pass the caches before that call, because the call may fill a window, which then cannot be
    trimmed. The result is at most `pk.GRID`. It is 0 for states, full windows, each ChunkedKVCache
    and unknown classes.
    """
    counts = []
    for slot in slots_of(caches):
        kinds = (kind for cls, kind in KINDS.items() if type(slot) in (cls, *kind.batches))
        counts.append(next((kind.most_taken_back(slot) for kind in kinds), 0))
    return max(0, min(counts, default=0))


def kind_of(cache: Any) -> CacheKind:
    """Return the kind of a cache; the self-test passes instances of subclasses."""
    return next(KINDS[cls] for cls in type(cache).__mro__ if cls in KINDS)


def slots_of(caches: Sequence[Any]) -> list[Any]:
    slots: list[Any] = []
    for cache in caches:
        slots += slots_of(cache.caches) if isinstance(cache, CacheList) else [cache]
    return slots


def empty_copy(slot: Any) -> Any:
    # For our class, `deepcopy` would take ten times as long.
    if type(slot) is SequenceQuantizedKVCache:
        return SequenceQuantizedKVCache(slot.precision, slot.plan)
    return copy.deepcopy(slot)


def replaced(caches: Sequence[Any], slots: Iterable[Any]) -> list[Any]:
    """Return a prompt cache of the structure of `caches`, with these slots."""
    rest = iter(slots)  # an inner call gets the iterator, and continues it
    return [
        CacheList(*replaced(cache.caches, rest)) if isinstance(cache, CacheList) else next(rest)
        for cache in caches
    ]


def end_on_grid(model: Any) -> None:
    """Make `model` compute a prompt of one row in several calls, cut at the ends of grid blocks.

    A query must see its own block in full precision and older blocks quantized. But if a quantized
    cache returns arrays, all queries of a call see the same arrays.
    """
    own: Any = model.__class__  # the class behind a proxy
    if _MARK in vars(own):
        return

    @wraps(own.__call__)  # so that mlx-lm finds the call's parameters
    def call(self: Any, inputs: mx.array, cache: Any = None, **embedded: Any) -> Any:
        n_rows, n_tokens = inputs.shape[:2]
        is_cut = n_tokens > 1 and n_rows == 1 and cache is not None
        slots = slots_of(cache) if is_cut else ()
        packed = (slot for slot in slots if isinstance(slot, PackedCache))
        of_arrays = next((slot for slot in packed if not hasattr(slot, "bits")), None)
        if of_arrays is None:
            return own.__call__(self, inputs, cache=cache, **embedded)
        logits = []
        for piece in _pieces(of_arrays.lengths[0] % pk.GRID, n_tokens):
            # With images, `embedded` has an embedding of each token.
            cut = {name: x if x is None else x[:, piece] for name, x in embedded.items()}
            logits.append(own.__call__(self, inputs[:, piece], cache=cache, **cut))
        return mx.concatenate(logits, axis=1) if logits[1:] else logits[0]

    named = {"__module__": own.__module__, "__qualname__": own.__qualname__, _MARK: True}
    model.__class__ = type(own.__name__, (own,), {"__call__": call, **named})


def _pieces(n_own: int, n_tokens: int) -> Iterator[slice]:
    """Cut the next tokens at the ends of blocks; the first block already has `n_own` tokens.

    A short piece becomes single tokens, because calls of a few rows may make MLX compile kernels.
    """
    for start, stop in pairwise([0, *range(pk.GRID - n_own, n_tokens, pk.GRID), n_tokens]):
        is_short = stop - start < min(n_tokens, least_rows())
        step = 1 if is_short else stop - start
        yield from (slice(first, first + step) for first in range(start, stop, step))
