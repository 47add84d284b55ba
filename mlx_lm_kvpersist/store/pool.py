"""The first tier: blocks in RAM under a byte budget, and the threads that read blocks into it.

The least recently used leaf is evicted first. Any thread may call the pool. Arrays are shared and
never changed. Adding or removing takes O(log n) comparisons.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from operator import attrgetter
from threading import RLock

from sortedcontainers import SortedList

from ..block import Block, Checkpoint, Record, Root
from ..errors import BlockCorrupt, Failures, StoreFormatError
from ..match import FEW, MAX_ALIKE, beginnings, nearest
from .records import RAM, KVBlock, ReadTier
from .writer import Threads

logger = logging.getLogger(__name__)

_MAX_GONE = 20_000
_FIRST = -(1 << 62)
_N_THREADS = 3


class BlockPool:
    """Blocks and checkpoints by key, counted in bytes."""

    name = RAM

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: dict[bytes, KVBlock] = {}
        self._children: dict[bytes, dict[str, list[Block]]] = {}
        """Each parent's blocks in two lists: one sorted by text and key, one by ids and key."""
        self._checkpoints: dict[bytes, dict[bytes, Checkpoint]] = {}
        self._places = SortedList()
        """Places of the entries that may be evicted, in order of eviction. After a use, a place is
        wrong until `_evict` corrects it."""
        self._n_uses = 0
        self._gone: dict[bytes, None] = {}
        self.lock = RLock()
        self.n_bytes = self.held_bytes = 0
        self.n_evicted = 0
        self.asked_again_tokens = 0

    def stats(self) -> dict[str, int]:
        with self.lock:
            keys = [key for of_block in self._checkpoints.values() for key in of_block]
            return {
                "blocks": len(self) - len(keys),
                "checkpoints": len(keys),
                "bytes": self.n_bytes,
                "checkpoint_bytes": sum(self._entries[key].n_bytes for key in keys),
                "held_bytes": self.held_bytes,
                "evicted": self.n_evicted,
                "asked_again_tokens": self.asked_again_tokens,
                "max_bytes": self.max_bytes,
            }

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> KVBlock | None:
        return self._entries.get(key)

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        """Return the blocks that continue `parent`; see `BlockSource.children`."""
        with self.lock:
            siblings = self._children.get(parent, {"text": []})
            if ahead is None or len(siblings["text"]) <= FEW:
                return siblings["text"][:limit]
            name = "text" if isinstance(ahead, str) else "packed_ids"
            nodes, by = siblings[name], attrgetter(name)

            def find(how: str, content: str | bytes) -> list[Block]:
                end = bisect_right(nodes, content, key=by)
                if how == ">":
                    return nodes[end : end + 1]
                first = bisect_left(nodes, by(nodes[end - 1]), key=by) if end else 0
                return nodes[max(first, end - MAX_ALIKE) : end]

            return nearest(ahead, find)

    def checkpoints(self, blocks: Iterable[bytes]) -> list[Checkpoint]:
        with self.lock:
            return [c for key in blocks for c in self._checkpoints.get(key, {}).values()]

    def put(self, entry: KVBlock) -> KVBlock:
        """Add an entry; return the pool's entry.

        If the pool has this key, its entry gets the pins. An entry that is larger than the pool
        is not added unless it must stay.
        """
        block = entry.block
        with self.lock:
            present = self._entries.get(block.key)
            if present is not None:
                self._hold([present], entry.pins, entry.prefetched)
                self._use(present)
                return present
            if entry.n_bytes > self.max_bytes and not entry.is_held:
                return entry
            self._entries[block.key] = entry
            self.n_bytes += entry.n_bytes
            self.held_bytes += entry.n_bytes * entry.is_held
            if isinstance(block, Checkpoint):
                self._checkpoints.setdefault(block.block, {})[block.key] = block
            else:
                if self._gone.pop(block.key, block) is None:
                    self.asked_again_tokens += block.n_tokens
                siblings = self._children.setdefault(block.parent, {"text": [], "packed_ids": []})
                for name, nodes in siblings.items():
                    insort(nodes, block, key=attrgetter(name, "key"))
                if len(nodes) == 1:
                    self._requeue(block.parent)
            self._use(entry)
            self._requeue(block.key)
            self._evict()
            return entry

    def admit(self, entry: KVBlock) -> KVBlock | None:
        """Add an entry, pinned for a prefetch; return the pool's entry, or None without room."""
        with self.lock:
            key = entry.block.key
            entry.prefetched += 1
            if key not in self._entries and self.held_bytes + entry.n_bytes > self.max_bytes:
                return None
            present = self.put(entry)
            if present is entry and self.n_bytes > self.max_bytes:
                self._remove(key)
                return None
            return present

    def unwritten(self, key: bytes) -> list[Block]:
        """Return the last blocks of the chain up to `key` that are only in RAM, in order."""
        blocks: list[Block] = []
        with self.lock:
            while (entry := self._entries.get(key)) is not None and not entry.is_stored:
                if not isinstance(entry.block, Block):
                    break
                blocks.append(entry.block)
                key = entry.block.parent
        return blocks[::-1]

    def pin(self, keys: Iterable[bytes], *, prefetch: bool = False) -> list[KVBlock]:
        """Pin the pool's entries for these keys until `unpin`; return the entries.

        A stored entry that only commits pin may still be evicted as a last resort.
        """
        with self.lock:
            pinned = [self._entries[key] for key in keys if key in self._entries]
            self._hold(pinned, not prefetch, prefetch)
            return pinned

    def unpin(self, entries: Iterable[KVBlock], *, prefetch: bool = False) -> None:
        """Unpin entries; they may have been removed before."""
        with self.lock:
            self._hold(entries, -(not prefetch), -prefetch)
            self._evict()

    def touch(self, keys: Iterable[bytes], *, proven: bool = False) -> None:
        """Mark a chain's blocks as used, the last block first. `proven`: a restore succeeded."""
        with self.lock:
            entries = [self._entries[key] for key in keys if key in self._entries]
            for entry in reversed(entries):
                self._use(entry)
                if proven:
                    entry.tier, entry.read_s = RAM, 0.0

    def set_stored(self, keys: Iterable[bytes], is_stored: bool = True) -> None:
        """Set `is_stored` of entries. A pinned entry that is not stored stays in RAM."""
        with self.lock:
            entries = [self._entries[key] for key in keys if key in self._entries]
            for entry in entries:
                was_held, entry.is_stored = entry.is_held, is_stored
                self.held_bytes += entry.n_bytes * (entry.is_held - was_held)
                self._requeue(entry.block.key)

    def remove(self, key: bytes) -> None:
        with self.lock:
            for record_key in (key, *self._checkpoints.get(key, ())):
                if record_key in self._entries:
                    self._remove(record_key)

    def is_spare(self, key: bytes) -> bool:
        """Say whether a record is only in RAM, and in no waiting commit."""
        entry = self._entries.get(key)
        return entry is not None and not entry.is_stored and not entry.pins

    def drop_unpinned(self, key: bytes) -> None:
        with self.lock:
            entry = self._entries.get(key)
            if entry is None or not entry.pins:
                self.remove(key)

    def drop_beginnings(self, block: Block) -> None:
        """Remove the spare blocks (`is_spare`) that consist of the first tokens of `block`.

        Such blocks remain after prompts that ended inside `block`.
        """
        with self.lock:
            for beginning in beginnings(block, self):
                if self.is_spare(beginning.key):
                    self.remove(beginning.key)

    def drop_chain(self, chain: Iterable[bytes]) -> int:
        """Remove a chain's blocks, the last first, until one must stay; return the freed bytes."""
        with self.lock:
            before = self.n_bytes
            for key in reversed(list(chain)):
                block, at_end = self._entries.get(key), self._checkpoints.get(key, {})
                entries = [entry for entry in (block, *map(self._entries.get, at_end)) if entry]
                if block is not None and isinstance(block.block, Block):
                    self.drop_beginnings(block.block)
                busy = any(entry.pins or entry.prefetched for entry in entries)
                if busy or (block and not block.is_stored) or key in self._children:
                    break
                self.remove(key)
            return before - self.n_bytes

    def resize(self, max_bytes: int) -> int:
        with self.lock:
            self.max_bytes = max_bytes
            return self._evict()

    def release(self, n_bytes: int) -> int:
        """Evict `n_bytes`, but no last resorts (see `_place_of`); return the evicted bytes."""
        with self.lock:
            return self._evict(self.n_bytes - n_bytes, last_resorts=False)

    def clear(self) -> None:
        with self.lock:
            for by_key in (self._entries, self._children, self._checkpoints):
                by_key.clear()
            self._places.clear()
            self._gone.clear()
            self.n_bytes = self.held_bytes = 0

    def _hold(self, entries: Iterable[KVBlock], pins: int, prefetched: int) -> None:
        for entry in entries:
            was_held = entry.is_held
            entry.pins += pins
            entry.prefetched += prefetched
            if self._entries.get(entry.block.key) is entry:
                self.held_bytes += entry.n_bytes * (entry.is_held - was_held)
                self._requeue(entry.block.key)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._move(entry, None)
        block = entry.block
        self.n_bytes -= entry.n_bytes
        self.held_bytes -= entry.n_bytes * entry.is_held
        if isinstance(block, Checkpoint):
            of_block = self._checkpoints[block.block]
            del of_block[key]
            if not of_block:
                del self._checkpoints[block.block]
        else:
            siblings = self._children[block.parent]
            for name, nodes in siblings.items():
                order = attrgetter(name, "key")
                del nodes[bisect_left(nodes, order(block), key=order)]
            if not siblings["text"]:
                del self._children[block.parent]
                self._requeue(block.parent)

    # The order of eviction.

    def _use(self, entry: KVBlock) -> None:
        self._n_uses += 1
        entry.used = self._n_uses

    def _place_of(self, entry: KVBlock) -> tuple[bool, int, bytes] | None:
        """Return an entry's place in the order of eviction; None if it must stay.

        First come entries that are neither pinned nor prefetched and have no children, the least
        recently used first. Then come last resorts: other entries that a tier below RAM has and
        that are not prefetched. Checkpoints are evicted first, then the blocks farthest from their
        root.
        """
        key = entry.block.key
        # A block is useless without its parent, so a block with children stays, or goes last.
        if not entry.pins and not entry.prefetched and key not in self._children:
            return False, entry.used, key
        # Commits may pin whole conversations. Stored records may go: they can be read again.
        if not entry.is_stored or entry.prefetched:
            return None
        return True, -entry.block.start if isinstance(entry.block, Block) else _FIRST, key

    def _requeue(self, key: bytes) -> None:
        if (entry := self._entries.get(key)) is not None:
            self._move(entry, self._place_of(entry))

    def _move(self, entry: KVBlock, place: tuple[bool, int, bytes] | None) -> None:
        if place != entry.place:
            if entry.place is not None:
                self._places.remove(entry.place)
            if place is not None:
                self._places.add(place)
            entry.place = place

    def _evict(self, down_to: int | None = None, *, last_resorts: bool = True) -> int:
        """Evict until `down_to` bytes (by default the budget) are left; return the freed bytes."""
        before, most = self.n_bytes, self.max_bytes if down_to is None else down_to
        while self.n_bytes > most and self._places:
            place: tuple[bool, int, bytes] = self._places[0]
            is_last_resort, _, key = place
            if is_last_resort and not last_resorts:
                break
            if place != self._place_of(self._entries[key]):
                self._requeue(key)
                continue
            self._remove(key)
            self.n_evicted += 1
            self._gone[key] = None
            if len(self._gone) > _MAX_GONE:
                del self._gone[next(iter(self._gone))]
        return before - self.n_bytes


