"""The block store: a pool in RAM, a folder on disk, a writer between them."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import StoreError
from ..match.block import Block, Root
from ..match.tree import AHEAD
from ..units import show_bytes
from .budget import StoreLimits
from .disk import DiskStore
from .files import Arrays
from .index import Index, Session
from .pool import BlockPool, KVBlock
from .reading import BlockReader, Loaded, Prefetch
from .records import Turn
from .writer import Writer

__all__ = ["BlockStore", "Loaded", "Prefetch", "StoreLimits", "Turn"]

Answer = TypeVar("Answer")
Default = TypeVar("Default")

logger = logging.getLogger(__name__)

_MIN_QUEUE_BYTES = 512 << 10
"""Even where RAM holds nothing, turns must wait to be written."""


@dataclass
class StoreCounters:
    """What has happened since the store was opened."""

    turns_saved: int = 0
    turns_not_saved: int = 0
    blocks_quarantined: int = 0
    """Blocks and checkpoints."""
    failures: set[str] = field(default_factory=set)
    """What keeps turns from being saved right now; each is logged once."""


@dataclass(frozen=True)
class HotFirst:
    """A store's blocks; the pool has all that continue one in `complete`."""

    store: BlockStore
    complete: set[bytes]

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        hot = self.store.pool.children(parent, ahead, limit) if parent in self.complete else ()
        return list(hot) or self.store.children(parent, ahead, limit)  # evicted since


