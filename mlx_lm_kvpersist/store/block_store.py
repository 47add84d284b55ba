"""The block store: blocks in tiers, RAM, the disk and any others, and a writer between them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..block import Block, Checkpoint, Record, Root
from ..errors import StoreError
from ..match.tree import AHEAD
from ..units import show_bytes
from .budget import StoreLimits
from .disk import DiskStore
from .disk_tier import DiskTier
from .files import Arrays
from .pool import BlockPool, KVBlock
from .reading import Prefetch, Reader
from .records import Commit
from .tier import LowerTier, Tier
from .writer import Writer

__all__ = ["BlockStore", "Commit", "Prefetch", "StoreLimits"]

logger = logging.getLogger(__name__)

_MIN_QUEUE_BYTES = 512 << 10
"""Even where RAM holds nothing, commits must wait to be written."""


@dataclass
class StoreCounters:
    """What has happened since the store was opened."""

    turns_saved: int = 0
    turns_not_saved: int = 0
    blocks_quarantined: int = 0
    """Blocks and checkpoints."""
    failures: set[str] = field(default_factory=set)
    """What keeps commits from being saved right now; each is logged once."""


@dataclass(frozen=True)
class RamFirst:
    """A store's blocks; the pool has all that continue one in `complete`."""

    store: BlockStore
    complete: set[bytes]

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        found = self.store.pool.children(parent, ahead, limit) if parent in self.complete else ()
        return list(found) or self.store.children(parent, ahead, limit)  # evicted since