class Prefetch:
    """Entries prefetched for a prompt. They stay in RAM until `release`."""

    def __init__(self, pool: BlockPool, released: Callable[[Prefetch], None]) -> None:
        self.sizes: dict[bytes, int] = {}
        """Sizes in bytes of records read in advance, by key."""
        self.stopped = False
        self.reading: Future[None] = Future()
        self._pool = pool
        self._released = released
        self._is_released = False
        self._entries: list[KVBlock] = []

    @property
    def finished(self) -> bool:
        return self.reading.done()

    def stop(self) -> None:
        """Stop after the file that is being read; entries in RAM stay."""
        self.stopped = True

    def release(self) -> None:
        """Stop the prefetch, and unpin all its entries, so that they can be evicted. Any thread."""
        with self._pool.lock:
            self.stopped = self._is_released = True
            entries, self._entries = self._entries, []
        self._pool.unpin(entries, prefetch=True)
        self._released(self)

    def add(self, entries: Iterable[KVBlock]) -> None:
        """Add pinned entries; `release` will unpin them."""
        with self._pool.lock:
            if self._is_released:
                self._pool.unpin(entries, prefetch=True)
            else:
                self._entries += entries


class Reader:
    """Reads from tiers, in their order, into a pool. Any thread.

    `lose_from` gets tiers, a record, and why the record is bad (None: the tiers lack it).
    """

    def __init__(
        self,
        pool: BlockPool,
        tiers: Sequence[ReadTier],
        lose_from: Callable[[Sequence[ReadTier], Record, str | None], None],
        failures: Failures | None = None,
    ) -> None:
        self.pool = pool
        self._tiers, self._lose_from = tiers, lose_from
        self._failures = failures or Failures(logger)
        self._workers = Threads(_N_THREADS, "kvpersist-reader")
        self._prefetcher = Threads(1, "kvpersist-prefetch")
        self._prefetches: set[Prefetch] = set()

    def load(self, block: Record, root: Root) -> KVBlock | None:
        """Return a block with evaluated arrays; None if no tier can return it now."""
        entry = self.pool.get(block.key)
        if entry is None and (entry := self.read(block, root)) is not None:
            entry = self.pool.put(entry)
        return entry

    def load_all(self, wanted: Sequence[Record], root: Root) -> Iterator[KVBlock | None]:
        """Yield what `load` returns for each record, in order. Records are read in parallel."""
        tasks = (partial(self.load, block, root) for block in wanted)
        if sum(self.pool.get(block.key) is None for block in wanted) < 2:
            yield from (task() for task in tasks)
            return
        coming = deque(map(self._workers.submit, islice(tasks, _N_THREADS + 1)))
        while coming:
            yield coming.popleft().result()
            coming.extend(map(self._workers.submit, islice(tasks, 1)))

    def prefetch(self, wanted: Sequence[tuple[Record, int]], root: Root) -> Prefetch:
        """Start to read the records (with sizes) that the pool lacks, up to half of its budget."""
        prefetch = Prefetch(self.pool, self._prefetches.discard)
        self._prefetches.add(prefetch)
        present = {e.block.key: e for e in self.pool.pin((b.key for b, _ in wanted), prefetch=True)}
        prefetch.add(present.values())
        left = [item for item in wanted if item[0].key not in present]

        def run() -> None:
            try:
                self._read_ahead(prefetch, left, root)
            except Exception:
                logger.exception(
                    "kvpersist: prefetching failed; the rest is read when it is needed"
                )

        prefetch.reading = self._prefetcher.submit(run)
        return prefetch

    def release_prefetched(self) -> None:
        for prefetch in list(self._prefetches):
            prefetch.release()

    def close(self, timeout_s: float) -> bool:
        """Stop reading; return False if the current read takes longer than `timeout_s`."""
        self.release_prefetched()
        return self._prefetcher.close(timeout_s) and self._workers.close(timeout_s)

    def _read_ahead(
        self, prefetch: Prefetch, wanted: Sequence[tuple[Record, int]], root: Root
    ) -> None:
        for block, n_bytes in wanted:
            if prefetch.stopped:
                return
            come = self.pool.pin([block.key], prefetch=True)  # another prompt may have read it
            if not come:
                sizes = {
                    key: n for running in list(self._prefetches) for key, n in running.sizes.items()
                }
                if n_bytes + sum(sizes.values()) > self.pool.max_bytes // 2:
                    return
                read = self.read(block, root)
                admitted = self.pool.admit(read) if read is not None else None
                if admitted is None:
                    return
                come = [admitted]
            prefetch.sizes[block.key] = come[0].n_bytes
            prefetch.add(come)

    def read(self, block: Record, root: Root) -> KVBlock | None:
        """Read a record from the first tier that can return it now."""
        for tier in self._tiers:
            started = time.perf_counter()
            try:
                arrays = tier.load(block, root)
            except FileNotFoundError:
                if block.key in tier:
                    self._failures.add("%s is no longer on %s", block, tier.name)
                    self._lose_from([tier], block, None)
            except BlockCorrupt as error:
                self._lose_from([tier], block, str(error))
            except (OSError, MemoryError, StoreFormatError) as error:
                # The file may be good: the next read, or a newer version, may succeed.
                self._failures.add("%s cannot be read now: %s", block, error or "no memory")
            else:
                entry = KVBlock.of(block, arrays)
                entry.is_stored, entry.tier = True, tier.name
                entry.read_s = time.perf_counter() - started
                return entry
        return None
