"""What an arena with views costs, against immutable blocks.

    python -m benchmarks.arena [--blocks 64 256 1024]

An arena is one array that all conversations' keys live in; a conversation is a range of it, and
reads it by a view. Blocks are small arrays that nothing changes; a conversation that runs is a
buffer of its own, made of them. Both hold the same: blocks of 256 tokens of 8 heads of 128 numbers
in float16, 512 KiB each. Both do a piece of work in turns. Wall and CPU time are medians; memory is
what MLX allocated at most beyond what it held before.

A second table fills an arena whose conversations need adjoining blocks, at random, evicting the
oldest, and counts how often the free blocks were enough and lay apart.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from .report import Result

N_BLOCKS = (64, 256, 1024)
HEADS, TOKENS, DIM = 8, 256, 128
CONVERSATION = 32
"""Blocks of the conversation that is read and goes on."""
REPEATS = 9
N_SEQUENCES = 20_000
_MIB = 1 << 20

Work = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=list(N_BLOCKS))
    parser.add_argument("--out", type=Path, help="folder of the results")
    args = parser.parse_args()
    measure_all(args.out, args.blocks).show()
    measure_room(args.out).show()


class Arena:
    """One array of all blocks, changed in place where MLX can.

    Heads come first: only so can attention read adjoining blocks as a view.
    """

    def __init__(self, n_blocks: int) -> None:
        self.keys = mx.zeros((HEADS, n_blocks, TOKENS, DIM), mx.float16)
        mx.eval(self.keys)

    def put(self, place: int, block: mx.array) -> None:
        self.keys[:, place] = block
        mx.eval(self.keys)

    def view(self, first: int) -> mx.array:
        """Return a conversation's blocks, which adjoin: (heads, tokens, dim)."""
        found = self.keys[:, first : first + CONVERSATION].reshape(HEADS, -1, DIM)
        mx.eval(found)
        return found

    def gather(self, places: Sequence[int]) -> mx.array:
        found = mx.take(self.keys, mx.array(list(places)), axis=1).reshape(HEADS, -1, DIM)
        mx.eval(found)
        return found

    def append(self, place: int, token: mx.array) -> None:
        """Write a conversation's next token."""
        self.keys[:, place, 7] = token
        mx.eval(self.keys)


class Blocks:
    """An array for each block, and a buffer for the conversation that runs."""

    def __init__(self, n_blocks: int) -> None:
        self.held = {place: new_block() for place in range(n_blocks)}
        self.running = self.join(range(CONVERSATION))

    def put(self, place: int, block: mx.array) -> None:
        self.held[place] = mx.contiguous(block)
        mx.eval(self.held[place])

    def join(self, places: Sequence[int]) -> mx.array:
        """Return the blocks of a conversation as the buffer that it goes on in."""
        joined = mx.concatenate([self.held[place] for place in places], axis=1)
        mx.eval(joined)
        return joined

    def append(self, token: mx.array) -> None:
        self.running[:, 7] = token
        mx.eval(self.running)


def new_block() -> mx.array:
    block = mx.random.normal((HEADS, TOKENS, DIM)).astype(mx.float16)
    mx.eval(block)
    return block


def measure_all(out: Path | None, sizes: Sequence[int]) -> Result:
    """Do each piece of work with arenas, and as many blocks, of each size."""
    result = Result(
        "arena",
        "An arena with views against immutable blocks: time and memory of each piece of work.",
        {"MiB per block": new_block().nbytes / _MIB, "blocks per conversation": CONVERSATION},
        folder=out,
    )
    for n_blocks in sizes:
        arena, blocks = Arena(n_blocks), Blocks(n_blocks)
        for what, in_turns in pieces(arena, blocks, n_blocks):
            result.add({"blocks": n_blocks, "what": what} | compared(*in_turns))
        held = mx.get_active_memory()
        blocks.held.clear()
        given_back = (held - mx.get_active_memory()) / _MIB
        result.add({"blocks": n_blocks, "what": "evict all", "blocks give back, MiB": given_back})
        del arena, blocks, in_turns
    return result


