from __future__ import annotations

import threading
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache

from mlx_lm_kvpersist.cache.blocks import (
    BLOCK_TOKENS,
    Joiner,
    Piece,
    copy_state,
    n_cached_tokens,
    split,
)
from mlx_lm_kvpersist.cache.geometry.kinds import KINDS, GroupKind
from mlx_lm_kvpersist.cache.geometry.spec import (
    LayerGroup,
    ModelCacheSpec,
    TensorShape,
    arrays_fit,
    token_arrays,
)
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache
from tests.support.joined import Pieces, join, n_bytes

from ..conftest import address, packed_tokens, random_kv, same_packed
from ..live.test_quantized import PRECISION


def quantized(name: str, slots: tuple[int, ...], n_heads: int, k: int, v: int) -> LayerGroup:
    return LayerGroup(
        name,
        GroupKind.FULL,
        "KVCache",
        slots,
        TensorShape(n_heads, k, "float32"),
        TensorShape(n_heads, v, "float32"),
        PRECISION.fitted(k, v),
    )


SPEC = ModelCacheSpec(
    (quantized("0", (0, 2), 2, 64, 32), quantized("1", (1,), 1, 20, 40)),
    [SequenceQuantizedKVCache(PRECISION.fitted(*dims)) for dims in ((64, 32), (20, 40), (64, 32))],
)


def join_blocks(
    spec: ModelCacheSpec,
    used: list[tuple[dict[str, mx.array], int]],
    headroom: int,
    *,
    whole: bool = True,
) -> list[Any]:
    pieces = [Piece(arrays, 0, n_tokens) for arrays, n_tokens in used]
    return join(spec, Pieces(sum(n for _, n in used), pieces), headroom, whole=whole)


def caches_of(n_tokens: int, spec: ModelCacheSpec = SPEC) -> list[SequenceQuantizedKVCache]:
    caches = spec.make_cache()
    for group in spec.groups:
        for slot in group.slots:
            assert group.keys is not None and group.values is not None
            keys, values = (
                mx.random.normal((1, shape.n_heads, n_tokens, shape.dim), key=mx.random.key(seed))
                for seed, shape in ((2 * slot, group.keys), (2 * slot + 1, group.values))
            )
            caches[slot].update_and_fetch(keys, values)
    return caches


def assert_same(
    actual: list[SequenceQuantizedKVCache],
    expected: list[SequenceQuantizedKVCache],
    start: int,
    stop: int,
) -> None:
    for a, b in zip(actual, expected, strict=True):
        for x, y in zip(
            packed_tokens(a, 0, stop - start), packed_tokens(b, start, stop), strict=True
        ):
            assert same_packed(x, y)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, BLOCK_TOKENS), min_size=1, max_size=5),
    first=st.integers(0, 40),
    rest=st.integers(0, 30),
    last_used=st.floats(0, 1),
    headroom=st.integers(0, 700),
    whole=st.booleans(),
)
def test_split_blocks_join_to_the_same_bits(
    sizes: list[int], first: int, rest: int, last_used: float, headroom: int, whole: bool
) -> None:
    total = first + sum(sizes)
    caches = caches_of(total + rest)
    ranges = []
    start = first
    for size in sizes:
        ranges.append((start, start + size))
        start += size
    blocks = split(SPEC.full, caches, ranges)
    assert [
        arrays_fit(token_arrays(SPEC.full, n), b) for b, n in zip(blocks, sizes, strict=True)
    ] == [None] * len(sizes)
    used = [*sizes[:-1], max(1, round(last_used * sizes[-1]))]
    restored = join_blocks(SPEC, list(zip(blocks, used, strict=True)), headroom, whole=whole)
    assert [cache.offset for cache in restored] == [sum(used)] * 3
    assert {cache.keys[0].shape[2] for cache in restored if cache.keys} == {sum(used) + headroom}
    assert_same(restored, caches, first, first + sum(used))


def test_split_accepts_ranges_with_gaps() -> None:
    caches = caches_of(100)
    for block, (start, stop) in zip(
        split(SPEC.full, caches, [(3, 20), (40, 41)]), [(3, 20), (40, 41)], strict=True
    ):
        assert_same(join_blocks(SPEC, [(block, stop - start)], 0), caches, start, stop)
    assert split(SPEC.full, caches, []) == []


