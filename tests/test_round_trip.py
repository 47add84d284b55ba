"""The round trip passes in every precision, and detects each injected fault."""

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
    """Compute each reference once: references take half of the time of a check.

    They use mlx-lm's own caches, so the faults in our caches do not change them.
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
def test_round_trip_passes_in_every_precision(precision: str) -> None:
    check_round_trip(PRECISIONS[precision])


@pytest.mark.parametrize("strategy", get_args(attention.Strategy))
def test_round_trip_passes_with_every_attention_strategy(strategy: attention.Strategy) -> None:
    check_round_trip(PRECISIONS["k8v4"], strategy)


# Injected faults: the check must fail.


def fault_after(owner: Any, name: str, change: Callable[..., Any]) -> Fault:
    """Return the fault that calls `change(result, *arguments)` after a method or function.

    The return value of `change`, if not None, replaces the result.
    """

    def fault(monkeypatch: pytest.MonkeyPatch) -> None:
        is_classmethod = isinstance(vars(owner).get(name), classmethod)
        original = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            result = original(*(args[1:] if is_classmethod else args), **kwargs)
            replacement = change(result, *args, **kwargs)
            return result if replacement is None else replacement

        monkeypatch.setattr(owner, name, classmethod(changed) if is_classmethod else changed)

    return fault


def swap_keys_and_values(result: Any, *args: Any) -> None:
    result.keys, result.values = result.values, result.keys


def swap_rows(result: Any, cache: Any, indices: Any) -> None:
    if len(cache._padding) > 1 and cache.keys is not None:
        both = (cache.keys, cache.values)
        cache.keys, cache.values = (
            packed.each(lambda x: x[::-1], x) if isinstance(x, tuple) else x[::-1] for x in both
        )
        if hasattr(cache, "newest"):
            swap_rows(result, cache.newest, indices)


def reduce_offset(result: Any, *args: Any) -> None:
    result.offset -= 1


def shift_by_one_token(result: Any, *args: Any) -> None:
    if result.keys is not None:
        both = (result.keys, result.values)
        result.keys, result.values = (
            packed.each(lambda x: mx.roll(x, 1, 2), x) if isinstance(x, tuple) else mx.roll(x, 1, 2)
            for x in both
        )
    if hasattr(result, "newest"):
        shift_by_one_token(result.newest)


def increase_offset(result: Any, cache: Any, *args: Any) -> None:
    cache.offset = cache.offset + 1


def no_mask(result: Any, cache: Any, n: int, *args: Any, **kwargs: Any) -> Any:
    return "causal" if isinstance(result, mx.array) else result


def reduce_padding(result: Any, cache: Any, *args: Any) -> None:
    cache._padding = [max(0, n - 1) for n in cache._padding]
    cache.left_padding = mx.array(cache._padding, mx.int32)


def without_biases(result: Any, *args: Any) -> Any:
    weights, scales, biases = result
    return weights, scales, mx.zeros_like(biases)


def swap_layers(result: Any, *args: Any) -> Any:
    swapped = [{name: array[::-1] for name, array in block.items()} for block in result]
    mx.eval(swapped)
    return swapped


def trim_one_token(result: Any, *args: Any) -> None:
    for cache in result:
        cache.trim(1)


def shift_each_by_one_token(result: Any, *args: Any) -> None:
    for cache in result:
        shift_by_one_token(cache)


def value_scales_for_keys(result: Any, *args: Any) -> Any:
    return [{**block, "0.k.scales": block["0.v.scales"]} for block in result]


def never_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(cache: BatchQuantizedKVCache) -> list[int]:
        return [n % packed.GRID for n in cache.lengths]

    monkeypatch.setattr(BATCH, "forget", forget)


def swap_heads(result: mx.array, *args: Any) -> mx.array:
    return result[:, ::-1]


def swap_heads_of_tiles(result: mx.array, *args: Any) -> mx.array:
    return result if args[-1] is None else swap_heads(result)


BATCH = BatchQuantizedKVCache
QUANTIZED: dict[str, Fault] = {
    "merge swaps keys and values": fault_after(BATCH, "merge", swap_keys_and_values),
    "biases dropped": fault_after(packed, "quantize", without_biases),
    "filter takes wrong rows": fault_after(BATCH, "filter", swap_rows),
    "filter moves padding": fault_after(BATCH, "filter", reduce_padding),
    "extend swaps rows": fault_after(BATCH, "extend", swap_rows),
    "extend moves padding": fault_after(BATCH, "extend", reduce_padding),
    "extract is one token short": fault_after(BATCH, "extract", reduce_offset),
    "extract shifts tokens by one": fault_after(BATCH, "extract", shift_by_one_token),
    "extract swaps keys and values": fault_after(BATCH, "extract", swap_keys_and_values),
    "offset is one more": fault_after(BATCH, "update_and_fetch", increase_offset),
    "mask is missing": fault_after(BATCH, "make_mask", no_mask),
    "a whole block is not packed": never_pack,
    "heads swapped in tiled attention": fault_after(
        attention, "dequantized_attention", swap_heads_of_tiles
    ),
    "heads swapped in prompts computed together": fault_after(RowsKV, "attend", swap_heads),
    "restore is one token short": fault_after(blocks.Joiner, "finish", trim_one_token),
    "restore shifts tokens by one": fault_after(blocks.Joiner, "finish", shift_each_by_one_token),
    "layers swapped in blocks": fault_after(saver, "split", swap_layers),
    "scales of values used for keys": fault_after(saver, "split", value_scales_for_keys),
}
FULL_PRECISION: dict[str, Fault] = {
    "merge swaps keys and values": fault_after(
        FullPrecisionBatchKVCache, "merge", swap_keys_and_values
    ),
    "filter takes wrong rows": fault_after(FullPrecisionBatchKVCache, "filter", swap_rows),
    "extend swaps rows": fault_after(FullPrecisionBatchKVCache, "extend", swap_rows),
    "extract shifts tokens by one": fault_after(
        FullPrecisionBatchKVCache, "extract", shift_by_one_token
    ),
    "offset is one more": fault_after(
        FullPrecisionBatchKVCache, "update_and_fetch", increase_offset
    ),
    "mask is missing": fault_after(FullPrecisionBatchKVCache, "make_mask", no_mask),
    "mask missing for prompts computed together": fault_after(ArrayRows, "make_mask", no_mask),
    "restore is one token short": fault_after(blocks.Joiner, "finish", trim_one_token),
    "layers swapped in blocks": fault_after(saver, "split", swap_layers),
}
FAULTS = [("k8v4", name) for name in QUANTIZED] + [("16", name) for name in FULL_PRECISION]


@pytest.mark.parametrize(("precision", "fault"), FAULTS)
def test_round_trip_detects_an_injected_fault(
    precision: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (FULL_PRECISION if precision == "16" else QUANTIZED)[fault](monkeypatch)
    strategy: Any = "tiled" if fault == "heads swapped in tiled attention" else "auto"
    with pytest.raises(SelfTestFailed):
        check_round_trip(PRECISIONS[precision], strategy)
