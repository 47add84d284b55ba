"""What a store takes on disk, and how what it holds is removed: evicted, set aside, swept.

A dry run finds out what making room would remove, by doing it on a copy of the index.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path

from ..errors import StoreError
from .budget import Space, StoreLimits, free_bytes
from .files import block_path, checkpoint_path, key_of
from .folder import INDEX_FILES, move, new_file, own_bytes, own_files, remove
from .index import Forgotten, Index, Session
from .lock import StoreLock, staged_bytes, sweep_staged
from .rebuild import rebuild_index
from .records import Gone, note_path

logger = logging.getLogger(__name__)

_INDEX_RESERVE_BYTES = 768 << 10
_MAX_GONE = 10_000


class StoredFiles:
    """The files of a store and their rows. `lock` is held while either changes."""

    index: Index

    def __init__(self, folder: Path, limits: StoreLimits, lock: StoreLock) -> None:
        self.folder = folder
        self.limits = limits
        self.lock = lock
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self.n_evicted = 0
        """Blocks and checkpoints that this process removed to make room."""

    def close(self) -> None:
        self.index.close()

    def _remove_note(self, session_id: str) -> None:
        remove(self.folder, note_path(self.folder, session_id))

    def used_bytes(self) -> int:
        """Return the size of the store's files, and of those that are announced."""
        others = own_bytes(self.folder, *INDEX_FILES, "sessions", "quarantine")
        return self.index.n_bytes() + others + staged_bytes(self.folder)[0]

    def space(self) -> Space:
        """Return what the store uses and may use."""
        return Space(
            self.folder,
            self.used_bytes(),
            self.limits.max_disk_bytes,
            free_bytes(self.folder),
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
        with self.lock.held():
            too_much = self._excess(n_bytes)
            if too_much > 0:
                self._empty_quarantine()
                self.index.empty_log()
                too_much = self._excess(n_bytes)
            pinned = self.index.pinned_blocks() if too_much > 0 else set()
            while too_much > 0:
                victim = self._victim(keep, pinned)
                if victim is None:
                    self.index.empty_log()  # the rows of what went take room no longer
                    return self._excess(n_bytes) <= 0
                went = self.forget(victim)
                for key in {victim, *went.checkpoints}:
                    self._note_gone(key, Gone.EVICTED)
                    self.n_evicted += 1
                too_much -= went.n_bytes
                if too_much <= 0:
                    # Removing rows makes the index's log longer.
                    self.index.empty_log()
                    too_much = self._excess(n_bytes)
        return True

    def _victim(self, keep: Collection[bytes], pinned: Collection[bytes]) -> bytes | None:
        """Return the least recently used leaf or checkpoint.

        One at a time: when a leaf goes, its parent may be the next. A leaf goes before checkpoints
        of its age, which were kept for blocks before it.
        """
        leaves = ((used, False, key) for used, key in self.index.unused_leaves() if key not in keep)
        checkpoints = (
            (used, True, key)
            for used, key, block in self.index.unused_checkpoints()
            if key not in keep and block not in pinned
        )
        candidates = [
            first for rows in (leaves, checkpoints) if (first := next(rows, None)) is not None
        ]
        return min(candidates)[-1] if candidates else None

    def _excess(self, n_bytes: int) -> int:
        """Return how many bytes must go before `n_bytes` more may come."""
        over_budget = self.used_bytes() + n_bytes - self.limits.max_disk_bytes
        if not self.limits.min_free_bytes:
            return over_budget
        announced, written = staged_bytes(self.folder)
        free = free_bytes(self.folder) - (announced - written)
        return max(over_budget, self.limits.min_free_bytes + n_bytes - free)

    def gone(self, key: bytes) -> Gone | None:
        """Return why a block or checkpoint went, if this process removed it lately. Any thread."""
        return self._gone.get(key)

    def _note_gone(self, key: bytes, why: Gone) -> None:
        self._gone[key] = why
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def forget(self, key: bytes) -> Forgotten:
        """Remove a checkpoint, or a block with its checkpoints and the sessions that end in it."""
        with self.lock.held():
            went = self.index.forget(key)
            for session_id in went.sessions:
                self._remove_note(session_id)
            remove(self.folder, block_path(self.folder, key))
            for one in {key, *went.checkpoints}:
                remove(self.folder, checkpoint_path(self.folder, one))
            return went

    def forget_missing(self, key: bytes) -> None:
        """Forget a block or checkpoint, unless its file is there after all."""
        with self.lock.held():
            if not any(path(self.folder, key).exists() for path in (block_path, checkpoint_path)):
                self.forget(key)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move what failed a check aside. Blocks that follow it are no longer reached."""
        with self.lock.held():
            self._note_gone(key, Gone.QUARANTINED)
            for path in (block_path(self.folder, key), checkpoint_path(self.folder, key)):
                self._set_aside(path, key, reason)
            self.forget(key)

    def _empty_quarantine(self) -> None:
        for path in own_files(self.folder, "quarantine"):
            remove(self.folder, path)

    def _set_aside(self, path: Path, key: bytes, reason: str) -> None:
        """Move the file of a block or checkpoint to quarantine, with a note, if it is there."""
        if not path.exists():
            return
        target = self.folder / "quarantine" / f"{key.hex()}-{time.time_ns()}.safetensors"
        note = target.with_suffix(".json")
        try:
            with new_file(note) as file:
                about = {"key": key.hex(), "reason": reason, "time": time.time()}
                file.write(json.dumps(about).encode())
            move(self.folder, path, target)
        except (OSError, StoreError) as error:
            # A file that cannot be kept is removed: it must not stand in the way of a whole one.
            logger.warning("%s is not kept aside: %s", path.name, error)
            remove(self.folder, note)
            remove(self.folder, path)

    def remove_session(self, session: Session) -> None:
        """Forget a session and the blocks that no other session needs."""
        with self.lock.held():
            chain = self.index.chain(session.leaf)
            self.index.remove_session(session.id)
            self._remove_note(session.id)
            for node, _ in reversed(chain):
                if self.index.sessions_at(node.key) or self.index.children(node.key, limit=1):
                    break
                self.forget(node.key)
            self.index.empty_log()

    def sweep(self) -> int:
        """Bring files and index in line after a crash; return how many of either were removed.

        A file without a row was moved by a turn that was never committed; a row without a file
        lost it; a block without its parent, or a checkpoint without its block, is never reached.
        """
        with self.lock.held():
            n_swept = sweep_staged(self.folder)
            if self.index.faults():
                rebuild_index(self.folder)  # or what its rows do not tell would be removed
            for name, keys in (("blocks", self.index.keys), ("parts", self.index.checkpoint_keys)):
                known, present = keys(), set[bytes]()
                for path in own_files(self.folder, name):
                    key = key_of(path)
                    if key is not None and key in known:
                        present.add(key)
                    else:
                        n_swept += remove(self.folder, path)
                for key in known - present:
                    self.forget(key)
                    n_swept += 1
            for key in self.index.unreachable():
                self.forget(key)
                n_swept += 1
            sessions = {f"{session.id}.json" for session in self.index.sessions()}
            for path in own_files(self.folder, "sessions"):
                if path.name not in sessions:
                    n_swept += remove(self.folder, path)
            return n_swept


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

    def _empty_quarantine(self) -> None:
        self.n_freed_bytes += own_bytes(self.folder, "quarantine")

    def _excess(self, n_bytes: int) -> int:
        over_budget = self.used_bytes() + n_bytes - self.limits.max_disk_bytes
        free = free_bytes(self.folder) + self.n_freed_bytes
        return max(over_budget, self.limits.min_free_bytes + n_bytes - free)
