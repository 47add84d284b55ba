"""The log line about a loaded model."""

from __future__ import annotations

from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.spec import LayerGroup, ModelCacheSpec, TensorShape
from mlx_lm_kvpersist.request.model import described

SHAPE = TensorShape(1, 64, "float32")
FULL = LayerGroup("0", GroupKind.FULL, "KVCache", (0,), SHAPE, SHAPE)
SLIDING = LayerGroup("1", GroupKind.SLIDING, "RotatingKVCache", (1,), SHAPE, SHAPE, window=256)


def test_the_description_distinguishes_full_precision_and_windows() -> None:
    full = ModelCacheSpec((FULL,), [KVCache()])
    assert described(full) == (
        "512 B a token, full precision; replies in batches, attention as in mlx-lm"
    )
    windows = ModelCacheSpec((SLIDING,), [RotatingKVCache(256)])
    assert described(windows).startswith("0 B a token, windows and states alone; ")
