"""The pool, compared with a simple model: the same content, bytes and order of use."""

from __future__ import annotations

import math
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_lm_kvpersist.block import Block, Checkpoint, Record
from mlx_lm_kvpersist.store.pool import BlockPool
from mlx_lm_kvpersist.store.records import KVBlock

from .conftest import ROOT, chain, state, window

OPS = (
    *("put", "put", "put stored", "put pinned", "use", "pin", "unpin", "prefetch"),
    *("end prefetch", "stored", "not stored", "drop", "drop chain", "admit", "resize", "release"),
)
Op = tuple[str, int, int]


class Universe:
    """Blocks in a tree, parents before children, and checkpoints at every fifth block."""

    def __init__(self, n: int) -> None:
        rng = random.Random(n)
        blocks: list[Block] = []
        for number in range(n):
            parent = rng.choice(blocks) if blocks and rng.random() < 0.85 else None
            (block,) = chain([number], parent=parent.key if parent else ROOT.key)
            blocks.append(Block(block.key, block.parent, parent.stop if parent else 0, b"\0\0\0\0"))
        checkpoints = [make(block) for block in blocks[::5] for make in (state, window)]
        self.records: list[Record] = [*blocks, *checkpoints]
        self.by_key = {record.key: record for record in self.records}

    def path(self, record: Record) -> list[bytes]:
        """Return the keys of a record's chain, with the record's own key at the end."""
        above = record.block if isinstance(record, Checkpoint) else record.parent
        return [*(self.path(self.by_key[above]) if above in self.by_key else ()), record.key]


class SimplePool:
    """The pool's expected behaviour, computed from all entries each time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.n_uses = max_bytes, 0
        self.entries: dict[bytes, KVBlock] = {}

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries.values())

    @property
    def held_bytes(self) -> int:
        return sum(entry.n_bytes for entry in self.entries.values() if entry.is_held)

    def use(self, entry: KVBlock) -> None:
        self.n_uses += 1
        entry.used = self.n_uses

    def parents(self) -> set[bytes]:
        blocks = [entry.block for entry in self.entries.values()]
        return {block.parent for block in blocks if isinstance(block, Block)}

    def present(self, keys: Iterable[bytes]) -> list[KVBlock]:
        return [self.entries[key] for key in keys if key in self.entries]

    def put(self, entry: KVBlock) -> KVBlock:
        block = entry.block
        if present := self.entries.get(block.key):
            present.pins += entry.pins
            present.prefetched += entry.prefetched
            self.use(present)
            return present
        if entry.n_bytes > self.max_bytes and not entry.is_held:
            return entry
        self.entries[block.key] = entry
        self.use(entry)
        self.evict(self.max_bytes)
        return entry

    def admit(self, entry: KVBlock) -> KVBlock | None:
        entry.prefetched += 1
        key, free = entry.block.key, self.max_bytes - self.n_bytes
        if key not in self.entries and entry.n_bytes > free + self.n_bytes - self.held_bytes:
            return None
        present = self.put(entry)
        if present is entry and self.n_bytes > self.max_bytes:
            del self.entries[key]
            return None
        return present

    def pin(self, keys: Iterable[bytes], *, prefetch: bool) -> list[KVBlock]:
        for entry in (pinned := self.present(keys)):
            entry.prefetched += prefetch
            entry.pins += not prefetch
        return pinned

    def unpin(self, entries: Iterable[KVBlock], *, prefetch: bool) -> None:
        for entry in entries:
            entry.prefetched -= prefetch
            entry.pins -= not prefetch
        self.evict(self.max_bytes)

    def touch(self, keys: Iterable[bytes]) -> None:
        for entry in reversed(self.present(keys)):
            self.use(entry)

    def set_stored(self, keys: Iterable[bytes], is_stored: bool) -> None:
        for entry in self.present(keys):
            entry.is_stored = is_stored

    def checkpoints_of(self, key: bytes) -> list[bytes]:
        return [
            key_of
            for key_of, entry in self.entries.items()
            if isinstance(entry.block, Checkpoint) and entry.block.block == key
        ]

    def remove(self, key: bytes) -> None:
        for removed in (key, *self.checkpoints_of(key)):
            self.entries.pop(removed, None)

    def drop_chain(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            entries = self.present((key, *self.checkpoints_of(key)))
            is_new = key in self.entries and not self.entries[key].is_stored
            is_busy = any(entry.pins or entry.prefetched for entry in entries)
            if is_new or is_busy or key in self.parents():
                return
            self.remove(key)

    def resize(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.evict(max_bytes)

    def release(self, n_bytes: int) -> None:
        self.evict(self.n_bytes - n_bytes, only_unneeded=True)

    def evict(self, down_to: int, *, only_unneeded: bool = False) -> None:
        while self.n_bytes > down_to:
            parents = self.parents()
            order = sorted(self.entries.items(), key=lambda item: item[1].used)
            free = [k for k, e in order if not e.pins and not e.prefetched and k not in parents]
            stored = [item for item in self.entries.items() if item[1].is_stored]
            deepest = sorted(stored, key=lambda item: (-start(item[1].block), item[0]))
            spare = [k for k, e in deepest if not e.prefetched]
            candidates = free or (not only_unneeded and spare)
            if not candidates:
                return
            del self.entries[candidates[0]]


def start(record: Record) -> float:
    """Return a block's first position; infinity for a checkpoint, which is evicted first."""
    return record.start if isinstance(record, Block) else math.inf


