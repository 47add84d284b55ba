"""Merging the caches of a layer: by a plugin, or by stock if the plugin fails."""

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
        self.calls: list[list[Any]] = []

    def __call__(self, caches: Sequence[Any]) -> Any:
        self.calls.append(list(caches))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Fills(ProbeModel):
    """Fills its caches: mlx-lm 0.31.3 cannot read the state of an empty cache."""

    def __call__(self, ids: mx.array, cache: list[Any]) -> None:
        for layer_cache in cache:
            layer_cache.update_and_fetch(*[mx.zeros((*ids.shape, 1))[:, None]] * 2)


def make_batches(server: ModuleType, caches: list[list[Any]], merges: Any) -> list[Any]:
    """Return the batches that the server's generator makes for sequences with these caches."""
    stream, model = mx.default_stream(mx.default_device()), Fills()
    support = ModelSupport(list, merges)
    model.make_cache = PluginCaches(model, "merges", support)  # type: ignore[method-assign]
    generator = server.BatchGenerator(model, stream=stream)
    generator.insert_segments(segments=[[[1, 2]] for _ in caches], caches=caches)
    generator.next()
    batches = [prefill.batch for prefill in generator.prefills.all]
    generator.close()
    return batches


def test_plugin_merges_each_layer_of_every_sequence(patched_server: ModuleType) -> None:
    caches = [[KVCache(), KVCache()] for _ in range(3)]
    merges = Merges(merged := BatchKVCache([0]))
    batches = make_batches(patched_server, caches, merges)
    assert [batch.prompt_cache for batch in batches] == [[merged, merged]] * 3
    assert merges.calls == [[cache] for row in caches for cache in row]


@pytest.mark.parametrize("answer", [None, RuntimeError("bug"), "no batch"])
def test_stock_merges_if_the_plugin_fails_or_does_not_answer(
    patched_server: ModuleType, answer: Any
) -> None:
    batches = make_batches(patched_server, [[KVCache()], [KVCache()]], Merges(answer))
    assert [type(batch.prompt_cache[0]) for batch in batches] == [BatchKVCache] * 2


def test_without_a_plugin_stocks_batch_generator_is_used(patched_server: ModuleType) -> None:
    generator = patched_server.BatchGenerator(ProbeModel())
    assert type(generator) is BatchGenerator
    generator.close()


def test_cache_without_merge_raises_stocks_error(patched_server: ModuleType) -> None:
    class Alone:
        nbytes = 0

    with pytest.raises(ValueError, match="does not yet support batching"):
        make_batches(patched_server, [[Alone()]], Merges(None))


def test_one_token_prompts_of_a_recurrent_model_begin_together(patched_server: ModuleType) -> None:
    """A prompt of one token has no chunk, and therefore no state before its reply begins."""

    class SumModel:
        """Answers with the sum of the ids that it has read; the sum is its state."""

        layers = (None,)
        make_cache: Any

        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            before = 0 if cache[0][0] is None else cache[0][0]
            cache[0][0] = ids.sum(axis=1, keepdims=True) + before
            return mx.eye(64)[cache[0][0] % 64]

    model = SumModel()
    support = ModelSupport(lambda: [ArraysCache(1)], limits=PrefillLimits(1.0, lambda _: 64))
    model.make_cache = PluginCaches(model, "saves", support)
    stream = mx.default_stream(mx.default_device())
    generator = patched_server.BatchGenerator(model, stream=stream)
    uids = generator.insert([[3], [5]], max_tokens=[2, 2], caches=[[ArraysCache(1)] for _ in "ab"])
    answers: dict[int, list[int]] = {uid: [] for uid in uids}
    while responses := generator.next_generated():
        assert generator.extract_cache(uids).keys() == {
            response.uid for response in responses if not response.finish_reason
        }
        for response in responses:
            answers[response.uid].append(response.token)
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


def test_replies_do_not_update_the_padding_of_a_state(patched_server: ModuleType) -> None:
    """No step evaluates the padding, so its graph would grow with each token."""
    stream, model = mx.default_stream(mx.default_device()), Stateful()
    model.make_cache = PluginCaches(model, "states", ModelSupport(list))
    generator = patched_server.BatchGenerator(model, stream=stream)
    generator.insert_segments(segments=[[[1, 2, 3]]], caches=[[ArraysCache(1)]])
    while not generator.next()[1]:
        pass
    (cache,) = generator.replies.prompt_cache
    generator.close()
    assert cache.left_padding is None