def pieces(
    arena: Arena, blocks: Blocks, n_blocks: int
) -> Iterator[tuple[str, tuple[Work, Work, Work]]]:
    """Yield names, what comes before, and the work itself for both."""
    block, token = new_block(), new_block()[:, 0]
    first, last = n_blocks // 4, n_blocks - 1
    adjoining = range(first, first + CONVERSATION)
    apart = random.Random(n_blocks).sample(range(n_blocks), CONVERSATION)
    viewed: list[mx.array] = []

    def view() -> None:
        viewed[:] = [arena.view(first)]

    for reading, before in (("", viewed.clear), (", a conversation being read", view)):
        put = partial(arena.put, last, block), partial(blocks.put, last, block)
        yield f"put a block{reading}", (before, *put)
        append = partial(arena.append, first, token), partial(blocks.append, token)
        yield f"append a token{reading}", (before, *append)
    get = partial(arena.view, first), partial(blocks.join, adjoining)
    yield "get a conversation that adjoins", (viewed.clear, *get)
    get = partial(arena.gather, apart), partial(blocks.join, apart)
    yield "get a conversation that lies apart", (viewed.clear, *get)


def compared(before: Work, in_arena: Work, in_blocks: Work) -> dict[str, Any]:
    """Return the times and the memory of both, which take turns; `before` comes before each."""
    columns: dict[str, list[float]] = {}
    for repeat in range(REPEATS + 1):
        for side, work in (("arena", in_arena), ("blocks", in_blocks)):
            before()
            mx.clear_cache()
            held = mx.get_active_memory()
            mx.reset_peak_memory()
            started_s, cpu_s = time.perf_counter(), time.process_time()
            work()
            times = {
                f"{side} ms": 1e3 * (time.perf_counter() - started_s),
                f"{side} CPU ms": 1e3 * (time.process_time() - cpu_s),
                f"{side} MiB": max(0, mx.get_peak_memory() - held) / _MIB,
            }
            if repeat:  # the first fills the caches
                for name, value in times.items():
                    columns.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in columns.items()}


def measure_room(out: Path | None) -> Result:
    """Give conversations adjoining blocks of an arena, the first run that is long enough."""
    result = Result(
        "arena-room",
        "How often an arena has room, but not in one piece: conversations of 1 to the given number "
        "of blocks, the oldest evicted until a new one fits.",
        {"blocks": 1024, "conversations": N_SEQUENCES},
        folder=out,
    )
    for longest in (8, 32, 128):
        result.add({"longest": longest} | churned(1024, longest, random.Random(longest)))
    return result


def churned(n_blocks: int, longest: int, rng: random.Random) -> dict[str, Any]:
    """Return how often room lay apart, and the share of blocks in use."""
    used = bytearray(n_blocks)
    placed: OrderedDict[int, tuple[int, int]] = OrderedDict()
    n_apart, in_use = 0, []
    for number in range(N_SEQUENCES):
        length = rng.randint(1, longest)
        lay_apart = False
        while (start := used.find(bytes(length))) < 0:
            lay_apart |= used.count(0) >= length
            # Not quite the oldest: conversations end in any order.
            victim = rng.choice(list(placed)[:8])
            begin, size = placed.pop(victim)
            used[begin : begin + size] = bytes(size)
        used[start : start + length] = b"\1" * length
        placed[number] = (start, length)
        n_apart += lay_apart
        in_use.append(used.count(1) / n_blocks)
    return {
        "room lay apart, % of conversations": 100 * n_apart / N_SEQUENCES,
        "blocks in use, % (blocks: as good as 100)": 100 * statistics.mean(in_use[1000:]),
    }


if __name__ == "__main__":
    main()
