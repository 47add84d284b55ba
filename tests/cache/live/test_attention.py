"""All implementations of attention match a softmax written out in float32."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import base
from mlx_lm.models.base import create_causal_mask

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import (
    AttentionPlan,
    Mask,
    PackedKV,
    Strategy,
    dequantized_attention,
    forced_plan,
    packed_attention,
)
from mlx_lm_kvpersist.cache.live.caches import (
    BatchQuantizedKVCache,
    SequenceQuantizedKVCache,
)
from mlx_lm_kvpersist.cache.live.packed import Backend
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from tests.support.pairs import every_pair

from ..conftest import N_HEADS, address, random_kv, same_bits

TOLERANCE = 2e-5
PRECISION = KVPrecision.of(4, 32)


@dataclass(frozen=True)
class Case:
    """Sizes of one call of attention."""

    n_rows: int = 2
    n_kv_heads: int = 2
    n_repeats: int = 2
    k_dim: int = 64
    v_dim: int = 64
    n_queries: int = 5
    n_keys: int = 40
    n_spare: int = 9
    precision: KVPrecision = PRECISION
    seed: int = 0

    @property
    def n_heads(self) -> int:
        return self.n_kv_heads * self.n_repeats

    @property
    def scores_shape(self) -> tuple[int, int, int, int]:
        return self.n_rows, self.n_heads, self.n_queries, self.n_keys

    def arrays(self) -> tuple[mx.array, PackedKV, PackedKV]:
        """Return queries, keys and values; the spare room has large numbers.

        The queries' own tokens are in full precision, with zeros for them in the packed buffers.
        """
        keys = mx.random.split(mx.random.key(self.seed), 3)
        lead = (self.n_rows, self.n_kv_heads, self.n_keys + self.n_spare)
        k, v = self.precision.keys, self.precision.values
        scale_of_token = mx.where(mx.arange(lead[2]) < self.n_keys, 1.0, 50.0)[:, None]
        own = slice(self.n_keys - self.n_queries, self.n_keys)
        sides = []
        for dim, side, key in ((self.k_dim, k, keys[0]), (self.v_dim, v, keys[1])):
            computed = scale_of_token * mx.random.normal((*lead, dim), key=key)
            packed = pk.quantize(computed, side)
            for buffer in packed:
                buffer[:, :, own] = 0
            sides.append(PackedKV(packed, side, self.n_keys, computed[:, :, own], self.n_queries))
        queries = mx.random.normal(
            (self.n_rows, self.n_heads, self.n_queries, self.k_dim), key=keys[2]
        )
        return queries, sides[0], sides[1]

    def head_bytes(self, n_keys: int | None = None) -> int:
        """Return the bytes of the dequantized keys and values of one head of one row."""
        n_numbers: int = (self.n_keys if n_keys is None else n_keys) * (self.k_dim + self.v_dim)
        return n_numbers * mx.float32.size

    def implementations(self) -> dict[str, Callable[..., mx.array]]:
        def tiled(tile_bytes: int) -> Callable[..., mx.array]:
            return partial(dequantized_attention, tile_bytes=tile_bytes)

        query_bytes = 4 * self.n_rows * self.n_heads * (self.n_keys + self.n_spare)
        a_third = max(1, self.n_queries // 3)
        return {
            "dequantize": dequantized_attention,
            "packed": packed_attention,
            "packed on Metal": on("metal", packed_attention),
            "packed on CUDA": on("cuda", packed_attention),
            "packed, few queries": partial(packed_attention, max_score_bytes=a_third * query_bytes),
            "tiled, whole": tiled(1 << 40),
            "tiled by rows": tiled(self.head_bytes() * self.n_kv_heads),
            "tiled by heads": tiled(self.head_bytes()),
        }


def on(backend: Backend, attention: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a function that calls `attention` as on another backend, but computes on this one."""

    def attend(*given: Any) -> mx.array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pk, "backend", lambda: backend)
            return attention(*given)

    return attend


