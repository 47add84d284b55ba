"""Tokens a second and memory of one to many conversations that are decoded at the same time.

    python -m benchmarks.decode [--contexts 1024 4096 16384] [--batches 1 2 4 8]

Every prompt was sent before, so that all sides have it in memory and what is timed is decoding.
Tokens a second count all tokens after the first of each stream, from the first token of any to the
last of all. A side that does not batch serves one stream after another; its rate says so.

Memory is what MLX says in the server's process: the most that its arrays took while the cell ran,
free buffers not counted, what is kept of other conversations counted. RSS is the process's peak.
CPU milliseconds are those of the whole process, all threads: on a shared machine they vary less.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.support.synthetic import Message

from .report import Result
from .runs import Run, median, parser, percentile, ratio, run_of
from .servers import Fleet, cpu_between, rotated

CONTEXTS = (1024, 4096)
BATCHES = (1, 2, 4, 8)
MAX_TOKENS = 128
_MB = 1e6


@dataclass(frozen=True)
class Cell:
    """Results of one round of a batch."""

    n_tokens: int
    seconds: float
    gaps_s: tuple[float, ...]
    peak_bytes: float | None
    rss_bytes: float | None
    cpu_s: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    options.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    args = options.parse_args()
    measure(run_of(args), args.contexts, args.batches, args.repeats, args.max_tokens).show()


def measure(
    run: Run,
    contexts: Sequence[int],
    batches: Sequence[int],
    n_repeats: int,
    max_tokens: int = MAX_TOKENS,
) -> Result:
    """Add rows for these contexts and batches to the run's result."""
    with run.fleet() as fleet:
        result = run.result(
            "decode",
            "Tokens a second of conversations decoded at the same time, all prompts in memory.",
            {
                "max_tokens": max_tokens,
                "memory": "peak of MLX's arrays in the server's process, as MLX counts them",
                "sides": fleet.flags,
            },
        )
        kv_bytes = fleet.kv_bytes_per_token()
        cell_s = 0.0
        for context in contexts:
            prepare_s = run.costs.of(context) * max(batches) * len(run.sides)
            if not run.deadline.allows(prepare_s + cell_s):
                result.leave_out(f"decode at {context:,}")
                continue
            prompts = _made_hot(run, fleet, context, max(batches))
            for batch in sorted(batches, reverse=True):
                if not run.deadline.allows(cell_s):
                    result.leave_out(f"decode, batch {batch} at {context:,}")
                    continue
                started = time.monotonic()
                cells: dict[str, list[Cell]] = defaultdict(list)
                for side in run.sides:
                    _decode(fleet, side, prompts[:batch], 4)  # kernels of this batch
                for repeat in range(n_repeats):
                    for side in rotated(run.sides, repeat):
                        cells[side].append(_decode(fleet, side, prompts[:batch], max_tokens))
                result.add(_row(run, context, batch, cells, kv_bytes, max_tokens))
                cell_s = max(cell_s, time.monotonic() - started)
    return result


def _made_hot(run: Run, fleet: Fleet, context: int, n_prompts: int) -> list[list[Message]]:
    """Return prompts that every side has in memory."""
    prompts = [run.prompts.of_length(context, seed=7_000_000 + n) for n in range(n_prompts)]
    for n, messages in enumerate(prompts):
        # On a CPU this takes minutes, before the first row.
        print(f"computing prompt {n + 1} of {n_prompts} of {context:,} tokens", file=sys.stderr)
        for side in rotated(run.sides, n):
            run.costs.learn(fleet.ask(side, messages, 4))
            fleet.settle(side)
    return prompts


def _decode(fleet: Fleet, side: str, prompts: Sequence[list[Message]], max_tokens: int) -> Cell:
    before = fleet.used(side)  # forget the peaks so far

    def stream(messages: list[Message]) -> tuple[int, list[float]]:
        started = time.perf_counter()
        reply = fleet.ask(side, messages, max_tokens)
        return reply.completion_tokens, [started + at_s for at_s in reply.times_s]

    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = list(pool.map(stream, prompts))
    after = fleet.used(side)
    fleet.settle(side)
    times = [times for _, times in streams]
    first, last = min(at[0] for at in times), max(at[-1] for at in times)
    return Cell(
        n_tokens=sum(n for n, _ in streams) - len(streams),
        seconds=last - first,
        gaps_s=tuple(b - a for at in times for a, b in pairwise(at)),
        peak_bytes=after.get("peak"),
        rss_bytes=after.get("peak_rss"),
        cpu_s=cpu_between(before, after),
    )


def _row(
    run: Run,
    context: int,
    batch: int,
    cells: dict[str, list[Cell]],
    kv_bytes: dict[str, float | None],
    max_tokens: int,
) -> dict[str, Any]:
    row: dict[str, Any] = {"context": context, "batch": batch}
    row["repeats"] = max(map(len, cells.values()))
    rates = {side: [cell.tokens_per_s for cell in cells[side]] for side in run.sides}
    for side in run.sides:
        row[f"{side} tokens/s"] = median(rates[side])
    first = run.sides[0]
    for other in run.sides[1:]:
        row[f"{first} / {other}"] = ratio(rates[first], rates[other])
    for side in run.sides:
        cpu = [1e3 * cell.cpu_s / cell.n_tokens for cell in cells[side] if cell.cpu_s is not None]
        row[f"{side} CPU ms/token"] = median(cpu)
    for side in run.sides:
        gaps = [gap for cell in cells[side] for gap in cell.gaps_s]
        p50 = percentile(gaps, 0.5)
        row[f"{side} gap p50 ms"] = None if p50 is None else p50 * 1e3
    for side in run.sides:
        row[f"{side} peak MB"] = _mb([cell.peak_bytes for cell in cells[side]])
        row[f"{side} RSS MB"] = _mb([cell.rss_bytes for cell in cells[side]])
    n_live = batch * (context + max_tokens)
    for side in run.sides:
        per_token = kv_bytes[side]
        row[f"{side} KV MB by shape"] = None if per_token is None else n_live * per_token / _MB
    return row


def _mb(sizes: Sequence[float | None]) -> float | None:
    """Return the median in MB; None where a server could not tell."""
    return median([size / _MB for size in sizes if size is not None])


if __name__ == "__main__":
    main()
