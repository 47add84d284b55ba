from __future__ import annotations

import copy
import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import AttentionPlan
from mlx_lm_kvpersist.cache.live.caches import (
    BatchQuantizedKVCache,
    FullPrecisionBatchKVCache,
    SequenceQuantizedKVCache,
)
from mlx_lm_kvpersist.cache.live.caches import batch_of as any_batch
from tests.support.pairs import every_pair

from ..conftest import K_DIM, N_HEADS, address, packed_tokens, random_kv, same_packed

PRECISION = KVPrecision.of(4, 32)
FINER_KEYS = KVPrecision.of(8, 32, 4)
ROTATED = KVPrecision.of(6, 32, 4, rotated=True)
PRECISIONS = (PRECISION, FINER_KEYS, ROTATED)
MAX_SPARE = 1024


def sequence(
    n_tokens: int, seed: int = 0, precision: KVPrecision = PRECISION
) -> SequenceQuantizedKVCache:
    cache = SequenceQuantizedKVCache(precision)
    if n_tokens:
        cache.update_and_fetch(*random_kv(seed, n_tokens))
    return cache


def batch_of(*lengths: int) -> BatchQuantizedKVCache:
    return BatchQuantizedKVCache.merge([sequence(n, i) for i, n in enumerate(lengths)])


def capacity_of(batch: BatchQuantizedKVCache) -> int:
    return 0 if batch.keys is None else int(batch.keys[0].shape[2])


def assert_row_is(batch: BatchQuantizedKVCache, row: int, alone: SequenceQuantizedKVCache) -> None:
    actual = batch.extract(row)
    assert actual.offset == alone.offset
    if alone.offset:
        for a, b in zip(
            packed_tokens(actual, 0, alone.offset),
            packed_tokens(alone, 0, alone.offset),
            strict=True,
        ):
            assert same_packed(a, b)