def reference_attention(
    queries: mx.array, keys: PackedKV, values: PackedKV, scale: float, mask: Mask
) -> mx.array:
    """Return attention in float32, computed step by step."""
    n_repeats = queries.shape[1] // keys.newest.shape[1]
    plain = []
    for x in (keys, values):
        tokens = pk.read(x.buffers, x.quantization, mx.float32)
        tokens = mx.concatenate([tokens[:, :, : x.n_tokens - x.newest.shape[2]], x.newest], axis=2)
        plain.append(mx.repeat(tokens, n_repeats, axis=1))
    scores = (queries.astype(mx.float32) @ plain[0].swapaxes(-1, -2)) * scale
    n, s = scores.shape[-2:]
    added = create_causal_mask(n, s - n) if isinstance(mask, str) else mask
    if isinstance(added, mx.array):
        if added.dtype == mx.bool_:
            added = mx.where(added, 0.0, -1e9)
        scores = scores + added.astype(mx.float32)
    scores = scores - scores.max(axis=-1, keepdims=True)
    weights = mx.exp(scores)
    return (weights / weights.sum(axis=-1, keepdims=True)) @ plain[1]


def sees_any_key(case: Case, mask: Mask) -> mx.array:
    """Return which queries see any key: [B, H, N, 1]."""
    if not isinstance(mask, mx.array):
        return mx.ones((*case.scores_shape[:3], 1), mx.bool_)
    seen = mask if mask.dtype == mx.bool_ else mask > -1e8
    return mx.broadcast_to(seen, case.scores_shape).any(axis=-1, keepdims=True)


def check(case: Case, mask: Mask, tolerance: float = TOLERANCE) -> None:
    queries, keys, values = case.arrays()
    untouched = mx.array(queries)
    scale = case.k_dim**-0.5
    expected = reference_attention(queries, keys, values, scale, mask)
    compared = sees_any_key(case, mask)
    for name, attention in case.implementations().items():
        actual = attention(queries, keys, values, scale, mask)
        assert actual.dtype == queries.dtype, name
        assert actual.shape == (*queries.shape[:3], case.v_dim), name
        assert mx.isfinite(actual).all(), name
        difference = mx.where(compared, mx.abs(actual - expected), 0).max()
        assert (difference < tolerance).item(), (name, difference)
    assert mx.array_equal(queries, untouched)


# --- single features


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize(
    ("n_kv_heads", "n_repeats"), [(4, 1), (2, 2), (1, 4), (2, 3), (1, 1)], ids=str
)
def test_grouped_queries_match_the_reference(n_kv_heads: int, n_repeats: int, mask: Mask) -> None:
    check(Case(n_kv_heads=n_kv_heads, n_repeats=n_repeats), mask)


@pytest.mark.parametrize("n_queries", [1, 7])
@pytest.mark.parametrize(
    ("k_dim", "v_dim", "group_size"),
    [(64, 64, 64), (96, 96, 32), (128, 128, 128), (192, 128, 64), (64, 32, 32), (256, 256, 64)],
)
def test_all_head_sizes_match_the_reference(
    k_dim: int, v_dim: int, group_size: int, n_queries: int
) -> None:
    precision = KVPrecision.of(4, group_size)
    check(Case(k_dim=k_dim, v_dim=v_dim, precision=precision, n_queries=n_queries), "causal")


@pytest.mark.parametrize(
    "precision",
    [
        KVPrecision.of(8, 32),
        KVPrecision.of(8, 32, 4),
        KVPrecision.of(4, 32, 8),
        KVPrecision.of(3, 32, 6),
    ],
    ids=str,
)
def test_all_precisions_match_the_reference(precision: KVPrecision) -> None:
    check(Case(precision=precision), "causal")
    check(Case(precision=precision, n_queries=1), None)


@every_pair(
    rotated=[False, True],
    strategy=get_args(Strategy),
    dims=[(40, 72), (80, 80), (100, 104), (112, 112), (120, 64)],
)
def test_padded_heads_match_the_reference(
    dims: tuple[int, int], strategy: Strategy, rotated: bool
) -> None:
    precision = KVPrecision.of(8, 32, 6, rotated=rotated).fitted(*dims)
    case = Case(k_dim=dims[0], v_dim=dims[1], precision=precision, n_queries=6)
    queries, keys, values = case.arrays()
    keys.strategy, keys.tile_bytes = strategy, case.head_bytes()
    for mask in (None, "causal", create_causal_mask(6, 34, left_padding=mx.array([0, 17]))):
        actual = keys.attend(queries, values, 0.1, mask)
        assert actual.shape == (*queries.shape[:3], dims[1])
        assert (
            mx.abs(actual - reference_attention(queries, keys, values, 0.1, mask)).max() < TOLERANCE
        )


