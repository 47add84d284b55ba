"""The disk as a tier below RAM: serving threads ask a view of its index, the writer changes it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..block import Block, Checkpoint, Record, Root
from ..errors import BlockCorrupt, StoreError
from .disk import DiskStore
from .files import Arrays, read_file
from .records import Commit, KVBlock, NewFile, Saved
from .saving import Saving
from .tier import DISK
from .writer import Writer

logger = logging.getLogger(__name__)


class DiskTier:
    """A store's folder below RAM. `failed` is called with what could not be done, and why."""

    name = DISK

    def __init__(
        self, disk: DiskStore, writer: Writer, failed: Callable[[str, Exception], None]
    ) -> None:
        self.disk = disk
        self._lost: set[bytes] = set()
        """Keys of what is damaged or may be missing, until it is removed or written anew. What
        could not be read for another reason is not among them."""
        self.view = disk.index.view(failed, self._lost)
        self.children, self.branches = self.view.children, self.view.branches
        self._writer = writer
        self._failed = failed

    def checkpoints(self, blocks: Sequence[bytes]) -> list[Checkpoint]:
        return [checkpoint for checkpoint, _ in self.view.checkpoints(blocks)]

    def chain(self, leaf: bytes) -> list[Block]:
        """Return the blocks from the root to a leaf; none if a block is missing."""
        return [block for block, _ in self.view.chain(leaf)]

    def __contains__(self, key: bytes) -> bool:
        return key in self.view

    def load(self, block: Record, root: Root) -> Arrays:
        path = self.disk.files.path_of(block.key, block.folder)
        record, its_root, arrays = read_file(path, self.disk.files)
        if record != block:
            raise BlockCorrupt(f"{path.name}: file and index disagree")
        if its_root.key != root.key:
            raise BlockCorrupt(f"{block} belongs to another model")
        return arrays

    def content_of(self, record: Record) -> bytes:
        """Return what the file of a block or checkpoint holds. Raises BlockCorrupt and OSError."""
        return self.disk.files.read(self.disk.files.path_of(record.key, record.folder))

    def store(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> list[Saved | Exception | None]:
        lost = self._lost.copy()
        # Postponed checkpoints come without blocks. If their blocks go, they are not written.
        waiting = (commit for commit in self._writer.commits() if commit.blocks)
        keep = {key for commit in waiting for key in commit.keys()}

        def file_of(root: Root, record: Record) -> NewFile | None:
            entry = entry_of(record.key)
            return self.disk.new_file(root, record, entry.arrays) if entry else None

        def block_of(key: bytes) -> Block | None:
            entry = entry_of(key)
            return entry.block if entry and isinstance(entry.block, Block) else None

        planned = [partial(lambda commit: commit, commit) for commit in commits]
        saving = Saving(self.disk, file_of, block_of, keep, self._writer.rest, lost)
        results = saving.save(planned)
        for saved in results:
            if isinstance(saved, Saved):
                # A record that was lost since then may not have been written again.
                self._lost.difference_update(lost & {record.key for record in saved.commit.records})
        return results

    def remove(self, key: bytes, reason: str | None = None) -> None:
        self._lost.add(key)
        self._writer.submit(partial(self._remove, key, reason))

    def _remove(self, key: bytes, reason: str | None) -> None:
        if key not in self._lost:
            return  # written again since
        if reason is None:
            remove = partial(self.disk.forget_missing, key)
        else:
            remove = partial(self.disk.quarantine, key, reason)
        if self.change("take a block out of the store", remove) or reason is None:
            self._lost.discard(key)  # else the file stays, and is damaged

    def change(self, what: str, change: Callable[[], object]) -> bool:
        """Change files or index under the lock. Return False if that fails. Writer thread.

        `what` it does is said in the log if it fails.
        """
        try:
            with self.disk.lock.held():
                self.disk.follow_folder()
                change()
        except (OSError, StoreError, sqlite3.Error) as error:
            self._failed(what, error)
            return False
        return True

    def sweep(self) -> None:
        """Remove what an interrupted run left, by an index that is whole. Writer thread."""
        try:
            self.disk.check_index()
            with self.disk.lock.held():
                self.disk.follow_folder()  # or files that only a newer index knows would be removed
                n_swept = self.disk.sweep()
        except (OSError, StoreError, sqlite3.Error) as error:
            return self._failed("check what is stored", error)
        if n_swept:
            logger.info("swept %d leftovers of an interrupted run from the store", n_swept)

    def stats(self) -> dict[str, Any]:
        """Return what `Tier.stats` does, by the index: no folder is looked at."""
        with self.disk.index.asked_once() as index:
            totals = index.totals()
        return {
            "blocks": totals.n_blocks,
            "checkpoints": totals.n_checkpoints,
            "bytes": totals.n_bytes,
            "checkpoint_bytes": totals.checkpoint_bytes,
            "evicted": self.disk.n_evicted,
            "asked_again_tokens": self.disk.asked_again_tokens,
            "max_bytes": self.disk.limits.max_disk_bytes,
            "written_bytes": self.disk.n_written_bytes,
        }
