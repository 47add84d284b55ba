"""Eviction: what is used least is removed from disk until the budgets hold."""

from __future__ import annotations

from collections.abc import Collection

from .budget import Space, StoreLimits
from .records import Gone
from .stored_files import StoredFiles

_INDEX_RESERVE_BYTES = 768 << 10


class Eviction:
    """Keeps files within limits. `files.lock` is held while it removes any."""

    def __init__(self, files: StoredFiles, limits: StoreLimits) -> None:
        self.files = files
        self.limits = limits
        self.n_evicted = 0
        """Blocks and checkpoints that this process removed to make room."""

    def space(self) -> Space:
        """Return what the store uses and may use."""
        return Space(
            self.files.folder,
            self.files.used_bytes(),
            self.limits.max_disk_bytes,
            self.files.free_bytes(),
            self.limits.min_free_bytes,
        )

    @property
    def reserve_bytes(self) -> int:
        """Room for the index and its log to grow by while a turn is saved."""
        return min(_INDEX_RESERVE_BYTES, self.limits.max_disk_bytes // 4)

    def make_room(self, n_bytes: int, keep: Collection[bytes] = ()) -> bool:
        """Remove what is used least until `n_bytes` more fit; False when they cannot.

        Quarantined files go first, then least recently used leaves and checkpoints; what belongs to
        pinned sessions and what is in `keep` stays.
        """
        n_bytes += self.reserve_bytes if n_bytes else 0
        if n_bytes > self.limits.max_disk_bytes:
            return False
        index = self.files.index
        with self.files.lock.held():
            too_much = self._excess(n_bytes)
            if too_much > 0:
                self.files.empty_quarantine()
                index.database.empty_log()
                too_much = self._excess(n_bytes)
            pinned = index.pinned_blocks() if too_much > 0 else set()
            while too_much > 0:
                victim = self._victim(keep, pinned)
                if victim is None:
                    index.database.empty_log()  # the rows of what went take room no longer
                    return self._excess(n_bytes) <= 0
                went = self.files.forget(victim, Gone.EVICTED)
                self.n_evicted += len({victim, *went.checkpoints})
                too_much -= went.n_bytes
                if too_much <= 0:
                    # Removing rows makes the index's log longer.
                    index.database.empty_log()
                    too_much = self._excess(n_bytes)
        return True

    def _victim(self, keep: Collection[bytes], pinned: Collection[bytes]) -> bytes | None:
        """Return the least recently used leaf or checkpoint.

        One at a time: when a leaf goes, its parent may be the next. A leaf goes before checkpoints
        of its age, which were kept for blocks before it.
        """
        index = self.files.index
        leaves = ((used, False, key) for used, key in index.unused_leaves() if key not in keep)
        checkpoints = (
            (used, True, key)
            for used, key, block in index.unused_checkpoints()
            if key not in keep and block not in pinned
        )
        candidates = [
            first for rows in (leaves, checkpoints) if (first := next(rows, None)) is not None
        ]
        return min(candidates)[-1] if candidates else None

    def _excess(self, n_bytes: int) -> int:
        """Return how many bytes must go before `n_bytes` more may come."""
        over_budget = self.files.used_bytes() + n_bytes - self.limits.max_disk_bytes
        if not self.limits.min_free_bytes:
            return over_budget
        return max(over_budget, self.limits.min_free_bytes + n_bytes - self.files.free_bytes())