@pytest.mark.parametrize("strategy", get_args(Strategy))
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 224, 256, 288])
def test_rotated_attention_matches_the_reference(dim: int, strategy: Strategy) -> None:
    """Some head sizes are 2^k, some 12 * 2^k (96, 192), and one is 28 * 2^k (224)."""
    precision = KVPrecision.of(8, 32, rotated=True)
    case = Case(k_dim=dim, v_dim=64, precision=precision, n_repeats=3, n_queries=6, n_spare=9)
    queries, keys, values = case.arrays()
    keys.strategy, keys.tile_bytes = strategy, case.head_bytes()
    padding = mx.array([0, 3, 17][: case.n_rows])
    for mask in (
        None,
        "causal",
        create_causal_mask(6, 34, left_padding=padding),
        create_causal_mask(6, 34, window_size=7),
        mx.random.normal(case.scores_shape),
    ):
        actual = keys.attend(queries, values, 0.1, mask)
        expected = reference_attention(queries, keys, values, 0.1, mask)
        assert mx.abs(actual - expected).max() < TOLERANCE
    # Negative control: both sides must be rotated.
    for side in (keys, values):
        side.quantization = replace(side.quantization, rotated=False)
        wrong = keys.attend(queries, values, 0.1, "causal")
        side.quantization = replace(side.quantization, rotated=True)
        right = keys.attend(queries, values, 0.1, "causal")
        assert mx.abs(wrong - right).max() > 10 * TOLERANCE


@pytest.mark.parametrize("n_rows", [1, 3, 8])
@pytest.mark.parametrize("n_queries", [1, 6])
def test_left_padded_rows_match_the_reference(n_rows: int, n_queries: int) -> None:
    case = Case(n_rows=n_rows, n_queries=n_queries)
    padding = mx.array([0, 3, 39, 17, 5, 1, 33, 0][:n_rows])
    check(case, create_causal_mask(n_queries, case.n_keys - n_queries, left_padding=padding))


@pytest.mark.parametrize("window", [1, 4, 39, 100])
@pytest.mark.parametrize("n_queries", [1, 6, 40])
def test_window_masks_match_the_reference(n_queries: int, window: int) -> None:
    case = Case(n_queries=n_queries)
    check(case, create_causal_mask(n_queries, case.n_keys - n_queries, window_size=window))


SHAPES = [
    *("[N, S]", "[S]", "[B, 1, N, S]", "[B, H, N, S]", "[1, 1, 1, S]", "[1, H, N, S]"),
    *("[N, 1]", "[B, H, 1, 1]"),
]


def mask_shape(case: Case, name: str) -> tuple[int, ...]:
    sizes = {"B": case.n_rows, "H": case.n_heads, "N": case.n_queries, "S": case.n_keys, "1": 1}
    return tuple(sizes[letter] for letter in name.strip("[]").split(", "))


@every_pair(shape=SHAPES, n_queries=[1, 6], is_bool=[True, False])
def test_masks_of_every_shape_match_the_reference(
    shape: str, n_queries: int, is_bool: bool
) -> None:
    case = Case(n_queries=n_queries, n_rows=3, n_keys=40 if n_queries > 1 else 2)
    noise = mx.random.normal(mask_shape(case, shape), key=mx.random.key(4))
    check(case, noise > -0.3 if is_bool else 3 * noise)


@pytest.mark.parametrize("is_bool", [True, False], ids=["bool", "added"])
def test_queries_without_visible_keys_give_finite_results(is_bool: bool) -> None:
    case = Case(n_queries=6)
    mask = mx.arange(6)[:, None] > mx.zeros((1, case.n_keys), mx.int32)
    check(case, mask if is_bool else mx.where(mask, 0.0, -1e9))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_minus_infinity_masks_give_finite_results(dtype: mx.Dtype) -> None:
    case = Case(n_queries=2)
    queries, keys, values = case.arrays()
    mask = mx.array([[0.0], [-mx.inf]]) + mx.zeros((2, case.n_keys))
    actual = packed_attention(queries.astype(dtype), keys, values, 0.1, mask.astype(dtype))
    assert actual.dtype == dtype
    assert mx.isfinite(actual).all()


