"""What it costs that MLX may keep few freed buffers: prefill and decode, by the room for them.

    python -m benchmarks.freed_buffers [--large]

The account of memory leaves MLX's freed buffers the room of a chunk of a prompt at least. A small
Llama (`--large`: 1.1 billion parameters) computes a prompt and decodes with eight rows, in turns
under MLX's own limit and under limits that leave a chunk's memory, or a part of it. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from .report import Result

ROOMS = (None, 1.0, 0.5, 0.25)
"""Parts of a chunk's memory; None for MLX's own limit."""
REPEATS, N_ROWS = 5, 8
SIZES = {
    "small": (256, 4, 4, 2, 512, 128, 20),
    "large": (2048, 16, 32, 8, 8192, 2048, 200),
}
"""Hidden size, layers, heads, heads of keys, tokens of the prompt, of a chunk, and decoded ones."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out", type=Path, help="folder of the results")
    args = parser.parse_args()
    measure("large" if args.large else "small", args.out).show()


class Work:
    """A model with random weights, and what is done with it."""

    def __init__(self, size: str) -> None:
        width, n_layers, n_heads, n_kv_heads, *self._n = SIZES[size]
        self._model: Any = llama.Model(
            llama.ModelArgs(
                model_type="llama",
                hidden_size=width,
                num_hidden_layers=n_layers,
                intermediate_size=4 * width,
                num_attention_heads=n_heads,
                num_key_value_heads=n_kv_heads,
                rms_norm_eps=1e-5,
                vocab_size=32_000,
            )
        )
        if size == "large":
            self._model.update(tree_map(lambda x: x.astype(mx.bfloat16), self._model.parameters()))
        mx.eval(self._model.parameters())

    def compute(self, n_rows: int, n_tokens: int) -> list[KVCache]:
        caches = [KVCache() for _ in self._model.layers]
        chunk = self._n[1]
        for start in range(0, n_tokens, chunk):
            ids = mx.zeros((n_rows, min(chunk, n_tokens - start)), mx.int32)
            self._model(ids, cache=caches)
            mx.eval([cache.state for cache in caches])
        return caches

    def prefill(self) -> object:
        return self.compute(1, self._n[0])

    def decode(self, caches: list[KVCache]) -> None:
        token = mx.zeros((N_ROWS, 1), mx.int32)
        for _ in range(self._n[2]):
            token = mx.argmax(self._model(token, cache=caches)[:, -1:], -1)
            mx.async_eval(token)  # type: ignore[no-untyped-call]
        mx.eval(token)

    def chunk_bytes(self) -> int:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        self.compute(1, self._n[1])
        return mx.get_peak_memory() - before

    def start(self) -> list[KVCache]:
        return self.compute(N_ROWS, self._n[1] // 2)


def measure(size: str, out: Path | None) -> Result:
    work = Work(size)
    work.decode(work.start())
    work.prefill()
    chunk, stock = work.chunk_bytes(), mx.set_memory_limit(1 << 50)
    found: dict[float | None, list[tuple[float, ...]]] = {room: [] for room in ROOMS}
    for _ in range(REPEATS):
        for room in ROOMS:
            mx.clear_cache()
            caches = work.start()
            # A quarter of a GiB are the caches that grow.
            full = mx.get_active_memory() + (1 << 28) * (size == "large")
            mx.set_memory_limit(stock if room is None else int(full + room * chunk))
            decode = timed(lambda caches=caches: work.decode(caches))  # type: ignore[misc]
            del caches
            found[room].append((*decode, *timed(work.prefill)))
            mx.set_memory_limit(stock)
    about = "Prefill, and decode with eight rows, by the room that freed buffers have."
    result = Result(f"freed-buffers-{size}", about, {"MiB of a chunk": chunk >> 20}, folder=out)
    names = "decode s", "decode CPU s", "prefill s", "prefill CPU s"
    for room, times in found.items():
        medians = map(statistics.median, zip(*times, strict=True))
        result.add({"room, chunks": room or "stock's"} | dict(zip(names, medians, strict=True)))
    return result


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall and the CPU time that a piece of work takes."""
    mx.synchronize()
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    mx.synchronize()
    return time.perf_counter() - started, time.process_time() - cpu_started


if __name__ == "__main__":
    main()
