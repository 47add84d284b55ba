"""The block store: blocks in tiers, and a writer between RAM and the tiers below."""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..block import Block, Checkpoint, Record
from ..errors import Failures, StoreError, remedy
from ..match import AHEAD
from ..units import show_bytes
from .database import is_damage
from .disk import DiskStore
from .disk_tier import DiskTier
from .files import Arrays
from .folder import PLAIN, Encryption
from .index import Index
from .objects import Objects
from .pool import BlockPool, Prefetch, Reader
from .records import Commit, Gone, KVBlock, LowerTier, ReadTier, Saved, StoreLimits
from .runs import StoredRuns
from .writer import Task, Writer

if TYPE_CHECKING:
    from .shared import RepliesOf, SharedTier

__all__ = ["BlockStore", "Commit", "KVBlock", "Prefetch", "StoreLimits"]

logger = logging.getLogger(__name__)

_MIN_QUEUE_BYTES = 512 << 10


@dataclass(frozen=True)
class RamFirst:
    """A store's blocks. For each block in `complete`, RAM has all blocks that continue it."""

    store: BlockStore
    complete: set[bytes]

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        children = self.store.pool.children(parent, ahead, limit) if parent in self.complete else ()
        return list(children) or self.store.children(parent, ahead, limit)  # if RAM evicted them