def test_unknown_mask_names_are_refused() -> None:
    with pytest.raises(ValueError, match='mask is "diagonal"'):
        packed_attention(*Case().arrays(), 0.1, "diagonal")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_queries_give_half_precision_results(dtype: mx.Dtype) -> None:
    """Scales in another dtype must not widen the activations."""
    case = Case(n_queries=1, k_dim=128, v_dim=128)
    queries, keys, values = case.arrays()
    expected = reference_attention(queries, keys, values, 0.1, None)
    for name, attention in case.implementations().items():
        actual = attention(queries.astype(dtype), keys, values, 0.1, None)
        assert actual.dtype == dtype
        assert mx.abs(actual.astype(mx.float32) - expected).max() < 0.1, name


@pytest.mark.parametrize("n_queries", [1, 200])
def test_long_sequences_match_the_reference(n_queries: int) -> None:
    case = Case(n_rows=1, n_queries=n_queries, n_keys=2048, n_spare=512)
    check(case, "causal" if n_queries > 1 else None, tolerance=1e-4)
    padded = create_causal_mask(n_queries, 2048 - n_queries, left_padding=mx.array([777]))
    check(case, padded, tolerance=1e-4)


@pytest.mark.parametrize("n_spare", [0, 1, 10, 13, 14, 400])
@pytest.mark.parametrize("n_queries", [1, 6])
def test_spare_room_does_not_change_results(n_spare: int, n_queries: int) -> None:
    case = Case(n_spare=n_spare, n_queries=n_queries)
    check(case, "causal" if n_queries > 1 else None)
    check(case, create_causal_mask(n_queries, 40 - n_queries, window_size=30))


@pytest.mark.parametrize("backend", ["cpu", "metal"])
def test_packed_attention_reads_no_spare_room(backend: Backend) -> None:
    """On CUDA it does, so the spare room must have finite numbers there."""
    queries, keys, values = Case(n_queries=1).arrays()
    attend = on(backend, packed_attention)
    expected = attend(queries, keys, values, 0.1, None)
    for x in (keys, values):
        for scales in x.buffers[1:]:
            scales[:, :, x.n_tokens :] = mx.nan
    assert mx.array_equal(attend(queries, keys, values, 0.1, None), expected)


def test_packed_attention_copies_no_buffers() -> None:
    case = Case(n_rows=1, n_kv_heads=8, n_repeats=1, n_queries=1, n_keys=8000, n_spare=4000)
    queries, keys, values = case.arrays()
    mx.eval(queries, keys.buffers, values.buffers, keys.newest, values.newest)
    peak = peak_bytes(lambda: packed_attention(queries, keys, values, 0.1, None))
    assert peak < sum(pk.view(x.buffers[0], 0, x.n_tokens).nbytes for x in (keys, values))


# --- random combinations


@st.composite
def calls(draw: st.DrawFn) -> tuple[Case, Mask]:
    n_keys = draw(st.integers(1, 90))
    case = Case(
        n_rows=draw(st.integers(1, 4)),
        n_kv_heads=draw(st.integers(1, 3)),
        n_repeats=draw(st.integers(1, 3)),
        k_dim=draw(st.sampled_from([64, 96, 128])),
        v_dim=draw(st.sampled_from([32, 64, 96])),
        n_queries=draw(st.integers(1, min(n_keys, 20))),
        n_keys=n_keys,
        n_spare=draw(st.sampled_from([0, 1, 9, 50])),
        precision=KVPrecision.of(
            draw(st.sampled_from([4, 8])), 32, draw(st.sampled_from([4, 8, None]))
        ),
        seed=draw(st.integers(0, 99)),
    )
    kind = draw(st.sampled_from(["none", "causal", "padding", "window", "bool", "added"]))
    past = case.n_keys - case.n_queries
    if kind == "none":
        return case, None
    if kind == "causal":
        return case, "causal"
    if kind == "padding":
        padding = mx.array([draw(st.integers(0, past)) for _ in range(case.n_rows)])
        return case, create_causal_mask(case.n_queries, past, left_padding=padding)
    if kind == "window":
        return case, create_causal_mask(
            case.n_queries, past, window_size=draw(st.integers(1, n_keys))
        )
    noise = mx.random.normal(mask_shape(case, draw(st.sampled_from(SHAPES))))
    return case, noise > -0.5 if kind == "bool" else 2 * noise