class BlockStore(BlockReader):
    """Blocks by key, and their checkpoints, wherever they are.

    The generation thread reads and submits; a thread of the store's own changes the disk.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        super().__init__(folder, BlockPool(limits.max_ram_bytes), verify=limits.verify)
        self.limits = limits
        self.disk = DiskStore(folder, limits)
        self.counters = StoreCounters()
        self.n_changes = 0
        """Grows when blocks come, or are found to be gone or damaged: what was matched before may
        be worth matching again."""
        self._unwritten_replies: dict[tuple[bytes, bytes], bytes] = {}
        self._lost: set[bytes] = set()
        """Keys of what is damaged or may be missing on disk, until it is removed or written anew.
        What could not be read for another reason is not among them."""
        self._writer = Writer(max(limits.max_ram_bytes // 2, _MIN_QUEUE_BYTES))
        self._writer.submit(self._sweep)

    @property
    def index(self) -> Index:
        return self.disk.index

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        """Return the blocks that continue `parent`, in RAM or, if it can be read, on disk.

        See `BlockSource.children`.
        """
        lost = self._lost.copy()  # before the index is read: they leave both, it first
        wanted = None if limit is None else limit + len(lost)
        stored = self._ask(partial(self.disk.index.children, parent, ahead, wanted), ())
        nodes = {node.key: node for node in stored if node.key not in lost}
        nodes.update((node.key, node) for node in self.pool.children(parent, ahead, limit))
        return list(nodes.values())[:limit]

    def hot_first(self, root: bytes, prompt: str | bytes) -> HotFirst:
        """Return a source of the same blocks that asks the disk less often.

        Where the pool has all that the disk has to continue the prompt (a text, or packed ids), the
        disk is not asked again. One query tells that of a whole conversation.
        """
        path: dict[bytes, bytes] = {}
        parent: bytes | None = root
        position = 0
        while parent is not None:
            before, parent = parent, None
            for node in self.pool.children(before, prompt[position : position + AHEAD]):
                content: Any = node.text if isinstance(prompt, str) else node.packed_ids
                if content and prompt.startswith(content, position):
                    path[before] = parent = node.key
                    position += len(content)
                    break
        branching = self._ask(partial(self.index.branches, path), path.keys()) if path else ()
        return HotFirst(self, path.keys() - branching)

    def __contains__(self, key: bytes) -> bool:
        if key in self.pool:
            return True
        return key not in self._lost and self._ask(
            partial(self.disk.index.__contains__, key), False
        )

    def checkpoints(self, blocks: Sequence[bytes]) -> dict[bytes, list[Block]]:
        """Return, by block, the checkpoints in RAM or, if they can be read, on disk.

        A block that has none may be missing. Blocks are given by their keys.
        """
        lost = self._lost.copy()  # as in `children`
        stored = self._ask(partial(self.disk.index.checkpoints, blocks), ())
        found = {block.key: block for block, _ in stored if block.key not in lost}
        found.update((block.key, block) for block in self.pool.checkpoints(blocks))
        by_block: dict[bytes, list[Block]] = {}
        for one in found.values():
            by_block.setdefault(one.parent, []).append(one)
        return by_block

    def quarantine(self, block: Block, reason: str) -> None:
        """Take a block or checkpoint out of use that failed a check, in RAM now, on disk soon.

        A block takes its checkpoints along. Any thread.
        """
        logger.warning("%s goes to quarantine: %s", block, reason)
        self.counters.blocks_quarantined += 1
        self._lose(block.key, reason)

    def _lose(self, key: bytes, reason: str | None = None) -> None:
        """Forget what is not there or, for a reason, must not be used. Any thread."""
        self._lost.add(key)
        if reason is not None:
            self.pool.drop(key)
        self.n_changes += 1
        self._writer.submit(partial(self._take_away, key, reason))

    def put(self, blocks: Iterable[tuple[Block, Arrays]]) -> None:
        """Put blocks into RAM, for as long as there is room."""
        for block, arrays in blocks:
            self.pool.put(KVBlock.of(block, arrays))
        self.n_changes += 1

    def save_turn(self, turn: Turn, new: Iterable[tuple[Block, Arrays]]) -> None:
        """Put a turn's new blocks and checkpoints into RAM and have it saved in the background.

        Until that is done, those of its blocks and checkpoints that are not on disk stay in RAM.
        """
        pinned = self.pool.pin(block.key for block in (*turn.blocks, *turn.checkpoints))
        for block, arrays in new:
            entry = KVBlock.of(block, arrays)
            entry.pins = 1
            pinned.append(self.pool.put(entry))
        self.pool.touch(block.key for block in turn.blocks)
        self.n_changes += 1
        for reply in turn.replies:
            self._unwritten_replies[turn.root.key, reply.digest] = reply.packed_ids
        sizes = {entry.block.key: entry.n_bytes for entry in pinned if not entry.on_disk}
        self._writer.submit_turn(
            turn,
            save=partial(self._save, turn, pinned),
            abandon=partial(self._abandon, turn, pinned),
            sizes=sizes,
        )

    def session_blocks(self, root: Root, name: str) -> set[bytes]:
        """Return the blocks of all branches of a session; none if the index cannot be read."""
        return self._ask(partial(self.disk.index.session_blocks, root.key, name), set[bytes]())

    def sessions_at(self, key: bytes) -> list[Session]:
        """Return the sessions that end in a block, as far as they are on disk."""
        return self._ask(partial(self.disk.index.sessions_at, key), list[Session]())

    def reply_ids(self, root: bytes, digest: bytes) -> bytes | None:
        """Return the packed ids of a remembered reply."""
        unwritten = self._unwritten_replies.get((root, digest))
        return unwritten or self._ask(partial(self.disk.index.reply_ids, root, digest), None)

    def other_roots(self, root: Root, limit: int) -> list[Root]:
        """Return what else is stored, the biggest first; nothing if the index cannot be read."""
        roots = self._ask(partial(self.disk.index.roots, limit + 1), ())
        return [other for other, _ in roots if other.key != root.key][:limit]

    def file_hash(self, path: str, stamp: str) -> str | None:
        """Return what is remembered of a model's file, if its stamp is still the same."""
        return self._ask(partial(self.disk.index.file_hash, path, stamp), None)

    def set_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        """Remember the hash of a model's file."""
        self._change_index(
            "remember the hash of a model's file",
            lambda index: index.set_file_hash(path, stamp, content_hash),
        )

    def keep_request(self, record: dict[str, Any]) -> None:
        """Remember what a request reused, for those who ask later."""
        self._change_index("remember what a request reused", lambda i: i.add_request(record))

    def touch(self, chain: Sequence[bytes], checkpoints: Sequence[Block] = ()) -> None:
        """Mark a chain, given by the keys of its blocks, and these checkpoints as used.

        The checkpoints are evicted before the chain: they are of no use without it.
        """
        self.pool.touch([*chain, *(block.key for block in checkpoints)])
        self._change_index(
            "mark a block as used", lambda index: index.touch(chain[-1], checkpoints)
        )

    def set_gentle(self, gentle: bool) -> None:
        """Say whether writing is to leave most of the time to others from now on. Any thread."""
        self._writer.set_gentle(gentle)

    def submit(self, task: Callable[[], object]) -> None:
        """Have the writer do something after all that waits. Any thread."""
        self._writer.submit(task)

    def drain(self) -> None:
        """Return when everything submitted so far is on disk."""
        self._writer.drain()

    def stats(self, *, all_files: bool = True) -> dict[str, Any]:
        """Return what is where, in numbers and bytes, and what has happened so far. Any thread.

        "bytes" are all bytes; "checkpoint_bytes" says how many of them are those of checkpoints.
        Without `all_files` the bytes on disk are those of blocks and checkpoints, as the index
        knows them, and no folder is looked at.
        """
        with self.disk.index.asked_once() as index:
            totals = index.totals()
            used_bytes = self.disk.used_bytes() if all_files else totals.n_bytes
        return {
            "folder": str(self.folder),
            "ram": self.pool.stats(),
            "disk": {
                "blocks": totals.n_blocks,
                "checkpoints": totals.n_checkpoints,
                "bytes": used_bytes,
                "checkpoint_bytes": totals.checkpoint_bytes,
                "evicted": self.disk.n_evicted,
                "max_bytes": self.limits.max_disk_bytes,
                "written_bytes": self.disk.written.total_bytes,
            },
            "queue": {
                "tasks": self._writer.n_tasks,
                "bytes": self._writer.n_bytes,
                "max_bytes": self._writer.max_bytes,
            },
            "turns_saved": self.counters.turns_saved,
            "turns_not_saved": self.counters.turns_not_saved,
            "blocks_quarantined": self.counters.blocks_quarantined,
            "failures": sorted(self.counters.failures),
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is waiting, for at most `timeout_s` seconds, then close the index."""
        deadline_s = time.monotonic() + timeout_s
        n_turns, n_bytes = self._writer.close(timeout_s)
        if n_turns:
            logger.warning(
                "%d turns (%s) could not be written within %.0f s; they are computed again when "
                "they are needed",
                n_turns,
                show_bytes(n_bytes),
                timeout_s,
            )
        readers_ended = self._stop_reading(max(0.0, deadline_s - time.monotonic()))
        if readers_ended and not self._writer.is_alive():
            self.disk.close()
            self.pool.clear()

    # Writer thread.

    def _save(self, turn: Turn, pinned: list[KVBlock]) -> None:
        lost = self._lost.copy()
        try:
            keep = self._writer.waiting_keys()
            saved = self.disk.save(turn, self._arrays_of, keep, self._writer.rest, lost)
        except Exception as error:  # whatever it is, the turn's pins are let go of
            self._failed("save a turn", error)
            self._abandon(turn, pinned)
            return
        if saved is None:
            logger.warning("a turn is not saved: another process removed a block that it needs")
            self._abandon(turn, pinned)
            return
        self.counters.turns_saved += 1
        self.counters.failures.clear()
        for block in (*saved.blocks, *saved.checkpoints):
            if block.key in lost:  # what was lost meanwhile may not have been written anew
                self._lost.discard(block.key)
            entry = self.pool.get(block.key)
            if entry is not None:
                entry.on_disk = True
        self._release(turn, pinned)
        for replaced, _ in saved.leaf.replaced if saved.leaf else ():
            self.pool.drop_unpinned(replaced)
        for block in set(saved.superseded).difference(saved.checkpoints):
            self.pool.drop_unpinned(block.key)

    def _arrays_of(self, key: bytes) -> Arrays | None:
        entry = self.pool.get(key)
        return None if entry is None else entry.arrays

    def _abandon(self, turn: Turn, pinned: list[KVBlock]) -> None:
        """A turn stays in memory only, where its blocks may now be evicted. Any thread."""
        self.counters.turns_not_saved += 1
        self._release(turn, pinned)

    def _release(self, turn: Turn, pinned: list[KVBlock]) -> None:
        self.pool.unpin(pinned)
        for reply in turn.replies:
            self._unwritten_replies.pop((turn.root.key, reply.digest), None)

    def _take_away(self, key: bytes, reason: str | None = None) -> None:
        """Forget a block or checkpoint that is not on disk; for a reason, move it to quarantine."""
        if key not in self._lost:
            return  # written anew since
        try:
            if reason is None:
                self.disk.forget_missing(key)
            else:
                self.disk.quarantine(key, reason)
        except (OSError, StoreError, sqlite3.Error) as error:
            self._failed("take a block out of the store", error)
            if reason is not None:
                return  # it stays damaged
        self._lost.discard(key)

    def _change_index(self, what: str, change: Callable[[Index], None]) -> None:
        def run() -> None:
            try:
                with self.disk.lock.held():
                    change(self.disk.index)
            except (OSError, sqlite3.Error) as error:
                self._failed(what, error)

        self._writer.submit(run)

    def _sweep(self) -> None:
        n_swept = self.disk.sweep()
        if n_swept:
            logger.info("swept %d leftovers of an interrupted run from the store", n_swept)

    def _ask(self, index: Callable[[], Answer], otherwise: Default) -> Answer | Default:
        """Return what the index answers, or something else if it cannot be read. Any thread."""
        try:
            return index()
        except (OSError, sqlite3.Error) as error:
            self._failed("read the index", error)
            return otherwise

    def _failed(self, what: str, error: Exception) -> None:
        """Say once what does not work, until something works again."""
        # A full disk fails here with one error and there with another.
        kind = f"{what}: {'limit' if isinstance(error, StoreError) else 'disk'}"
        if kind not in self.counters.failures:
            self.counters.failures.add(kind)
            logger.error("cannot %s: %s; serving goes on from memory", what, error)