class BlockStore:
    """Blocks and checkpoints by key, in tiers, for HTTP threads and the generation thread."""

    def __init__(self, folder: Path, limits: StoreLimits, encryption: Encryption = PLAIN) -> None:
        self.folder = folder
        self.limits = limits
        self.turns_saved = self.turns_not_saved = 0
        self._not_saved_before = 0
        """`turns_not_saved` when a turn was last saved."""
        self.reused_tokens: Counter[str] = Counter()
        self.blocks_quarantined = 0
        self._failures: set[str] = set()
        """Kinds of failure that prevent saving now."""
        self._is_damaged = False
        """Whether damage to the index was found since the last saved turn."""
        self.failures = Failures(logger)
        self.n_changes = 0
        """Grows when blocks are added or removed, so that a prompt may be matched again."""
        self.disk = DiskStore(folder, limits, check_all=False, encryption=encryption)
        self.disk.lock.is_patient = True  # only the writer waits
        self.writer = Writer(_queue_bytes(limits.max_ram_bytes), self._save)
        self.disk_tier = DiskTier(self.disk, self.writer, self._failed)
        self.index, self.view = self.disk.index, self.disk_tier.view
        """The index raises errors. Serving threads use the view, which raises none."""
        self.runs = StoredRuns(self.index)
        self.pool = BlockPool(limits.max_ram_bytes)
        self.disk.forgotten = partial(self.pool.set_stored, is_stored=False)
        self.below: list[ReadTier] = [self.disk_tier]
        """The tiers below RAM that lookups ask, the disk first."""
        self.lower: list[LowerTier] = [self.disk_tier]
        """All tiers below RAM, the disk first: the tiers in `below`, and the shared tier if it is
        used. The disk stores commits first; then the other tiers store the same commits."""
        self.shared: SharedTier | None = None
        self.reader = Reader(self.pool, self.below, self._lose_from, self.failures)
        self.writer.submit(self.disk_tier.sweep)

    @property
    def tiers(self) -> tuple[BlockPool | ReadTier, ...]:
        """The tiers that lookups ask, the quickest first."""
        return self.pool, *self.below

    def add(self, tier: ReadTier) -> None:
        """Use another tier below the disk. Call this before anything is served."""
        self.below.append(tier)
        self.lower.append(tier)

    def share(
        self,
        objects: Objects,
        encryption: Encryption,
        max_bytes: int | None = None,
        replies_of: RepliesOf = lambda root, messages: {},
    ) -> None:
        """Use a shared store of at most `max_bytes`. Call this before anything is served."""
        from .shared import SharedTier
        from .shared_objects import SharedObjects  # most servers share nothing and start sooner

        checked = SharedObjects(objects, encryption, self.failures)
        self.shared = SharedTier(
            checked, self.disk_tier, self._land, self.pool, replies_of, max_bytes
        )
        self.lower.append(self.shared)

    def _land(self, commit: Commit, entries: Iterable[KVBlock]) -> None:
        task = self._task(commit, {entry.block.key: entry for entry in entries})
        self.n_changes += 1
        self.turns_not_saved += self.writer.submit_commit(task)

    # Find.

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        """Return the blocks that continue `parent`, from all tiers; see `BlockSource.children`."""
        tiers = reversed(self.tiers)
        blocks = {b.key: b for tier in tiers for b in tier.children(parent, ahead, limit)}
        return list(blocks.values())[:limit]

    def ram_first(self, root: bytes, prompt: str | bytes) -> RamFirst:
        """Return a source that asks lower tiers only if RAM may lack children of a block.

        First, each lower tier is asked once about the prompt's blocks in RAM.
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
        return RamFirst(self, path.keys() - self._branches(path))

    def _branches(self, path: Mapping[bytes, bytes]) -> set[bytes]:
        return {parent for tier in self.below for parent in tier.branches(path)}

    def __contains__(self, key: bytes) -> bool:
        return any(key in tier for tier in self.tiers)

    def has(self, record: Record) -> bool:
        """Say whether a tier has a record. If only the disk has it, its file must exist, too."""
        path = self.disk.files.path_of(record.key, record.folder)
        tiers = (tier for tier in self.tiers if record.key in tier)
        return any(tier is not self.disk_tier or os.path.exists(path) for tier in tiers)

    def tier_of(self, key: bytes) -> str:
        *upper, last = self.tiers
        return next((tier.name for tier in upper if key in tier), last.name)

    def checkpoints(self, blocks: Sequence[bytes]) -> dict[bytes, list[Checkpoint]]:
        tiers = reversed(self.tiers)
        checkpoints = {c.key: c for tier in tiers for c in tier.checkpoints(blocks)}
        by_block: dict[bytes, list[Checkpoint]] = {}
        for checkpoint in checkpoints.values():
            by_block.setdefault(checkpoint.block, []).append(checkpoint)
        return by_block

    # Remove.

    def lose(self, block: Record, reason: str) -> None:
        """Remove a bad record, and the checkpoints of a bad block, from all tiers. Any thread."""
        self._lose_from(self.lower, block, reason)

    def _lose_from(self, tiers: Iterable[LowerTier], block: Record, reason: str | None) -> None:
        if reason is not None:
            self.failures.add("%s goes to quarantine: %s", block, reason)
            self.disk.gone[block.key] = Gone.QUARANTINED
            self.blocks_quarantined += 1
            self.pool.remove(block.key)
        self.n_changes += 1
        for tier in tiers:
            tier.remove(block.key, reason)

    # Add.

    def put(self, blocks: Iterable[tuple[Record, Arrays]]) -> None:
        """Put records into RAM without pinning them."""
        for block, arrays in blocks:
            self.pool.put(KVBlock.of(block, arrays))
        self.n_changes += 1

    def commit(
        self,
        commit: Commit,
        new: Iterable[tuple[Record, Arrays]],
        loss_s: float = math.inf,
        chain: Sequence[Block] = (),
    ) -> None:
        """Put a commit's new records into RAM, and save the commit in the background.

        `loss_s` is the time to compute the commit's checkpoints again. If this time is at most
        `limits.max_loss_s`, the checkpoints are postponed. Earlier blocks of `chain` that the disk
        lacks are also saved.
        """
        entries = {block.key: KVBlock.of(block, arrays) for block, arrays in new}
        keys = [block.key for block in commit.blocks]
        goes_on = [commit.parent, *keys] if commit.checkpoints else []
        later = commit.checkpoints if loss_s <= self.limits.max_loss_s else ()
        postponed = Commit(commit.root, (), checkpoints=later)
        unwritten = self._lacking(commit, chain) or self.pool.unwritten(commit.parent)
        at_once = () if later else commit.checkpoints
        commit = replace(commit, blocks=(*unwritten, *commit.blocks), checkpoints=at_once)
        task, later_task = (self._task(part_commit, entries) for part_commit in (commit, postponed))
        self.pool.touch(keys)
        self.n_changes += bool(keys)
        self.writer.withdraw([*goes_on, *(checkpoint.block for checkpoint in commit.superseded)])
        self.turns_not_saved += self.writer.submit_commit(task)
        if later:
            self.writer.postpone(keys[-1], later_task, has_ended=commit.leaf is not None)

    def _lacking(self, commit: Commit, chain: Sequence[Block]) -> list[Block]:
        """If a tier is below the disk, return the chain's earlier blocks that the disk lacks."""
        if len(self.below) == 1 or not commit.blocks:
            return []
        before = (block for block in reversed(chain) if block.start < commit.blocks[0].start)
        return [*takewhile(lambda block: block.key not in self.disk_tier, before)][::-1]

    def _task(self, commit: Commit, new: Mapping[bytes, KVBlock]) -> Task:
        keys = [record.key for record in commit.records]
        pinned = self.pool.pin(key for key in keys if key not in new)
        for entry in [new[key] for key in keys if key in new]:
            entry.pins = 1
            pinned.append(self.pool.put(entry))
        sizes = {entry.block.key: entry.n_bytes for entry in pinned if not entry.is_stored}
        return Task(commit=commit, let_go=partial(self.pool.unpin, pinned), sizes=sizes)

    def is_safe(self, key: bytes) -> bool:
        """Say whether a block or checkpoint is in a tier below RAM, or waits to be written."""
        entry = self.pool.get(key)
        if entry is None or entry.is_stored:  # another process may have evicted it since
            return any(key in tier for tier in self.below)
        return key in self.writer.unwritten()

    def ends(self, chain: Sequence[Block], session: str | None) -> set[bytes]:
        """Return the keys of a chain's blocks in which other sessions end or will end.

        Here, "other" sessions are all pinned sessions, and all sessions of another name than
        `session`.
        """
        keys = [block.key for block in chain]
        stored = self.view.sessions_at(*keys)
        leaf_keys = [ending.leaf for ending in stored if ending.name != session or ending.pinned]
        leaves = (commit.leaf for commit in self.writer.commits() if commit.leaf)
        leaf_keys += [leaf.key for leaf in leaves if leaf.name != session]
        return set(keys).intersection(leaf_keys)

    def forks(self, chain: Sequence[Block]) -> set[bytes]:
        """Return the keys of a chain's blocks at which another conversation branches off."""
        path = {block.parent: block.key for block in chain[1:]}
        forks = self._branches(path)
        for parent, child in path.items():
            if any(block.key != child for block in self.pool.children(parent, limit=2)):
                forks.add(parent)
        return forks

    def resize(self, max_ram_bytes: int) -> None:
        """Change the budget of RAM. Any thread."""
        self.writer.resize(_queue_bytes(max_ram_bytes))
        self.pool.resize(max_ram_bytes)
        if self.pool.n_bytes > max_ram_bytes:
            self.writer.write_postponed()  # RAM may evict what is written

    def replies(self, root: bytes, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        waiting = {
            digest: packed_ids
            for commit in self.writer.commits()
            if commit.root.key == root
            for digest, packed_ids in commit.replies.items()
        }
        return {**self.view.state.replies(root, digests), **waiting}

    def change_index(self, what: str, change: Callable[[Index], None]) -> None:
        """Let the writer change the index; `what` names the change in the log."""
        run = partial(self.disk_tier.change, what, lambda: change(self.index))
        self.writer.submit(run, is_note=True)

    def touch(self, chain: Sequence[bytes], checkpoints: Sequence[Checkpoint] = ()) -> None:
        """Mark blocks (given by key) and checkpoints as used by a restore that succeeded."""
        self.pool.touch([*chain, *(block.key for block in checkpoints)], proven=True)
        self.change_index("mark used blocks", lambda index: index.touch(chain[-1], checkpoints))

    def drain(self) -> None:
        self.writer.drain()

    def stats(self, *, all_files: bool = True) -> dict[str, Any]:
        """Return numbers and bytes of the records in each tier, and counts of events. Any thread.

        "written_last_hour_bytes" counts what all processes wrote; "written_turn_bytes" is what this
        process wrote per saved turn. If `all_files` is false, no folder is read.
        """
        all_tiers: Sequence[BlockPool | LowerTier] = [self.pool, *self.lower]
        tiers: dict[str, dict[str, Any]] = {
            tier.name: {**tier.stats(), "reused_tokens": self.reused_tokens[tier.name]}
            for tier in all_tiers
        }
        with self.index.asked_once() as index:
            last_hour_bytes = index.state.written_last_hour()
            if all_files:
                tiers["disk"]["bytes"] = self.disk.used_bytes()
        n_turns = self.turns_saved
        return {
            "folder": str(self.folder),
            "tiers": tiers,
            "written_last_hour_bytes": last_hour_bytes,
            "written_turn_bytes": self.disk.n_written_bytes // n_turns if n_turns else None,
            "queue": {
                "tasks": self.writer.n_tasks,
                "bytes": self.writer.n_bytes,
                "max_bytes": self.writer.max_bytes,
                "postponed_bytes": self.writer.n_postponed_bytes,
            },
            "turns_saved": self.turns_saved,
            "turns_not_saved": self.turns_not_saved,
            "blocks_quarantined": self.blocks_quarantined,
            "failures": sorted(self._failures),
            "failed": dict(self.failures.counts),
        }

    def close(self, timeout_s: float = 10.0) -> None:
        """Write waiting commits, for at most `timeout_s` seconds, then close the index."""
        deadline_s = time.monotonic() + timeout_s
        n_turns, n_bytes = self.writer.close(timeout_s)
        if n_turns:
            logger.warning(
                "kvpersist: %d turns or checkpoints (%s) were not written within %.0f s; they are "
                "computed again when needed",
                n_turns,
                show_bytes(n_bytes),
                timeout_s,
            )
        if n_not_saved := self.turns_not_saved - self._not_saved_before:
            logger.warning(
                "kvpersist: turns that could not be saved since the last saved turn: %d; tokens "
                "that the disk lacks are computed again when needed",
                n_not_saved,
            )
        if self.shared is not None:
            self.shared.close(max(0.0, deadline_s - time.monotonic()))
        readers_ended = self.reader.close(max(0.0, deadline_s - time.monotonic()))
        if readers_ended and not self.writer.is_alive():
            self.disk.close()
            self.pool.clear()

    # Writer thread.

    def _save(self, tasks: Sequence[Task]) -> None:
        """Write the commits of tasks to disk; if the tasks are notes, run them to change the index.

        A failed commit's blocks stay in RAM, but unpinned.
        """
        if tasks[0].is_note:
            self.disk_tier.change("note the reuse of blocks", partial(self._note, tasks))
            return
        commits = [task.commit for task in tasks if task.commit is not None]
        results: Sequence[Saved | Exception | None]
        try:
            if len(self.below) > 1:
                self._bring_to_disk(commits)
            results = self.disk_tier.store(commits, self.pool.get)
        except Exception as error:
            results = [error] * len(tasks)
        for task, result in zip(tasks, results, strict=True):
            if isinstance(result, Saved):
                self._set_saved(result.commit)
            elif isinstance(result, Exception):
                self._failed("save a turn", result)
            task.let_go()
            self.turns_not_saved += task.is_turn and not isinstance(result, Saved)

    def _note(self, tasks: Sequence[Task]) -> None:
        with self.index.database.transaction():
            for task in tasks:
                task.run()

    def _bring_to_disk(self, commits: Sequence[Commit]) -> None:
        """Copy to disk blocks that only a tier below it has, one at a time: RAM may be small."""
        for commit in commits:
            for block in commit.blocks:
                if block.key in self.pool or block.key in self.disk_tier:
                    continue
                if (entry := self.reader.read(block, commit.root)) is not None:
                    self.disk_tier.store([Commit(commit.root, (block,))], {block.key: entry}.get)

    def _set_saved(self, commit: Commit) -> None:
        # Only a saved turn clears failures. Smaller commits may fit although turns do not.
        if commit.leaf and commit.records:
            self.turns_saved += 1
            self._not_saved_before = self.turns_not_saved
            self._failures.clear()
            self._is_damaged = False
        for tier in self.lower[1:]:
            try:
                tier.store([commit], self.pool.get)
            except Exception as error:
                self.failures.add("tier %s cannot save a turn: %s", tier.name, error)
        self.pool.set_stored({record.key for record in commit.records})
        for replaced, successor in commit.leaf.replaced if commit.leaf else ():
            old, new = self.pool.get(replaced), self.pool.get(successor)
            if old and new and old.arrays.keys() != new.arrays.keys():
                # Only the longer block is quantized. The old one stays for prompts that end in it.
                self.pool.set_stored([replaced], is_stored=False)
            else:
                self.pool.drop_unpinned(replaced)
        for checkpoint in set(commit.superseded).difference(commit.checkpoints):
            self.pool.drop_unpinned(checkpoint.key)

    def _failed(self, what: str, error: Exception) -> None:
        # A full disk can raise several errors; they count as one kind.
        kind = f"{what}: {'limit' if isinstance(error, StoreError) else 'disk'}"
        self._failures.add(kind)
        if isinstance(error, sqlite3.Error) and is_damage(error) and not self._is_damaged:
            self._is_damaged = True
            self.writer.submit(self.disk_tier.sweep)  # rebuilds the index
        message = "cannot %s: %s; serving continues from memory"
        if advice := remedy(error):
            message += f"{advice} with --kvpersist-dir"
        self.failures.add(message, what, error, kind=kind, level=logging.ERROR)


def _queue_bytes(max_ram_bytes: int) -> int:
    return max(max_ram_bytes // 2, _MIN_QUEUE_BYTES)
