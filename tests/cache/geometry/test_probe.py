"""A trace of a few tokens finds the shapes of a model's caches, and refuses unknown contents."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.spec import TensorShape, position_limit, probe_model, spec_with
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache
from mlx_lm_kvpersist.errors import ModelNotSupported

from ..conftest import tiny_llama

VOCAB, DIM = 10, 64
TABLE, KEYS = mx.random.normal((2, VOCAB, DIM), key=mx.random.key(0))


class Attention(nn.Module):  # type: ignore[misc]
    """One layer of attention; its logits are the attention's result."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Identity()]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        x = TABLE[inputs % VOCAB]
        mask = create_attention_mask(x, cache[0])
        cached = cache[0].update_and_fetch(KEYS[inputs % VOCAB][:, None], x[:, None])
        out = scaled_dot_product_attention(x[:, None], *cached, cache[0], scale=0.1, mask=mask)
        logits: mx.array = out[:, 0]
        return logits


class FillsCaches(nn.Module):  # type: ignore[misc]
    """A model that only calls `fill` on its caches."""

    def __init__(self, fill: Callable[[list[Any], int], None], *caches: Any) -> None:
        super().__init__()
        self.layers = [nn.Identity() for _ in caches]
        self.fill, self.caches = fill, caches

    def make_cache(self) -> list[Any]:
        return [make() for make in self.caches]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.fill(cache, inputs.shape[1])
        return inputs


# --- shapes


def test_states_are_grouped_by_shape_and_position() -> None:
    """A state that stays empty has no shape; a cache without states is in no group."""

    def fill(cache: list[Any], n: int) -> None:
        for slot in (cache[0][0], cache[1]):
            slot[0] = mx.ones((1, 3, 8))
        cache[0][1].update_and_fetch(mx.ones((1, 2, n, 64)), mx.ones((1, 2, n, 64)))
        cache[2][1] = mx.ones((1, 5), mx.float16)

    two_states = lambda: ArraysCache(2)  # noqa: E731
    model = FillsCaches(
        fill, lambda: CacheList(ArraysCache(2), KVCache()), two_states, two_states, two_states
    )
    spec = probe_model(model)
    assert [(group.kind, group.slots, group.states) for group in spec.groups] == [
        (GroupKind.RECURRENT, (0, 2), (((3, 8), "float32"), None)),
        (GroupKind.FULL, (1,), ()),
        (GroupKind.RECURRENT, (3,), (None, ((5,), "float16"))),
    ]
    assert [group.cache for group in spec.groups] == ["ArraysCache", "KVCache", "ArraysCache"]
    assert [group.name for group in spec.groups] == ["0", "1", "2"]


def sets_kv(keys: Any, values: Any, offset: int = 16) -> FillsCaches:
    def fill(cache: list[Any], n: int) -> None:
        cache[0].keys, cache[0].values, cache[0].offset = keys, values, offset

    return FillsCaches(fill, KVCache)


def sets_state(state: Any) -> FillsCaches:
    def fill(cache: list[Any], n: int) -> None:
        cache[0][0] = state

    return FillsCaches(fill, lambda: ArraysCache(1))


def cannot_make_caches() -> FillsCaches:
    def make() -> KVCache:
        raise RuntimeError("no room")

    return FillsCaches(lambda cache, n: None, make)


RIGHT = mx.ones((1, 2, 16, 64))
SHAPE = r"expected \(1, heads, tokens, dim\)"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (sets_kv(RIGHT, None), f"cache 0 has values of shape None, {SHAPE}"),
        (sets_kv(None, RIGHT), f"cache 0 has keys of shape None, {SHAPE}"),
        (sets_kv(RIGHT[:, 0], RIGHT), rf"keys of shape \(1, 16, 64\), {SHAPE}"),
        (sets_kv(RIGHT, mx.ones((2, 2, 16, 64))), rf"values of shape \(2, 2, 16, 64\), {SHAPE}"),
        (sets_kv((RIGHT,), RIGHT), f"keys of shape None, {SHAPE}"),
        (sets_kv(RIGHT, RIGHT, 17), "cache 0 holds 17 tokens after a forward pass of 16"),
        (sets_state("text"), "cache 0 has a state that is not an array with one row"),
        (sets_state(mx.ones((2, 3))), "cache 0 has a state that is not an array with one row"),
        (cannot_make_caches(), "the model cannot be probed: RuntimeError.*no room"),
    ],
    ids=lambda given: "" if isinstance(given, FillsCaches) else None,
)
def test_unknown_cache_contents_are_refused_with_the_reason(
    model: FillsCaches, reason: str
) -> None:
    with pytest.raises(ModelNotSupported, match=reason):
        probe_model(model)


@pytest.mark.parametrize(
    ("args", "limit"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024, "max_seq_len": 512}, 512),
        ({"n_ctx": "many"}, None),
        ({}, None),
    ],
)
def test_position_limit_is_the_smallest_configured_length(
    args: dict[str, Any], limit: int | None
) -> None:
    assert position_limit(SimpleNamespace(args=SimpleNamespace(**args))) == limit
    assert position_limit(SimpleNamespace()) is None


def test_spec_with_changed_groups_makes_caches_of_their_precision() -> None:
    model = tiny_llama()
    (group,) = probe_model(model).groups
    groups = [replace(group, slots=(0,), precision=None), replace(group, name="1", slots=(1,))]
    made = spec_with(model, groups)
    assert list(made.groups) == groups
    assert [type(cache) for cache in made.make_cache()] == [KVCache, SequenceQuantizedKVCache]


# --- nothing is evaluated


def test_probing_a_model_evaluates_nothing(tmp_path: Path) -> None:
    """The weight file is truncated before its numbers, so evaluating the weights raises."""
    path = tmp_path / "weights.npy"
    mx.save(str(path), mx.ones((DIM,)))
    weights: Any = mx.load(str(path))
    os.truncate(path, 128)

    class ReadsMissingWeights(Attention):
        def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
            logits: mx.array = super().__call__(inputs, cache) + weights
            return logits

    (group,) = probe_model(ReadsMissingWeights()).groups
    assert group.keys == TensorShape(1, DIM, "float32") and group.precision is not None
    with pytest.raises(RuntimeError, match="read"):
        mx.eval(weights)


def test_model_that_rejects_quantized_caches_stays_in_full_precision() -> None:
    class RejectsQuantized(Attention):
        def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
            if isinstance(cache[0], SequenceQuantizedKVCache):
                raise TypeError("an array, please")
            return super().__call__(inputs, cache)

    (group,) = probe_model(RejectsQuantized()).groups
    assert group.precision is None and "does not take it: TypeError: an array" in group.why


def test_model_that_raises_in_the_trace_is_refused() -> None:
    class Fails(Attention):
        def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
            raise RuntimeError("out of luck")

    with pytest.raises(ModelNotSupported, match=r"cannot be probed.*out of luck"):
        probe_model(Fails())
