"""The files of a store with their rows: their sizes, and how they are forgotten or set aside."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from ..errors import StoreError
from .budget import free_bytes
from .files import block_path, checkpoint_path, key_of
from .folder import INDEX_FILES, move, new_file, own_bytes, own_files, remove
from .index import Forgotten, Index, Session
from .lock import StoreLock, staged_bytes, sweep_staged
from .rebuild import rebuild_index
from .records import Gone, sidecar_path, write_sidecar

logger = logging.getLogger(__name__)

_MAX_GONE = 10_000


class StoredFiles:
    """What a store's folder holds, files and rows together. `lock` is held while either changes."""

    def __init__(self, folder: Path, index: Index, lock: StoreLock, *, fsync: bool) -> None:
        self.folder = folder
        self.index = index
        self.lock = lock
        self._fsync = fsync
        self.forgotten: Callable[[Collection[bytes]], None] = lambda keys: None
        """Called with the keys of blocks and checkpoints that are no longer on disk."""
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()

    def used_bytes(self) -> int:
        """Return the size of the store's files, and of those that are announced."""
        totals = self.index.totals()
        others = own_bytes(self.folder, *INDEX_FILES, "quarantine")
        return totals.n_bytes + totals.sidecar_bytes + others + staged_bytes(self.folder)[0]

    def free_bytes(self) -> int:
        """Return the free space of the volume, less what is announced and not yet written."""
        announced, written = staged_bytes(self.folder)
        return free_bytes(self.folder) - (announced - written)

    def gone(self, key: bytes) -> Gone | None:
        """Return why a block or checkpoint went, if this process removed it lately. Any thread."""
        return self._gone.get(key)

    def forget(self, key: bytes, why: Gone | None = None) -> Forgotten:
        """Remove a checkpoint, or a block with its checkpoints and the sessions that end in it."""
        with self.lock.held():
            went = self.index.forget(key)
            for session_id in went.sessions:
                self.remove_sidecar(session_id)
            remove(self.folder, block_path(self.folder, key))
            keys = {key, *went.checkpoints}
            self.forgotten(keys)
            for one in keys:
                remove(self.folder, checkpoint_path(self.folder, one))
                if why is not None:
                    self._gone[one] = why
            while len(self._gone) > _MAX_GONE:
                self._gone.popitem(last=False)
            return went

    def forget_missing(self, key: bytes) -> None:
        """Forget a block or checkpoint, unless its file is there after all."""
        with self.lock.held():
            if not any(path(self.folder, key).exists() for path in (block_path, checkpoint_path)):
                self.forget(key)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move what failed a check aside. Blocks that follow it are no longer reached."""
        with self.lock.held():
            for path in (block_path(self.folder, key), checkpoint_path(self.folder, key)):
                self._set_aside(path, key, reason)
            self.forget(key, Gone.QUARANTINED)

    def empty_quarantine(self) -> None:
        for path in own_files(self.folder, "quarantine"):
            remove(self.folder, path)

    def _set_aside(self, path: Path, key: bytes, reason: str) -> None:
        """Move the file of a block or checkpoint to quarantine, with a sidecar, if it is there."""
        if not path.exists():
            return
        target = self.folder / "quarantine" / f"{key.hex()}-{time.time_ns()}.safetensors"
        sidecar = target.with_suffix(".json")
        try:
            with new_file(sidecar) as file:
                about = {"key": key.hex(), "reason": reason, "time": time.time()}
                file.write(json.dumps(about).encode())
            move(self.folder, path, target)
        except (OSError, StoreError) as error:
            # A file that cannot be kept is removed: it must not stand in the way of a whole one.
            logger.warning("%s is not kept aside: %s", path.name, error)
            remove(self.folder, sidecar)
            remove(self.folder, path)

    def remove_session(self, session: Session) -> None:
        """Forget a session and the blocks that no other session needs."""
        with self.lock.held():
            chain = self.index.chain(session.leaf)
            self.index.remove_session(session.id)
            self.remove_sidecar(session.id)
            for node, _ in reversed(chain):
                if self.index.sessions_at(node.key) or self.index.children(node.key, limit=1):
                    break
                self.forget(node.key)
            self.index.database.empty_log()

    def sweep(self) -> int:
        """Bring files and index in line after a crash; return how many of either were removed.

        A file without a row was moved by a turn that was never committed; a row without a file
        lost it; a block without its parent, or a checkpoint without its block, is never reached.
        """
        with self.lock.held():
            n_swept = sweep_staged(self.folder)
            if self.index.faults():
                rebuild_index(self.folder)  # or what its rows do not tell would be removed
            for name in ("blocks", "checkpoints"):
                known, present = self.index.keys(name), set[bytes]()
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

    def write_sidecar(self, session: Session) -> None:
        write_sidecar(self.folder, session, fsync=self._fsync)

    def remove_sidecar(self, session_id: str) -> None:
        remove(self.folder, sidecar_path(self.folder, session_id))

    def set_pinned(self, session: Session, pinned: bool) -> Session:
        """Pin a session, so that it is never removed to make room, or let it go again.

        Raises StoreError when it was removed meanwhile.
        """
        with self.lock.held():
            current = self.index.session(session.id)  # another process may have moved its leaf
            if current is None:
                raise StoreError(f"session {session.id} was removed meanwhile")
            changed = replace(current, pinned=pinned)
            self.write_sidecar(changed)
            self.index.put_session(changed)
            if not pinned and changed.name is None:
                self.remove_sidecar(changed.id)
            return changed
