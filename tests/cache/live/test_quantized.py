from __future__ import annotations

import copy
import random

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, Quantization
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import AttentionPlan
from mlx_lm_kvpersist.cache.live.caches import (
    SequenceQuantizedKVCache,
)

from ..conftest import (
    K_DIM,
    N_HEADS,
    V_DIM,
    address,
    packed_tokens,
    random_kv,
    rounded,
    same_bits,
    same_packed,
)

PRECISION = KVPrecision.of(4, 32)


def packed_bytes(quantization: Quantization, dim: int) -> int:
    return sum(int(x.nbytes) for x in pk.quantize(mx.zeros((1, dim)), quantization))


def filled(n_tokens: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> SequenceQuantizedKVCache:
    cache = SequenceQuantizedKVCache(PRECISION)
    cache.update_and_fetch(*random_kv(seed, n_tokens, dtype=dtype))
    return cache


@pytest.mark.parametrize("name", ["bits", "group_size"])
def test_cache_lacks_attributes_that_mark_mlx_lm_quantized_caches(name: str) -> None:
    assert not hasattr(filled(1), name)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_older_blocks_equal_mx_dequantize_in_the_model_dtype(dtype: mx.Dtype) -> None:
    keys, values = random_kv(1, pk.GRID, dtype=dtype)
    cache = SequenceQuantizedKVCache(PRECISION)
    cache.update_and_fetch(keys, values)
    fetched = cache.update_and_fetch(*random_kv(2, 1, dtype=dtype))
    for block, x in zip((x[:, :, : pk.GRID] for x in fetched), (keys, values), strict=True):
        assert same_bits(block, rounded(x, 32, 4))


def test_values_may_have_fewer_bits_than_keys() -> None:
    precision = KVPrecision.of(8, 32, 4)
    cache = SequenceQuantizedKVCache(precision)
    keys, values = random_kv(1, pk.GRID + 9)
    fetched = cache.update_and_fetch(keys, values)
    for actual, again in zip(fetched, cache.keys_and_values(), strict=True):
        assert same_bits(actual, again)
    for actual, x, bits in zip(fetched, (keys, values), (8, 4), strict=True):
        assert same_bits(actual[:, :, : pk.GRID], rounded(x, 32, bits)[:, :, : pk.GRID])
        assert same_bits(actual[:, :, pk.GRID :], x[:, :, pk.GRID :])
    n_bytes = packed_bytes(precision.keys, K_DIM) + packed_bytes(precision.values, V_DIM)
    n_tokens = cache.keys[0].shape[2]
    assert cache.nbytes == n_tokens * 2 * n_bytes + cache.newest.nbytes  # two heads


@pytest.mark.parametrize("rotated", [True, False])
def test_fetched_arrays_equal_the_given_arrays_without_rotation(rotated: bool) -> None:
    cache = SequenceQuantizedKVCache(KVPrecision.of(8, 32, rotated=rotated))
    given = random_kv(1, 5)
    for x, original in zip(cache.update_and_fetch(*given), given, strict=True):
        assert mx.abs(x - original).max() < 1e-5


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_one_byte_over_the_dequantized_limit_uses_tiles(dtype: mx.Dtype) -> None:
    all_bytes = 9 * N_HEADS * (K_DIM + V_DIM) * dtype.size
    for limit_bytes, strategy in ((all_bytes, "dequantize"), (all_bytes - 1, "tiled")):
        plan = AttentionPlan(can_take_packed=True, max_dequantized_bytes=limit_bytes)
        cache = SequenceQuantizedKVCache(PRECISION, plan)
        cache.update_and_fetch(*random_kv(1, 6, dtype=dtype))
        keys, _ = cache.update_and_fetch(*random_kv(2, 3, dtype=dtype))
        assert keys.strategy == strategy


@pytest.mark.parametrize("seed", range(6))
def test_chunks_of_any_size_give_the_same_bits(seed: int) -> None:
    n_tokens = 900
    keys, values = random_kv(seed, n_tokens)
    whole = SequenceQuantizedKVCache(PRECISION)
    whole.update_and_fetch(keys, values)
    chunked = SequenceQuantizedKVCache(PRECISION)
    rng = random.Random(seed)
    while (start := chunked.offset) < n_tokens:
        stop = min(n_tokens, start + rng.choice([1, 1, 2, 17, 256, 400]))
        fetched = chunked.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
        assert fetched[0].shape == (1, 2, stop, K_DIM)
        assert fetched[1].shape == (1, 2, stop, V_DIM)
    for a, b in zip(
        packed_tokens(chunked, 0, n_tokens), packed_tokens(whole, 0, n_tokens), strict=True
    ):
        assert same_packed(a, b)
    whole.forget()
    chunked.forget()
    for x, y in zip(chunked.newest.view(), whole.newest.view(), strict=True):
        assert same_bits(x, y)


@pytest.mark.parametrize(("n", "capacity"), [(1, 512), (256, 512), (257, 768), (2048, 2304)])
def test_capacity_is_in_steps_and_leaves_spare_room(n: int, capacity: int) -> None:
    cache = filled(n)
    assert cache.keys is not None
    assert cache.keys[0].shape[2] == pk.capacity(n) == capacity


def test_spare_room_is_a_small_part_of_a_long_sequence() -> None:
    for n in range(0, 1 << 18, 37):
        assert 256 <= pk.capacity(n) - n <= 256 + max(256, (n + 256) // 32)
        assert pk.capacity(n) <= pk.capacity(n + 1)


def test_sequences_of_similar_lengths_have_equal_buffers() -> None:
    """So MLX reuses the buffers of a turn for the same prompt again, and mostly for the next."""
    assert pk.capacity(8064) == pk.capacity(8063) == pk.capacity(8064 + 80)


def test_tokens_are_appended_in_place() -> None:
    cache = filled(600)
    assert cache.keys is not None
    before = [address(x) for x in cache.keys]
    for step in range(4):
        mx.eval(cache.update_and_fetch(*random_kv(step, 1)))
        mx.eval(cache.state)
    assert [address(x) for x in cache.keys] == before
    capacity = cache.keys[0].shape[2]
    mx.eval(cache.update_and_fetch(*random_kv(9, capacity - 604)))  # all tokens that fit
    mx.eval(cache.state)
    assert [address(x) for x in cache.keys] == before


def test_trimmed_tokens_are_not_packed_later() -> None:
    """Tokens that were decoded right after a block are trimmed before they are packed."""
    n = pk.GRID + 3
    (keys, values), (others, other_values) = random_kv(1, n), random_kv(2, 1)
    cache, never_trimmed = (SequenceQuantizedKVCache(PRECISION) for _ in range(2))
    for start, stop in ((0, pk.GRID), *((i, i + 1) for i in range(pk.GRID, n))):
        cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
    assert cache.trim(3) == 3
    never_trimmed.update_and_fetch(keys[:, :, : pk.GRID], values[:, :, : pk.GRID])
    for each in (cache, never_trimmed):
        each.update_and_fetch(others, other_values)
    both = [packed_tokens(each, 0, pk.GRID + 1) for each in (cache, never_trimmed)]
    assert all(same_packed(a, b) for a, b in zip(*both, strict=True))


def test_new_tokens_overwrite_trimmed_tokens() -> None:
    cache = filled(40)
    assert cache.trim(15) == 15
    assert cache.size() == cache.offset == 25
    keys, values = random_kv(7, 30)
    cache.update_and_fetch(keys, values)
    fresh = SequenceQuantizedKVCache(PRECISION)
    fresh.update_and_fetch(keys, values)
    for a, b in zip(packed_tokens(cache, 25, 55), packed_tokens(fresh, 0, 30), strict=True):
        assert same_packed(a, b)
    for a, b in zip(packed_tokens(cache, 0, 25), packed_tokens(filled(40), 0, 25), strict=True):
        assert same_packed(a, b)
    assert cache.trim(1000) == 55
    assert not cache.empty()


def test_masks_are_arrays_only_if_needed() -> None:
    cache = filled(10)
    assert cache.make_mask(1) is None
    assert cache.make_mask(3) == "causal"
    array = cache.make_mask(3, return_array=True)
    assert isinstance(array, mx.array) and array.shape == (3, 13)
    windowed = cache.make_mask(1, window_size=4)
    assert isinstance(windowed, mx.array)
    assert windowed.tolist() == [[False] * 7 + [True] * 4]
    assert cache.make_mask(1, window_size=11) is None
    assert cache.make_mask(3, window_size=13) == "causal"
    assert isinstance(cache.make_mask(3, window_size=12), mx.array)
    assert isinstance(cache.make_mask(3, window_size=13, return_array=True), mx.array)


def test_empty_cache_has_no_state_and_no_bytes() -> None:
    cache = SequenceQuantizedKVCache(PRECISION)
    assert cache.empty() and cache.nbytes == 0 and cache.size() == 0
    assert cache.is_trimmable() and cache.trim(3) == 0
    assert cache.state == (None, None, 0, None, None)


def test_nbytes_counts_packed_and_newest_buffers() -> None:
    per_token = 2 * (packed_bytes(PRECISION.keys, K_DIM) + packed_bytes(PRECISION.values, V_DIM))
    newest = pk.GRID * 2 * (K_DIM + V_DIM) * mx.float32.size
    assert filled(8).nbytes == pk.capacity(8) * per_token + newest


def test_changing_a_deep_copy_does_not_change_the_original() -> None:
    cache = filled(20)
    twin = copy.deepcopy(cache)
    twin.trim(10)
    twin.update_and_fetch(*random_kv(99, 10))
    for a, b in zip(packed_tokens(cache, 0, 20), packed_tokens(filled(20), 0, 20), strict=True):
        assert same_packed(a, b)


def test_later_tokens_of_another_dtype_do_not_widen_the_scales() -> None:
    cache = filled(4, dtype=mx.bfloat16)
    keys, values = random_kv(1, 600)
    fetched, _ = cache.update_and_fetch(keys, values)
    assert cache.keys is not None
    assert [x.dtype for x in cache.keys] == [mx.uint32, mx.bfloat16, mx.bfloat16]
    assert fetched.dtype == mx.float32


def test_later_writes_do_not_change_views_of_the_whole_buffer() -> None:
    cache = filled(5)
    cache.keys, cache.values = packed_tokens(cache, 0, 5)
    views = pk.view(cache.keys, 0, 5), pk.view(cache.values, 0, 5)
    cache.trim(3)
    cache.update_and_fetch(*random_kv(99, 2))
    for a, b in zip(views, packed_tokens(filled(5), 0, 5), strict=True):
        assert same_packed(a, b)


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_fast_rotation_equals_multiplying_by_the_matrix(dim: int) -> None:
    x, side = mx.random.normal((2, 3, dim)), Quantization(8, 32, rotated=True)
    rotated = pk.prepared(x, side)
    assert mx.allclose(rotated, x @ pk.rotation(dim, dim, x.dtype), atol=1e-5)
    assert mx.allclose(pk.as_it_came(rotated, side), x, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_16_bit_rotation_neither_overflows_nor_adds_rounding_steps(dtype: mx.Dtype) -> None:
    side = Quantization(8, 64, rotated=True)
    large = pk.prepared(mx.full((1, 128), 1000.0, dtype), side)
    assert mx.allclose(large[0, 0].astype(mx.float32), mx.array(1000 * 128**0.5), rtol=0.01)
    x, exact = mx.random.normal((64, 128)).astype(dtype), pk.rotation(128, 128, mx.float32)
    error = pk.prepared(x, side).astype(mx.float32) - x.astype(mx.float32) @ exact
    most = 2**-8 if dtype == mx.bfloat16 else 2**-11
    assert mx.sqrt(mx.mean(error * error)) < most
