"""What the mlx-lm that is installed can do, where its versions differ."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache


def keeps_short_chunks() -> bool:
    """Tell whether ChunkedKVCache works for chunks shorter than the 256 tokens that it grows by.

    That of 0.31.3 trims its buffer where it should trim its tokens.
    """
    cache = ChunkedKVCache(16)
    one = mx.zeros((1, 1, 1, 4))
    cache.update_and_fetch(one, one)
    cache.maybe_trim_front()
    return int(cache.start_position) == 0
