"""Merging: a plugin merges one layer's caches, or stock does, even if the plugin fails."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import ArraysCache, BatchKVCache, KVCache

from mlx_lm_kvpersist.host.hooks import ModelSupport, PrefillLimits
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


class Fills(ProbeModel):
    """Fills its caches: mlx-lm 0.31.3 cannot read the state of an empty one."""

    def __call__(self, ids: mx.array, cache: list[Any]) -> None:
        for one in cache:
            one.update_and_fetch(*[mx.zeros((*ids.shape, 1))[:, None]] * 2)


def make_batches(server: ModuleType, caches: list[list[Any]], merges: Any) -> list[Any]:
    """Return the prompt batches that the server's generator makes of sequences of these caches."""
    stream, model = mx.default_stream(mx.default_device()), Fills()
    support = ModelSupport(list, merges)
    model.make_cache = PluginCaches(model, "merges", support)  # type: ignore[method-assign]
    generator = server.BatchGenerator(model, stream=stream)
    generator.insert_segments(segments=[[[1, 2]] for _ in caches], caches=caches)
    generator.next()
    batches = [prefill.batch for prefill in generator.prefills.all]
    generator.close()
    return batches


def test_a_plugin_sees_each_layer_of_every_sequence(patched_server: ModuleType) -> None:
    caches = [[KVCache(), KVCache()] for _ in range(3)]
    merges = Merges(merged := BatchKVCache([0]))
    batches = make_batches(patched_server, caches, merges)
    assert [batch.prompt_cache for batch in batches] == [[merged, merged]] * 3
    assert merges.seen == [[cache] for row in caches for cache in row]


@pytest.mark.parametrize("answer", [None, RuntimeError("bug"), "no batch"])
def test_otherwise_stock_merges(patched_server: ModuleType, answer: Any) -> None:
    batches = make_batches(patched_server, [[KVCache()], [KVCache()]], Merges(answer))
    assert [type(batch.prompt_cache[0]) for batch in batches] == [BatchKVCache] * 2


def test_without_a_plugin_the_batch_generator_is_stocks(patched_server: ModuleType) -> None:
    generator = patched_server.BatchGenerator(ProbeModel())
    assert type(generator) is BatchGenerator
    generator.close()


def test_a_cache_that_cannot_merge_is_stocks_error(patched_server: ModuleType) -> None:
    class Alone:
        nbytes = 0

    with pytest.raises(ValueError, match="does not yet support batching"):
        make_batches(patched_server, [[Alone()]], Merges(None))


def test_states_that_are_not_made_yet_begin_together(patched_server: ModuleType) -> None:
    """Prompts of one token are not computed before their replies begin."""

    class Adds:
        """Answers with the sum of the ids that it has read; the sum is its state."""

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
        assert generator.extract_cache(uids).keys() == {
            one.uid for one in responses if not one.finish_reason
        }
        for one in responses:
            answers[one.uid].append(one.token)
    generator.close()
    assert list(answers.values()) == [[3, 6], [5, 10]]


class Stateful:
    """A model with one recurrent layer."""

    layers = (None,)
    make_cache: Any

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        (state,) = cache
        state[0] = mx.zeros((len(ids), 1))
        state.advance(ids.shape[1])
        return mx.zeros((*ids.shape, 4))


def test_a_state_counts_no_padding_during_a_reply(patched_server: ModuleType) -> None:
    """No step evaluates the count: its graph would grow with each token."""
    stream, model = mx.default_stream(mx.default_device()), Stateful()
    model.make_cache = PluginCaches(model, "states", ModelSupport(list))
    generator = patched_server.BatchGenerator(model, stream=stream)
    generator.insert_segments(segments=[[[1, 2, 3]]], caches=[[ArraysCache(1)]])
    while not generator.next()[1]:
        pass
    (cache,) = generator.replies.prompt_cache
    generator.close()
    assert cache.left_padding is None
