"""Find out what making room would remove, by doing it on a copy of the index without texts."""

from __future__ import annotations

from pathlib import Path

from .budget import StoreLimits, free_bytes
from .eviction import StoredFiles
from .folder import own_bytes
from .index import Forgotten, Index
from .lock import StoreLock
from .turn import Gone


class DryRun(StoredFiles):
    """A store that removes rows of a copy of its index and counts them; its files stay.

    index: the file to copy, the store's own or a copy of it. scratch: an empty folder.
    """

    def __init__(self, folder: Path, limits: StoreLimits, index: Path, scratch: Path) -> None:
        super().__init__(folder, limits, StoreLock(scratch / "lock"))
        self.n_freed_bytes = 0
        self.n_blocks = 0
        self.n_checkpoints = 0
        self.ended: list[str] = []
        self.index = Index(scratch / "index.sqlite")
        self.index.copy_outline(index)
        self._used_before = super().used_bytes()

    def used_bytes(self) -> int:
        return self._used_before - self.n_freed_bytes

    def forget(self, key: bytes) -> Forgotten:
        is_block = key in self.index
        went = self.index.forget(key)
        self.n_freed_bytes += went.n_bytes
        self.n_blocks += is_block
        self.n_checkpoints += len(went.checkpoints)
        self.ended += went.sessions
        return went

    def _note_gone(self, key: bytes, why: Gone) -> None:
        pass  # it is still there

    def _empty_quarantine(self) -> None:
        self.n_freed_bytes += own_bytes(self.folder, "quarantine")

    def _excess(self, n_bytes: int) -> int:
        over_budget = self.used_bytes() + n_bytes - self.limits.max_disk_bytes
        free = free_bytes(self.folder) + self.n_freed_bytes
        return max(over_budget, self.limits.min_free_bytes + n_bytes - free)
