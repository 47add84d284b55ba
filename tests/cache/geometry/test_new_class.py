"""An entry in `KINDS` is enough to support a new cache class of mlx-lm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache, _BaseCache

from mlx_lm_kvpersist.cache.geometry.kinds import KINDS, CacheKind, GroupKind, most_taken_back
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, probe_model
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache
from mlx_lm_kvpersist.cache.measuring.attention_check import plan_attention
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.errors import ModelNotSupported
from models_check.conversation import random_ids
from models_check.drive import Row, alone, generate
from models_check.stored import StoredModel

from ..conftest import tiny_llama


class DoublingKVCache(_BaseCache):  # type: ignore[misc]
    """A cache for full attention whose buffers double when full. It cannot be trimmed."""

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        start, self.offset = self.offset, self.offset + keys.shape[2]
        for name, new in (("keys", keys), ("values", values)):
            buffer = getattr(self, name)
            if buffer is None or buffer.shape[2] < self.offset:
                room = mx.zeros((*new.shape[:2], 2 * self.offset, new.shape[3]), new.dtype)
                if buffer is not None:
                    room[:, :, :start] = buffer[:, :, :start]
                buffer = room
            buffer[:, :, start : self.offset] = new
            setattr(self, name, buffer)
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, : self.offset], self.values[:, :, : self.offset]

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self.offset, **kwargs)

    def empty(self) -> bool:
        return self.keys is None

    def size(self) -> int:
        return self.offset

    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchKVCache:
        rows = []
        for cache in caches:
            row = KVCache()
            if cache.offset:
                row.update_and_fetch(*(x[:, :, : cache.offset] for x in cache.state))
            rows.append(row)
        return BatchKVCache.merge(rows)


@pytest.fixture
def model() -> Any:
    """A tiny llama; every second layer has the new class."""
    model = tiny_llama()
    model.make_cache = lambda: [
        DoublingKVCache() if number % 2 else KVCache() for number in range(len(model.layers))
    ]
    return model


@pytest.fixture
def known_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, DoublingKVCache, CacheKind(GroupKind.FULL))


def test_new_cache_class_without_an_entry_is_refused_by_name(model: Any) -> None:
    with pytest.raises(ModelNotSupported, match="layer 1 has a DoublingKVCache: the plugin does"):
        probe_model(model)


@pytest.mark.usefixtures("known_class")
def test_new_cache_class_stays_in_full_precision_among_quantized_layers(model: Any) -> None:
    spec = probe_model(model)
    quantized, new = spec.groups
    assert quantized.precision is not None and quantized.cache == "KVCache"
    assert new.precision is None and new.cache == "DoublingKVCache"
    assert new.why == "no quantized cache can take the place of a DoublingKVCache"
    classes = {type(cache) for cache in spec.make_cache()}
    assert classes == {SequenceQuantizedKVCache, DoublingKVCache}
    assert most_taken_back(spec.make_cache()) == 0


def planned(model: Any) -> ModelCacheSpec:
    return plan_attention(model, probe_model(model))


@pytest.mark.usefixtures("known_class")
def test_new_cache_class_is_stored_restored_and_batched(model: Any, tmp_path: Path) -> None:
    """Prompts end in the first and second block; the canary cannot trim the new class."""
    with server_attention():
        spec = planned(model)
        stored = StoredModel(model, spec, tmp_path)
        prompts = [[i % 60 + 2 for i in random_ids(n, n)] for n in (40, 300)]
        expected = [alone(model, Row([ids], spec.make_cache())) for ids in prompts]
        for ids, reply_alone in zip(prompts, expected, strict=True):
            stored.answer([ids], 8, reply_alone.ids)
            next_prompt = [*ids, *reply_alone.ids, 5, 6, 7]
            stored.restart()
            next_reply = stored.answer([next_prompt], 8)
            assert stored.outcomes[-1].n_reused == len(ids) + 8
            uncached_reply = alone(
                model, Row([next_prompt], spec.make_cache(), reply=next_reply.ids)
            )
            np.testing.assert_allclose(next_reply.logprobs, uncached_reply.logprobs, atol=1e-3)
        stored.close()
        together = generate(model, [Row([ids], spec.make_cache()) for ids in prompts])
    for reply_alone, reply in zip(expected, together, strict=True):
        np.testing.assert_allclose(reply.logprobs, reply_alone.logprobs, atol=1e-3)
