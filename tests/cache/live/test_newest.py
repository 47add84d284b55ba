"""A query sees its own block of the grid in full precision, and older blocks quantized.

The reference has two of mlx-lm's KVCaches for each sequence: one in full precision, and one with
keys and values after `mx.quantize` and `mx.dequantize`. A boolean mask selects from both.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, Quantization
from mlx_lm_kvpersist.cache.live import attention, caches
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import AttentionPlan, forced_plan
from mlx_lm_kvpersist.cache.live.caches import (
    BatchQuantizedKVCache,
    Newest,
    PackedCache,
    SequenceQuantizedKVCache,
)
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.host.scheduling.prefill import MOST_DRAFTED
from tests.support.pairs import every_pair

from ..conftest import K_DIM, N_HEADS, V_DIM, random_kv, rounded

TOLERANCE = 1e-4
SCALE = K_DIM**-0.5
GRID = 16
COARSE = KVPrecision.of(4, 32)
PRECISIONS = {
    "4 bits": COARSE,
    "rotated": KVPrecision.of(3, 32, 2, rotated=True),
}
PLANS: dict[str, AttentionPlan | None] = {
    "arrays": None,
    "dequantize": forced_plan("dequantize"),
    "packed": forced_plan("packed"),
    "tiles of heads": replace(forced_plan("tiled"), max_dequantized_bytes=1),
}


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    with server_attention():
        yield


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pk, "GRID", GRID)


def quantized_and_back(x: mx.array, quantization: Quantization) -> mx.array:
    """Return `x` quantized and dequantized by MLX, with heads padded by zeros to whole groups.

    If rotated, `x` is multiplied by a Hadamard matrix before, and by its transpose after.
    """
    size, dim = quantization.group_size, x.shape[-1]
    x = mx.pad(x, [(0, 0)] * 3 + [(0, -dim % size)])
    matrix = mx.eye(x.shape[-1])
    matrix = mx.hadamard_transform(matrix) if quantization.rotated else matrix
    return (rounded(x @ matrix, size, quantization.bits) @ matrix.T)[..., :dim]


class Reference:
    """One sequence in mlx-lm's own caches."""

    def __init__(self, precision: KVPrecision) -> None:
        self.precision = precision
        self.computed, self.quantized = KVCache(), KVCache()

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        precise = self.computed.update_and_fetch(keys, values)
        coarse = self.quantized.update_and_fetch(
            quantized_and_back(keys, self.precision.keys),
            quantized_and_back(values, self.precision.values),
        )
        n_keys, n = self.computed.offset, keys.shape[2]
        at, seen = mx.arange(n_keys - n, n_keys)[:, None], mx.arange(n_keys)
        own_block = (at // pk.GRID == seen // pk.GRID) & (seen <= at)
        mask = mx.concatenate([own_block, seen // pk.GRID < at // pk.GRID], axis=1)
        both = (mx.concatenate(list(pair), axis=2) for pair in zip(precise, coarse, strict=True))
        return mx.fast.scaled_dot_product_attention(queries, *both, scale=SCALE, mask=mask)

    def trim(self, n: int) -> None:
        self.computed.trim(n)
        self.quantized.trim(n)


class Streams:
    """Sequences in quantized caches, alone and as rows of a batch, each with its reference."""

    def __init__(
        self,
        seed: int,
        precision: KVPrecision,
        plan: AttentionPlan | None,
        dims: tuple[int, int] = (K_DIM, V_DIM),
    ) -> None:
        self.rng = random.Random(seed)
        self.precision, self.plan, self.dims = precision.fitted(*dims), plan, dims
        self.seed = 1000 * seed
        self.worst = 0.0
        self.references: list[Reference] = []
        self.batch = BatchQuantizedKVCache([], self.precision, plan)
        for _ in range(self.rng.randint(1, 3)):
            self.join()

    def join(self) -> None:
        """Compute a prompt in chunks, and let it join the batch."""
        reference = Reference(self.precision)
        cache = SequenceQuantizedKVCache(self.precision, self.plan)
        for _ in range(self.rng.randint(0, 4)):
            self.step(cache, [reference], 40)
        self.references.append(reference)
        self.batch.extend(BatchQuantizedKVCache.merge([cache]))

    def step(self, cache: Any, references: list[Reference], most: int) -> None:
        """Attend over more tokens; sometimes trim the last of them, like refused draft tokens."""
        n = self.rng.choice([1, 1, 2, self.rng.randint(1, most)])
        if self.plan is not None and len(references) > 1:
            n = 1
        if self.plan is None:
            # A call that fetches arrays ends within its block.
            n = min(n, *(GRID - length % GRID for length in cache.lengths))
        # No draft is longer than a block.
        n_trimmed = self.rng.randint(0, n) if n <= GRID and self.rng.random() < 0.15 else 0
        self.attend(cache, references, n, n_trimmed)

    def attend(self, cache: Any, references: list[Reference], n: int, n_trimmed: int) -> None:
        """Attend over `n` more tokens, then trim the last `n_trimmed`."""
        self.seed += 1
        n_rows = len(references)
        keys, values = random_kv(self.seed, n, n_rows, dims=self.dims)
        lead = n_rows, 2 * N_HEADS, n
        queries = mx.random.normal((*lead, self.dims[0]), key=mx.random.key(self.seed))
        mask = cache.make_mask(n)
        fetched = cache.update_and_fetch(keys, values)
        actual = scaled_dot_product_attention(
            queries, *fetched, cache=cache, scale=SCALE, mask=mask
        )
        if n_trimmed:
            assert cache.trim(n_trimmed) == n_trimmed
        for i, reference in enumerate(references):
            row = slice(i, i + 1)
            expected = reference.attend(queries[row], keys[row], values[row])
            self.worst = max(self.worst, float(mx.abs(actual[row] - expected).max()))
            reference.trim(n_trimmed)

    def run(self, n_steps: int = 30) -> float:
        """Let rows join, leave and continue; return the largest difference from the references."""
        for _ in range(n_steps):
            act, n_rows = self.rng.random(), len(self.references)
            if act < 0.08 and n_rows < 4:
                self.join()
            elif act < 0.16:
                keep = sorted(self.rng.sample(range(n_rows), self.rng.randint(0, n_rows - 1)))
                self.batch.filter(keep)
                self.references = [self.references[i] for i in keep]
                if not keep:
                    self.join()
            elif act < 0.24:
                rows = [self.batch.extract(i) for i in range(n_rows)]
                self.batch = BatchQuantizedKVCache.merge(copy.deepcopy(rows))
            self.step(self.batch, self.references, 40)
        return self.worst


CASES = [(precision, plan) for precision in ("4 bits", "rotated") for plan in PLANS]


@every_pair(precision=["4 bits", "rotated"], plan=list(PLANS), seed=range(2))
def test_random_chunks_joins_leaves_and_trims_match_the_reference(
    precision: str, plan: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed:  # steps then also read the spare room
        monkeypatch.setattr(pk, "capacity", lambda n_tokens: n_tokens + 7)
        monkeypatch.setattr(pk, "backend", lambda: "cuda")
    assert Streams(seed, PRECISIONS[precision], PLANS[plan]).run() < TOLERANCE


@pytest.mark.parametrize("plan", [name for name in PLANS if PLANS[name]])
def test_equal_rows_attend_to_several_tokens_over_the_ends_of_blocks(plan: str) -> None:
    streams = Streams(5, PRECISIONS["rotated"], PLANS[plan])
    cache = SequenceQuantizedKVCache(streams.precision, streams.plan)
    reference = Reference(streams.precision)
    streams.attend(cache, [reference], GRID - 3, 0)
    batch = BatchQuantizedKVCache.merge([cache, copy.deepcopy(cache)])
    streams.attend(batch, [reference, copy.deepcopy(reference)], 2 * GRID, 0)
    assert streams.worst < TOLERANCE


@pytest.mark.parametrize("plan", [name for name in PLANS if PLANS[name]])
def test_rows_in_the_first_block_may_have_packed_tokens(plan: str) -> None:
    """The trimmed row has 8 packed tokens, the other row has 10 in full precision."""
    results = []
    for use in (PLANS["arrays"], PLANS[plan]):
        rows = [SequenceQuantizedKVCache(COARSE.fitted(K_DIM, V_DIM), use) for _ in range(2)]
        for row, n in zip(rows, (10, GRID + 4), strict=True):
            for start in range(0, n, GRID):
                row.update_and_fetch(*random_kv(start, min(GRID, n - start)))
        trimmed = BatchQuantizedKVCache.merge([rows[1]]).extract(0)
        trimmed.forget()
        trimmed.trim(GRID - 4)
        batch = BatchQuantizedKVCache.merge([rows[0], trimmed])
        assert (batch.lengths, batch.newest.lengths) == ([10, 8], [10, 0])
        queries = mx.random.normal((2, 2 * N_HEADS, 1, K_DIM), key=mx.random.key(1))
        mask, fetched = batch.make_mask(1), batch.update_and_fetch(*random_kv(99, 1, 2))
        results.append(
            scaled_dot_product_attention(queries, *fetched, cache=batch, scale=SCALE, mask=mask)
        )
    assert mx.abs(results[0] - results[1]).max() < TOLERANCE


@pytest.mark.parametrize(("precision", "plan"), CASES)
def test_drafts_of_several_steps_are_trimmed_across_block_ends(precision: str, plan: str) -> None:
    streams = Streams(3, PRECISIONS[precision], PLANS[plan])
    cache = SequenceQuantizedKVCache(streams.precision, streams.plan)
    references = [Reference(streams.precision)]
    for _ in range(30):
        n_steps = streams.rng.randint(1, 8)
        n_trimmed = streams.rng.randint(0, n_steps - 1)
        for n in range(n_steps):
            streams.attend(cache, references, 1, n_trimmed if n == n_steps - 1 else 0)
    assert streams.worst < TOLERANCE and cache.offset > 3 * GRID


@pytest.mark.parametrize("plan", ["arrays", "packed"])
@pytest.mark.parametrize("n_before", [1, 2, MOST_DRAFTED - 3, MOST_DRAFTED - 1])
def test_longest_draft_is_trimmed_across_a_block_end(
    plan: str, n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pk, "GRID", 256)
    streams = Streams(3, COARSE, PLANS[plan])
    cache, references = SequenceQuantizedKVCache(COARSE, PLANS[plan]), [Reference(COARSE)]
    streams.attend(cache, references, 256 - n_before, 0)
    for n in range(MOST_DRAFTED):
        streams.attend(cache, references, 1, MOST_DRAFTED - 1 if n == MOST_DRAFTED - 1 else 0)
    for _ in range(n_before + 2):
        streams.attend(cache, references, 1, 0)
    assert cache.offset == 259 and streams.worst < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("plan", ["dequantize", "tiles of heads"])
def test_keys_and_queries_padded_to_few_lengths_match_the_reference(
    plan: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, words = set(), set()
    attend = mx.fast.scaled_dot_product_attention

    def recorded(queries: mx.array, keys: mx.array, *others: Any, **more: Any) -> mx.array:
        mask = more.get("mask")
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:  # the reference's mask is boolean
            is_first_block = keys.shape[2] == pk.GRID  # then the buffer is not dequantized
            lengths.add((queries.shape[2] % 5, is_first_block or keys.shape[2] % 48))
        if isinstance(mask, str):
            words.add(mask)
        return attend(queries, keys, *others, **more)

    monkeypatch.setattr(attention, "builds_for_each_length", lambda *arrays: True)
    monkeypatch.setattr(pk, "backend", lambda: "cuda")
    monkeypatch.setattr(attention, "KEY_MULTIPLE", 48)
    monkeypatch.setattr(attention, "QUERY_MULTIPLE", 5)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    streams = Streams(seed, COARSE, PLANS[plan])
    assert streams.run() < TOLERANCE
    # After the last trim, the newest tokens are in a buffer that is longer than a block.
    cache, references = SequenceQuantizedKVCache(COARSE, PLANS[plan]), [Reference(COARSE)]
    for n, n_trimmed in ((GRID - 7, 0), (11, 9), (4, 0)):
        streams.attend(cache, references, n, n_trimmed)
    assert streams.worst < TOLERANCE
    assert lengths == {(0, 0), (0, True)}
    assert not words  # also for few queries, such as a check of draft tokens


@pytest.mark.parametrize(
    ("dim", "dtype", "n_padded"),
    [(128, mx.bfloat16, 64), (128, mx.float32, 3), (256, mx.bfloat16, 3)],
)
def test_queries_are_padded_only_if_cudnn_computes_their_attention(
    dim: int, dtype: mx.Dtype, n_padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_queries, attend = [], mx.fast.scaled_dot_product_attention

    def recorded(queries: mx.array, *others: Any, **more: Any) -> mx.array:
        n_queries.append(queries.shape[2])
        return attend(queries, *others, **more)

    cache = SequenceQuantizedKVCache(KVPrecision.of(8, 64, 4), PLANS["dequantize"])
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    keys, values = mx.random.normal((2, 1, 2, 3, dim)).astype(dtype)
    queries, mask = mx.random.normal((1, 2, 3, dim)).astype(dtype), cache.make_mask(3)
    fetched = cache.update_and_fetch(keys, values)
    out = scaled_dot_product_attention(queries, *fetched, cache=cache, scale=0.1, mask=mask)
    assert out.shape == queries.shape and n_queries == [n_padded]


@pytest.mark.parametrize("n_rows", [1, 3])
def test_decoding_step_does_not_copy_the_dequantized_keys(n_rows: int) -> None:
    """New keys are written into the dequantized array; reading it earlier would copy it."""
    n_heads, n_keys, dim = 4, 8000, 64
    cache = BatchQuantizedKVCache(
        [0] * n_rows, KVPrecision.of(8, 64, 4, rotated=True), PLANS["dequantize"]
    )
    cache.update_and_fetch(*mx.random.normal((2, n_rows, n_heads, n_keys, dim)))
    queries = mx.random.normal((n_rows, n_heads, 1, dim))
    peaks = []
    for _ in range(2):  # the first call makes the array for later calls
        keys, values = cache.update_and_fetch(*mx.random.normal((2, n_rows, n_heads, 1, dim)))
        mx.eval(cache.state, queries)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(keys.attend(queries, values, SCALE, None))
        peaks.append(mx.get_peak_memory() - before)
    dequantized_bytes = 2 * n_rows * n_heads * n_keys * dim * 4
    assert min(peaks) < 2.5 * dequantized_bytes  # MLX's attention on the CPU copies its inputs


def test_chunk_of_a_whole_block_does_not_keep_the_arrays_of_longer_rows() -> None:
    n_bytes = 4 * 4 * pk.GRID * 64
    keys, values = mx.random.normal((2, 1, 4, 100 * pk.GRID, 64))
    cache = SequenceQuantizedKVCache(KVPrecision.of(8, 64, 4))
    cache.update_and_fetch(keys[:, :, : pk.GRID], values[:, :, : pk.GRID])
    mx.eval(cache.state)
    before = mx.get_active_memory()
    del keys, values
    assert before - mx.get_active_memory() > 2 * 90 * n_bytes


def test_recalling_newest_tokens_does_not_copy_older_tokens() -> None:
    cache = SequenceQuantizedKVCache(KVPrecision.of(8, 64, 4, rotated=True))
    cache.update_and_fetch(*mx.random.normal((2, 1, 4, 20_000, 64)))
    keys, values = mx.random.normal((2, 1, 4, 10, 64))
    cache.update_and_fetch(*mx.random.normal((2, 1, 4, 1, 64)))
    cache.trim(1)  # now all tokens are packed
    cache.newest = Newest(1)
    assert all(mx.any(x[:, :, 19_990:]).item() for x in (*cache.keys, *cache.values))
    mx.eval(cache.state, keys, values)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache.recall(keys, values)
    mx.eval(cache.state)
    assert mx.get_peak_memory() - before < cache.nbytes / 4
    assert not any(mx.any(x[:, :, 19_990:]).item() for x in (*cache.keys, *cache.values))
    assert all(mx.all(x[:, :, 19_000]).item() for x in (cache.keys[1], cache.values[1]))


HEADS = [(40, 40), (72, 72), (80, 80), (88, 96), (100, 100), (104, 80), (112, 112), (120, 64)]


@pytest.mark.parametrize("plan", ["arrays", "dequantize", "packed", "tiles of heads"])
@pytest.mark.parametrize("dims", HEADS, ids=str)
def test_heads_of_any_size_match_the_reference(dims: tuple[int, int], plan: str) -> None:
    precision = PRECISIONS["rotated" if dims[0] % 3 else "4 bits"]
    assert Streams(1, precision, PLANS[plan], dims).run(12) < TOLERANCE


def test_batch_without_rows_is_empty() -> None:
    cache = SequenceQuantizedKVCache(COARSE, PLANS["packed"])
    for n in (5, 1):  # decoded tokens are not packed at once
        cache.update_and_fetch(*random_kv(n, n))
    batch = BatchQuantizedKVCache.merge([cache])
    batch.update_and_fetch(*random_kv(2, 1))
    batch.filter([])
    assert batch.empty() and batch.nbytes == 0


def test_trimming_beyond_a_block_start_empties_the_newest_buffer() -> None:
    cache = SequenceQuantizedKVCache(COARSE)
    cache.update_and_fetch(*random_kv(1, GRID + 4))
    cache.forget()
    assert cache.trim(6) == 6
    assert cache.newest.size() == 0


def test_newest_rows_of_any_length_are_left_padded_with_zeros() -> None:
    rows = [Newest(1) for _ in range(2)]
    for row, n in zip(rows, (3, 1), strict=True):
        row.append(*random_kv(n, n))
    newest = Newest(0)
    for row in rows:
        newest.extend(row)
    for n_more in (1, 1, GRID, 1):
        newest.append(*random_kv(n_more, n_more, 2))
        for x in newest.view():
            assert (x != 0).any(axis=(1, 3)).sum(axis=1).tolist() == newest.lengths
    newest.keep([2, 5])
    for x in newest.view():
        assert (x != 0).any(axis=(1, 3)).tolist() == [[False] * 3 + [True] * 2, [True] * 5]


def test_packed_buffers_are_zero_beyond_the_packed_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SequenceQuantizedKVCache(COARSE, PLANS["packed"])

    def n_packed() -> int:
        (n_packed,) = cache.n_packed
        for weights, *_ in (cache.keys, cache.values):
            expected = [i < n_packed for i in range(weights.shape[2])]
            assert weights.any(axis=(0, 1, 3)).tolist() == expected
        return n_packed

    for n in (2 * GRID - 2, 5):
        cache.update_and_fetch(*random_kv(n, n))
    assert n_packed() == 2 * GRID
    cache.trim(3)
    assert n_packed() == GRID, "the last block is still in full precision"
    cache.forget()
    assert n_packed() == 2 * GRID
    cache.trim(5)
    assert n_packed() == GRID, "also while the next block is short"
    cache.update_and_fetch(*random_kv(2, 7))
    assert n_packed() == 2 * GRID
    monkeypatch.setattr(caches, "_MOST_TAKEN_BACK", 2)
    cache.trim(2)
    for n in range(4):
        cache.update_and_fetch(*random_kv(n, 1))
    cache.trim(5)
    assert n_packed() == cache.offset == 2 * GRID - 1


def test_packed_attention_is_not_called_in_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    stock = attention.packed_attention

    def counted(queries: mx.array, keys: Any, *args: Any) -> mx.array:
        calls.append(keys.n_tokens)
        return stock(queries, keys, *args)

    monkeypatch.setattr(attention, "packed_attention", counted)
    cache = SequenceQuantizedKVCache(COARSE)
    cache.plan = forced_plan("packed")
    for step in range(GRID + 2):
        keys, values = cache.update_and_fetch(*random_kv(step, 1))
        queries = mx.random.normal((1, N_HEADS, 1, K_DIM))
        scaled_dot_product_attention(queries, keys, values, cache, SCALE, None)
    assert calls == [GRID + 1, GRID + 2]


def test_newest_buffer_has_the_length_of_one_block() -> None:
    cache = SequenceQuantizedKVCache(COARSE, PLANS["packed"])
    for n in (3, 40, 1, 1, 100):
        cache.update_and_fetch(*random_kv(n, n))
        cache.forget()
        assert cache.newest.size() == cache.offset % GRID
        assert cache.newest.keys is None or cache.newest.keys.shape[2] == GRID


# --- faults, to show that the tests above can fail


def keeping_one_less(keep: Callable[..., None]) -> Callable[..., None]:
    return lambda self, n_tokens: keep(self, [max(0, n - 1) for n in n_tokens])


def faults() -> dict[str, tuple[type, str, Any]]:
    return {
        "window": (Newest, "keep", keeping_one_less(Newest.keep)),
        "padding": (Newest, "only", lambda self, n_tokens: self.last(max(n_tokens))),
        "reset": (PackedCache, "forget", lambda self: [n % pk.GRID for n in self.lengths]),
        "phase": (
            BatchQuantizedKVCache,
            "lengths",
            property(lambda self: [self._idx + 1 - n for n in self._padding]),
        ),
    }


# If arrays are fetched, the fault in `forget` does not change results.
FAULT_CASES = [(fault, plan) for fault in faults() for plan in ("arrays", "packed")]
FAULT_CASES.remove(("reset", "arrays"))


@pytest.mark.parametrize(("fault", "plan"), FAULT_CASES)
def test_injected_faults_exceed_the_tolerance(
    fault: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*faults()[fault])
    worst = max(Streams(seed, COARSE, PLANS[plan]).run() for seed in range(2))
    assert worst > 100 * TOLERANCE
