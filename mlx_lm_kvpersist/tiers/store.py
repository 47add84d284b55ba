"""The block store: a pool in RAM, a folder on disk, a writer between them."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import BlockCorrupt, StoreError
from ..match.keys import Root
from ..match.tree import Node
from .budget import StoreLimits
from .disk import DiskStore
from .files import Arrays, read_block
from .index import Index
from .pool import BlockPool, KVBlock
from .turn import Gone, Turn
from .writer import Writer

__all__ = ["BlockStore", "Loaded", "StoreLimits", "Turn"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A block's arrays, and whether they came from disk."""

    arrays: Mapping[str, mx.array]
    from_disk: bool


@dataclass
class StoreCounters:
    """What has happened since the store was opened."""

    turns_saved: int = 0
    turns_not_saved: int = 0
    blocks_quarantined: int = 0
    failures: set[str] = field(default_factory=set)
    """What keeps turns from being saved right now; each is logged once."""


class BlockStore:
    """Blocks by key, wherever they are.

    The generation thread reads and submits; a thread of the store's own changes the disk.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.limits = limits
        self.disk = DiskStore(folder, limits)
        self.pool = BlockPool(limits.max_ram_bytes)
        self.counters = StoreCounters()
        self._unwritten_replies: dict[tuple[bytes, bytes], bytes] = {}
        self._lost: set[bytes] = set()
        """Blocks on disk that could not be read; until they are gone from it, or anew."""
        self._writer = Writer(limits.max_queue_bytes)
        self._writer.submit(self._sweep)

    @property
    def folder(self) -> Path:
        return self.disk.folder

    @property
    def index(self) -> Index:
        return self.disk.index

    def children(self, parent: bytes, ahead: str | None = None) -> list[Node]:
        """Return the blocks that continue `parent`, in RAM or, if it can be read, on disk.

        With the text that lies ahead, those on disk may be only the ones that are near to it.
        """
        nodes: dict[bytes, Node] = {}
        try:
            stored = self.index.children(parent, ahead)
            nodes.update((node.key, node) for node in stored if node.key not in self._lost)
        except sqlite3.Error as error:
            self._failed("read the index", error)
        nodes.update((node.key, node) for node in self.pool.children(parent))
        return list(nodes.values())

    def __contains__(self, key: bytes) -> bool:
        try:
            return key in self.pool or (key not in self._lost and key in self.index)
        except sqlite3.Error as error:
            self._failed("read the index", error)
            return False

    def load(self, node: Node, root: Root) -> Loaded | None:
        """Return a block's evaluated arrays, or None when it is gone or must not be trusted."""
        block = self.pool.get(node.key)
        if block is not None:
            return Loaded(block.arrays, from_disk=False)
        try:
            stored, stored_root, arrays = read_block(
                self.folder, node.key, verify=self.limits.verify
            )
            if (stored.packed_ids, stored.start) != (node.packed_ids, node.start):
                raise BlockCorrupt(f"block {node.key.hex()}: file and index disagree")
            if stored_root.key != root.key:
                raise BlockCorrupt(f"block {node.key.hex()} belongs to another model")
        except FileNotFoundError:
            logger.warning("block %s is no longer on disk", node.key.hex())
            self._lost.add(node.key)
            self._writer.submit(partial(self._take_away, node.key))
            return None
        except StoreError as error:
            self.quarantine(node.key, str(error))
            return None
        block = _in_ram(node, arrays)
        block.on_disk = True
        self.pool.put(block)
        return Loaded(arrays, from_disk=True)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Take a block that failed a check out of use, in RAM now and on disk soon."""
        logger.warning("block %s goes to quarantine: %s", key.hex(), reason)
        self.counters.blocks_quarantined += 1
        self._lost.add(key)
        self.pool.drop(key)
        self._writer.submit(partial(self._take_away, key, reason))

    def keep(self, blocks: Iterable[tuple[Node, Arrays]]) -> None:
        """Keep blocks in RAM, for as long as there is room."""
        for node, arrays in blocks:
            self.pool.put(_in_ram(node, arrays))

    def keep_turn(self, turn: Turn, new: Iterable[tuple[Node, Arrays]]) -> None:
        """Keep a turn's new blocks in RAM and have it written in the background.

        Until that is done, none of its blocks leaves RAM.
        """
        pinned = self.pool.pin(node.key for node in turn.nodes)
        for node, arrays in new:
            block = _in_ram(node, arrays)
            block.pins = 1
            self.pool.put(block)
            pinned.append(node.key)
        self.pool.touch(node.key for node in turn.nodes)
        for reply in turn.replies:
            self._unwritten_replies[turn.root.key, reply.digest] = reply.packed_ids
        blocks = (self.pool.get(key) for key in pinned)
        n_bytes = sum(block.n_bytes for block in blocks if block and not block.on_disk)
        self._writer.submit_turn(
            turn,
            save=partial(self._save, turn, pinned),
            abandon=partial(self._abandon, turn, pinned),
            n_bytes=n_bytes,
        )

    def drop_unwritten(self, key: bytes) -> None:
        """Drop a block that is in RAM alone and was not submitted to be written."""
        block = self.pool.get(key)
        if block is not None and not block.pins and not block.on_disk:
            self.pool.drop(key)

    def session_blocks(self, root: Root, name: str) -> set[bytes]:
        """Return the blocks of all branches of a session; none if the index cannot be read."""
        try:
            return self.index.session_blocks(root.key, name)
        except sqlite3.Error as error:
            self._failed("read the index", error)
            return set()

    def tails(self, parent: bytes, max_tokens: int) -> list[Node]:
        """Return the blocks that continue `parent` and hold fewer than `max_tokens` tokens."""
        nodes: dict[bytes, Node] = {}
        try:
            nodes.update((node.key, node) for node in self.index.tails(parent, max_tokens))
        except sqlite3.Error as error:
            self._failed("read the index", error)
        in_ram = self.pool.children(parent)
        nodes.update((node.key, node) for node in in_ram if node.n_tokens < max_tokens)
        return list(nodes.values())

    def reply_ids(self, root: bytes, digest: bytes) -> bytes | None:
        """Return the packed ids of a remembered reply."""
        try:
            return self._unwritten_replies.get((root, digest)) or self.index.reply_ids(root, digest)
        except sqlite3.Error as error:
            self._failed("read the index", error)
            return None

    def gone(self, key: bytes) -> Gone | None:
        """Return why a block is no longer on disk, if that is known."""
        return self.disk.gone(key)

    def other_roots(self, root: Root, limit: int) -> list[Root]:
        """Return what else is stored, the biggest first; nothing if the index cannot be read."""
        try:
            roots = [other for other, _, _ in self.index.roots()]
        except sqlite3.Error as error:
            self._failed("read the index", error)
            return []
        return [other for other in roots if other.key != root.key][:limit]

    def file_hash(self, path: str, stamp: str) -> str | None:
        """Return what is remembered of a model's file, if its stamp is still the same."""
        try:
            return self.index.file_hash(path, stamp)
        except sqlite3.Error as error:
            self._failed("read the index", error)
            return None

    def keep_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        """Remember the hash of a model's file."""
        self._writer.submit(partial(self._keep_file_hash, path, stamp, content_hash))

    def touch(self, key: bytes) -> None:
        """Mark a chain, given by its last block, as used."""
        self._writer.submit(partial(self._touch, key))

    def drain(self) -> None:
        """Return when everything submitted so far is on disk."""
        self._writer.drain()

    def stats(self) -> dict[str, Any]:
        """Return what is where, in blocks and bytes, and what has happened so far. Any thread."""
        return {
            "folder": str(self.folder),
            "ram": {
                "blocks": len(self.pool),
                "bytes": self.pool.n_bytes,
                "max_bytes": self.limits.max_ram_bytes,
            },
            "disk": {
                "blocks": self.index.n_blocks(),
                "bytes": self.disk.used_bytes(),
                "max_bytes": self.limits.max_disk_bytes,
                "written_bytes": self.disk.written.total_bytes,
            },
            "queue": {
                "tasks": self._writer.n_tasks,
                "bytes": self._writer.n_bytes,
                "max_bytes": self.limits.max_queue_bytes,
            },
            "turns_saved": self.counters.turns_saved,
            "turns_not_saved": self.counters.turns_not_saved,
            "blocks_quarantined": self.counters.blocks_quarantined,
            "failures": sorted(self.counters.failures),
        }

    def close(self, timeout_s: float = 30.0) -> None:
        """Write what is waiting, then close the index."""
        if not self._writer.close(timeout_s):
            logger.warning("not everything could be written within %.0f s", timeout_s)
            return
        self.disk.close()
        self.pool.clear()

    # Writer thread.

    def _save(self, turn: Turn, pinned: list[bytes]) -> None:
        try:
            saved = self.disk.save(turn, self._arrays_of, keep=self._writer.waiting_keys())
        except (StoreError, OSError, RuntimeError, sqlite3.Error) as error:
            self._failed("save a turn", error)
            self._abandon(turn, pinned)
            return
        if not saved:
            logger.warning("a turn is not saved: another process removed a block that it needs")
            self._abandon(turn, pinned)
            return
        self.counters.turns_saved += 1
        self.counters.failures.clear()
        for node in turn.nodes:
            self._lost.discard(node.key)
            block = self.pool.get(node.key)
            if block is not None:
                block.on_disk = True
        self._release(turn, pinned)
        for replaced, _ in turn.leaf.replaced if turn.leaf else ():
            self.pool.drop(replaced)

    def _arrays_of(self, key: bytes) -> Arrays | None:
        block = self.pool.get(key)
        return None if block is None else block.arrays

    def _abandon(self, turn: Turn, pinned: list[bytes]) -> None:
        """A turn stays in memory only, where its blocks may now be evicted. Any thread."""
        self.counters.turns_not_saved += 1
        self._release(turn, pinned)

    def _release(self, turn: Turn, pinned: list[bytes]) -> None:
        self.pool.unpin(pinned)
        for reply in turn.replies:
            self._unwritten_replies.pop((turn.root.key, reply.digest), None)

    def _take_away(self, key: bytes, reason: str | None = None) -> None:
        """Forget a block that is not on disk, or, for a reason, move it to quarantine."""
        try:
            if reason is None:
                self.disk.forget(key)
            else:
                self.disk.quarantine(key, reason)
        except (OSError, sqlite3.Error) as error:
            self._failed("take a block out of the store", error)
        else:
            self._lost.discard(key)

    def _touch(self, key: bytes) -> None:
        try:
            with self.disk.lock.held():
                self.index.touch(key)
        except (OSError, sqlite3.Error) as error:
            self._failed("mark a block as used", error)

    def _keep_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        try:
            with self.disk.lock.held():
                self.index.keep_file_hash(path, stamp, content_hash)
        except (OSError, sqlite3.Error) as error:
            self._failed("remember the hash of a model's file", error)

    def _sweep(self) -> None:
        n_swept = self.disk.sweep()
        if n_swept:
            logger.info("swept %d leftovers of an interrupted run from the store", n_swept)

    def _failed(self, what: str, error: Exception) -> None:
        """Say once what does not work, until something works again."""
        # A full disk fails here with one error and there with another.
        kind = f"{what}: {'limit' if isinstance(error, StoreError) else 'disk'}"
        if kind not in self.counters.failures:
            self.counters.failures.add(kind)
            logger.error("cannot %s: %s; serving goes on from memory", what, error)


def _in_ram(node: Node, arrays: Arrays) -> KVBlock:
    return KVBlock(node, arrays, sum(array.nbytes for array in arrays.values()))