def test_block_arrays_are_named_by_group_side_and_field() -> None:
    (block,) = split(SPEC.full, caches_of(10), [(0, 10)])
    assert list(block) == [
        f"{group}.{side}.{field}"
        for group in "01"
        for side in "kv"
        for field in ("weights", "scales", "biases")
    ]
    assert block["0.k.weights"].shape == (2, 2, 10, 8)
    assert block["1.v.biases"].shape == (1, 1, 10, 2)
    assert n_bytes(block) == 10 * SPEC.bytes_per_token


def test_blocks_share_no_memory_with_the_caches() -> None:
    """Even if a group has one layer with one head, whose slice would need no copy."""
    mx.clear_cache()
    caches = caches_of(2000)
    mx.eval([cache.state for cache in caches])
    before = mx.get_active_memory()
    blocks = split(SPEC.full, caches, [(0, 256), (256, 300)])
    added = mx.get_active_memory() - before
    assert added >= 300 * SPEC.bytes_per_token
    del caches
    assert mx.get_active_memory() < before
    restored = join_blocks(SPEC, [(blocks[0], 256), (blocks[1], 44)], 0)
    assert_same(restored, caches_of(2000), 0, 300)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("headroom", [0, 64])
def test_joined_layers_share_no_buffers_with_blocks(headroom: int, whole: bool) -> None:
    (block,) = split(SPEC.full, caches_of(10), [(0, 10)])
    restored = join_blocks(SPEC, [(block, 10)], headroom, whole=whole)
    active_bytes = mx.get_active_memory()
    in_blocks = {(address(x), x.nbytes) for x in block.values()}
    for cache in restored:
        for packed in (cache.keys, cache.values):
            assert packed is not None
            for x in packed:
                assert not any(start <= address(x) < start + n for start, n in in_blocks)
    assert mx.get_active_memory() == active_bytes


def test_a_restored_cache_appends_in_place() -> None:
    (block,) = split(SPEC.full, caches_of(200), [(0, 200)])
    cache = join_blocks(SPEC, [(block, 200)], 64)[0]
    assert cache.keys is not None
    before = [address(x) for x in cache.keys]
    mx.eval(cache.update_and_fetch(*random_kv(1, 3)), cache.state)
    assert [address(x) for x in cache.keys] == before


def test_splitting_a_long_cache_needs_little_more_memory_than_blocks() -> None:
    caches = caches_of(8193)
    mx.eval([cache.state for cache in caches])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    blocks = split(SPEC.full, caches, [(i, i + 256) for i in range(0, 8192, 256)])
    assert mx.get_peak_memory() - before < 1.3 * sum(map(n_bytes, blocks))


def test_splitting_the_last_block_of_a_batch_copies_few_bytes() -> None:
    batch = [cache.merge([cache]) for cache in caches_of(7936)]
    for cache, last in zip(batch, caches_of(256), strict=True):
        cache.update_and_fetch(last.newest.keys, last.newest.values)
    mx.eval([cache.state for cache in batch])
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    (block,) = split(SPEC.full, [cache.extract(0) for cache in batch], [(7936, 8192)])
    assert mx.get_peak_memory() - before < 10 * n_bytes(block)  # the batch is 32 blocks


def test_split_and_joined_arrays_are_evaluated() -> None:
    """Another thread cannot use the stream of the thread that made the arrays."""
    (block,) = split(SPEC.full, caches_of(10), [(0, 10)])
    arrays = list(block.values())
    for cache in join_blocks(SPEC, [(block, 10)], 5):
        assert cache.keys is not None and cache.values is not None
        arrays += [*cache.keys, *cache.values]
    mixed = mixed_caches(40)
    (block,) = split(MIXED.full, mixed, [(0, 40)])
    (window,) = split(MIXED.sliding[16], mixed, [(24, 40)])
    state = copy_state(MIXED, mixed)
    arrays += [*block.values(), *window.values(), *copy_state(MIXED, mixed).values()]
    for whole in (True, False):
        pieces = Pieces(40, [Piece(block, 0, 40)], {16: [Piece(window, 0, 16)]}, state)
        joined = join(MIXED, pieces, 5, whole=whole)
        arrays += [x for cache in joined[:3] for x in (cache.keys, cache.values)]
        arrays += [cache.cache[0] for cache in joined[3:]]
    errors: list[BaseException] = []

    def read_arrays() -> None:
        try:
            for array in arrays:
                array.tolist()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=read_arrays)
    thread.start()
    thread.join()
    assert not errors


def test_joining_no_blocks_gives_empty_caches() -> None:
    assert all(cache.empty() for cache in join_blocks(SPEC, [], 10))


def test_splitting_beyond_the_cached_tokens_raises_an_error() -> None:
    with pytest.raises(ValueError, match="of a cache that holds 0 to 100"):
        split(SPEC.full, caches_of(100), [(90, 101)])


