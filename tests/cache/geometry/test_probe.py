"""What a few tokens tell of a model: its caches' forms, what it cannot take, what a batch does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, ChunkedKVCache, KVCache

from mlx_lm_kvpersist.cache.geometry.kinds import GroupKind
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.probe import position_limit, spec_with
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, TensorShape
from mlx_lm_kvpersist.cache.live.quantized import BatchQuantizedKVCache, SequenceQuantizedKVCache
from mlx_lm_kvpersist.errors import ModelNotSupported

from ..conftest import tiny_llama

VOCAB, DIM = 10, 64
TABLE, KEYS = mx.random.normal((2, VOCAB, DIM), key=mx.random.key(0))


class Attention(nn.Module):  # type: ignore[misc]
    """One layer of attention; its logits are what it attends to.

    Each row of a batch gets `mixed` of the mean of all rows. With `noise`, chunks of more than five
    tokens have larger keys.
    """

    def __init__(self, mixed: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.layers = [nn.Identity()]
        self.mixed, self.noise = mixed, noise

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        x = TABLE[inputs % VOCAB]
        mask = create_attention_mask(x, cache[0])
        keys = KEYS[inputs % VOCAB] * (1 + self.noise * (inputs.shape[1] > 5))
        held = cache[0].update_and_fetch(keys[:, None], x[:, None])
        out = scaled_dot_product_attention(x[:, None], *held, cache[0], scale=0.1, mask=mask)[:, 0]
        logits: mx.array = (1 - self.mixed) * out + self.mixed * out.mean(axis=0)
        return logits


class Leaves(nn.Module):  # type: ignore[misc]
    """Does to its caches what `leave` does, and nothing else."""

    def __init__(self, leave: Callable[[list[Any], int], None], *caches: Any) -> None:
        super().__init__()
        self.layers = [nn.Identity() for _ in caches]
        self.leave, self.caches = leave, caches

    def make_cache(self) -> list[Any]:
        return [make() for make in self.caches]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.leave(cache, inputs.shape[1])
        return inputs


def probe(model: Any) -> ModelCacheSpec:
    return ModelCacheSpec.probe(model, PrecisionChoice())


# --- forms


def test_states_are_grouped_by_their_shapes_and_places() -> None:
    """A state that the model leaves empty has no shape; a cache without states is in no group."""

    def leave(cache: list[Any], n: int) -> None:
        for slot in (cache[0][0], cache[1]):
            slot[0] = mx.ones((1, 3, 8))
        cache[0][1].update_and_fetch(mx.ones((1, 2, n, 64)), mx.ones((1, 2, n, 64)))
        cache[2][1] = mx.ones((1, 5), mx.float16)

    two = lambda: ArraysCache(2)  # noqa: E731
    model = Leaves(leave, lambda: CacheList(ArraysCache(2), KVCache()), two, two, two)
    spec = ModelCacheSpec.probe(model)
    found = [(group.kind, group.slots, group.states) for group in spec.groups]
    assert found == [
        (GroupKind.RECURRENT, (0, 2), (((3, 8), "float32"), None)),
        (GroupKind.FULL, (1,), ()),
        (GroupKind.RECURRENT, (3,), (None, ((5,), "float16"))),
    ]
    assert [group.cache for group in spec.groups] == ["ArraysCache", "KVCache", "ArraysCache"]
    assert [group.name for group in spec.groups] == ["0", "1", "2"]


def sets(keys: Any, values: Any, offset: int = 16) -> Leaves:
    def leave(cache: list[Any], n: int) -> None:
        cache[0].keys, cache[0].values, cache[0].offset = keys, values, offset

    return Leaves(leave, KVCache)


def sets_state(state: Any) -> Leaves:
    def leave(cache: list[Any], n: int) -> None:
        cache[0][0] = state

    return Leaves(leave, lambda: ArraysCache(1))


def cannot_make() -> Leaves:
    def make() -> KVCache:
        raise RuntimeError("no room")

    return Leaves(lambda cache, n: None, make)


RIGHT = mx.ones((1, 2, 16, 64))
SHAPE = r"expected \(1, heads, tokens, dim\)"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (sets(RIGHT, None), f"cache 0 has values of shape None, {SHAPE}"),
        (sets(None, RIGHT), f"cache 0 has keys of shape None, {SHAPE}"),
        (sets(RIGHT[:, 0], RIGHT), rf"keys of shape \(1, 16, 64\), {SHAPE}"),
        (sets(RIGHT, mx.ones((2, 2, 16, 64))), rf"values of shape \(2, 2, 16, 64\), {SHAPE}"),
        (sets((RIGHT,), RIGHT), f"keys of shape None, {SHAPE}"),
        (sets(RIGHT, RIGHT, 17), "cache 0 holds 17 tokens after a forward pass of 16"),
        (sets_state("text"), "cache 0 has a state that is not an array with one row"),
        (sets_state(mx.ones((2, 3))), "cache 0 has a state that is not an array with one row"),
        (cannot_make(), "the model cannot be probed: RuntimeError.*no room"),
    ],
    ids=lambda given: "" if isinstance(given, Leaves) else None,
)
def test_a_cache_of_another_form_is_refused(model: Leaves, reason: str) -> None:
    with pytest.raises(ModelNotSupported, match=reason):
        ModelCacheSpec.probe(model)


@pytest.mark.parametrize(
    ("args", "limit"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024, "max_seq_len": 512}, 512),
        ({"n_ctx": "many"}, None),
        ({}, None),
    ],
)
def test_positions_end_with_the_shortest_table(args: dict[str, Any], limit: int | None) -> None:
    assert position_limit(SimpleNamespace(args=SimpleNamespace(**args))) == limit
    assert position_limit(SimpleNamespace()) is None


def test_other_groups_have_live_caches_of_their_precision() -> None:
    model = tiny_llama()
    (group,) = probe(model).groups
    groups = [replace(group, slots=(0,), precision=None), replace(group, name="1", slots=(1,))]
    made = spec_with(model, groups)
    assert list(made.groups) == groups
    assert [type(cache) for cache in made.make_cache()] == [KVCache, SequenceQuantizedKVCache]


# --- evaluated or not


@pytest.fixture
def nan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN stands for what MLX cannot compute, which shows only when it is evaluated.

    mlx 0.31 ends the process then.
    """
    evaluate = mx.eval

    def evaluated(*given: Any) -> None:
        arrays = [x for _, x in tree_flatten(list(given)) if isinstance(x, mx.array)]
        evaluate(*arrays)
        if any(mx.isnan(x).any().item() for x in arrays):
            raise RuntimeError("cannot be computed")

    monkeypatch.setattr(mx, "eval", evaluated)