@settings(max_examples=60)
@given(calls())
def test_random_calls_match_the_reference(call: tuple[Case, Mask]) -> None:
    case, mask = call
    check(case, mask)


# --- memory


def peak_bytes(attention: Callable[[], mx.array]) -> int:
    mx.eval(attention())
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(attention())
    return int(mx.get_peak_memory() - before)


def test_tiles_limit_the_dequantized_memory() -> None:
    case = Case(n_rows=1, n_kv_heads=8, n_repeats=1, n_queries=1, n_keys=8000, n_spare=0)
    queries, keys, values = case.arrays()
    mx.eval(queries, keys, values)
    tile_bytes = case.head_bytes()
    whole = peak_bytes(lambda: dequantized_attention(queries, keys, values, 0.1, None))
    tiled = peak_bytes(lambda: dequantized_attention(queries, keys, values, 0.1, None, tile_bytes))
    assert whole > 8 * case.head_bytes()
    # MLX's attention on the CPU copies its inputs. Tiles that are computed at the same time would
    # need 12 times a head's bytes.
    assert tiled < 3 * tile_bytes


def test_packed_attention_limits_the_memory_of_scores() -> None:
    case = Case(n_rows=1, n_queries=256, n_keys=1000, n_spare=0)
    queries, keys, values = case.arrays()
    mx.eval(queries, keys, values)
    few_bytes = 4 * case.n_heads * case.n_keys * 4
    peaks = [
        peak_bytes(partial(packed_attention, queries, keys, values, 0.1, "causal", n_bytes))
        for n_bytes in (1 << 30, few_bytes)
    ]
    assert peaks[1] < peaks[0] / 4
    assert peaks[1] < 20 * few_bytes


def test_packed_attention_never_dequantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = Case().arrays()
    dequantized: list[int] = []
    dequantize = pk.dequantize

    def recorded(*given: Any) -> mx.array:
        dequantized.append(1)
        return dequantize(*given)

    monkeypatch.setattr(pk, "dequantize", recorded)
    for keys.strategy, expected in (("packed", False), ("dequantize", True), ("tiled", True)):
        dequantized.clear()
        keys.attend(queries, values, 0.1, None)
        assert bool(dequantized) is expected


# --- plans of caches

PACKED = forced_plan("packed")
TILED = forced_plan("tiled")


def cache_of(plan: AttentionPlan | None, n_tokens: int = 0) -> SequenceQuantizedKVCache:
    cache = SequenceQuantizedKVCache(KVPrecision.of(8, 32, 4), plan)
    if n_tokens:
        cache.update_and_fetch(*random_kv(1, n_tokens))
    return cache


def test_only_caches_with_packed_fetches_have_bits() -> None:
    cache = cache_of(AttentionPlan())
    keys, values = cache.update_and_fetch(*random_kv(1, 5))
    assert isinstance(keys, mx.array)
    assert not hasattr(cache, "bits") and not hasattr(cache, "group_size")
    cache.plan = AttentionPlan(can_take_packed=True)
    keys, values = cache.update_and_fetch(*random_kv(2, 1))
    assert isinstance(keys, PackedKV) and isinstance(values, PackedKV)
    assert (cache.bits, cache.group_size) == (8, 32)
    assert (keys.quantization.bits, values.quantization.bits) == (8, 4)
    # A layer that also reads this cache's arrays (afm7) would see other keys in the same call.
    with pytest.raises(ValueError, match="packed"):
        cache.keys_and_values()


def test_merge_extract_extend_and_copy_keep_the_attention_plan() -> None:
    batch = SequenceQuantizedKVCache.merge([cache_of(PACKED, 5), cache_of(PACKED)])
    assert batch.plan is PACKED
    assert batch.extract(0).plan is PACKED and batch.extract(1).plan is PACKED
    batch.filter([0])
    assert batch.plan is PACKED
    other = BatchQuantizedKVCache([0], KVPrecision.of(8, 32, 4))
    other.extend(batch)
    assert other.plan is PACKED
    assert copy.deepcopy(batch).plan == PACKED
    assert SequenceQuantizedKVCache.merge([cache_of(None, 5), cache_of(TILED)]).plan is TILED
    assert SequenceQuantizedKVCache.merge([cache_of(None, 5)]).plan is None


