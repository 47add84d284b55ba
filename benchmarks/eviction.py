"""How many tokens are found again, by what is evicted first: three traces, and a mix of them.

    python -m benchmarks.eviction [--seeds 3] [--budgets 0.01 0.1] [--disk]
    python -m benchmarks.eviction --scale 1000 10000 100000 1000000

A trace is five days of requests, each the blocks of its prompt and reply in order. Sessions of
agents have many turns over one of ten system prompts of 8K to 16K tokens, chats few turns over
short ones, and a batch asks some hundred prompts once, each after one of twenty templates. Each
trace is replayed over the package's own pool, at budgets that are a part of all its blocks. The
optimum is Belady's: of blocks of one size, what is used last in the future goes first. A parent is
used whenever its child is, so this never takes a parent before its child, and no other order finds
more. `gdsf` is the policy as it was published, where every use is a hit to be expected again.

`--disk` replays over the index instead, which a pool of a quarter of its size tells what to expect.
It says which part of all seconds is saved, where a block of 256 tokens takes twice as long after
32K tokens. `by position` is `value` with such a block worth twice as much.
`--scale` says how long it takes to store a conversation of eight blocks and to evict as many, by
blocks held; the index is on this machine's temporary disk.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.block import Block, Root
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.store.pool import BlockPool, KVBlock
from mlx_lm_kvpersist.store.records import Commit
from mlx_lm_kvpersist.store.worth import LRU, VALUE

from .report import Result

BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2)
ROOT = Root("benchmark", "4b64")
_HOUR = 3600.0
_N_CHAIN = 8
_NEVER = 1 << 60
_ON_DISK = {LRU: False, VALUE: False, "by position": True}

Chain = list[Block]
Trace = list[Chain]


class Maker:
    """Makes requests: the time of each in seconds, and its blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.n_blocks = 0

    def chain(self, n: int, parent: Block | None = None) -> Chain:
        made: Chain = []
        for _ in range(n):
            above = parent.key if parent else ROOT.key
            self.n_blocks += 1
            ids = self.n_blocks.to_bytes(4, "little")
            parent = Block(ids * 4, above, parent.stop if parent else 0, ids, str(self.n_blocks))
            made.append(parent)
        return made

    def system_prompts(self, n: int, least: int, most: int) -> Callable[[], Chain]:
        """Return a function that takes one of `n`, the first most often."""
        made = [self.chain(self.rng.randint(least, most)) for _ in range(n)]
        weights = [1 / (place + 1) for place in range(n)]
        return lambda: self.rng.choices(made, weights)[0]

    def daytime(self) -> float:
        return self.rng.randrange(5) * 24 * _HOUR + self.rng.triangular(9, 18) * _HOUR

    def pause(self, quick_s: float, share: float, slow_s: float) -> float:
        median = quick_s if self.rng.random() < share else slow_s
        return self.rng.lognormvariate(math.log(median), 1.0)

    def session(
        self, start: Chain, n_turns: int, most: int, pause: Callable[[], float]
    ) -> list[tuple[float, Chain]]:
        now, blocks, requests = self.daytime(), start, []
        for _ in range(n_turns):
            blocks = [*blocks, *self.chain(self.rng.randint(1, most), blocks[-1])]
            requests.append((now, blocks))
            now += pause()
        return requests

    def agents(self, n: int) -> list[tuple[float, Chain]]:
        prompt = self.system_prompts(10, 32, 64)

        def pause() -> float:
            if self.rng.random() < 0.03:  # until the next day
                return self.rng.uniform(8, 20) * _HOUR
            return self.pause(10, 0.88, 600)

        return [
            request
            for _ in range(n)
            for request in self.session(
                prompt(), min(60, 1 + int(self.rng.expovariate(1 / 15))), 5, pause
            )
        ]

    def chats(self, n: int) -> list[tuple[float, Chain]]:
        prompt = self.system_prompts(6, 2, 8)
        found = []
        for _ in range(n):
            n_turns = 1 + int(self.rng.expovariate(1 / 4)) if self.rng.random() < 0.6 else 1
            found += self.session(prompt(), n_turns, 4, lambda: self.pause(90, 0.85, 6 * _HOUR))
        return found

    def batch(self, n: int) -> list[tuple[float, Chain]]:
        template = self.system_prompts(20, 4, 24)
        found: list[tuple[float, Chain]] = []
        while len(found) < n:
            start, now = template(), self.daytime()
            for _ in range(self.rng.randint(20, 300)):
                found.append((now, [*start, *self.chain(self.rng.randint(2, 24), start[-1])]))
                now += self.rng.uniform(2, 12)
        return found


