"""The quantized KV cache of one sequence: stored packed, read in the form its plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from . import packed as pk
from .attention_plan import AttentionPlan
from .fetch import PackedCache
from .packed import Packed
from .precision import KVPrecision

if TYPE_CHECKING:
    from .batch import BatchQuantizedKVCache

__all__ = ["SequenceQuantizedKVCache"]


class SequenceQuantizedKVCache(PackedCache):
    """Keys and values of one layer and one sequence, `offset` tokens long.

    `keys` and `values` are None or packed buffers [1, H, S, ...] (see `packed`), S >= `offset`.
    Owned by the thread that runs the model.
    """

    def __init__(self, precision: KVPrecision, plan: AttentionPlan | None = None) -> None:
        self.precision = precision
        self.plan = plan
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.offset = 0

    @classmethod
    def from_packed(
        cls,
        precision: KVPrecision,
        keys: Packed,
        values: Packed,
        offset: int,
        plan: AttentionPlan | None = None,
    ) -> SequenceQuantizedKVCache:
        """Return a cache that owns these buffers, of which the first `offset` tokens are real."""
        cache = cls(precision, plan)
        cache.keys, cache.values, cache.offset = keys, values, offset
        return cache

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys [1, H, n, Dk] and values [1, H, n, Dv]; return all of both.

        By the plan: arrays of the dtype of what came in, [1, H, offset, D], or two `PackedKV`.
        """
        n_new = keys.shape[2]
        precision = self.precision
        self.keys = pk.append(self.keys, self.offset, pk.quantize(keys, precision))
        self.values = pk.append(self.values, self.offset, pk.quantize(values, precision.of_values))
        self.offset += n_new
        return self._fetch((self.keys, self.values), self.offset, (keys, values))

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return all keys and values, plain, in the dtype they came in.

        Raises:
            ValueError: the cache is empty.
        """
        keys, values = self._filled()
        return (
            pk.read(keys, self.precision, self.offset),
            pk.read(values, self.precision.of_values, self.offset),
        )

    def packed(self, start: int, stop: int) -> tuple[Packed, Packed]:
        """Return keys and values of tokens [start, stop) as lazy views of the buffers.

        Drop them before the next update: a live view makes it copy the whole buffer.

        Raises:
            ValueError: the cache is empty or does not hold these tokens.
        """
        keys, values = self._filled()
        if not 0 <= start <= stop <= self.offset:
            raise ValueError(f"tokens {start} to {stop} of a cache of {self.offset}")
        return pk.view(keys, start, stop), pk.view(values, start, stop)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """Return the mask for the next N tokens: None, "causal" or a boolean array [N, S].

        An array only where it is asked for, or where the window cuts something off.
        """
        if window_size is not None and self.offset + N <= window_size:
            window_size = None
        mask: mx.array | str | None = create_attention_mask(
            N, offset=self.offset, return_array=return_array, window_size=window_size
        )
        return mask

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens, or all; return how many. The buffers keep their size."""
        n = min(self.offset, n)
        self.offset -= n
        return n

    def is_trimmable(self) -> bool:
        return True

    def size(self) -> int:
        """Number of tokens held."""
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, spare room included; 0 when empty."""
        return pk.n_bytes(self.keys) + pk.n_bytes(self.values)

    @property
    def state(self) -> tuple[Any, ...]:
        """Everything the cache holds: keys, values, offset, bits, group size, bits of values."""
        return (
            self.keys,
            self.values,
            self.offset,
            self.precision.bits,
            self.precision.group_size,
            self.precision.value_bits,
        )

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, *precision = state
        self.precision = KVPrecision(*precision)

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        """Return one batch cache for the caches of several sequences."""
        from .batch import BatchQuantizedKVCache

        return BatchQuantizedKVCache.merge(caches)

    def _filled(self) -> tuple[Packed, Packed]:
        if self.keys is None or self.values is None:
            raise ValueError("the cache is empty")
        return self.keys, self.values