@pytest.fixture
def patched() -> Iterator[None]:
    with server_attention():
        yield


@pytest.mark.parametrize("plan", [PACKED, TILED], ids=["packed", "tiled"])
@pytest.mark.parametrize(("lengths", "n_new"), [((8,), 1), ((8,), 11), ((30, 8, 0), 1)])
@pytest.mark.parametrize("window", [None, 6])
def test_mlx_lm_attention_is_equal_with_and_without_a_plan(
    patched: None, plan: AttentionPlan, lengths: tuple[int, ...], n_new: int, window: int | None
) -> None:
    """The call has the same function and arguments as in mlx-lm's models."""
    results = []
    for used_plan in (None, plan):
        caches = [SequenceQuantizedKVCache(KVPrecision.of(8, 32, 4), used_plan) for _ in lengths]
        for i, n in enumerate(lengths):
            if n:
                caches[i].update_and_fetch(*random_kv(i, n))
        batch = SequenceQuantizedKVCache.merge(caches)
        mask = batch.make_mask(n_new, window_size=window)
        fetched = batch.update_and_fetch(*random_kv(77, n_new, len(lengths)))
        assert isinstance(fetched[0], PackedKV) == (used_plan is not None)
        queries = mx.random.normal((len(lengths), 2 * N_HEADS, n_new, 64), key=mx.random.key(5))
        results.append(base.scaled_dot_product_attention(queries, *fetched, batch, 0.125, mask))
    assert mx.abs(results[0] - results[1]).max() < TOLERANCE


def test_rows_at_different_positions_refuse_several_tokens_per_call() -> None:
    batch = SequenceQuantizedKVCache.merge([cache_of(PACKED, 5), cache_of(PACKED, 3)])
    with pytest.raises(ValueError, match="2 tokens for rows at different positions"):
        batch.update_and_fetch(*random_kv(1, 2, 2))


@pytest.mark.parametrize("plan", [PACKED, TILED], ids=["packed", "tiled"])
def test_buffers_are_updated_in_place_after_a_packed_fetch(
    patched: None, plan: AttentionPlan
) -> None:
    """A view that outlives its step would turn every update into a copy of the buffer."""
    cache = cache_of(plan, 300)
    assert cache.keys is not None and cache.values is not None

    def addresses() -> list[int]:
        newest = cache.newest.keys, cache.newest.values
        buffers = *cache.keys, *cache.values, *newest
        mx.eval(buffers)
        return [address(x) for x in buffers]

    before = addresses()
    for step in range(3):
        fetched = cache.update_and_fetch(*random_kv(step, 1))
        out = base.scaled_dot_product_attention(
            mx.ones((1, N_HEADS, 1, 64)), *fetched, cache, 0.1, None
        )
        del fetched
        mx.eval(out, cache.state)
    assert addresses() == before


# --- a reply


def random_strategy(seed: int) -> Strategy:
    return random.Random(seed).choice(["packed", "tiled"])


@pytest.mark.parametrize("seed", range(6))
def test_logits_are_equal_with_changing_plans_and_without_plan(
    patched: None, llama_model: Any, seed: int
) -> None:
    """The plan changes at every step."""
    rng = random.Random(seed)
    caches = {
        way: [SequenceQuantizedKVCache(KVPrecision.of(8, 32, 4)) for _ in range(2)]
        for way in ("plain", "planned")
    }
    for step in range(6):
        tokens = mx.array([[rng.randrange(97) for _ in range(rng.choice([1, 1, 4]))]])
        plan = forced_plan(random_strategy(seed + step))
        for cache in caches["planned"]:
            cache.plan = plan
        plain, planned = (llama_model(tokens, cache=caches[way]) for way in ("plain", "planned"))
        assert mx.abs(plain - planned).max() < 1e-3
    for a, b in zip(caches["plain"], caches["planned"], strict=True):
        assert same_bits(a.values[0][:, :, :3], b.values[0][:, :, :3])
