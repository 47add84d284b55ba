"""How long the pool takes for each thing that it does, by the number of blocks in it.

    python -m benchmarks.pool [--blocks 1000 10000 100000 1000000]

Conversations of ten blocks without arrays, so that only the pool's own work is timed: apart, each
with a beginning of its own, or together, below one shared root. CPU microseconds are means over
batches, the median of the batches; flat is the goal. Memory is what an entry takes with its block,
which has an id and a few characters of text.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.block import Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.store.pool import BlockPool, KVBlock

from .lookup import rss_bytes
from .report import Result

N_BLOCKS = (1000, 10_000, 100_000, 1_000_000)
CHAIN = 10
N_BYTES = 100
"""Of an entry, as the pool counts it."""
_WORTH_WEIGHING = 100_000
"""Fewer fit into memory that Python has already."""
BATCHES, BATCH = 15, 20
"""Batches of conversations."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=list(N_BLOCKS))
    parser.add_argument("--out", type=Path, help="folder of the result")
    args = parser.parse_args()
    measure_all(args.out, args.blocks).show()


def conversations(parents: Iterator[bytes]) -> Iterator[list[Block]]:
    """Yield chains of blocks, each below the next of `parents`."""
    for number, parent in enumerate(parents):
        chain = []
        for depth in range(CHAIN):
            packed = pack_ids([number, depth])
            key = block_key(parent, packed)
            chain.append(Block(key, parent, 2 * depth, packed, f"{number:x} {depth}"))
            parent = key
        yield chain


def parents(together: bool) -> Iterator[bytes]:
    number = 0
    while True:
        yield Root("benchmark", "0" if together else str(number)).key
        number += 1


def measure_all(out: Path | None, sizes: Sequence[int]) -> Result:
    """Fill a pool with each number of blocks, and time what a server asks of it."""
    result = Result(
        "pool",
        "CPU microseconds per block of what the pool does, by the blocks in it.",
        {"blocks per conversation": CHAIN, "batches": BATCHES, "blocks per batch": BATCH * CHAIN},
        folder=out,
    )
    for together in (False, True):
        for n_blocks in sizes:
            gc.collect()
            result.add(measure(n_blocks, together))
    return result


def measure(n_blocks: int, together: bool) -> dict[str, Any]:
    """Return a row: the pool is filled, used, and then evicts for each block that comes."""
    rng, made = random.Random(n_blocks), conversations(parents(together))
    pool = BlockPool(n_blocks * N_BYTES)
    before = rss_bytes()
    keys = [put(pool, next(made)) for _ in range(n_blocks // CHAIN)]
    row: dict[str, Any] = {
        "blocks": len(pool),
        "conversations": "together" if together else "apart",
    }
    if n_blocks >= _WORTH_WEIGHING:
        row["memory, bytes per block"] = round((rss_bytes() - before) / len(pool))

    def some() -> list[list[bytes]]:
        return [rng.choice(keys) for _ in range(BATCH)]

    def pin_and_unpin(chain: list[bytes]) -> None:
        pool.unpin(pool.pin(chain))

    row["get"] = timed(some, lambda chain: [pool.get(key) for key in chain])
    row["touch"] = timed(some, pool.touch)
    row["pin and unpin"] = timed(some, pin_and_unpin)
    row["stats"] = timed(lambda: range(BATCH), lambda _: pool.stats()) * CHAIN

    def new() -> list[list[Block]]:
        return [next(made) for _ in range(BATCH)]

    row["put and evict"] = timed(new, lambda chain: put(pool, chain))
    assert len(pool) == row["blocks"] and pool.n_evicted >= BATCHES * BATCH * CHAIN
    pool.resize(2 * pool.max_bytes)
    row["put, room left"] = timed(new, lambda chain: put(pool, chain))
    n_evicted = pool.n_evicted
    started = time.thread_time()
    pool.resize(pool.n_bytes // 2)
    row["evict half"] = 1e6 * (time.thread_time() - started) / (pool.n_evicted - n_evicted)
    return row


def put(pool: BlockPool, chain: list[Block]) -> list[bytes]:
    for block in chain:
        pool.put(KVBlock(block, None, N_BYTES))
    return [block.key for block in chain]


def timed(given: Callable[[], Any], act: Callable[[Any], object]) -> float:
    """Return microseconds per block: `act` takes a conversation, `given` makes a batch of them."""
    times = []
    for _ in range(BATCHES):
        batch = given()
        started = time.thread_time()
        for one in batch:
            act(one)
        times.append(1e6 * (time.thread_time() - started) / (BATCH * CHAIN))
    return statistics.median(times)


if __name__ == "__main__":
    main()
