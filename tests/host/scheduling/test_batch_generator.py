"""Merging: a plugin merges one layer's caches, or stock does, whatever the plugin does."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from mlx_lm_kvpersist.host.answers import ModelSupport, PrefillLimits
from mlx_lm_kvpersist.host.patching.probes import ProbeModel
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches


class Merges:
    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.seen: list[list[Any]] = []

    def __call__(self, caches: Sequence[Any]) -> Any:
        self.seen.append(list(caches))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def make_batch(server: ModuleType, caches: list[list[Any]], merges: Any = None) -> Any:
    """Return the prompt batch that the server's generator makes of sequences of these caches."""
    stream, model = mx.default_stream(mx.default_device()), ProbeModel()
    if merges is not None:
        support = ModelSupport(list, merges)
        model.make_cache = PluginCaches(model, "merges", support)  # type: ignore[method-assign]
    generator = server.BatchGenerator(model, stream=stream)
    generator.insert_segments(segments=[[[1, 2]] for _ in caches], caches=caches)
    batch = generator._make_batch(len(caches))
    assert generator.prompt_cache_nbytes == 0
    generator.close()
    return batch


def test_a_plugin_sees_each_layer_of_all_sequences(patched_server: ModuleType) -> None:
    caches = [[KVCache(), KVCache()] for _ in range(3)]
    merges = Merges(merged := BatchKVCache([0]))
    batch = make_batch(patched_server, caches, merges)
    assert batch.prompt_cache == [merged, merged]
    assert merges.seen == [[row[layer] for row in caches] for layer in range(2)]


@pytest.mark.parametrize("answer", [None, RuntimeError("bug"), "no batch"])
def test_otherwise_stock_merges(patched_server: ModuleType, answer: Any) -> None:
    batch = make_batch(patched_server, [[KVCache()], [KVCache()]], Merges(answer))
    assert [type(cache) for cache in batch.prompt_cache] == [BatchKVCache]


def test_without_a_plugin_stock_merges(patched_server: ModuleType) -> None:
    batch = make_batch(patched_server, [[KVCache()]])
    assert [type(cache) for cache in batch.prompt_cache] == [BatchKVCache]


def test_a_cache_that_cannot_merge_is_stocks_error(patched_server: ModuleType) -> None:
    class Alone:
        nbytes = 0

    with pytest.raises(ValueError, match="does not yet support batching"):
        make_batch(patched_server, [[Alone()]], Merges(None))


def test_states_that_are_not_made_yet_begin_together(patched_server: ModuleType) -> None:
    """Prompts of one token: nothing of them is computed before their replies begin."""

    class Adds:
        """Answers with the sum of what it has read, which it holds as a state."""

        layers = (None,)
        make_cache: Any

        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            before = 0 if cache[0][0] is None else cache[0][0]
            cache[0][0] = ids.sum(axis=1, keepdims=True) + before
            return mx.eye(64)[cache[0][0] % 64]

    model = Adds()
    support = ModelSupport(lambda: [ArraysCache(1)], limits=PrefillLimits(1.0, lambda _: 64))
    model.make_cache = PluginCaches(model, "saves", support)
    stream = mx.default_stream(mx.default_device())
    generator = patched_server.BatchGenerator(model, stream=stream)
    uids = generator.insert([[3], [5]], max_tokens=[2, 2], caches=[[ArraysCache(1)] for _ in "ab"])
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        assert generator._find_uids(uids).keys() == {
            one.uid for one in responses if not one.finish_reason
        }
        for one in responses:
            answers[one.uid].append(one.token)
    generator.close()
    assert list(answers.values()) == [[3, 6], [5, 10]]
