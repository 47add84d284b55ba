"""How long one layer attends over quantized keys and values, each way, and at full precision.

    python -m benchmarks.attention [--dtype bfloat16] [--keys 1024 4096 16384 32768]
                                   [--shapes llama-3.1-8b] [--bits k6v4] [--rotated]

The ways take turns; a number is the median.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.live import packed as pk
from mlx_lm_kvpersist.cache.live.attention import (
    Mask,
    PackedKV,
    dequantized_attention,
    packed_attention,
    tiled_attention,
)
from mlx_lm_kvpersist.cache.live.policy import AttentionPlan, AttentionShape, rules_for

from .report import Result

SHAPES = {
    "llama-3.1-8b": AttentionShape(32, 8, 128, 128),
    "gemma3-12b": AttentionShape(16, 8, 256, 256),
    "deepseek-v2-lite": AttentionShape(16, 16, 192, 128),
}
DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
BITS = {**{str(bits): (bits, bits) for bits in (4, 5, 6, 8)}, "k6v4": (6, 4), "k8v4": (8, 4)}
FULL = "full precision"


@dataclass(frozen=True)
class Phase:
    """Queries of a number of sequences; `is_padded`: under the mask of a padded batch."""

    name: str
    n_rows: int
    n_queries: int
    is_padded: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--bits", choices=BITS, default="4")
    parser.add_argument("--rotated", action="store_true", help="keys and values are rotated")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--keys", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--chunk", type=int, default=2048, help="queries of a chunk of prefill")
    parser.add_argument("--no-prefill", action="store_true", help="on a CPU it takes minutes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10, help="most for one row of the table")
    parser.add_argument("--out", type=Path, help="folder of the result")
    args = parser.parse_args()
    key_bits, value_bits = BITS[args.bits]
    precision = KVPrecision.of(key_bits, 64, value_bits, rotated=args.rotated)
    phases = [Phase("decode", 1, 1), Phase("decode", 8, 1), Phase("decode, padded", 8, 1, True)]
    if not args.no_prefill:
        phases += [Phase("prefill", 1, args.chunk), Phase("prefill, padded", 1, args.chunk, True)]
    result = Result(
        f"attention-{precision}",
        "Milliseconds that one layer attends, by the way it reads quantized keys and values.",
        {"dtype": args.dtype, "precision": str(precision), "chunk": args.chunk, "plans": {}},
        folder=args.out,
    )
    plans = result.content["setting"]["plans"]
    for name in args.shapes:
        for row in measured(SHAPES[name], precision, DTYPES[args.dtype], phases, args):
            result.add({"shape": name, **row})
            print(json.dumps(result.rows[-1]), flush=True)
        rules = rules_for(SHAPES[name], precision.keys)
        plans[name] = str(AttentionPlan(rules, can_take_packed=True))
    result.write()
    result.show()


def measured(
    shape: AttentionShape,
    precision: KVPrecision,
    dtype: mx.Dtype,
    phases: list[Phase],
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    for n_keys in args.keys:
        for phase in phases:
            if phase.n_queries > n_keys:
                continue
            layers = Layers(shape, precision, dtype, phase, n_keys)
            ms = layers.race(args.rounds, args.seconds)
            quickest = min((name for name in ms if name != FULL), key=lambda name: ms[name])
            yield {
                "phase": phase.name,
                "rows": phase.n_rows,
                "keys": n_keys,
                **{name: ms.get(name, "-") for name in layers.ways()},
                "quickest": quickest,
                "of full": round(ms[FULL] / ms[quickest], 3),
            }
            del layers
            mx.clear_cache()


class Layers:
    """Layers with buffers of their own: what was just read for one is of no use to the next."""

    def __init__(
        self,
        shape: AttentionShape,
        precision: KVPrecision,
        dtype: mx.Dtype,
        phase: Phase,
        n_keys: int,
    ) -> None:
        self.precision = precision
        self.scale = shape.k_dim**-0.5
        self.mask: Mask = None if phase.n_queries == 1 else "causal"
        if phase.is_padded:
            seen = mx.arange(n_keys)[None] <= mx.arange(n_keys - phase.n_queries, n_keys)[:, None]
            padding = 100 * mx.arange(phase.n_rows)[:, None, None, None]
            self.mask = seen & (mx.arange(n_keys) >= padding)
        self.queries = mx.random.normal(
            (phase.n_rows, shape.n_q_heads, phase.n_queries, shape.k_dim)
        ).astype(dtype)
        self.held = []
        self.plain = []
        for _ in range(4 if phase.n_queries == 1 else 1):
            lead = (phase.n_rows, shape.n_kv_heads, n_keys + 512)
            plain = [
                mx.random.normal((*lead, dim)).astype(dtype) for dim in (shape.k_dim, shape.v_dim)
            ]
            n_own = (n_keys - phase.n_queries) % pk.GRID
            newest = slice(n_keys - phase.n_queries - n_own, n_keys)
            packed = [
                PackedKV.of(
                    pk.quantize(x, each),
                    each,
                    n_keys,
                    newest=mx.contiguous(x[:, :, newest]),
                    n_own=n_own,
                )
                for x, each in zip(plain, (precision.keys, precision.values), strict=True)
            ]
            self.held.append(packed)
            self.plain.append([x[:, :, :n_keys] for x in plain])
            mx.eval(self.held, self.plain)
        mx.eval(self.queries, self.mask)

    def ways(self) -> dict[str, Callable[..., mx.array]]:
        """Return the ways by name; each takes queries and the number of a layer."""
        ours: dict[str, Callable[..., mx.array]] = {
            "dequantize": dequantized_attention,
            "packed": packed_attention,
            "tiled": tiled_attention,
        }
        return {
            FULL: self.full,
            **{name: partial(self.over_packed, attention) for name, attention in ours.items()},
            "stock": self.stock,
        }

    def full(self, queries: mx.array, layer: int) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            queries, *self.plain[layer], scale=self.scale, mask=self.mask
        )

    def over_packed(
        self, attention: Callable[..., mx.array], queries: mx.array, layer: int
    ) -> mx.array:
        return attention(queries, *self.held[layer], self.scale, self.mask)

    def stock(self, queries: mx.array, layer: int) -> mx.array:
        """mlx-lm's own; on CUDA it takes no slices, so copies are a part of its time."""
        if self.precision.values != self.precision.keys or self.precision.keys.rotated:
            raise ValueError("stock has one number of bits for both, and rotates nothing")
        keys, values = (tuple(mx.contiguous(x) for x in part) for part in self.held[layer])
        out: mx.array = quantized_scaled_dot_product_attention(
            queries * 1, keys, values, self.scale, self.mask, 64, self.precision.keys.bits
        )
        return out

    def time(self, way: Callable[..., mx.array]) -> float:
        """Attend layer after layer; return the ms that one takes."""
        start_s = time.perf_counter()
        queries = self.queries
        for layer in range(len(self.held)):
            out = way(queries, layer)
            (queries,) = mx.depends([queries], [out])
        mx.eval(out)
        return (time.perf_counter() - start_s) * 1e3 / len(self.held)

    def race(self, n_rounds: int, most_s: float) -> dict[str, float]:
        """Return the median ms of each way; one that raises is left out, and said."""
        ways = self.ways()
        for name, way in list(ways.items()):
            try:
                self.time(way)
            except Exception as error:
                print(f"{name}: {error}", flush=True)
                del ways[name]
        times: dict[str, list[float]] = {name: [] for name in ways}
        start_s = time.perf_counter()
        for _ in range(n_rounds):
            for name, way in ways.items():
                times[name].append(self.time(way))
            if time.perf_counter() - start_s > most_s:
                break
        return {name: round(median(ms), 4) for name, ms in times.items()}


if __name__ == "__main__":
    main()
