"""`python -m tools.commit_cost`: CPU time of a commit of one block, by the conversation's length.

Two conversations grow in separate stores, one from 8 blocks and one from 256. Their commits
alternate, so that other work on the machine slows both. The output has the median CPU time of all
threads, from the commit to the end of its transaction, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import mlx.core as mx

from mlx_lm_kvpersist.block import BLOCK_TOKENS, Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.records import Leaf

ROOT = Root("commit-cost", "layout")
LENGTHS = (8, 256)
"""Blocks of a conversation before the first measured commit."""


class Conversation:
    def __init__(self, folder: Path, n_blocks: int) -> None:
        self.store = BlockStore(folder, StoreLimits(1 << 30, 1 << 32))
        self._end, self._n_blocks = ROOT.key, 0
        self._commit([self._next() for _ in range(n_blocks)])

    def _next(self) -> Block:
        start = self._n_blocks * BLOCK_TOKENS
        packed = pack_ids(range(start, start + BLOCK_TOKENS))
        text = "".join(f"{start + n:5} " for n in range(BLOCK_TOKENS))
        block = Block(block_key(self._end, packed), self._end, start, packed, text)
        self._end, self._n_blocks = block.key, self._n_blocks + 1
        return block

    def _commit(self, blocks: list[Block]) -> float:
        """Commit a turn; return the CPU seconds that it took."""
        entries = [(block, {"0.k": mx.zeros((1, 2, BLOCK_TOKENS, 64))}) for block in blocks]
        mx.eval([arrays for _, arrays in entries])
        leaf = Leaf("session", blocks[-1].key, blocks[-1].stop)
        started_s = time.process_time()
        self.store.commit(Commit(ROOT, tuple(blocks), leaf), entries)
        self.store.drain()
        return time.process_time() - started_s

    def grow(self) -> float:
        return self._commit([self._next()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commits", type=int, default=60, help="commits of each conversation")
    n_commits = parser.parse_args().commits
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stores:
        growing = {n: Conversation(Path(folder) / f"{n}", n) for n in LENGTHS}
        for conversation in growing.values():
            stores.enter_context(closing(conversation.store))
        seconds: dict[int, list[float]] = {n: [] for n in LENGTHS}
        for _ in range(n_commits):
            for n, conversation in growing.items():
                seconds[n].append(conversation.grow())
    few, many = (median(seconds[n]) * 1e3 for n in LENGTHS)
    for n, ms in zip(LENGTHS, (few, many), strict=True):
        print(f"a commit of one block after {n:3} blocks: {ms:.2f} ms of CPU")
    print(f"ratio: {many / few:.2f}")


if __name__ == "__main__":
    main()