@pytest.mark.parametrize("n_blocks", [1, 3, 20])
def test_many_small_and_few_large_copies_give_the_same_blocks(
    monkeypatch: pytest.MonkeyPatch, n_blocks: int
) -> None:
    ranges = [(i * 10, i * 10 + 10) for i in range(n_blocks)]
    blocks_of_runs = []
    for few in (False, True):
        name = "mlx_lm_kvpersist.cache.blocks.prefers_few_copies"
        monkeypatch.setattr(name, lambda few=few: few)
        caches = caches_of(200)
        blocks = split(SPEC.full, caches, ranges)
        addresses = {address(x) for cache in caches for x in (*cache.state[0], *cache.state[1])}
        assert not addresses & {address(x) for block in blocks for x in block.values()}
        for whole in (True, False):
            used = [(block, 10) for block in blocks]
            restored = join_blocks(SPEC, used, 64, whole=whole)
            assert_same(restored, caches, 0, 10 * n_blocks)
        blocks_of_runs.append(blocks)
    for small, large in zip(*blocks_of_runs, strict=True):
        assert all(mx.array_equal(small[name], large[name]) for name in small)


def test_token_count_is_the_smallest_of_all_full_caches() -> None:
    assert n_cached_tokens(SPEC, caches_of(7)) == 7
    assert n_cached_tokens(SPEC, SPEC.make_cache()) == 0
    one_behind = caches_of(7)
    one_behind[1].trim(1)
    assert n_cached_tokens(SPEC, one_behind) == 6


def test_counting_tokens_raises_if_window_and_full_caches_differ() -> None:
    window = LayerGroup(
        "2",
        GroupKind.SLIDING,
        "RotatingKVCache",
        (3,),
        TensorShape(1, 64, "float32"),
        TensorShape(1, 64, "float32"),
        window=4,
    )
    spec = ModelCacheSpec((*SPEC.groups, window), [*SPEC.template, RotatingKVCache(4)])
    ring = RotatingKVCache(4)
    for _ in range(7):
        ring.update_and_fetch(mx.ones((1, 1, 1, 64)), mx.ones((1, 1, 1, 64)))
    assert n_cached_tokens(spec, [*caches_of(7), ring]) == 7
    with pytest.raises(ValueError, match=r"have seen \[6, 7\] tokens"):
        n_cached_tokens(spec, [*caches_of(6), ring])


def test_recurrent_states_have_no_token_count() -> None:
    state = LayerGroup("0", GroupKind.RECURRENT, "ArraysCache", (0,), states=(((2,), "float32"),))
    spec = ModelCacheSpec((state,), [ArraysCache(1)])
    assert n_cached_tokens(spec, spec.make_cache()) is None


def test_counting_tokens_raises_if_an_unused_cache_has_tokens() -> None:
    spec = ModelCacheSpec(SPEC.groups[:1], SPEC.template)
    assert n_cached_tokens(spec, caches_of(5, spec)) == 5
    with pytest.raises(ValueError, match="cache 1, which the model did not use, is not empty"):
        n_cached_tokens(spec, caches_of(5))


