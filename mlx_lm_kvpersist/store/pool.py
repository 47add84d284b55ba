"""The hot tier: blocks and parts in RAM under a byte budget, least recently used ones going first.

Of blocks only leaves go, unless all are needed. Any thread may call it. Entries are
immutable; what they hold is shared, never changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ..match.siblings import Siblings
from ..match.tree import Node
from .part import Part


@dataclass
class KVBlock:
    """A block in RAM: what the tree knows of it, and its KV arrays (opaque to the pool).

    `pins` counts the turns that wait to be written with it, `holds` the prompts that it was read
    ahead for. `read_s` is how long it took to read from disk, until a restore with it
    has been completed: only then is it as good as one that was computed here.
    """

    node: Node
    arrays: Any
    n_bytes: int
    on_disk: bool = False
    pins: int = 0
    holds: int = 0
    read_s: float | None = None

    @property
    def key(self) -> bytes:
        return self.node.key


@dataclass
class KVPart:
    """A part in RAM, like a block's entry. Its block may be elsewhere."""

    part: Part
    arrays: Any
    n_bytes: int
    on_disk: bool = False
    pins: int = 0
    holds: int = 0
    read_s: float | None = None

    @property
    def key(self) -> bytes:
        return self.part.key


class BlockPool:
    """Blocks and parts by key, counted in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, KVBlock | KVPart] = OrderedDict()
        self._children: dict[bytes, Siblings] = {}
        self._parts: dict[bytes, dict[bytes, Part]] = {}
        self._n_bytes = 0
        self._n_parts = 0
        self._n_part_bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of blocks and parts."""
        return len(self._entries)

    @property
    def n_bytes(self) -> int:
        """Bytes of all blocks and parts."""
        return self._n_bytes

    @property
    def n_parts(self) -> int:
        return self._n_parts

    @property
    def n_part_bytes(self) -> int:
        return self._n_part_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> KVBlock | KVPart | None:
        return self._entries.get(key)

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Node]:
        """Return the blocks that continue `parent`; see `NodeSource.children`."""
        with self._lock:
            siblings = self._children.get(parent)
            return [] if siblings is None else siblings.some(ahead, limit)

    def parts(self, blocks: Iterable[bytes]) -> list[Part]:
        """Return the parts of these blocks."""
        with self._lock:
            return [part for block in blocks for part in self._parts.get(block, {}).values()]

    def put(self, entry: KVBlock | KVPart) -> None:
        """Add a block or part, or keep the one there: equal keys mean equal content."""
        with self._lock:
            key = entry.key
            present = self._entries.get(key)
            if present is not None:
                present.pins += entry.pins
                self._entries.move_to_end(key)
                return
            self._add(entry)
            self._evict()

    def admit(self, entry: KVBlock | KVPart) -> KVBlock | KVPart | None:
        """Add a block or part if there is room, and hold it until `let_go`.

        Return what is here under its key, which may be what was there before; None where what
        others need leaves no room for it.
        """
        with self._lock:
            present = self._entries.get(entry.key)
            if present is None:
                present = entry
                self._add(entry)
            present.holds += 1
            self._evict()
            if present is entry and self._n_bytes > self.max_bytes:
                self._remove(entry.key)
                return None
            return present

    def hold(self, keys: Iterable[bytes]) -> list[KVBlock | KVPart]:
        """Hold those of these blocks and parts that are here, until `let_go`; return them."""
        with self._lock:
            held = [self._entries[key] for key in keys if key in self._entries]
            for entry in held:
                entry.holds += 1
            return held

    def let_go(self, entries: Iterable[KVBlock | KVPart]) -> None:
        """Let go of what was held; it may have been dropped meanwhile."""
        with self._lock:
            for entry in entries:
                entry.holds -= 1
            self._evict()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark a chain, given from its first block on, as used: its leaf stays evictable first."""
        with self._lock:
            for key in reversed(list(keys)):
                if key in self._entries:
                    self._entries.move_to_end(key)

    def trust(self, keys: Iterable[bytes]) -> None:
        """Mark what was read from disk as proven: a restore with it has been completed."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.read_s = None

    def pin(self, keys: Iterable[bytes]) -> list[bytes]:
        """Pin those of these blocks and parts that are here; return which."""
        with self._lock:
            pinned = [key for key in keys if key in self._entries]
            for key in pinned:
                self._entries[key].pins += 1
            return pinned

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Unpin what has been written, or never will be."""
        with self._lock:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and entry.pins:
                    entry.pins -= 1
            self._evict()

    def drop(self, key: bytes) -> None:
        """Remove a part, or a block with its parts."""
        with self._lock:
            if key in self._entries:
                self._remove(key)
            for part in list(self._parts.get(key, ())):
                self._remove(part)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._children.clear()
            self._parts.clear()
            self._n_bytes = self._n_parts = self._n_part_bytes = 0

    def _add(self, entry: KVBlock | KVPart) -> None:
        self._entries[entry.key] = entry
        self._n_bytes += entry.n_bytes
        if isinstance(entry, KVPart):
            self._parts.setdefault(entry.part.block, {})[entry.key] = entry.part
            self._n_parts += 1
            self._n_part_bytes += entry.n_bytes
        else:
            self._children.setdefault(entry.node.parent, Siblings()).add(entry.node)

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self._n_bytes -= entry.n_bytes
        if isinstance(entry, KVPart):
            self._n_parts -= 1
            self._n_part_bytes -= entry.n_bytes
            parts = self._parts[entry.part.block]
            del parts[key]
            if not parts:
                del self._parts[entry.part.block]
        else:
            siblings = self._children[entry.node.parent]
            siblings.remove(entry.node)
            if not siblings:
                del self._children[entry.node.parent]

    def _evict(self) -> None:
        while self._n_bytes > self.max_bytes:
            # Without its parent a block is of no use, so parents stay as long as they have any.
            # Nothing needs a part, and its key is nobody's parent.
            unneeded = (
                key
                for key, entry in self._entries.items()
                if not entry.pins and not entry.holds and key not in self._children
            )
            # Turns that wait may need whole conversations. What is on disk can be read again.
            stored = (k for k, entry in self._entries.items() if entry.on_disk and not entry.holds)
            victim = next(unneeded, None) or next(stored, None)
            if victim is None:
                return
            is_gone = not self._entries[victim].on_disk
            self._remove(victim)
            # Parts of a block that is nowhere else would be of no use; there are none of a part.
            for part in list(self._parts.get(victim, ())) if is_gone else ():
                if not self._entries[part].pins and not self._entries[part].holds:
                    self._remove(part)
