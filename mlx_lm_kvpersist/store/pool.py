"""The first tier: blocks in RAM under a byte budget; those of least worth are evicted first.

Of blocks of tokens only leaves are evicted, unless all are pinned. Any thread may call it. Arrays
are shared and never changed. Every change takes O(log n).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from threading import RLock
from typing import Any

from sortedcontainers import SortedList

from ..block import Block, Checkpoint, Record
from ..errors import PoolFull
from ..match.tree import FEW, MAX_ALIKE, nearest
from ..units import show_bytes
from .tier import RAM
from .worth import LRU, VALUE, Habit

_MAX_GONE = 20_000
"""Evicted blocks, and roots, that are remembered."""


@dataclass
class KVBlock:
    """A block or a checkpoint in RAM: its record, and its KV arrays (opaque to the pool).

    `is_stored`: a tier below has it, too. `pins` counts the commits that wait to be written with
    it, `prefetched` the prompts that it was prefetched for. `tier` is where it was read from, and
    `read_s` how long that took, until a restore with it has been completed: only then is it as
    good as one that was computed here. Entries with a low `rank` are evicted first, those with a
    low `used` first of equal ones; `order` and `item` say where it waits for that. `worth` is what
    plugins say.
    """

    block: Record
    arrays: Any
    n_bytes: int
    is_stored: bool = False
    pins: int = 0
    prefetched: int = 0
    tier: str = RAM
    read_s: float = 0.0
    rank: float = 0.0
    used: int = 0
    order: SortedList | None = None
    item: tuple[float, int, bytes] = (0.0, 0, b"")
    worth: float = 1.0
    habit: Habit = field(default_factory=Habit)

    @property
    def is_held(self) -> bool:
        """Whether it must stay: a prompt waits for it, or a commit has no other copy of it."""
        return self.prefetched > 0 or (self.pins > 0 and not self.is_stored)

    @classmethod
    def of(cls, block: Record, arrays: Any) -> KVBlock:
        """Return the entry of a block. Ids and text count: there may be no arrays."""
        n_bytes = sum(array.nbytes for array in arrays.values())
        if isinstance(block, Block):
            n_bytes += len(block.packed_ids) + len(block.text)
        return cls(block, arrays, n_bytes)


class BlockPool:
    """Blocks and checkpoints by key, counted in bytes."""

    name = RAM

    def __init__(self, max_bytes: int, evict: str = VALUE) -> None:
        self.max_bytes = max_bytes
        self._by_use = evict == LRU
        self._entries: dict[bytes, KVBlock] = {}
        self._children: dict[bytes, dict[str, list[Block]]] = {}
        """The blocks that continue a block, by its key: sorted by text, and by packed ids; of equal
        ones by key."""
        self._checkpoints: dict[bytes, dict[bytes, Checkpoint]] = {}
        self._unneeded, self._spare = SortedList(), SortedList()
        """What may be evicted, and what may be when that is not enough, because a tier below has
        it, too: rank, last use and key of each, as they were when it came here."""
        self._n_uses = 0
        self._clock = 0.0
        self._roots: dict[bytes, Habit] = {}
        self._gone: dict[bytes, None] = {}
        """Keys of blocks that were evicted lately."""
        self._lock = RLock()
        self.n_bytes = self.held_bytes = self.checkpoint_bytes = self.n_checkpoints = 0
        """Bytes of all entries, of those that must stay for now, and of checkpoints."""
        self.n_evicted = 0
        """Blocks and checkpoints that went to make room."""
        self.asked_again_tokens = 0
        """Tokens of evicted blocks that came back."""

    def stats(self) -> dict[str, int]:
        with self._lock:
            return {
                "blocks": len(self) - self.n_checkpoints,
                "checkpoints": self.n_checkpoints,
                "bytes": self.n_bytes,
                "checkpoint_bytes": self.checkpoint_bytes,
                "held_bytes": self.held_bytes,
                "evicted": self.n_evicted,
                "asked_again_tokens": self.asked_again_tokens,
                "max_bytes": self.max_bytes,
            }

    def __len__(self) -> int:
        """Return the number of blocks and checkpoints."""
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> KVBlock | None:
        return self._entries.get(key)

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        """Return the blocks that continue `parent`; see `BlockSource.children`."""
        with self._lock:
            siblings = self._children.get(parent, {"text": []})
            if ahead is None or len(siblings["text"]) <= FEW:
                return siblings["text"][:limit]
            name = "text" if isinstance(ahead, str) else "packed_ids"
            nodes, by = siblings[name], attrgetter(name)

            def find(how: str, content: str | bytes) -> list[Block]:
                end = bisect_right(nodes, content, key=by)
                if how == ">":
                    return nodes[end : end + 1]
                if how == "<=":
                    return nodes[max(end - 1, 0) : end]
                return nodes[max(bisect_left(nodes, content, key=by), end - MAX_ALIKE) : end]

            return nearest(ahead, find)

    def checkpoints(self, blocks: Iterable[bytes]) -> list[Checkpoint]:
        with self._lock:
            return [c for key in blocks for c in self._checkpoints.get(key, {}).values()]

    def put(self, entry: KVBlock) -> KVBlock:
        """Add an entry, or keep the one there: equal keys mean equal content. Return what is here.

        The pins of both are added up. One that is larger than the pool, and need not stay, is not
        added.
        """
        block = entry.block
        with self._lock:
            present = self._entries.get(block.key)
            if present is not None:
                self._hold([present], entry.pins, entry.prefetched)
                self._use(present)
                return present
            if entry.n_bytes > self.max_bytes and not entry.is_held:
                return entry
            self._entries[block.key] = entry
            self._count(entry, 1)
            if isinstance(block, Checkpoint):
                entry.habit = Habit(self.share_of(block.block))
                self._checkpoints.setdefault(block.block, {})[block.key] = block
            else:
                if (above := self._habit_above(block)) is not None:
                    entry.habit = above.of_next()
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

    def admit(self, entry: KVBlock) -> KVBlock:
        """Add an entry, and pin it for a prefetch.

        Return what is here under its key, which may be what was there before. Raises PoolFull where
        entries that must stay leave no room for it.
        """
        with self._lock:
            key, free = entry.block.key, self.max_bytes - self.n_bytes
            reclaimable = self.n_bytes - self.held_bytes
            entry.prefetched += 1
            if key in self._entries or entry.n_bytes <= free + reclaimable:
                present = self.put(entry)
                if present is not entry or self.n_bytes <= self.max_bytes:
                    return present
                self._remove(key)
            raise PoolFull(
                f"{entry.block} needs {show_bytes(entry.n_bytes)} of RAM: "
                f"{show_bytes(max(0, free))} of {show_bytes(self.max_bytes)} are free and "
                f"{show_bytes(reclaimable)} reclaimable; give a larger --kvpersist-ram"
            )

    def pin(self, keys: Iterable[bytes], *, prefetch: bool = False) -> list[KVBlock]:
        """Keep those of these blocks and checkpoints that are here, until `unpin`; return them.

        What a commit pinned and a tier below has may still be evicted, when nothing else is left.
        """
        with self._lock:
            pinned = [self._entries[key] for key in keys if key in self._entries]
            self._hold(pinned, not prefetch, prefetch)
            return pinned

    def unpin(self, entries: Iterable[KVBlock], *, prefetch: bool = False) -> None:
        """Let go of what was pinned; it may have been dropped meanwhile."""
        with self._lock:
            self._hold(entries, -(not prefetch), -prefetch)
            self._evict()

    def touch(self, keys: Iterable[bytes], *, proven: bool = False) -> None:
        """Mark a chain, given from its first block on, as used: its leaf stays evictable first.

        proven: a restore with it has been completed, so what was read of it is right.
        """
        with self._lock:
            entries = [self._entries[key] for key in keys if key in self._entries]
            if proven:
                blocks = [entry.block.key for entry in entries if isinstance(entry.block, Block)]
                is_branch = bool(blocks) and blocks[-1] in self._children
                for entry in entries:
                    entry.tier, entry.read_s = RAM, 0.0
                    entry.habit.use(self._habit_above(entry.block), is_branch=is_branch)
            for entry in reversed(entries):
                self._use(entry)

    def share_of(self, key: bytes) -> float:
        """Return the chance that a block is used again; 1 for one that is not here."""
        entry = self._entries.get(key)
        return 1.0 if entry is None else entry.habit.share

    def set_worth(self, key: bytes, worth: float) -> None:
        """Multiply what an entry is worth. This is no use of it."""
        with self._lock:
            if (entry := self._entries.get(key)) is not None:
                if not self._by_use:
                    entry.rank += (worth - entry.worth) * entry.habit.expected_hits
                entry.worth = worth
                self._requeue(key, anew=True)

    def set_stored(self, keys: Iterable[bytes], is_stored: bool = True) -> None:
        """Say of entries whether a tier below has them; without, they stay for waiting commits."""
        with self._lock:
            entries = [self._entries[key] for key in keys if key in self._entries]
            for entry in entries:
                self.held_bytes -= entry.n_bytes * entry.is_held
                entry.is_stored = is_stored
                self.held_bytes += entry.n_bytes * entry.is_held
                self._requeue(entry.block.key)

    def drop(self, key: bytes) -> None:
        """Remove a checkpoint, or a block with its checkpoints."""
        with self._lock:
            for one in (key, *self._checkpoints.get(key, ())):
                if one in self._entries:
                    self._remove(one)

    def drop_unpinned(self, key: bytes, *, written: bool = True) -> None:
        """Do what `drop` does, unless a commit waits to be written with this block or checkpoint.

        `written` says whether one that a tier below has is dropped, too. Of a block that is not
        here the checkpoints may be.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or (not entry.pins and (written or not entry.is_stored)):
                self.drop(key)

    def drop_chain(self, chain: Iterable[bytes]) -> int:
        """Drop the blocks on disk of a chain, given from its first on; return the bytes.

        Their checkpoints go with them. Blocks that others in RAM continue stay, and so does what
        is about to be used.
        """
        with self._lock:
            before = self.n_bytes
            for key in reversed(list(chain)):
                block, at_end = self._entries.get(key), self._checkpoints.get(key, {})
                entries = [entry for entry in (block, *map(self._entries.get, at_end)) if entry]
                busy = any(entry.pins or entry.prefetched for entry in entries)
                if busy or (block and not block.is_stored) or key in self._children:
                    break
                self.drop(key)
            return before - self.n_bytes

    def resize(self, max_bytes: int) -> int:
        """Change the budget and evict what is over it; return the bytes that went. Any thread.

        What must stay is evicted later, when it is let go of.
        """
        with self._lock:
            self.max_bytes = max_bytes
            return self._evict()

    def release(self, n_bytes: int) -> int:
        """Evict at least `n_bytes`, or all that may go; return the bytes that went. Any thread.

        What prompts or commits wait for stays.
        """
        with self._lock:
            return self._evict(self._unneeded, down_to=self.n_bytes - n_bytes)

    def clear(self) -> None:
        with self._lock:
            for by_key in (self._entries, self._children, self._checkpoints):
                by_key.clear()
            self._unneeded.clear()
            self._spare.clear()
            self._gone.clear()
            self._roots.clear()
            self.n_bytes = self.held_bytes = self.checkpoint_bytes = self.n_checkpoints = 0

    def _count(self, entry: KVBlock, n: int) -> None:
        """Count an entry that comes (1) or goes (-1)."""
        is_checkpoint = isinstance(entry.block, Checkpoint)
        self.n_checkpoints += n * is_checkpoint
        self.n_bytes += n * entry.n_bytes
        self.checkpoint_bytes += n * entry.n_bytes * is_checkpoint
        self.held_bytes += n * entry.n_bytes * entry.is_held

    def _hold(self, entries: Iterable[KVBlock], pins: int, prefetched: int) -> None:
        """Add to the pins of entries, of which some may not be here any longer."""
        for entry in entries:
            was_held, was_pinned = entry.is_held, entry.pins > 0
            entry.pins += pins
            entry.prefetched += prefetched
            key = entry.block.key
            if (was_held, was_pinned) != (entry.is_held, entry.pins > 0) and (
                self._entries.get(key) is entry
            ):
                self.held_bytes += entry.n_bytes * (entry.is_held - was_held)
                self._requeue(key)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._unqueue(entry)
        block = entry.block
        self._count(entry, -1)
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

    # The order in which entries go.

    def _use(self, entry: KVBlock) -> None:
        """Raise the rank of an entry that is used. Its item follows when it is the first."""
        self._n_uses += 1
        entry.used = self._n_uses
        if not self._by_use:
            entry.rank = self._clock + entry.worth * entry.habit.expected_hits

    def _habit_above(self, block: Record) -> Habit | None:
        """Return the habit of a block's parent or root; None if it is not known."""
        if isinstance(block, Checkpoint):
            return None
        if block.start == 0:
            if len(self._roots) > _MAX_GONE:
                self._roots.clear()
            return self._roots.setdefault(block.parent, Habit())
        parent = self._entries.get(block.parent)
        return parent.habit if parent else None

    def _order_of(self, entry: KVBlock) -> SortedList | None:
        """Return the order in which an entry waits to go; None if it must stay."""
        # Without its parent a block is of no use, so parents stay as long as they have any. Nothing
        # needs a checkpoint, and its key is no parent's.
        if not entry.pins and not entry.prefetched and entry.block.key not in self._children:
            return self._unneeded
        # Turns that wait may need whole conversations. What is on disk can be read again.
        return self._spare if entry.is_stored and not entry.prefetched else None

    def _requeue(self, key: bytes, *, anew: bool = False) -> None:
        """Let an entry, if it is here, wait in the order that it belongs to now; by its rank now.

        With `anew` also if it waits there already.
        """
        if (entry := self._entries.get(key)) is None:
            return
        if (order := self._order_of(entry)) is not entry.order or anew:
            self._unqueue(entry)
            entry.order, entry.item = order, (entry.rank, entry.used, key)
            if order is not None:
                order.add(entry.item)

    def _unqueue(self, entry: KVBlock) -> None:
        if entry.order is not None:
            entry.order.remove(entry.item)
            entry.order = None

    def _next(self, order: SortedList) -> bytes | None:
        """Return the key of the lowest rank."""
        while order:
            key: bytes = order[0][-1]
            if self._entries[key].used == order[0][1]:
                return key
            self._requeue(key, anew=True)  # its rank is another by now
        return None

    def _evict(self, *orders: SortedList, down_to: int | None = None) -> int:
        """Evict until `down_to` bytes, by default the budget, are left; return the bytes."""
        orders, before = orders or (self._unneeded, self._spare), self.n_bytes
        while self.n_bytes > (self.max_bytes if down_to is None else down_to):
            key = next((key for order in orders if (key := self._next(order)) is not None), None)
            if key is None:
                break
            is_gone = not self._entries[key].is_stored
            self._clock = max(self._clock, self._entries[key].rank)
            self._evict_one(key)
            # Checkpoints of a block that is nowhere else would be of no use.
            for one in list(self._checkpoints.get(key, ())) if is_gone else ():
                if not self._entries[one].pins and not self._entries[one].prefetched:
                    self._evict_one(one)
        return before - self.n_bytes

    def _evict_one(self, key: bytes) -> None:
        self._remove(key)
        self.n_evicted += 1
        self._gone[key] = None
        if len(self._gone) > _MAX_GONE:
            del self._gone[next(iter(self._gone))]
