"""The pool against a model that looks at everything: same content, same bytes, same order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_lm_kvpersist.block import Block, Checkpoint, Record
from mlx_lm_kvpersist.errors import PoolFull
from mlx_lm_kvpersist.store.pool import BlockPool, KVBlock
from mlx_lm_kvpersist.store.worth import LRU, VALUE, Habit

from .conftest import ROOT, chain, state, window

OPS = (
    *("put", "put", "put stored", "put pinned", "use", "commit", "pin", "unpin", "prefetch"),
    *("let go", "stored", "gone", "drop", "drop chain", "admit", "resize", "release", "score"),
)
Op = tuple[str, int, int]


def universe(n: int) -> list[Record]:
    """Return blocks in a tree, parents before children, and checkpoints at some."""
    rng = random.Random(n)
    blocks: list[Block] = []
    for number in range(n):
        parent = rng.choice(blocks) if blocks and rng.random() < 0.85 else None
        (block,) = chain([number], parent=parent.key if parent else ROOT.key)
        blocks.append(Block(block.key, block.parent, parent.stop if parent else 0, b"\0\0\0\0"))
    points = [make(block) for block in blocks[::5] for make in (state, window)]
    return [*blocks, *points]


@dataclass
class Seen:
    record: Record
    n_bytes: int
    stored: bool
    pins: int = 0
    prefetched: int = 0
    rank: float = 0.0
    used: int = 0
    worth: float = 1.0
    habit: Habit = field(default_factory=Habit)

    @property
    def is_held(self) -> bool:
        return bool(self.prefetched or (self.pins and not self.stored))


class Naive:
    """What the pool should do, by looking at all entries each time."""

    def __init__(self, max_bytes: int, evict: str) -> None:
        self.max_bytes, self.evict_by = max_bytes, evict
        self.held: dict[bytes, Seen] = {}
        self.roots: dict[bytes, Habit] = {}
        self.clock, self.n_uses = 0.0, 0

    def above(self, record: Record) -> Habit | None:
        if isinstance(record, Checkpoint):
            return None
        if record.start == 0:
            return self.roots.setdefault(record.parent, Habit())
        return self.held[record.parent].habit if record.parent in self.held else None

    def use(self, key: bytes) -> None:
        self.n_uses += 1
        seen = self.held[key]
        seen.used = self.n_uses
        if self.evict_by == VALUE:
            seen.rank = self.clock + seen.worth * seen.habit.expected_hits

    def parents(self) -> set[bytes]:
        records = [seen.record for seen in self.held.values()]
        return {record.parent for record in records if isinstance(record, Block)}

    def n_bytes(self) -> int:
        return sum(seen.n_bytes for seen in self.held.values())

    def put(self, seen: Seen) -> None:
        key = seen.record.key
        if present := self.held.get(key):
            present.pins += seen.pins
            present.prefetched += seen.prefetched
            self.use(key)
            return
        if seen.n_bytes > self.max_bytes and not seen.is_held:
            return
        if isinstance(seen.record, Checkpoint):
            block = self.held.get(seen.record.block)
            seen.habit = Habit(block.habit.share if block else 1.0)
        elif (above := self.above(seen.record)) is not None:
            seen.habit = above.of_next()
        self.held[key] = seen
        self.use(key)
        self.evict(self.max_bytes)

    def touch(self, keys: Iterable[bytes], proven: bool) -> None:
        there = [key for key in keys if key in self.held]
        if proven:
            blocks = [key for key in there if isinstance(self.held[key].record, Block)]
            is_branch = bool(blocks) and blocks[-1] in self.parents()
            for key in there:
                self.held[key].habit.use(self.above(self.held[key].record), is_branch=is_branch)
        for key in reversed(there):
            self.use(key)

    def points(self, key: bytes) -> list[bytes]:
        return [
            key_of
            for key_of, seen in self.held.items()
            if isinstance(seen.record, Checkpoint) and seen.record.block == key
        ]

    def drop(self, key: bytes) -> None:
        for one in (key, *self.points(key)):
            self.held.pop(one, None)

    def drop_chain(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            entries = [self.held[one] for one in (key, *self.points(key)) if one in self.held]
            is_new = key in self.held and not self.held[key].stored
            is_busy = any(seen.pins or seen.prefetched for seen in entries)
            if is_new or is_busy or key in self.parents():
                return
            self.drop(key)

    def evict(self, down_to: int, *, only_unneeded: bool = False) -> None:
        while self.n_bytes() > down_to:
            parents = self.parents()
            order = sorted(self.held.items(), key=lambda item: (item[1].rank, item[1].used))
            free = [k for k, s in order if not s.pins and not s.prefetched and k not in parents]
            spare = [k for k, s in order if s.stored and not s.prefetched]
            found = free or (not only_unneeded and spare)
            if not found:
                return
            gone = self.held.pop(found[0])
            self.clock = max(self.clock, gone.rank)
            for key in self.points(found[0]) if not gone.stored else ():
                if not self.held[key].pins and not self.held[key].prefetched:
                    del self.held[key]


class Pair:
    """The pool and its model, which do the same."""

    def __init__(self, records: list[Record], max_bytes: int, evict: str) -> None:
        self.records = records
        self.pool, self.naive = BlockPool(max_bytes, evict), Naive(max_bytes, evict)
        self.pinned: dict[bool, list[KVBlock]] = {False: [], True: []}
        self.by_key = {record.key: record for record in records}

    def path(self, record: Record) -> list[bytes]:
        """Return the keys of a block's chain, or of a checkpoint's with its own at the end."""
        above = record.block if isinstance(record, Checkpoint) else record.parent
        return [*(self.path(self.by_key[above]) if above in self.by_key else ()), record.key]

    def do(self, op: Op) -> None:
        name, number, size = op
        record = self.records[number % len(self.records)]
        pool, naive, key, path = self.pool, self.naive, record.key, self.path(record)
        is_stored, pins = name != "put pinned" and size % 3 == 0, int(name == "put pinned")
        if name.startswith("put"):
            is_stored = is_stored or name == "put stored"
            entry = pool.put(KVBlock(record, None, size, is_stored, pins))
            naive.put(Seen(record, size, is_stored, pins))
            if pins:
                self.pinned[False].append(entry)
        elif name == "admit":
            self.admit(record, size)
        elif name in ("use", "commit"):
            pool.touch(path, proven=name == "use")
            naive.touch(path, name == "use")
        elif name in ("pin", "prefetch"):
            prefetch = name == "prefetch"
            self.pinned[prefetch] += pool.pin(path, prefetch=prefetch)
            for seen in (naive.held[one] for one in path if one in naive.held):
                seen.prefetched += prefetch
                seen.pins += not prefetch
        elif name in ("unpin", "let go"):
            self.unpin(name == "let go", size)
        elif name in ("stored", "gone"):
            pool.set_stored(path, name == "stored")
            for seen in (naive.held[one] for one in path if one in naive.held):
                seen.stored = name == "stored"
        elif name == "drop":
            pool.drop(key)
            naive.drop(key)
        elif name == "drop chain":
            pool.drop_chain(path)
            naive.drop_chain(path)
        elif name == "resize":
            pool.resize(40 + 5 * size)
            naive.max_bytes = 40 + 5 * size
            naive.evict(naive.max_bytes)
        elif name == "release":
            before = pool.n_bytes
            assert pool.release(size) == before - pool.n_bytes
            naive.evict(naive.n_bytes() - size, only_unneeded=True)
        elif key in naive.held:
            pool.set_worth(key, size / 10)
            naive.held[key].worth = size / 10
            naive.use(key)

    def admit(self, record: Record, size: int) -> None:
        try:
            self.pinned[True].append(self.pool.admit(KVBlock(record, None, size, True)))
        except PoolFull:
            held = sum(seen.n_bytes for seen in self.naive.held.values() if seen.is_held)
            spare = self.naive.max_bytes - self.naive.n_bytes() + self.naive.n_bytes() - held
            assert record.key not in self.naive.held
            if size <= spare:  # what has to stay is more than what is held
                self.naive.put(Seen(record, size, True, prefetched=1))
                assert self.naive.n_bytes() > self.naive.max_bytes
                del self.naive.held[record.key]
        else:
            self.naive.put(Seen(record, size, True, prefetched=1))
            assert record.key in self.naive.held

    def unpin(self, prefetch: bool, size: int) -> None:
        going, self.pinned[prefetch] = self.pinned[prefetch][:size], self.pinned[prefetch][size:]
        # Another may have taken the place of one that was dropped.
        there = [entry.block.key for entry in going if self.pool.get(entry.block.key) is entry]
        self.pool.unpin(going, prefetch=prefetch)
        for key in there:
            self.naive.held[key].prefetched -= prefetch
            self.naive.held[key].pins -= not prefetch
        self.naive.evict(self.naive.max_bytes)

    def check(self) -> None:
        held = self.naive.held
        assert self.pool._entries.keys() == held.keys()
        assert self.pool.n_bytes == self.naive.n_bytes()
        assert self.pool.held_bytes == sum(seen.n_bytes for seen in held.values() if seen.is_held)


@settings(max_examples=150, deadline=None)
@given(
    evict=st.sampled_from([VALUE, LRU]),
    ops=st.lists(
        st.tuples(st.sampled_from(OPS), st.integers(0, 40), st.integers(0, 40)), max_size=80
    ),
)
def test_the_pool_does_what_a_naive_one_does(evict: str, ops: list[Op]) -> None:
    pair = Pair(universe(24), 200, evict)
    for op in ops:
        pair.do(op)
        pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("evict", [VALUE, LRU])
def test_half_a_million_operations(evict: str) -> None:
    rng = random.Random(7)
    pair = Pair(universe(60), 600, evict)
    for _ in range(500_000):
        pair.do((rng.choice(OPS), rng.randrange(120), rng.randrange(40)))
        pair.check()


def check_sums(pool: BlockPool) -> None:
    """All that is counted is what is there, and what may go is on its way."""
    entries = pool._entries.values()
    points = [e for e in entries if isinstance(e.block, Checkpoint)]
    assert pool.n_bytes == sum(e.n_bytes for e in entries)
    assert pool.held_bytes == sum(e.n_bytes for e in entries if e.is_held)
    assert pool.stats()["checkpoint_bytes"] == sum(e.n_bytes for e in points)
    assert pool.stats()["checkpoints"] == len(points) == sum(map(len, pool._checkpoints.values()))
    assert len(pool) - len(points) == sum(len(c["text"]) for c in pool._children.values())
    queued = {item[-1] for heap in (pool._unneeded, pool._spare) for item in heap}
    assert {e.block.key for e in entries if pool._heap_of(e) is not None} <= queued


@pytest.mark.parametrize("n_each", [400, pytest.param(125_000, marks=pytest.mark.slow)])
def test_eight_threads(n_each: int) -> None:
    pool, records = BlockPool(2000), universe(300)
    failed: list[BaseException] = []

    def run(seed: int) -> None:
        rng, pinned = random.Random(seed), list[KVBlock]()
        try:
            for _ in range(n_each):
                record, act = rng.choice(records), rng.randrange(10)
                if act < 4:
                    pool.put(KVBlock(record, None, rng.randrange(1, 40), rng.random() < 0.5))
                elif act < 6:
                    pinned += pool.pin([record.key])
                elif act < 8:
                    pool.unpin(pinned)
                    pinned = []
                elif act == 8:
                    pool.touch([record.key], proven=True)
                else:
                    pool.set_stored([record.key], rng.random() < 0.5)
                    pool.release(rng.randrange(30))
            pool.unpin(pinned)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    check_sums(pool)
    assert pool.held_bytes == 0 and 0 < pool.n_bytes <= 2000
    pool.release(1 << 30)
    assert len(pool) == 0
