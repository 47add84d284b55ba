"""The round trip passes in every precision, and finds each fault that is put in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args
from unittest import mock

import mlx.core as mx
import pytest

from mlx_lm_kvpersist import round_trip
from mlx_lm_kvpersist.cache import blocks
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.live import attention, packed
from mlx_lm_kvpersist.cache.live.caches import BatchQuantizedKVCache, FullPrecisionBatchKVCache
from mlx_lm_kvpersist.cache.live.rows import ArrayRows, RowsKV
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.config import KV_BITS
from mlx_lm_kvpersist.errors import SelfTestFailed
from mlx_lm_kvpersist.request import saver
from mlx_lm_kvpersist.round_trip import check_round_trip

PRECISIONS = {name: KV_BITS[name] for name in ("k8v4", "4", "k6v4", "8", "16")}
PRECISIONS |= {f"group size {n}": PrecisionChoice(8, 4, n, rotated=True) for n in (32, 128)}
PRECISIONS["not rotated"] = PrecisionChoice(8, 4)
Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True, scope="module")
def patched() -> Iterator[None]:
    """mlx-lm's attention takes packed keys, as in the server that runs the check."""
    with server_attention():
        yield


@pytest.fixture(autouse=True, scope="module")
def references() -> Iterator[None]:
    """Compute each reference once: it takes half of a check, and no fault below changes it.

    It is computed by mlx-lm's own caches, and the faults are in ours.
    """
    known: dict[tuple[Any, ...], mx.array] = {}
    compute = round_trip._reference

    def reference(model: Any, ids: list[int], precisions: Any) -> mx.array:
        key = model.args.head_dim, tuple(ids), tuple(precisions)
        if key not in known:
            known[key] = compute(model, ids, precisions)
        return known[key]

    with mock.patch.object(round_trip, "_reference", reference):
        yield


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_it_passes_in_every_precision(precision: str) -> None:
    check_round_trip(PRECISIONS[precision])


@pytest.mark.parametrize("strategy", get_args(attention.Strategy))
def test_it_passes_with_every_strategy(strategy: attention.Strategy) -> None:
    check_round_trip(PRECISIONS["k8v4"], strategy)


# --- faults: the check above can fail


def after(owner: Any, name: str, change: Callable[..., Any]) -> Fault:
    """Return the fault that calls `change(result, *arguments)` after a method or function.

    The return value of `change`, if not None, replaces the result.
    """

    def fault(monkeypatch: pytest.MonkeyPatch) -> None:
        is_classmethod = isinstance(vars(owner).get(name), classmethod)
        original = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            result = original(*(args[1:] if is_classmethod else args), **kwargs)
            again = change(result, *args, **kwargs)
            return result if again is None else again

        monkeypatch.setattr(owner, name, classmethod(changed) if is_classmethod else changed)

    return fault


def swap_sides(result: Any, *args: Any) -> None:
    result.keys, result.values = result.values, result.keys


def swap_rows(result: Any, cache: Any, indices: Any) -> None:
    if len(cache._padding) > 1 and cache.keys is not None:
        both = (cache.keys, cache.values)
        cache.keys, cache.values = (
            packed.each(lambda x: x[::-1], x) if isinstance(x, tuple) else x[::-1] for x in both
        )
        if hasattr(cache, "newest"):
            swap_rows(result, cache.newest, indices)


def one_less(result: Any, *args: Any) -> None:
    result.offset -= 1


def one_token_on(result: Any, *args: Any) -> None:
    if result.keys is not None:
        both = (result.keys, result.values)
        result.keys, result.values = (
            packed.each(lambda x: mx.roll(x, 1, 2), x) if isinstance(x, tuple) else mx.roll(x, 1, 2)
            for x in both
        )
    if hasattr(result, "newest"):
        one_token_on(result.newest)


def offset_one_on(result: Any, cache: Any, *args: Any) -> None:
    cache.offset = cache.offset + 1


def no_mask(result: Any, cache: Any, n: int, *args: Any, **kwargs: Any) -> Any:
    return "causal" if isinstance(result, mx.array) else result