class _Operations:
    """Counts the array operations of a join, and the copies that they start on a device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_operations = self.n_copies = 0
        concatenate, write = mx.concatenate, mx.array.__setitem__

        def counted_concatenate(arrays: Any, axis: int = 0) -> mx.array:
            self.n_operations += 1
            self.n_copies += len(arrays)
            return concatenate(arrays, axis=axis)

        def counted_write(array: mx.array, at: Any, value: Any) -> None:
            self.n_operations += 1
            self.n_copies += 1
            write(array, at, value)

        monkeypatch.setattr(mx, "concatenate", counted_concatenate)
        monkeypatch.setattr(mx.array, "__setitem__", counted_write)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_joining_a_32k_prompt_takes_few_large_operations(
    monkeypatch: pytest.MonkeyPatch, is_gpu: bool
) -> None:
    monkeypatch.setattr("mlx_lm_kvpersist.cache.blocks.prefers_few_copies", lambda: is_gpu)
    n_layers, n_blocks = 32, 128
    shape = TensorShape(1, 32, "float32")
    group = LayerGroup(
        "0", GroupKind.FULL, "KVCache", tuple(range(n_layers)), shape, shape, PRECISION
    )
    spec = ModelCacheSpec((group,), [SequenceQuantizedKVCache(PRECISION) for _ in range(n_layers)])
    first = {
        name: mx.random.randint(0, 1 << 20, form).astype(dtype)
        for name, form, dtype in token_arrays(spec.full, BLOCK_TOKENS)
    }
    blocks = [{name: array + n for name, array in first.items()} for n in range(n_blocks)]
    mx.eval(blocks)
    counted = _Operations(monkeypatch)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    caches = join_blocks(spec, [(block, BLOCK_TOKENS) for block in blocks], 512)
    n_arrays = 6 * n_layers
    # One operation makes a layer's array; fewer than twenty stack the blocks.
    assert counted.n_operations < n_arrays + 20
    # At most twice the least number: one copy per stored array and one per layer's array.
    assert counted.n_copies < 2 * (6 * n_blocks + n_arrays)
    total = sum(map(n_bytes, blocks)) * (n_blocks * BLOCK_TOKENS + 512) / (n_blocks * BLOCK_TOKENS)
    assert mx.get_peak_memory() - before < 1.125 * total
    monkeypatch.undo()
    for place, cache in ((0, caches[0]), (31, caches[31])):
        for side, packed in (("k", cache.keys), ("v", cache.values)):
            for field, array in zip(("weights", "scales", "biases"), packed, strict=True):
                name = f"0.{side}.{field}"
                stored = mx.concatenate([b[name][place : place + 1] for b in blocks], axis=2)
                assert mx.array_equal(array[:, :, : n_blocks * BLOCK_TOKENS], stored)
                assert not array[:, :, n_blocks * BLOCK_TOKENS :].any()


def cached_positions(cache: Any) -> tuple[int, int]:
    return KINDS[type(cache)].positions(cache)


STATES = LayerGroup(
    "0", GroupKind.RECURRENT, "ArraysCache", (0, 1), states=(((3,), "float32"), None)
)
STATE_SPEC = ModelCacheSpec((STATES,), [ArraysCache(2), ArraysCache(2)])


def states_of(*arrays: tuple[mx.array | None, mx.array | None]) -> list[ArraysCache]:
    caches: list[ArraysCache] = STATE_SPEC.make_cache()
    for cache, pair in zip(caches, arrays, strict=True):
        cache.cache = list(pair)
    return caches


def test_copied_states_are_stacked_over_slots() -> None:
    caches = states_of((mx.full((1, 3), 1.0), None), (mx.full((1, 3), 2.0), None))
    state = copy_state(STATE_SPEC, caches)
    assert {name: array.tolist() for name, array in state.items()} == {
        "0.0": [[1.0] * 3, [2.0] * 3]
    }


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ((None, None), "group 0 has array 0 in some layers only"),
        ((mx.ones((1, 3)), mx.ones((1, 3))), "group 0 has array 1 in some layers only"),
        ((mx.ones((1, 4)), None), "."),
    ],
)
def test_copying_states_that_differ_from_their_group_is_refused(
    second: tuple[mx.array | None, mx.array | None], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        copy_state(STATE_SPEC, states_of((mx.ones((1, 3)), None), second))


def test_copying_states_of_another_dtype_is_refused() -> None:
    half = mx.ones((1, 3), mx.float16)
    with pytest.raises(ValueError, match=r"0\.0 is float16, expected float32"):
        copy_state(STATE_SPEC, states_of((half, None), (half, None)))


@pytest.mark.parametrize("whole", [True, False])
def test_caches_without_values_are_joined(whole: bool) -> None:
    """An indexer of sparse attention has only keys: its values have no numbers."""
    group = LayerGroup(
        *("0", GroupKind.FULL, "KVCache", (0,)),
        TensorShape(1, 16, "float32"),
        TensorShape(1, 0, "float32"),
    )
    spec = ModelCacheSpec((group,), [KVCache()])
    (cache,) = caches = spec.make_cache()
    keys, values = random_kv(1, 300)[0][:, :1, :, :16], mx.zeros((1, 1, 300, 0))
    cache.update_and_fetch(keys, values)
    cuts = [(0, 256), (256, 300)]
    blocks = split(spec.full, caches, cuts)
    used = [(block, stop - start) for block, (start, stop) in zip(blocks, cuts, strict=True)]
    (joined,) = join_blocks(spec, used, 10, whole=whole)
    joined_keys, joined_values = joined.state[:2]
    assert mx.array_equal(joined_keys[:, :, :300], keys) and joined_values.shape[3] == 0


MIXED = ModelCacheSpec(
    (
        LayerGroup("0", GroupKind.FULL, "KVCache", (0,), *2 * (TensorShape(1, 8, "float32"),)),
        LayerGroup(
            *("1", GroupKind.SLIDING, "RotatingKVCache", (1, 2)),
            *2 * (TensorShape(1, 4, "float32"),),
            window=16,
        ),
        LayerGroup(
            "2", GroupKind.RECURRENT, "ArraysCache", (3, 4), states=(((3,), "float32"), None)
        ),
    ),
    [KVCache(), RotatingKVCache(16), RotatingKVCache(16), ArraysCache(2), ArraysCache(2)],
)


def mixed_caches(n_tokens: int) -> list[Any]:
    """Caches whose keys and values encode their slot and position; states encode their slot."""
    caches = MIXED.make_cache()
    for slot, dim in ((0, 8), (1, 4), (2, 4)):
        at = mx.arange(n_tokens, dtype=mx.float32)[None, None, :, None] + 1000 * slot
        keys = mx.broadcast_to(at, (1, 1, n_tokens, dim))
        for start, stop in (
            (0, n_tokens - 10),
            *((n, n + 1) for n in range(n_tokens - 10, n_tokens)),
        ):
            caches[slot].update_and_fetch(keys[:, :, start:stop], -keys[:, :, start:stop])
    for slot in (3, 4):
        caches[slot].cache = [mx.full((1, 3), float(slot)), None]
    return caches


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("with_full", [True, False])
def test_windows_and_states_are_joined_with_and_without_full_caches(
    whole: bool, with_full: bool
) -> None:
    """Only full caches have spare room; a window may begin within a piece."""
    spec = MIXED if with_full else ModelCacheSpec(MIXED.groups[1:], MIXED.template)
    caches = mixed_caches(40)
    ranges = [(0, 25), (25, 40)] if with_full else []
    early, late = split(spec.sliding[16], caches, [(24, 34), (34, 40)])
    pieces = Pieces(
        40,
        [Piece(block, 0, block["0.k"].shape[2]) for block in split(spec.full, caches, ranges)],
        {16: [Piece(early, 2, 10), Piece(late, 0, 6)]},
        copy_state(spec, caches),
    )
    joined = join(spec, pieces, 9, whole=whole)
    assert cached_positions(joined[0]) == ((0, 40) if with_full else (0, 0))
    for slot in (0, 1, 2) if with_full else (1, 2):
        start = 26 if slot else 0
        assert cached_positions(joined[slot]) == (start, 40)
        assert joined[slot].keys.shape[2] == (14 if slot else 49)
        both = (
            KINDS[type(cache[slot])].tokens(cache[slot], start, 40) for cache in (joined, caches)
        )
        for (actual,), (expected,) in zip(*both, strict=True):
            assert mx.array_equal(actual, expected)
    for slot in (3, 4):
        state, other = joined[slot].cache
        assert state.tolist() == [[float(slot)] * 3] and other is None


@pytest.mark.parametrize("whole", [True, False])
def test_joined_window_has_its_start_position(whole: bool) -> None:
    group = LayerGroup(
        *("0", GroupKind.SLIDING, "ChunkedKVCache", (0,)),
        *2 * (TensorShape(1, 4, "float32"),),
        window=16,
    )
    spec = ModelCacheSpec((group,), [ChunkedKVCache(16)])
    window = {name: mx.ones((1, 1, 16, 4)) for name in ("0.k", "0.v")}
    pieces = Pieces(40, windows={16: [Piece(window, 0, 16)]})
    (joined,) = join(spec, pieces, 0, whole=whole)
    assert cached_positions(joined) == (24, 40)


def test_join_with_missing_tokens_raises_an_error() -> None:
    caches = mixed_caches(40)
    (block,) = split(MIXED.full, caches, [(0, 40)])
    (window,) = split(MIXED.sliding[16], caches, [(24, 40)])
    for whole in (True, False):
        joiner = Joiner(MIXED, 40, 40, {16: 16}, whole=whole)
        joiner.add(Piece(block, 0, 39))
        joiner.add(Piece(window, 0, 16), 16)
        with pytest.raises(ValueError, match="39 tokens where there should be 40"):
            joiner.finish()


def test_joining_only_full_blocks_leaves_other_caches_empty() -> None:
    """The canary's kernels are compiled over such caches, filled with zeros."""
    (block,) = split(MIXED.full, mixed_caches(40), [(0, 40)])
    for whole in (True, False):
        joined = join(MIXED, Pieces(40, [Piece(block, 0, 40)]), 0, whole=whole)
        assert [cached_positions(cache) for cache in joined[:3]] == [(0, 40), (0, 0), (0, 0)]
        assert [cache.cache for cache in joined[3:]] == [[None, None], [None, None]]