def traces(seed: int) -> dict[str, Trace]:
    made = {}
    for name, numbers in {
        "agents": (250, 0, 0),
        "chats": (0, 1200, 0),
        "batch": (0, 0, 2500),
        "mix": (100, 500, 1500),
    }.items():
        maker = Maker(seed)
        parts = zip((maker.agents, maker.chats, maker.batch), numbers, strict=True)
        requests = [one for make, n in parts if n for one in make(n)]
        made[name] = [chain for _, chain in sorted(requests, key=lambda request: request[0])]
    return made


def optimum(trace: Trace, n_blocks: int) -> int:
    """Return how many blocks Belady's order finds."""
    last: dict[bytes, int] = {}
    coming: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        coming.append([last.get(block.key, _NEVER) for block in trace[number]])
        last.update((block.key, number) for block in trace[number])
    held: dict[bytes, int] = {}
    heap: list[tuple[int, int, bytes]] = []
    n_found = 0
    for chain, uses in zip(trace, reversed(coming), strict=True):
        n_found += sum(block.key in held for block in chain)
        for block, use in zip(chain, uses, strict=True):
            held[block.key] = use
            heapq.heappush(heap, (-use, -block.start, block.key))
        while len(held) > n_blocks:
            use, _, key = heapq.heappop(heap)
            if held.get(key) == -use:
                del held[key]
    return n_found


class Gdsf(BlockPool):
    """GDSF as it was published: a hit is a hit, and there are no others to be expected."""

    def touch(self, keys: object, *, proven: bool = False) -> None:
        for key in list(keys) if proven else ():  # type: ignore[call-overload]
            self._entries[key].habit.n_branches += 1
        super().touch(keys)  # type: ignore[arg-type]

    def _use(self, entry: KVBlock) -> None:
        super()._use(entry)
        entry.rank = self._clock + 1 + entry.habit.n_branches


def in_pool(trace: Trace, pool: BlockPool) -> int:
    """Return how many blocks are found."""
    n_found = 0
    for chain in trace:
        used = _found(chain, pool)
        n_found += len(used)
        pool.touch(used, proven=True)
        for block in chain:
            if block.start and block.parent not in pool:
                break  # the rest of what is longer than the pool
            pool.put(KVBlock(block, None, 1, is_stored=True))
    return n_found


def _found(chain: Chain, source: BlockPool | set[bytes]) -> list[bytes]:
    used: list[bytes] = []
    for block in chain:
        if block.key not in source:
            break
        used.append(block.key)
    return used


def _seconds(block: Block) -> float:
    return 1 + block.start / 128