class Rows:
    """A batch, and for each row a sequence cache that gets the same tokens."""

    def __init__(self, rng: random.Random, precision: KVPrecision) -> None:
        self.rng = rng
        self.precision = precision
        self.seed = rng.randrange(1 << 30)
        self.alone: list[SequenceQuantizedKVCache] = []
        caches = [self.new_cache() for _ in range(rng.randint(1, 3))]
        self.batch = BatchQuantizedKVCache.merge(caches)

    def sequence(self) -> SequenceQuantizedKVCache:
        return sequence(0, precision=self.precision)

    def tokens(self, n_tokens: int, n_rows: int = 1) -> tuple[mx.array, mx.array]:
        self.seed += 1
        return random_kv(self.seed, n_tokens, n_rows)

    def new_cache(self) -> Any:
        """Return a cache, and remember the expected tokens of its row."""
        kind = self.rng.choice(["empty", "filled", "filled", "trimmed"])
        alone = self.sequence()
        self.alone.append(alone)
        if kind == "empty":
            return self.sequence()
        keys, values = self.tokens(self.rng.choice([1, 5, 40, 300]))
        alone.update_and_fetch(keys, values)
        if kind == "trimmed":
            alone.trim(self.rng.randint(0, alone.offset))
        return copy.deepcopy(alone)

    def prefill(self) -> None:
        n_new = self.rng.choice([1, 2, 9, 30])
        keys, values = self.tokens(n_new, len(self.alone))
        cut = self.rng.randint(1, n_new)
        for start, stop in ((0, cut), (cut, n_new)):
            if start < stop:
                self.batch.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
        for i, alone in enumerate(self.alone):
            alone.update_and_fetch(keys[i : i + 1], values[i : i + 1])

    def decode(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            keys, values = self.tokens(1, len(self.alone))
            plain = self.batch.update_and_fetch(keys, values)
            for i, alone in enumerate(self.alone):
                expected = alone.update_and_fetch(keys[i : i + 1], values[i : i + 1])
                for x, y in zip(plain, expected, strict=True):
                    assert mx.array_equal(x[i : i + 1, :, -alone.offset :], y)

    def filter(self) -> None:
        keep = sorted(self.rng.sample(range(len(self.alone)), self.rng.randint(1, len(self.alone))))
        self.batch.filter(keep)
        self.alone = [self.alone[i] for i in keep]

    def extend(self) -> None:
        if len(self.alone) > 5:
            return self.filter()
        caches = [self.new_cache() for _ in range(self.rng.randint(1, 2))]
        self.batch.extend(BatchQuantizedKVCache.merge(caches))

    def trim(self) -> None:
        n = self.rng.randint(0, min(alone.offset % pk.GRID for alone in self.alone))
        assert self.batch.trim(n) == n
        for alone in self.alone:
            alone.trim(n)

    def split(self) -> None:
        """Split like mlx-lm if only some prompts are ready: one deep copy and two filters."""
        twin = copy.deepcopy(self.batch)
        cut = self.rng.randint(0, len(self.alone) - 1)
        if cut:
            self.batch.filter(list(range(cut)))
            self.batch.update_and_fetch(*self.tokens(1, cut))
        twin.filter(list(range(cut, len(self.alone))))
        self.batch, self.alone = twin, self.alone[cut:]

    def remerge(self) -> None:
        rows = [self.batch.extract(i) for i in range(len(self.alone))]
        self.batch = BatchQuantizedKVCache.merge(rows)

    def check(self) -> None:
        batch = self.batch
        assert batch.offset.tolist() == [alone.offset for alone in self.alone]
        assert batch.left_padding.tolist() == [batch.size() - alone.offset for alone in self.alone]
        for i, alone in enumerate(self.alone):
            assert_row_is(batch, i, alone)
        if batch.keys is not None:
            mx.eval([batch.state])
            assert batch.nbytes > 0


@pytest.mark.parametrize("seed", range(75))
def test_batch_rows_have_the_same_bits_as_sequences_alone(seed: int) -> None:
    rng = random.Random(seed)
    rows = Rows(rng, PRECISIONS[seed % len(PRECISIONS)])
    rows.check()
    steps = [
        rows.prefill,
        rows.decode,
        rows.filter,
        rows.extend,
        rows.extend,
        rows.trim,
        rows.split,
        rows.remerge,
    ]
    for _ in range(12):
        rng.choice(steps)()
        rows.check()


def test_buffers_grow_only_if_they_are_full() -> None:
    batch = batch_of(300, 20)
    for n in (1, 7, 600, 1, 860, 3000, 1, 200):
        before = capacity_of(batch)
        batch.update_and_fetch(*random_kv(n, n, 2))
        is_full = batch.size() > before
        assert capacity_of(batch) == (pk.capacity(batch.size()) if is_full else before)
    batch.extend(batch_of(5, 9))
    assert capacity_of(batch) - batch.size() <= MAX_SPARE


# --- no copies


def test_merging_one_cache_reuses_its_buffers() -> None:
    cache = sequence(500)
    assert cache.keys is not None
    before = [address(x) for x in cache.keys]
    batch = SequenceQuantizedKVCache.merge([cache])
    del cache
    assert batch.keys is not None
    assert [address(x) for x in batch.keys] == before
    mx.eval(batch.update_and_fetch(*random_kv(1, 1)), batch.state)
    assert [address(x) for x in batch.keys] == before


def test_batch_writes_do_not_change_the_merged_cache() -> None:
    cache = sequence(30)
    batch = SequenceQuantizedKVCache.merge([cache])
    batch.trim(10)
    batch.update_and_fetch(*random_kv(99, 10))
    for a, b in zip(packed_tokens(cache, 0, 30), packed_tokens(sequence(30), 0, 30), strict=True):
        assert same_packed(a, b)


def test_keeping_all_rows_copies_nothing() -> None:
    batch = batch_of(70, 40, 0)
    assert batch.keys is not None
    before = [id(x) for x in batch.keys]
    batch.filter([0, 1, 2])
    assert [id(x) for x in batch.keys] == before


def test_keeping_one_row_frees_the_memory_of_others() -> None:
    batch = batch_of(400, 400)
    mx.eval(batch.state)
    both = batch.nbytes
    active = mx.get_active_memory()
    batch.filter([0])
    mx.eval(batch.state)
    assert batch.nbytes == both // 2
    assert active - mx.get_active_memory() > both / 4  # other tests' threads may still allocate


def test_extracting_a_row_allocates_no_memory() -> None:
    batch = batch_of(400, 300)
    mx.eval(batch.state)
    active = mx.get_active_memory()
    row = batch.extract(1)
    mx.eval(row.state)
    assert mx.get_active_memory() == active


def test_the_only_row_is_extracted_with_its_spare_room() -> None:
    """Caches that are extracted and merged again between a prompt's segments are not copied."""
    batch = batch_of(400)
    assert batch.keys is not None
    before = [address(x) for x in batch.keys]
    again = BatchQuantizedKVCache.merge([batch.extract(0)])
    del batch
    mx.eval(again.update_and_fetch(*random_kv(1, 3)), again.state)
    assert again.keys is not None and again.offset.tolist() == [403]
    assert [address(x) for x in again.keys] == before


def test_extending_a_batch_without_rows_reuses_the_other_buffers() -> None:
    batch, other = batch_of(4), batch_of(300, 7)
    batch.filter([])
    assert other.keys is not None
    before = [address(x) for x in other.keys]
    batch.extend(other)
    del other
    assert batch.keys is not None
    assert [address(x) for x in batch.keys] == before
    assert_row_is(batch, 0, sequence(300, 0))
    assert_row_is(batch, 1, sequence(7, 1))


@pytest.mark.parametrize("lengths", [(300,), (300, 300)])
def test_splitting_all_prompts_off_copies_nothing(lengths: tuple[int, ...]) -> None:
    """mlx-lm deep-copies the caches of a batch of prompts and filters both copies."""
    prompts = PromptProcessingBatch.empty(None, None)
    batch = batch_of(*lengths)
    assert batch.keys is not None
    before = [address(x) for x in batch.keys]
    prompts.uids, prompts.prompt_cache = list(range(len(lengths))), [batch]
    for name in ("tokens", "samplers", "logits_processors", "max_tokens", "stop_sequences"):
        if hasattr(prompts, name):
            setattr(prompts, name, [[] for _ in lengths])
    for name in ("state_machines",):
        if hasattr(prompts, name):
            setattr(prompts, name, [None for _ in lengths])
    del batch
    ready = prompts.split(list(range(len(lengths))))
    assert prompts.prompt_cache == []
    (split,) = ready.prompt_cache
    mx.eval(split.update_and_fetch(*random_kv(1, 1, len(lengths))), split.state)
    assert [address(x) for x in split.keys] == before


def test_batch_writes_do_not_change_an_extracted_row() -> None:
    full = sequence(8)
    full.keys, full.values = packed_tokens(full, 0, 8)  # without spare room
    batch = BatchQuantizedKVCache.merge([full])
    row = batch.extract(0)
    batch.trim(3)
    batch.update_and_fetch(*random_kv(99, 2))
    assert row.offset == 8
    for a, b in zip(packed_tokens(row, 0, 8), packed_tokens(sequence(8), 0, 8), strict=True):
        assert same_packed(a, b)


# --- masks


@pytest.mark.parametrize("lengths", [(0,), (5,), (5, 5), (0, 0, 0)])
def test_rows_of_equal_length_need_no_array_mask(lengths: tuple[int, ...]) -> None:
    batch = batch_of(*lengths)
    assert batch.make_mask(1) is None
    assert batch.make_mask(4) == "causal"
    assert batch.make_mask(4, window_size=64) == "causal"
    n_seen = lengths[0] + 4
    array = batch.make_mask(4, return_array=True)
    assert isinstance(array, mx.array) and array.shape == (len(lengths), 1, 4, n_seen)


def test_filtering_away_the_padding_removes_the_array_mask() -> None:
    batch = batch_of(5, 7)
    assert isinstance(batch.make_mask(1), mx.array)
    batch.filter([1])
    assert batch.make_mask(1) is None
    assert batch.size() == 7


def attention(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=K_DIM**-0.5, mask=mask)


def reference_attention(
    queries: mx.array, keys: mx.array, values: mx.array, window: int | None
) -> mx.array:
    """Return causal attention of one row [H, n, D] over [H, S, D], written out."""
    n, n_seen = queries.shape[-2], keys.shape[-2]
    at = mx.arange(n_seen - n, n_seen)[:, None]
    seen = mx.arange(n_seen)[None]
    allowed = seen <= at
    if window is not None:
        allowed = allowed & (seen > at - window)
    scores = mx.where(allowed, queries @ keys.swapaxes(-1, -2) * K_DIM**-0.5, -1e9)
    return mx.softmax(scores, axis=-1) @ values


@every_pair(
    window=[None, 1, 6, 20, 500], n_new=[1, 2, 11], lengths=[(8,), (8, 8), (30, 8, 0), (0, 0)]
)
def test_attention_of_batch_rows_matches_the_reference(
    lengths: tuple[int, ...], n_new: int, window: int | None
) -> None:
    batch = batch_of(*lengths)
    mask = batch.make_mask(n_new, window_size=window)
    new_keys, new_values = random_kv(77, n_new, len(lengths))
    keys, values = batch.update_and_fetch(new_keys, new_values)
    queries = mx.random.normal((len(lengths), N_HEADS, n_new, K_DIM), key=mx.random.key(5))
    actual = attention(queries, keys, values, mask)
    for i, length in enumerate(lengths):
        alone = sequence(length, i)
        k, v = alone.update_and_fetch(new_keys[i : i + 1], new_values[i : i + 1])
        expected = reference_attention(queries[i], k[0], v[0], window)
        assert mx.allclose(actual[i], expected, atol=1e-5), (i, mx.abs(actual[i] - expected).max())


def test_queries_in_the_padding_give_finite_results() -> None:
    """A query inside the padding sees no keys; its result must not be NaN."""
    batch = BatchQuantizedKVCache([0, 3], PRECISION)
    assert batch.offset.tolist() == [0, -3]
    mask = batch.make_mask(5)
    keys, values = batch.update_and_fetch(*random_kv(1, 5, 2))
    queries = mx.random.normal((2, N_HEADS, 5, K_DIM))
    assert mx.isfinite(attention(queries, keys, values, mask)).all()
    assert batch.offset.tolist() == [5, 2]


# --- edges


def test_offset_arrays_are_replaced_and_never_changed() -> None:
    batch = batch_of(5, 3)
    offset, padding = batch.offset, batch.left_padding
    batch.update_and_fetch(*random_kv(1, 2, 2))
    batch.trim(1)
    batch.filter([1])
    assert offset.tolist() == [5, 3] and padding.tolist() == [0, 2]


def test_empty_batch_has_no_tokens_to_extract_or_read() -> None:
    batch = batch_of(0, 0)
    assert batch.empty() and batch.nbytes == 0 and batch.size() == 0 and batch.is_trimmable()
    assert batch.extract(1).empty()
    assert batch.trim(4) == 0
    mx.eval([batch.state])
    batch.filter([1])
    assert batch.left_padding.tolist() == [0]
    with pytest.raises(ValueError, match="empty"):
        batch.keys_and_values()


@pytest.mark.parametrize("sides", [((0,), (4, 2)), ((4, 2), (0,)), ((0,), (0, 0))])
def test_extending_with_an_empty_side_keeps_all_rows(
    sides: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    batch = batch_of(*sides[0])
    batch.extend(batch_of(*sides[1]))
    assert batch.offset.tolist() == [*sides[0], *sides[1]]
    batch.update_and_fetch(*random_kv(1, 1, 3))
    assert batch.offset.tolist() == [n + 1 for n in (*sides[0], *sides[1])]


def test_batch_without_rows_is_empty_and_can_be_extended() -> None:
    batch = batch_of(4, 2)
    batch.filter([])
    assert batch.empty() and batch.size() == 0
    batch.extend(batch_of(7))
    assert_row_is(batch, 0, sequence(7))


def test_batch_dtype_follows_the_model() -> None:
    cache = SequenceQuantizedKVCache(PRECISION)
    cache.update_and_fetch(*random_kv(1, 3, dtype=mx.float16))
    batch = BatchQuantizedKVCache.merge([sequence(0), cache])
    keys, values = batch.update_and_fetch(*random_kv(2, 1, 2, dtype=mx.float16))
    assert keys.dtype == values.dtype == mx.float16
    assert batch.keys is not None
    assert [x.dtype for x in batch.keys] == [mx.uint32, mx.float16, mx.float16]


def test_merge_and_extend_errors_name_the_unsuitable_cache() -> None:
    for other in (RotatingKVCache(8), QuantizedKVCache(), KVCache()):
        with pytest.raises(TypeError, match=type(other).__name__):
            BatchQuantizedKVCache.merge([sequence(1), other])
    for precision, name in ((KVPrecision.of(), "4b64"), (FINER_KEYS, "k8v4b32")):
        with pytest.raises(ValueError, match=f"4b32 by {name}"):
            BatchQuantizedKVCache.merge([sequence(1), SequenceQuantizedKVCache(precision)])
    with pytest.raises(ValueError, match="4b32 by 8b32"):
        batch_of(1).extend(BatchQuantizedKVCache([0], KVPrecision.of(8, 32)))
    with pytest.raises(TypeError, match="list"):
        batch_of(1).extend([])


def test_each_cache_class_gets_its_batch_class() -> None:
    """Classes without a batch class of the plugin keep mlx-lm's batch class."""
    full, windows = [KVCache(), KVCache()], [RotatingKVCache(8), RotatingKVCache(8)]
    assert type(any_batch([sequence(3), sequence(2)])) is BatchQuantizedKVCache
    assert any_batch(windows) is None
    assert any_batch([*full, *windows]) is None
    assert type(any_batch(full)) is FullPrecisionBatchKVCache


def test_filter_removes_the_padding_common_to_all_rows() -> None:
    batch = BatchQuantizedKVCache([2, 5], PRECISION)
    batch.update_and_fetch(*random_kv(3, 9, 2))
    batch.filter([0, 1])
    assert batch.left_padding.tolist() == [0, 3] and batch.offset.tolist() == [7, 4]
    assert batch.size() == 7 and batch.keys is not None


def test_extended_batch_keeps_its_plan_or_takes_the_other_plan() -> None:
    plans = [AttentionPlan(can_take_packed=taken) for taken in (True, False)]
    for mine, theirs in ((plans[0], None), (None, plans[0]), (plans[0], plans[1])):
        batch, other = batch_of(4), batch_of(3)
        batch.plan, other.plan = mine, theirs
        batch.extend(other)
        assert batch.plan is plans[0]


def test_merged_batch_has_the_capacity_of_its_longest_row() -> None:
    assert capacity_of(batch_of(40, 4)) == pk.capacity(40)


def test_rows_give_back_the_spare_room_of_a_long_row_that_leaves() -> None:
    batch = batch_of(33_000, 40, 30)
    batch.filter([1, 2])
    assert capacity_of(batch) == pk.capacity(40)
    assert_row_is(batch, 1, sequence(30, 2))