class Computes(Attention):
    """Attention with an array that cannot be computed, in its logits or in its cache."""

    def __init__(self, where: str, only: type = object) -> None:
        super().__init__()
        self.where, self.only = where, only

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        logits = super().__call__(inputs, cache)
        slot: Any = cache[0]
        if not issubclass(type(slot), self.only):
            return logits
        if self.where == "cache":
            if inputs.shape[1] == 1:
                slot.values = tuple(x + math.nan for x in slot.values)
            return logits
        return logits + math.nan


def test_a_model_that_cannot_be_computed_is_refused(nan_fails: None) -> None:
    with pytest.raises(ModelNotSupported, match="cannot be probed"):
        probe(Computes("logits"))


@pytest.mark.parametrize("where", ["logits", "cache"])
def test_what_cannot_be_computed_over_packed_keys_stays_plain(nan_fails: None, where: str) -> None:
    (group,) = probe(Computes(where, SequenceQuantizedKVCache)).groups
    assert group.precision is None and "does not take it: RuntimeError" in group.why


def test_nothing_is_computed_that_need_not_be(nan_fails: None) -> None:
    for model in (Computes("logits"), Computes("cache", SequenceQuantizedKVCache)):
        (group,) = ModelCacheSpec.probe(model).groups
        assert group.keys == TensorShape(1, DIM, "float32") and group.precision is not None
    mixes = Attention(mixed=1.0)
    assert ModelCacheSpec.probe(mixes).batches


# --- batches


@pytest.mark.parametrize(
    ("mixed", "noise", "batches"),
    [
        (0.0, 0.0, True),
        (0.05, 0.0, True),
        (0.3, 0.0, False),
        (0.3, 3.0, True),
        (1.0, 3.0, False),
        (float("nan"), 3.0, False),
    ],
)
def test_rows_that_are_mixed_are_found_out(mixed: float, noise: float, batches: bool) -> None:
    """What other chunks of a prompt change as well is no fault of the batch, up to a bound."""
    assert probe(Attention(mixed, noise)).batches is batches


class FailsInBatches(Attention):
    def __init__(self, cls: type) -> None:
        super().__init__()
        self.cls = cls

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        if isinstance(cache[0], self.cls):
            raise RuntimeError("one row at a time")
        return super().__call__(inputs, cache)


@pytest.mark.parametrize("cls", [BatchKVCache, BatchQuantizedKVCache])
def test_a_model_that_fails_in_a_batch_is_served_alone(cls: type) -> None:
    assert not probe(FailsInBatches(cls)).batches
    assert probe(FailsInBatches(ArraysCache)).batches


def test_a_batch_that_cannot_be_taken_apart_or_made_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raises(self: Any, row: int) -> None:
        raise RuntimeError("no row")

    monkeypatch.setattr(BatchQuantizedKVCache, "extract", raises)
    assert not probe(Attention()).batches

    def leave(cache: Sequence[Any], n: int) -> None:
        cache[0].update_and_fetch(mx.ones((1, 2, n, 64)), mx.ones((1, 2, n, 64)))

    assert not probe(Leaves(leave, lambda: ChunkedKVCache(64))).batches
