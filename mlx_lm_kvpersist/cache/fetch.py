"""What a cache of packed keys and values hands to the model: plain arrays, or the packed ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache

from . import packed as pk
from .attention import PackedKV
from .attention_plan import AttentionPlan
from .packed import Packed
from .precision import KVPrecision

__all__ = ["PackedCache"]


class PackedCache(_BaseCache):  # type: ignore[misc]
    """A cache whose plan decides, fetch by fetch, in what form its keys and values are read.

    mlx-lm asks `hasattr(cache, "bits")`, after each fetch, which attention to use. So `bits` and
    `group_size` are there only while the last fetch was packed. Without a plan none is: plain
    arrays work for every model.
    """

    precision: KVPrecision
    plan: AttentionPlan | None = None
    _fetched_packed = False

    @property
    def bits(self) -> int:
        """Bits of the keys.

        Raises:
            AttributeError: the last fetch was plain.
        """
        return self._of_packed("bits")

    @property
    def group_size(self) -> int:
        """Numbers that share a scale.

        Raises:
            AttributeError: the last fetch was plain.
        """
        return self._of_packed("group_size")

    def _of_packed(self, name: str) -> int:
        if not self._fetched_packed:
            raise AttributeError(f"{type(self).__name__} was read plain and has no {name}")
        value: int = getattr(self.precision, name)
        return value

    def _fetch(
        self, held: tuple[Packed, Packed], n_tokens: int, new: tuple[mx.array, mx.array]
    ) -> tuple[Any, Any]:
        """Return the first `n_tokens` of `held` for the queries that came with `new`.

        Two arrays of the dtypes of `new`, or two `PackedKV`.
        """
        keys, values = held
        strategy = "dequantize"
        if self.plan is not None:
            n_rows, n_heads, n_queries, k_dim = new[0].shape
            token_bytes = n_heads * (k_dim + new[1].shape[3]) * new[0].dtype.size
            strategy = self.plan.choose(n_queries, n_tokens, n_rows, token_bytes)
        self._fetched_packed = strategy != "dequantize"
        if self.plan is None or not self._fetched_packed:
            return (
                pk.read(keys, self.precision, n_tokens).astype(new[0].dtype),
                pk.read(values, self.precision.of_values, n_tokens).astype(new[1].dtype),
            )
        tile_bytes = self.plan.tile_bytes if strategy == "tiled" else None
        return (
            PackedKV.of(keys, self.precision, n_tokens, tile_bytes),
            PackedKV.of(values, self.precision.of_values, n_tokens, tile_bytes),
        )