def less_padding(result: Any, cache: Any, *args: Any) -> None:
    cache._padding = [max(0, n - 1) for n in cache._padding]
    cache.left_padding = mx.array(cache._padding, mx.int32)


def without_biases(result: Any, *args: Any) -> Any:
    weights, scales, biases = result
    return weights, scales, mx.zeros_like(biases)


def layers_swapped(result: Any, *args: Any) -> Any:
    swapped = [{name: array[::-1] for name, array in block.items()} for block in result]
    mx.eval(swapped)
    return swapped


def one_token_less(result: Any, *args: Any) -> None:
    for cache in result:
        cache.trim(1)


def tokens_one_on(result: Any, *args: Any) -> None:
    for cache in result:
        one_token_on(cache)


def blocks_swapped(result: Any, *args: Any) -> Any:
    return [{**block, "0.k.scales": block["0.v.scales"]} for block in result]


def never_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(cache: BatchQuantizedKVCache) -> list[int]:
        return [n % packed.GRID for n in cache.lengths]

    monkeypatch.setattr(BATCH, "forget", own)


def head_swapped(result: mx.array, *args: Any) -> mx.array:
    return result[:, ::-1]


def tiles_swapped(result: mx.array, *args: Any) -> mx.array:
    return result if args[-1] is None else head_swapped(result)


BATCH = BatchQuantizedKVCache
QUANTIZED: dict[str, Fault] = {
    "merge swaps keys and values": after(BATCH, "merge", swap_sides),
    "biases dropped": after(packed, "quantize", without_biases),
    "filter takes wrong rows": after(BATCH, "filter", swap_rows),
    "filter moves padding": after(BATCH, "filter", less_padding),
    "extend swaps rows": after(BATCH, "extend", swap_rows),
    "extend moves padding": after(BATCH, "extend", less_padding),
    "extract is one short": after(BATCH, "extract", one_less),
    "extract is one off": after(BATCH, "extract", one_token_on),
    "extract swaps keys and values": after(BATCH, "extract", swap_sides),
    "offset": after(BATCH, "update_and_fetch", offset_one_on),
    "mask": after(BATCH, "make_mask", no_mask),
    "a whole block is not packed": never_packed,
    "tiled attention": after(attention, "dequantized_attention", tiles_swapped),
    "prompts that are computed together": after(RowsKV, "attend", head_swapped),
    "restore is one short": after(blocks.Joiner, "finish", one_token_less),
    "restore is one off": after(blocks.Joiner, "finish", tokens_one_on),
    "layers swapped in blocks": after(saver, "split", layers_swapped),
    "scales of values for keys": after(saver, "split", blocks_swapped),
}
OWN: dict[str, Fault] = {
    "merge swaps keys and values": after(FullPrecisionBatchKVCache, "merge", swap_sides),
    "filter takes wrong rows": after(FullPrecisionBatchKVCache, "filter", swap_rows),
    "extend swaps rows": after(FullPrecisionBatchKVCache, "extend", swap_rows),
    "extract is one off": after(FullPrecisionBatchKVCache, "extract", one_token_on),
    "offset": after(FullPrecisionBatchKVCache, "update_and_fetch", offset_one_on),
    "mask": after(FullPrecisionBatchKVCache, "make_mask", no_mask),
    "mask of prompts that are computed together": after(ArrayRows, "make_mask", no_mask),
    "restore is one short": after(blocks.Joiner, "finish", one_token_less),
    "layers swapped in blocks": after(saver, "split", layers_swapped),
}
FAULTS = [("k8v4", name) for name in QUANTIZED] + [("16", name) for name in OWN]


@pytest.mark.parametrize(("precision", "name"), FAULTS)
def test_the_round_trip_finds(precision: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (OWN if precision == "16" else QUANTIZED)[name](monkeypatch)
    strategy: Any = "tiled" if name == "tiled attention" else "auto"
    with pytest.raises(SelfTestFailed):
        check_round_trip(PRECISIONS[precision], strategy)
