"""The first tier: blocks in RAM under a byte budget; the least recently used are evicted first.

Of blocks of tokens only leaves are evicted, unless all are pinned. Any thread may call it. Arrays
are shared and never changed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from threading import RLock
from typing import Any

from ..block import Block, Checkpoint, Record
from ..match.tree import FEW, MAX_ALIKE, nearest
from .tier import RAM


@dataclass
class KVBlock:
    """A block or a checkpoint in RAM: its record, and its KV arrays (opaque to the pool).

    `is_stored`: a tier below has it, too. `pins` counts the commits that wait to be written with
    it, `prefetched` the prompts that it was prefetched for. `tier` is where it was read from, and
    `read_s` how long that took, until a restore with it has been completed: only then is it as
    good as one that was computed here.
    """

    block: Record
    arrays: Any
    n_bytes: int
    is_stored: bool = False
    pins: int = 0
    prefetched: int = 0
    tier: str = RAM
    read_s: float = 0.0

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

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._children: dict[bytes, dict[str, list[Block]]] = {}
        """The blocks that continue a block, by its key: sorted by text, and by packed ids."""
        self._checkpoints: dict[bytes, dict[bytes, Checkpoint]] = {}
        self._lock = RLock()
        self.n_bytes = 0
        """Bytes of all entries."""
        self.n_evicted = 0
        """Blocks and checkpoints that went to make room."""

    def stats(self) -> dict[str, int]:
        """Return what is here, in numbers and bytes, and what went to make room."""
        with self._lock:
            sizes = [self._entries[key].n_bytes for at in self._checkpoints.values() for key in at]
        return {
            "blocks": len(self) - len(sizes),
            "checkpoints": len(sizes),
            "bytes": self.n_bytes,
            "checkpoint_bytes": sum(sizes),
            "evicted": self.n_evicted,
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
        """Return the checkpoints at the ends of these blocks."""
        with self._lock:
            return [c for key in blocks for c in self._checkpoints.get(key, {}).values()]

    def put(self, entry: KVBlock) -> KVBlock:
        """Add an entry, or keep the one there: equal keys mean equal content. Return what is here.

        The pins of both are added up.
        """
        block = entry.block
        with self._lock:
            present = self._entries.get(block.key)
            if present is not None:
                present.pins += entry.pins
                present.prefetched += entry.prefetched
                self._entries.move_to_end(block.key)
                return present
            self._entries[block.key] = entry
            self.n_bytes += entry.n_bytes
            if isinstance(block, Checkpoint):
                self._checkpoints.setdefault(block.block, {})[block.key] = block
            else:
                siblings = self._children.setdefault(block.parent, {"text": [], "packed_ids": []})
                for name, nodes in siblings.items():
                    insort(nodes, block, key=attrgetter(name))
            if self.n_bytes > self.max_bytes:
                self._evict()
            return entry

    def admit(self, entry: KVBlock) -> KVBlock | None:
        """Add an entry if there is room, and pin it for a prefetch.

        Return what is here under its key, which may be what was there before; None where pinned
        entries leave no room for it.
        """
        with self._lock:
            entry.prefetched += 1
            present = self.put(entry)
            if present is entry and self.n_bytes > self.max_bytes:
                self._remove(entry.block.key)
                return None
            return present

    def pin(self, keys: Iterable[bytes], *, prefetch: bool = False) -> list[KVBlock]:
        """Keep those of these blocks and checkpoints that are here, until `unpin`; return them.

        What a commit pinned and a tier below has may still be evicted, when nothing else is left.
        """
        with self._lock:
            pinned = [self._entries[key] for key in keys if key in self._entries]
            for entry in pinned:
                entry.prefetched += prefetch
                entry.pins += not prefetch
            return pinned

    def unpin(self, entries: Iterable[KVBlock], *, prefetch: bool = False) -> None:
        """Let go of what was pinned; it may have been dropped meanwhile."""
        with self._lock:
            for entry in entries:
                entry.prefetched -= prefetch
                entry.pins -= not prefetch
            self._evict()

    def touch(self, keys: Iterable[bytes], *, proven: bool = False) -> None:
        """Mark a chain, given from its first block on, as used: its leaf stays evictable first.

        proven: a restore with it has been completed, so what was read of it is right.
        """
        with self._lock:
            for key in reversed(list(keys)):
                if (entry := self._entries.get(key)) is not None:
                    self._entries.move_to_end(key)
                    if proven:
                        entry.tier, entry.read_s = RAM, 0.0

    def not_stored(self, keys: Iterable[bytes]) -> None:
        """Mark what no tier below has any longer: while a commit waits for it, it stays."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.is_stored = False

    def drop(self, key: bytes) -> None:
        """Remove a checkpoint, or a block with its checkpoints."""
        with self._lock:
            for one in (key, *self._checkpoints.get(key, ())):
                if one in self._entries:
                    self._remove(one)

    def drop_unpinned(self, key: bytes, *, written: bool = True) -> None:
        """Do what `drop` does, unless a commit waits to be written with this block or checkpoint.

        `written` says whether one that a tier below has is dropped, too.
        """
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.pins and (written or not entry.is_stored):
                self.drop(key)

    def release(self, chain: Iterable[bytes]) -> int:
        """Drop what is on disk, too, of a chain given from its first block on; return the bytes.

        Blocks that others in RAM continue stay, and so does what is about to be used.
        """
        with self._lock:
            before = self.n_bytes
            for key in reversed(list(chain)):
                block, at_end = self._entries.get(key), self._checkpoints.get(key, {})
                entries = [entry for entry in (block, *map(self._entries.get, at_end)) if entry]
                busy = any(not e.is_stored or e.pins or e.prefetched for e in entries)
                if busy or key in self._children:
                    break
                self.drop(key)
            return before - self.n_bytes

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._children.clear()
            self._checkpoints.clear()
            self.n_bytes = 0

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        block = entry.block
        self.n_bytes -= entry.n_bytes
        if isinstance(block, Checkpoint):
            of_block = self._checkpoints[block.block]
            del of_block[key]
            if not of_block:
                del self._checkpoints[block.block]
        else:
            siblings = self._children[block.parent]
            for name, nodes in siblings.items():
                place = bisect_left(nodes, getattr(block, name), key=attrgetter(name))
                while nodes[place].key != key:
                    place += 1
                del nodes[place]
            if not siblings["text"]:
                del self._children[block.parent]

    def _evict(self) -> None:
        while self.n_bytes > self.max_bytes:
            # Without its parent a block is of no use, so parents stay as long as they have any.
            # Nothing needs a checkpoint, and its key is no parent's.
            unneeded = (
                key
                for key, entry in self._entries.items()
                if not entry.pins and not entry.prefetched and key not in self._children
            )
            # Turns that wait may need whole conversations. What is on disk can be read again.
            stored = (k for k, e in self._entries.items() if e.is_stored and not e.prefetched)
            victim = next(unneeded, None) or next(stored, None)
            if victim is None:
                return
            is_gone = not self._entries[victim].is_stored
            self._evict_one(victim)
            # Checkpoints of a block that is nowhere else would be of no use.
            for key in list(self._checkpoints.get(victim, ())) if is_gone else ():
                if not self._entries[key].pins and not self._entries[key].prefetched:
                    self._evict_one(key)

    def _evict_one(self, key: bytes) -> None:
        self._remove(key)
        self.n_evicted += 1
