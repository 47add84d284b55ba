"""The hot tier: blocks in RAM under a byte budget, least recently used leaves going first.

Any thread may call it. Entries are immutable; what they hold is shared, never changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from ..match.tree import Node


@dataclass
class KVBlock:
    """A block in RAM: what the tree knows of it, and its KV arrays (opaque to the pool).

    `pins` counts the turns that wait to be written with it: it must not go before they are.
    """

    node: Node
    arrays: Any
    n_bytes: int
    on_disk: bool = False
    pins: int = 0


class BlockPool:
    """Blocks by key, counted in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._blocks: OrderedDict[bytes, KVBlock] = OrderedDict()
        self._children: dict[bytes, dict[bytes, Node]] = {}
        self._n_bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def n_bytes(self) -> int:
        return self._n_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def get(self, key: bytes) -> KVBlock | None:
        return self._blocks.get(key)

    def children(self, parent: bytes) -> list[Node]:
        with self._lock:
            return list(self._children.get(parent, {}).values())

    def put(self, block: KVBlock) -> None:
        """Add a block, or keep the one that is there: equal keys mean equal content."""
        with self._lock:
            present = self._blocks.get(block.node.key)
            if present is not None:
                present.pins += block.pins
                self._blocks.move_to_end(block.node.key)
                return
            self._blocks[block.node.key] = block
            self._children.setdefault(block.node.parent, {})[block.node.key] = block.node
            self._n_bytes += block.n_bytes
            self._evict()

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark a chain, given from its first block on, as used: its leaf stays evictable first."""
        with self._lock:
            for key in reversed(list(keys)):
                if key in self._blocks:
                    self._blocks.move_to_end(key)

    def pin(self, keys: Iterable[bytes]) -> list[bytes]:
        """Hold those of these blocks that are here; return which."""
        with self._lock:
            held = [key for key in keys if key in self._blocks]
            for key in held:
                self._blocks[key].pins += 1
            return held

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let go of blocks that have been written, or never will be."""
        with self._lock:
            for key in keys:
                block = self._blocks.get(key)
                if block is not None and block.pins:
                    block.pins -= 1
            self._evict()

    def drop(self, key: bytes) -> None:
        with self._lock:
            if key in self._blocks:
                self._remove(key)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._children.clear()
            self._n_bytes = 0

    def _remove(self, key: bytes) -> None:
        block = self._blocks.pop(key)
        siblings = self._children[block.node.parent]
        del siblings[key]
        if not siblings:
            del self._children[block.node.parent]
        self._n_bytes -= block.n_bytes

    def _evict(self) -> None:
        while self._n_bytes > self.max_bytes:
            # Without its parent a block is of no use, so parents stay as long as they have any.
            leaves = (
                key
                for key, block in self._blocks.items()
                if not block.pins and key not in self._children
            )
            leaf = next(leaves, None)
            if leaf is None:
                return
            self._remove(leaf)