class User:
    """A user of a pool, which runs one operation at a time and unpins only its own entries."""

    def __init__(self, pool: BlockPool | SimplePool, universe: Universe) -> None:
        self.pool, self.universe = pool, universe
        self.pinned: dict[bool, list[KVBlock]] = {False: [], True: []}

    def do(self, op: Op) -> None:
        """Call one method of the pool."""
        name, number, size = op
        record = self.universe.records[number % len(self.universe.records)]
        pool, key, path = self.pool, record.key, self.universe.path(record)
        prefetch = name in ("prefetch", "end prefetch", "admit")
        if name.startswith("put"):
            pins = int(name == "put pinned")
            is_stored = not pins and (size % 3 == 0 or name == "put stored")
            entry = pool.put(KVBlock(record, None, size, is_stored, pins))
            self.pinned[False] += [entry] * pins
        elif name == "admit":
            if (admitted := pool.admit(KVBlock(record, None, size, True))) is not None:
                self.pinned[True].append(admitted)
        elif name == "use":
            pool.touch(path)
        elif name in ("pin", "prefetch"):
            self.pinned[prefetch] += pool.pin(path, prefetch=prefetch)
        elif name in ("unpin", "end prefetch"):
            pinned = self.pinned[prefetch]
            unpinned, self.pinned[prefetch] = pinned[:size], pinned[size:]
            pool.unpin(unpinned, prefetch=prefetch)
        elif name in ("stored", "not stored"):
            pool.set_stored(path, name == "stored")
        elif name == "drop":
            pool.remove(key)
        elif name == "drop chain":
            pool.drop_chain(path)
        elif name == "resize":
            pool.resize(40 + 5 * size)
        else:
            pool.release(size)


def check(pool: BlockPool, simple: SimplePool) -> None:
    assert pool._entries.keys() == simple.entries.keys()
    assert (pool.n_bytes, pool.held_bytes) == (simple.n_bytes, simple.held_bytes)


@settings(max_examples=150, deadline=None)
@given(
    ops=st.lists(
        st.tuples(st.sampled_from(OPS), st.integers(0, 40), st.integers(0, 40)), max_size=80
    ),
)
def test_pool_agrees_with_the_simple_model(ops: list[Op]) -> None:
    universe, pool, simple = Universe(24), BlockPool(200), SimplePool(200)
    users = User(pool, universe), User(simple, universe)
    for op in ops:
        for user in users:
            user.do(op)
        check(pool, simple)


def ops(seed: int, n: int) -> Iterator[Op]:
    rng = random.Random(seed)
    for _ in range(n):
        yield rng.choice(OPS), rng.randrange(120), rng.randrange(40)


@pytest.mark.slow
def test_pool_agrees_with_the_simple_model_over_a_million_operations() -> None:
    universe, pool, simple = Universe(60), BlockPool(600), SimplePool(600)
    users = User(pool, universe), User(simple, universe)
    for op in ops(7, 1_000_000):
        for user in users:
            user.do(op)
        check(pool, simple)


class Journal:
    """A pool's lock that records the calls of all users in the order of the lock."""

    def __init__(self) -> None:
        self.lock, self.depth = threading.RLock(), 0
        self.current = threading.local()
        self.entries: list[tuple[int, Op]] = []

    def __enter__(self) -> None:
        self.lock.acquire()
        self.depth += 1
        if self.depth == 1:
            self.entries.append(self.current.operation)

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        self.lock.release()


@contextmanager
def fast_thread_switches() -> Iterator[None]:
    """Switch between threads a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("n_each", [400, pytest.param(125_000, marks=pytest.mark.slow)])
def test_operations_of_eight_threads_equal_the_same_operations_in_series(n_each: int) -> None:
    universe, pool, simple = Universe(60), BlockPool(600), SimplePool(600)
    journal = pool.lock = Journal()  # type: ignore[assignment]
    errors: list[BaseException] = []

    def run(number: int) -> None:
        user = User(pool, universe)
        try:
            for op in ops(number, n_each):
                journal.current.operation = number, op
                user.do(op)
        except BaseException as error:
            errors.append(error)

    with fast_thread_switches():
        threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert len(journal.entries) == 8 * n_each
    users = [User(simple, universe) for _ in range(8)]
    for number, op in journal.entries:
        users[number].do(op)
    check(pool, simple)
    for key, entry in simple.entries.items():
        actual = pool._entries[key]
        assert (actual.used, actual.pins) == (entry.used, entry.pins)
    check_sums(pool)


def check_sums(pool: BlockPool) -> None:
    """Check that the counts are sums over the entries, and that evictable entries are queued."""
    entries = pool._entries.values()
    checkpoints = [e for e in entries if isinstance(e.block, Checkpoint)]
    by_block = pool._checkpoints.values()
    assert len(checkpoints) == sum(map(len, by_block))
    assert len(pool) - len(checkpoints) == sum(len(c["text"]) for c in pool._children.values())
    places = {key: is_last_resort for is_last_resort, _, key in pool._places}
    expected = {entry.block.key: pool._place_of(entry) for entry in entries}
    assert places == {key: place[0] for key, place in expected.items() if place is not None}