class BlockStore:
    """Blocks by key, and their checkpoints, in whichever tier they are.

    The generation thread reads and submits; a thread of the store's own changes the tiers below
    RAM. `others` are tiers below the disk, the quickest first.
    """

    def __init__(self, folder: Path, limits: StoreLimits, others: Sequence[LowerTier] = ()) -> None:
        self.folder = folder
        self.limits = limits
        self.counters = StoreCounters()
        self.n_changes = 0
        """Grows when blocks come, or are found to be gone or damaged: what was matched before may
        be worth matching again."""
        self.disk = DiskStore(folder, limits)
        self.disk.lock.is_patient = True  # only the writer waits for it, and no request for that
        self._writer = Writer(max(limits.max_ram_bytes // 2, _MIN_QUEUE_BYTES))
        self._disk_tier = DiskTier(self.disk, self._writer, self._failed)
        self.index, self.view = self.disk.index, self._disk_tier.view
        self.pool = BlockPool(limits.max_ram_bytes)
        self.disk.files.forgotten = self.pool.not_stored
        self.below: tuple[LowerTier, ...] = (self._disk_tier, *others)
        """The tiers below RAM, in the order in which they are read."""
        self.tiers: tuple[Tier, ...] = (self.pool, *self.below)
        self.reader = Reader(self.pool, self.below, self._lose_from)
        self._writer.submit(self._disk_tier.sweep)

    # Find.

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        """Return the blocks that continue `parent`, of all tiers; see `BlockSource.children`."""
        found: dict[bytes, Block] = {}
        for tier in reversed(self.tiers):
            for one in tier.children(parent, ahead, limit):
                found[one.key] = one
        return list(found.values())[:limit]

    def ram_first(self, root: bytes, prompt: str | bytes) -> RamFirst:
        """Return a source of the same blocks that asks the tiers below RAM less often.

        Where the pool has all that they have to continue the prompt (a text, or packed ids), they
        are not asked again. One query of each tells that of a whole conversation.
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
        return RamFirst(self, path.keys() - {b for tier in self.below for b in tier.branches(path)})

    def __contains__(self, key: bytes) -> bool:
        return any(key in tier for tier in self.tiers)

    def tier_of(self, key: bytes) -> str:
        """Return the name of the tier that a stored block or checkpoint is read from."""
        *upper, last = self.tiers
        return next((tier.name for tier in upper if key in tier), last.name)

    def checkpoints(self, blocks: Sequence[bytes]) -> dict[bytes, list[Checkpoint]]:
        """Return, by block, the checkpoints of all tiers; a block that has none may be missing.

        Blocks are given by their keys.
        """
        tiers = reversed(self.tiers)
        found = {one.key: one for tier in tiers for one in tier.checkpoints(blocks)}
        by_block: dict[bytes, list[Checkpoint]] = {}
        for one in found.values():
            by_block.setdefault(one.block, []).append(one)
        return by_block

    # Forget.

    def lose(self, block: Record, reason: str) -> None:
        """Take a block or checkpoint that must not be used out of all tiers. Any thread.

        A block takes its checkpoints along. The disk moves it to quarantine.
        """
        self._lose_from(self.below, block, reason)

    def _lose_from(self, tiers: Iterable[LowerTier], block: Record, reason: str | None) -> None:
        if reason is not None:
            logger.warning("%s goes to quarantine: %s", block, reason)
            self.counters.blocks_quarantined += 1
            self.pool.drop(block.key)
        self.n_changes += 1
        for tier in tiers:
            tier.forget(block.key, reason)

    # Add.

    def put(self, blocks: Iterable[tuple[Record, Arrays]]) -> None:
        """Put blocks into RAM, for as long as there is room."""
        for block, arrays in blocks:
            self.pool.put(KVBlock.of(block, arrays))
        self.n_changes += 1

    def commit(self, commit: Commit, new: Iterable[tuple[Record, Arrays]]) -> None:
        """Put a commit's new blocks and checkpoints into RAM and have it saved in the background.

        Until that is done, those of its blocks and checkpoints that are not on disk stay in RAM.
        """
        pinned = self.pool.pin(record.key for record in commit.records)
        for block, arrays in new:
            entry = KVBlock.of(block, arrays)
            entry.pins = 1
            pinned.append(self.pool.put(entry))
        self.pool.touch(block.key for block in commit.blocks)
        self.n_changes += 1
        sizes = {entry.block.key: entry.n_bytes for entry in pinned if not entry.is_stored}
        self._writer.submit_commit(
            commit,
            save=partial(self._save, commit, pinned),
            abandon=partial(self._abandon, pinned),
            sizes=sizes,
        )

    def replies(self, root: bytes, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the packed ids of those of these replies that are remembered, by digest."""
        waiting = {
            reply.digest: reply.packed_ids
            for commit in self._writer.commits()
            if commit.root.key == root
            for reply in commit.replies
        }
        return {**self.view.replies(root, digests), **waiting}

    def other_roots(self, root: Root, limit: int) -> list[Root]:
        """Return what else is stored, the biggest first; nothing if the index cannot be read."""
        others = [other for other, _ in self.view.roots(limit + 1) if other.key != root.key]
        return others[:limit]

    def keep_request(self, record: dict[str, Any]) -> None:
        """Remember what a request reused, for those who ask later."""
        self._disk_tier.change_index(
            "remember what a request reused", lambda index: index.state.add_request(record)
        )

    def add_first_token(self, request_id: str, first_token_s: float) -> None:
        """Add to what is remembered of a request how long it waited for its first token."""
        self._disk_tier.change_index(
            "remember what a request waited",
            lambda index: index.state.add_first_token(request_id, first_token_s),
        )

    def touch(self, chain: Sequence[bytes], checkpoints: Sequence[Checkpoint] = ()) -> None:
        """Mark a chain, given by the keys of its blocks, and these checkpoints as used.

        The checkpoints are evicted before the chain: they are of no use without it.
        """
        self.pool.touch([*chain, *(block.key for block in checkpoints)])
        self._disk_tier.change_index(
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
        found: dict[str, dict[str, Any]]
        found = {tier.name: tier.stats() for tier in self.tiers}
        if all_files:
            with self.index.asked_once():
                found["disk"]["bytes"] = self.disk.files.used_bytes()
        return {
            "folder": str(self.folder),
            "tiers": found,
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
        readers_ended = self.reader.close(max(0.0, deadline_s - time.monotonic()))
        if readers_ended and not self._writer.is_alive():
            self.disk.close()
            self.pool.clear()

    # Writer thread.

    def _save(self, commit: Commit, pinned: list[KVBlock]) -> None:
        try:
            written = [tier.write(commit, self._arrays_of) for tier in self.below]
        except Exception as error:  # whatever it is, the commit's pins are let go of
            self._failed("save a turn", error)
            self._abandon(pinned)
            return
        saved = [one for one in written if one is not None]
        if not saved:
            self._abandon(pinned)
            return
        self.counters.turns_saved += 1
        self.counters.failures.clear()
        for key in {record.key for one in saved for record in one.records}:
            entry = self.pool.get(key)
            if entry is not None:
                entry.is_stored = True
        self.pool.unpin(pinned)
        for one in saved:
            for replaced, _ in one.leaf.replaced if one.leaf else ():
                self.pool.drop_unpinned(replaced)
            for block in set(one.superseded).difference(one.checkpoints):
                self.pool.drop_unpinned(block.key)

    def _arrays_of(self, key: bytes) -> Arrays | None:
        entry = self.pool.get(key)
        return None if entry is None else entry.arrays

    def _abandon(self, pinned: list[KVBlock]) -> None:
        """A commit stays in memory only, where its blocks may now be evicted. Any thread."""
        self.counters.turns_not_saved += 1
        self.pool.unpin(pinned)

    def _failed(self, what: str, error: Exception) -> None:
        """Say once what does not work, until something works again."""
        # A full disk fails here with one error and there with another.
        kind = f"{what}: {'limit' if isinstance(error, StoreError) else 'disk'}"
        if kind not in self.counters.failures:
            self.counters.failures.add(kind)
            logger.error("cannot %s: %s; serving goes on from memory", what, error)
