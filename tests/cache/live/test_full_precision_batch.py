"""The full-precision batch has the same numbers as stock's, with fewer masks and copies."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, RotatingKVCache

from mlx_lm_kvpersist.cache.live.caches import FullPrecisionBatchKVCache
from tests.support.pairs import every_pair

from ..conftest import address, random_kv, same_bits
from . import test_schedules as schedules


def sequence(n_tokens: int, seed: int = 0) -> KVCache:
    cache = KVCache()
    if n_tokens:
        cache.update_and_fetch(*random_kv(seed, n_tokens))
    return cache


def ours_and_stock(*lengths: int) -> tuple[FullPrecisionBatchKVCache, BatchKVCache]:
    def caches() -> list[KVCache]:
        return [sequence(n, i) for i, n in enumerate(lengths)]

    return FullPrecisionBatchKVCache.merge(caches()), BatchKVCache.merge(caches())


def surplus(ours: FullPrecisionBatchKVCache, stock: BatchKVCache) -> int:
    """Return the common padding of all rows, which stock keeps and ours drops."""
    (n,) = {b - a for a, b in zip(ours._padding, stock.left_padding.tolist(), strict=True)}
    assert n >= 0
    return int(n)


def assert_same_state(ours: FullPrecisionBatchKVCache, stock: BatchKVCache) -> None:
    assert ours._padding == ours.left_padding.tolist()
    assert ours.offset.tolist() == stock.offset.tolist()
    assert ours._idx == ours.size() == stock._idx - surplus(ours, stock)
    assert (ours.keys is None) == (stock.keys is None)
    for i in range(len(ours._padding)):
        if ours.keys is not None:
            mine, theirs = ours.extract(i), stock.extract(i)
            assert type(mine) is KVCache and mine.offset == theirs.offset
            if mine.offset == 0:
                assert mine.empty()
                continue
            at = slice(0, mine.offset)  # a single row keeps its spare room
            assert same_bits(mine.keys[:, :, at], theirs.keys)
            assert same_bits(mine.values[:, :, at], theirs.values)


@pytest.mark.parametrize("seed", range(40))
def test_batch_equals_stock_batch_after_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    ours, stock = ours_and_stock(
        *(rng.choice([0, 1, 5, 40, 300]) for _ in range(rng.randint(1, 3)))
    )
    for step in range(12):
        n_rows = len(ours._padding)
        kind = rng.choice(["decode", "prefill", "filter", "extend", "extend", "trim"])
        if kind == "decode":
            new = random_kv(step, 1, n_rows)
            for mine, theirs in zip(
                ours.update_and_fetch(*new), stock.update_and_fetch(*new), strict=True
            ):
                n_more = surplus(ours, stock)
                for i, n in enumerate(ours._padding):  # numbers in the padding do not count
                    assert same_bits(mine[i, :, n:], theirs[i, :, n_more + n :])
        elif kind == "prefill":
            new = random_kv(step, rng.choice([1, 2, 9]), n_rows)
            for batch in (ours, stock):
                batch.update_and_fetch(*new)
        elif kind == "filter":
            keep = sorted(rng.sample(range(n_rows), rng.randint(1, n_rows)))
            ours.filter(keep)
            stock.filter(keep)
        elif kind == "extend" and n_rows < 6:
            lengths = [rng.choice([0, 3, 50]) for _ in range(rng.randint(1, 2))]
            more, more_of_stock = ours_and_stock(*lengths)
            ours.extend(more)
            stock.extend(more_of_stock)
        elif kind == "trim":
            n = rng.randint(0, ours.size() - max(ours._padding))
            assert ours.trim(n) == stock.trim(n)
        assert_same_state(ours, stock)


@every_pair(lengths=[(5,), (5, 5), (0, 0), (5, 3)], n_new=[1, 4], window=[None, 6, 9])
def test_attention_with_our_masks_matches_stock(
    lengths: tuple[int, ...], n_new: int, window: int | None
) -> None:
    queries = mx.random.normal((len(lengths), 2, n_new, 64), key=mx.random.key(9))
    new = random_kv(7, n_new, len(lengths))
    results = []
    for batch in ours_and_stock(*lengths):
        mask = batch.make_mask(n_new, window_size=window)
        keys, values = batch.update_and_fetch(*new)
        results.append(
            mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask=mask)
        )
    assert mx.allclose(results[0], results[1], atol=1e-6)


def test_masks_are_arrays_only_if_keys_are_hidden_or_requested() -> None:
    ours, _ = ours_and_stock(5, 5)
    assert ours.make_mask(1) is None and ours.make_mask(4) == "causal"
    assert ours.make_mask(4, window_size=9) == "causal"
    for mask in (
        ours.make_mask(4, window_size=8),
        ours.make_mask(4, return_array=True),
        ours_and_stock(5, 4)[0].make_mask(1),
    ):
        assert isinstance(mask, mx.array)


def test_empty_batch_with_left_padding_matches_stock() -> None:
    ours, stock = FullPrecisionBatchKVCache([0, 3]), BatchKVCache([0, 3])
    assert_same_state(ours, stock)
    mask = ours.make_mask(5)
    assert isinstance(mask, mx.array) and mx.array_equal(mask, stock.make_mask(5))
    for batch in (ours, stock):
        batch.update_and_fetch(*random_kv(1, 5, 2))
    assert_same_state(ours, stock)


def test_merging_one_cache_and_keeping_all_rows_copies_nothing() -> None:
    cache = sequence(300)
    before = address(cache.keys)
    batch = FullPrecisionBatchKVCache.merge([cache])
    del cache
    batch.filter([0])
    mx.eval(batch.update_and_fetch(*random_kv(1, 1)), batch.state)
    assert batch.keys is not None and address(batch.keys) == before


def test_the_only_row_is_extracted_without_a_copy() -> None:
    batch = FullPrecisionBatchKVCache.merge([sequence(300)])
    cache = batch.extract(0)
    assert batch.keys is not None and cache.keys is not None
    assert address(cache.keys) == address(batch.keys) and cache.offset == 300
    batch.update_and_fetch(*random_kv(9, 4))
    cache.update_and_fetch(*random_kv(7, 4))
    assert same_bits(batch.keys[:, :, :300], sequence(300).keys[:, :, :300])
    assert not same_bits(batch.keys[:, :, 300:304], cache.keys[:, :, 300:304])


def test_batch_writes_do_not_change_the_merged_cache() -> None:
    cache = sequence(8)
    batch = FullPrecisionBatchKVCache.merge([cache])
    batch.trim(4)
    batch.update_and_fetch(*random_kv(9, 4))
    assert same_bits(cache.keys[:, :, :8], sequence(8).keys[:, :, :8])


def test_merging_other_cache_classes_is_refused() -> None:
    with pytest.raises(TypeError, match="RotatingKVCache"):
        FullPrecisionBatchKVCache.merge([KVCache(), RotatingKVCache(8)])


class PlainSetup(schedules.Setup):
    """The schedules with full-precision caches, alone and in batches."""

    def make_caches(self) -> list[Any]:
        return [MergesIntoOurs() for _ in self.model.layers]


class MergesIntoOurs(KVCache):  # type: ignore[misc]
    @classmethod
    def merge(cls, caches: list[Any]) -> FullPrecisionBatchKVCache:
        return FullPrecisionBatchKVCache.merge(caches)


class NoPadding(FullPrecisionBatchKVCache):
    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> str | None:
        return None if N == 1 else "causal"


@pytest.fixture(scope="module")
def setup() -> PlainSetup:
    return PlainSetup("llama")


def test_batched_sequences_give_the_same_tokens_as_alone(setup: PlainSetup) -> None:
    bad = {seed: n for seed in range(40) if (n := setup.run(seed))}
    assert not bad


def test_schedules_detect_batches_without_padding_masks(
    setup: PlainSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MergesIntoOurs, "merge", NoPadding.merge)
    assert sum(setup.run(seed) for seed in range(30)) > 5
