"""The disk as a tier: what serving threads find and read there, and what the writer changes."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..block import Block, Checkpoint, Record, Root
from ..errors import BlockCorrupt, StoreError
from .disk import DiskStore
from .files import Arrays, path_of, read_file
from .index import Index
from .index_view import IndexView
from .records import Commit
from .tier import DISK
from .writer import Writer

logger = logging.getLogger(__name__)


class DiskTier:
    """A store's folder below RAM. `failed` is told what could not be done, and why."""

    name = DISK

    def __init__(
        self, disk: DiskStore, writer: Writer, failed: Callable[[str, Exception], None]
    ) -> None:
        self.disk = disk
        self.view = IndexView(disk.index, failed)
        self._writer = writer
        self._failed = failed
        self._lost: set[bytes] = set()
        """Keys of what is damaged or may be missing, until it is removed or written anew. What
        could not be read for another reason is not among them."""

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        lost = self._lost.copy()  # before the index is read: they leave both, it first
        wanted = None if limit is None else limit + len(lost)
        found = self.view.children(parent, ahead, wanted)
        return [block for block in found if block.key not in lost] if lost else found

    def branches(self, path: Mapping[bytes, bytes]) -> set[bytes]:
        return self.view.branches(path)

    def checkpoints(self, blocks: Sequence[bytes]) -> list[Checkpoint]:
        lost = self._lost.copy()  # as in `children`
        return [one for one, _ in self.view.checkpoints(blocks) if one.key not in lost]

    def __contains__(self, key: bytes) -> bool:
        if key in self._lost:
            return False
        return self.view.has_block(key) or self.view.has_checkpoint(key)

    def read(self, block: Record, root: Root) -> Arrays:
        path = path_of(self.disk.folder, block)
        found, its_root, arrays = read_file(path, verify=self.disk.limits.verify)
        if found != block:
            raise BlockCorrupt(f"{path.name}: file and index disagree")
        if its_root.key != root.key:
            raise BlockCorrupt(f"{block} belongs to another model")
        return arrays

    def write(self, commit: Commit, arrays_of: Callable[[bytes], Arrays | None]) -> Commit | None:
        lost = self._lost.copy()
        keep = {key for commit in self._writer.commits() for key in commit.keys()}
        saved = self.disk.save(commit, arrays_of, keep, self._writer.rest, lost)
        if saved is None:
            return None
        # What was lost meanwhile may not have been written anew.
        written = {record.key for record in saved.records}
        self._lost.difference_update(lost & written)
        return saved

    def forget(self, key: bytes, reason: str | None = None) -> None:
        self._lost.add(key)
        self._writer.submit(partial(self._take_away, key, reason))

    def _take_away(self, key: bytes, reason: str | None) -> None:
        if key not in self._lost:
            return  # written anew since
        try:
            if reason is None:
                self.disk.files.forget_missing(key)
            else:
                self.disk.files.quarantine(key, reason)
        except (OSError, StoreError, sqlite3.Error) as error:
            self._failed("take a block out of the store", error)
            if reason is not None:
                return  # it stays damaged
        self._lost.discard(key)

    def change_index(self, what: str, change: Callable[[Index], None]) -> None:
        """Have the writer change the index; `what` it does is said where it fails."""

        def run() -> None:
            try:
                with self.disk.lock.held():
                    change(self.disk.index)
            except (OSError, sqlite3.Error) as error:
                self._failed(what, error)

        self._writer.submit(run)

    def sweep(self) -> None:
        """Remove what an interrupted run left. Writer thread."""
        with self.disk.lock.held():
            self.disk.follow_folder()  # or files that only a newer index knows would be removed
            n_swept = self.disk.files.sweep()
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
            "evicted": self.disk.eviction.n_evicted,
            "max_bytes": self.disk.limits.max_disk_bytes,
            "written_bytes": self.disk.n_written_bytes,
        }