@dataclass
class OnDisk:
    """An index of so many rows, without files."""

    index: Index
    n_blocks: int
    evict: str
    by_position: bool = False

    def store(self, blocks: Chain, share: float) -> list[bytes]:
        """Add blocks; return the keys of those that go for them."""
        scores = {block.key: _seconds(block) for block in blocks if self.by_position}
        self.index.commit(
            Commit(ROOT, (), share=share, scores=scores), [(block, 1 << 20) for block in blocks]
        )
        gone = []
        for _ in range(self.index.totals().n_blocks - self.n_blocks):
            rank, *_, key = next(self.index.unused(ROOT.fingerprint, self.evict))
            if self.evict == VALUE:
                self.index.clock = max(self.index.clock, rank)
            self.index.forget(key)
            gone.append(key)
        return gone

    def replay(self, trace: Trace) -> tuple[int, float]:
        """Return how many blocks are found, and the part of all seconds that they stand for."""
        pool, held = BlockPool(self.n_blocks // 4, self.evict), set[bytes]()
        n_found, found_s = 0, 0.0
        for chain in trace:
            used = _found(chain, held)
            n_found += len(used)
            found_s += sum(map(_seconds, chain[: len(used)]))
            for block in chain[: len(used)]:
                pool.put(KVBlock(block, None, 1, is_stored=True))
            pool.touch(used, proven=True)
            if used:
                self.index.touch(used[-1])
            new = chain[len(used) :]
            for block in new:
                pool.put(KVBlock(block, None, 1, is_stored=True))
            share = pool.share_of(chain[-1].key)
            held.update(block.key for block in new)
            held.difference_update(self.store(new, share))
        return n_found, found_s / sum(_seconds(block) for chain in trace for block in chain)


def on_disk(folder: Path, n_blocks: int, evict: str, *, by_position: bool = False) -> OnDisk:
    index = Index(folder / f"{evict}-{n_blocks}-{time.time_ns()}.sqlite")
    index.database.connection.execute("PRAGMA synchronous = OFF")
    return OnDisk(index, n_blocks, evict, by_position)


def cases(
    seeds: Sequence[int], budgets: Sequence[float]
) -> Iterator[tuple[dict[str, Any], Trace, int]]:
    """Yield rows to be filled in, their traces, and how many blocks the optimum finds."""
    for seed in seeds:
        for name, trace in traces(seed).items():
            n_all = len({block.key for chain in trace for block in chain})
            for part in budgets:
                n_blocks = int(n_all * part)
                row = {"trace": name, "seed": seed, "budget, blocks": n_blocks, "of all": part}
                yield row, trace, optimum(trace, n_blocks)


def measure(result: Result, seeds: Sequence[int], budgets: Sequence[float]) -> None:
    for row, trace, best in cases(seeds, budgets):
        n_blocks = row["budget, blocks"]
        result.add(
            {
                **row,
                "optimum, of prompts": best / sum(map(len, trace)),
                "lru": in_pool(trace, BlockPool(n_blocks, LRU)) / best,
                "gdsf": in_pool(trace, Gdsf(n_blocks)) / best,
                "value": in_pool(trace, BlockPool(n_blocks)) / best,
            }
        )


def measure_disk(result: Result, seeds: Sequence[int], budgets: Sequence[float]) -> None:
    for row, trace, best in cases(seeds, budgets):
        for name, by_position in _ON_DISK.items():
            evict = LRU if name == LRU else VALUE
            with tempfile.TemporaryDirectory() as folder:
                store = on_disk(Path(folder), row["budget, blocks"], evict, by_position=by_position)
                n_found, row[f"{name}, of seconds"] = store.replay(trace)
                store.index.close()
            row[name] = n_found / best
        result.add(row)


def scale(result: Result, sizes: Sequence[int]) -> None:
    """Time conversations of eight blocks that replace others, in a pool and in an index."""
    for size in sizes:
        maker = Maker(1)
        head = maker.chain(_N_CHAIN)
        pool = BlockPool(size)
        with tempfile.TemporaryDirectory() as folder:
            store = on_disk(Path(folder), size, VALUE)
            filling = [b for _ in range(size // _N_CHAIN) for b in maker.chain(_N_CHAIN)]
            store.store([*head, *filling], 1.0)
            for block in (*head, *filling):
                pool.put(KVBlock(block, None, 1, is_stored=True))
            new = [maker.chain(_N_CHAIN, head[-1]) for _ in range(300)]
            started = time.process_time()
            for chain in new:
                for block in chain:
                    pool.put(KVBlock(block, None, 1, is_stored=True))
                pool.unpin(pool.pin([block.key for block in chain]))
            pool_s = time.process_time() - started
            started = time.process_time()
            for chain in new[:100]:
                store.store(chain, 0.5)
            index_s = time.process_time() - started
            store.index.close()
        result.add(
            {
                "blocks": size,
                "pool, us a block": pool_s / len(new) / _N_CHAIN * 1e6,
                "index, us a block": index_s / 100 / _N_CHAIN * 1e6,
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1, help="so many traces of each kind")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="parts of all")
    parser.add_argument("--disk", action="store_true", help="replay over the index")
    parser.add_argument("--scale", type=int, nargs="+", help="blocks held")
    parser.add_argument("--out", type=Path, help="folder of the result")
    args = parser.parse_args()
    if args.scale:
        about = "CPU time to store a block and evict another, by blocks held."
        result = Result("eviction-scale", about, {"chain": _N_CHAIN}, folder=args.out)
        scale(result, args.scale)
    else:
        about = "Tokens found again, by what is evicted first, as a part of the optimum's"
        about += (
            ", and of all seconds those that they save, on disk."
            if args.disk
            else "; the optimum as a part of all tokens of prompts and replies."
        )
        name = "eviction-disk" if args.disk else "eviction"
        result = Result(name, about, {"seeds": args.seeds}, folder=args.out)
        fill = measure_disk if args.disk else measure
        fill(result, range(1, args.seeds + 1), args.budgets)
    result.show()


if __name__ == "__main__":
    main()
