"""The block store: the pool in RAM, the files and the index on disk, and the writer between them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

from ..errors import BlockCorrupt, StoreError
from ..match.tree import Node
from .files import block_path, make_private, read_block, write_block
from .index import Index, Leaf, StoredReply
from .pool import BlockPool, KVBlock
from .writer import Writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreLimits:
    """Budgets in bytes."""

    max_ram_bytes: int
    max_disk_bytes: int
    fsync: bool = False


@dataclass(frozen=True)
class Loaded:
    """A block's arrays, and whether they came from disk."""

    arrays: Mapping[str, mx.array]
    from_disk: bool


@dataclass(frozen=True)
class Turn:
    """What one turn of a conversation puts on disk.

    `nodes` are the blocks of its chain, in order from the root; those that are not on disk yet
    wait in the pool, pinned. Without a leaf the turn has not ended: no session moves.
    """

    root: bytes
    nodes: tuple[Node, ...]
    leaf: Leaf | None = None
    replies: tuple[StoredReply, ...] = ()


class BlockStore:
    """Blocks by key, wherever they are.

    The generation thread reads and submits; a thread of the store's own writes. Opening takes the
    folder into use (made 0700 when missing) and raises StoreError when that is not possible.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.folder = folder
        self.limits = limits
        try:
            make_private(folder)
            self.index = Index(folder / "index.sqlite")
        except OSError as error:
            raise StoreError(
                f"the store {folder} cannot be used: {error}. "
                "Choose a writable folder with --kvpersist-dir."
            ) from error
        self.pool = BlockPool(limits.max_ram_bytes)
        self._writer = Writer()

    def children(self, parent: bytes) -> list[Node]:
        """Return the blocks that continue `parent`, in RAM or on disk."""
        nodes = {node.key: node for node in self.index.children(parent)}
        nodes.update((node.key, node) for node in self.pool.children(parent))
        return list(nodes.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self.pool or key in self.index

    def load(self, node: Node, root: bytes) -> Loaded | None:
        """Return a block's evaluated arrays, or None when it is gone or must not be trusted."""
        block = self.pool.get(node.key)
        if block is not None:
            return Loaded(block.arrays, from_disk=False)
        try:
            stored, stored_root, arrays = read_block(self.folder, node.key)
            if stored.packed_ids != node.packed_ids or stored_root != root:
                raise BlockCorrupt(f"block {node.key.hex()}: file and index disagree")
        except FileNotFoundError:
            logger.warning("block %s is no longer on disk", node.key.hex())
            self._writer.submit(partial(self._forget, node.key))
            return None
        except BlockCorrupt as error:
            logger.warning("%s; it is dropped", error)
            self._writer.submit(partial(self._forget, node.key))
            return None
        n_bytes = sum(array.nbytes for array in arrays.values())
        self.pool.put(KVBlock(node, arrays, n_bytes))
        return Loaded(arrays, from_disk=True)

    def keep(self, blocks: Sequence[tuple[Node, Mapping[str, mx.array]]], *, pinned: bool) -> None:
        """Put blocks into the pool; pinned ones must be submitted to be written."""
        for node, arrays in blocks:
            n_bytes = sum(array.nbytes for array in arrays.values())
            self.pool.put(KVBlock(node, arrays, n_bytes, pinned))

    def drop_unwritten(self, key: bytes) -> None:
        """Drop a block that is in RAM alone and was not submitted to be written."""
        block = self.pool.get(key)
        if block is not None and not block.pinned:
            self.pool.drop(key)

    def submit(self, turn: Turn) -> None:
        """Have a turn written in the background."""
        self._writer.submit(partial(self._save, turn))

    def touch(self, key: bytes) -> None:
        """Mark a chain, given by its last block, as used."""
        self._writer.submit(partial(self.index.touch, key))

    def drain(self) -> None:
        """Return when everything submitted so far is on disk."""
        self._writer.drain()

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is waiting, then close the index."""
        if not self._writer.close(timeout_s):
            logger.warning("not everything could be written within %.0f s", timeout_s)
            return
        self.index.close()
        self.pool.clear()

    def _save(self, turn: Turn) -> None:
        """Files first, then the index. Writer thread."""
        written: list[tuple[Node, int]] = []
        try:
            for node in turn.nodes:
                if node.key in self.index:
                    continue
                block = self.pool.get(node.key)
                if block is None:
                    raise StoreError(f"block {node.key.hex()} went before it was written")
                size = write_block(
                    self.folder, node, turn.root, block.arrays, fsync=self.limits.fsync
                )
                written.append((node, size))
            self.index.commit_turn(turn.root, written, turn.leaf, turn.replies)
        finally:
            for node in turn.nodes:
                self.pool.unpin(node.key)
        if turn.leaf is not None:
            for replaced, _ in turn.leaf.replaced:
                self.pool.drop(replaced)
                self._forget(replaced)
        self._collect()

    def _collect(self) -> None:
        """Remove least recently used leaves until the disk budget holds. Writer thread."""
        n_bytes = self.index.n_bytes()
        while n_bytes > self.limits.max_disk_bytes:
            leaf = self.index.least_recently_used_leaf()
            if leaf is None:
                return
            key, size = leaf
            self._forget(key)
            n_bytes -= size

    def _forget(self, key: bytes) -> None:
        self.index.forget_block(key)
        try:
            os.unlink(block_path(self.folder, key))
        except FileNotFoundError:
            pass
