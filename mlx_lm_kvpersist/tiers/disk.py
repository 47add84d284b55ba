"""The store on disk: files first, then the index, within the budgets, one process at a time.

    index.sqlite      what the files say, quick to ask; can be rebuilt from them
    blocks/ab/        a safetensors file for each block whose key begins with ab
    sessions/         what only a session knows (its name, its pin), a JSON file each
    quarantine/       blocks that failed a check, each with the reason
    lock              held while anything of this changes

Everything here is synchronous; the writer thread and the command line call it.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..match.tree import Node
from .budget import StoreLimits, WriteMeter, free_bytes, tree_bytes
from .files import Arrays, block_path, file_bytes, make_private, sync, write_block
from .index import Index, Session
from .index_file import is_damage
from .lock import StoreLock
from .rebuild import rebuild_index
from .turn import Gone, NewFile, Turn

logger = logging.getLogger(__name__)

_INDEX_RESERVE_BYTES = 768 << 10
_MAX_GONE = 10_000


class DiskStore:
    """The folder of a store.

    Opening takes the folder into use: it is made, 0700, when missing, and its index is rebuilt
    when that is missing or damaged. Raises StoreError when the folder cannot be used.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        self.folder = folder
        self.limits = limits
        self.written = WriteMeter()
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self.lock = StoreLock(folder / "lock")
        try:
            make_private(folder)
            with self.lock.held():
                self.index = self._open_index()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"the store {folder} cannot be used: {error}. "
                "Choose a writable folder with --kvpersist-dir."
            ) from error

    def _open_index(self) -> Index:
        path = self.folder / "index.sqlite"
        # An empty file counts as missing: with an empty index, sweep() would remove every block.
        missing = not path.exists() or path.stat().st_size == 0
        if missing and (self.folder / "blocks").exists():
            rebuild_index(self.folder)
        try:
            return Index(path)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            logger.warning("the index of the store is damaged (%s); it is rebuilt", error)
            rebuild_index(self.folder)
            return Index(path)

    def close(self) -> None:
        self.index.close()

    # Saving.

    def save(
        self,
        turn: Turn,
        arrays_of: Callable[[bytes], Arrays | None],
        keep: Collection[bytes] = (),
    ) -> bool:
        """Write a turn's missing blocks and commit it: whole, or not at all.

        The blocks in `keep`, on which turns to come are built, do not go to make room for it.
        False when one of its blocks, which another process had stored, has been removed or
        replaced since. Raises StoreError when it is too big for what the store may use, and
        OSError or RuntimeError when the disk refuses.
        """
        with self.lock.held():
            self._follow_folder()
            missing = [node for node in turn.nodes if not self._is_there(node.key)]
            arrays = [arrays_of(node.key) for node in missing]
            todo = [(n, a) for n, a in zip(missing, arrays, strict=True) if a is not None]
            if len(todo) < len(missing):
                return False
            fsync = self.limits.fsync
            self._commit(
                turn,
                [
                    NewFile(
                        node,
                        file_bytes(node, block),
                        partial(write_block, self.folder, node, turn.root, block, fsync=fsync),
                    )
                    for node, block in todo
                ],
                keep,
            )
            return True

    def adopt(self, turn: Turn, files: Sequence[NewFile]) -> tuple[Session | None, int]:
        """Commit a turn that comes with block files of its own, whole or not at all.

        Return its session and how many files were missing, and so written. Raises what `save`
        does.
        """
        with self.lock.held():
            todo = [file for file in files if not self._is_there(file.node.key)]
            return self._commit(turn, todo), len(todo)

    def _is_there(self, key: bytes) -> bool:
        """Say whether a block has its row and its file, neither alone."""
        return key in self.index and block_path(self.folder, key).exists()

    def _commit(
        self, turn: Turn, todo: Sequence[NewFile], keep: Collection[bytes] = ()
    ) -> Session | None:
        """Make room, write files, then the index; take the files back when any of it fails."""
        needed = sum(file.n_bytes for file in todo)
        self._check_wear(needed)
        if not self.make_room(needed, keep={*keep, *(node.key for node in turn.nodes)}):
            raise StoreError(
                f"a turn of {needed / 1e6:.1f} MB does not fit into --kvpersist-disk "
                f"({self.limits.max_disk_bytes / 1e6:.1f} MB) and --kvpersist-min-free "
                f"({self.limits.min_free_bytes / 1e6:.1f} MB)"
            )
        written: list[tuple[Node, int]] = []
        try:
            for file in todo:
                size = file.write()
                written.append((file.node, size))
                self.written.add(size)
            session = self._session_of(turn)
            self.index.commit_turn(
                turn.root, written, session, turn.leaf, turn.replies, chain=turn.nodes
            )
        except BaseException:
            for node, _ in written:
                block_path(self.folder, node.key).unlink(missing_ok=True)
            raise
        for replaced, successor in turn.leaf.replaced if turn.leaf else ():
            self.forget(replaced)
            for moved in self.index.sessions_at(successor):
                self._write_session(moved)
        return session

    def _session_of(self, turn: Turn) -> Session | None:
        if turn.leaf is None:
            return None
        now, leaf = time.time(), turn.leaf
        session = self.index.session_at(turn.root, leaf)
        if session is None:
            session = Session(
                uuid.uuid4().hex[:8], turn.root.key, leaf.name, leaf.key, 0, False, now, now
            )
        session = replace(session, leaf=leaf.key, n_tokens=leaf.n_tokens, used=now)
        self._write_session(session)
        return session

    def _write_session(self, session: Session) -> None:
        """Keep what a rebuilt index could not know."""
        if session.name is None and not session.pinned:
            return
        path = self._session_path(session.id)
        make_private(path.parent)
        content = {**asdict(session), "root": session.root.hex(), "leaf": session.leaf.hex()}
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(content, file)
            if self.limits.fsync:
                sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _session_path(self, session_id: str) -> Path:
        return self.folder / "sessions" / f"{session_id}.json"

    def _follow_folder(self) -> None:
        """Take a folder that was removed under us into use again."""
        if self.index.is_current():
            return
        logger.warning("the store %s was removed; it is made anew", self.folder)
        make_private(self.folder)
        # Not closed: another thread may be reading, and SQLite would crash under it. The last
        # one who holds the old index lets go of its connections.
        self.index = self._open_index()

    # Budgets.

    def used_bytes(self) -> int:
        """Return the size of all files in the folder."""
        others = sum(tree_bytes(self.folder / name) for name in ("sessions", "quarantine"))
        for suffix in ("", "-wal", "-shm"):
            path = self.folder / f"index.sqlite{suffix}"
            others += path.stat().st_size if path.exists() else 0
        return self.index.n_bytes() + others

    @property
    def reserve_bytes(self) -> int:
        """Room for the index and its log to grow by while a turn is saved."""
        return min(_INDEX_RESERVE_BYTES, self.limits.max_disk_bytes // 4)

    def make_room(self, n_bytes: int, keep: Collection[bytes] = ()) -> bool:
        """Remove what is used least until `n_bytes` more fit; False when they cannot.

        Quarantined files go first, then least recently used leaves; pinned sessions and the
        blocks in `keep` stay.
        """
        n_bytes += self.reserve_bytes if n_bytes else 0
        if n_bytes > self.limits.max_disk_bytes:
            return False
        with self.lock.held():
            too_much = self._excess(n_bytes)
            if too_much > 0:
                self._empty_quarantine()
                self.index.checkpoint()
                too_much = self._excess(n_bytes)
            while too_much > 0:
                victim = self._victim(keep)
                if victim is None:
                    return False
                key, size = victim
                self.forget(key)
                self._note_gone(key, Gone.EVICTED)
                too_much -= size
                if too_much <= 0:
                    # Removing rows makes the index's log longer.
                    self.index.checkpoint()
                    too_much = self._excess(n_bytes)
        return True

    def _victim(self, keep: Collection[bytes]) -> tuple[bytes, int] | None:
        """Return the least recently used leaf, with its size.

        One at a time: when a leaf goes, its parent may be the next.
        """
        for key, size in self.index.unused_leaves():
            if key not in keep:
                return key, size
        return None

    def _excess(self, n_bytes: int) -> int:
        """Return how many bytes must go before `n_bytes` more may come."""
        over_budget = self.used_bytes() + n_bytes - self.limits.max_disk_bytes
        if not self.limits.min_free_bytes:
            return over_budget
        return max(over_budget, self.limits.min_free_bytes + n_bytes - free_bytes(self.folder))

    def _check_wear(self, n_bytes: int) -> None:
        limit = self.limits.max_hourly_bytes
        if limit is not None and self.written.last_hour_bytes() + n_bytes > limit:
            raise StoreError(
                f"--kvpersist-max-writes-per-hour ({limit / 1e6:.1f} MB) is used up; "
                "turns stay in memory for now"
            )

    # Removing.

    def gone(self, key: bytes) -> Gone | None:
        """Return why a block went, if this process removed it not too long ago. Any thread."""
        return self._gone.get(key)

    def _note_gone(self, key: bytes, why: Gone) -> None:
        self._gone[key] = why
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Remove a block and the sessions that end in it."""
        with self.lock.held():
            for session_id in self.index.forget_block(key):
                self._session_path(session_id).unlink(missing_ok=True)
            block_path(self.folder, key).unlink(missing_ok=True)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move a block that failed a check aside. What follows it is no longer reached."""
        with self.lock.held():
            self._note_gone(key, Gone.QUARANTINED)
            path = block_path(self.folder, key)
            aside = self.folder / "quarantine"
            if path.exists():
                target = aside / f"{key.hex()}-{time.time_ns()}.safetensors"
                try:
                    _move_aside(path, target, {"key": key.hex(), "reason": reason})
                except OSError as error:
                    # Better no evidence than a block that stays in the way of a whole one.
                    logger.warning("block %s is removed, not kept aside: %s", key.hex(), error)
                    path.unlink(missing_ok=True)
            for session_id in self.index.forget_block(key):
                self._session_path(session_id).unlink(missing_ok=True)

    def quarantined(self) -> list[Path]:
        """Return the files in quarantine, the oldest first."""
        aside = self.folder / "quarantine"
        return sorted(aside.glob("*"), key=lambda path: path.stat().st_mtime)

    def _empty_quarantine(self) -> None:
        for path in self.quarantined():
            path.unlink(missing_ok=True)

    def remove_session(self, session: Session) -> None:
        """Forget a session and the blocks that no other session needs."""
        with self.lock.held():
            chain = self.index.chain(session.leaf)
            self.index.remove_session(session.id)
            self._session_path(session.id).unlink(missing_ok=True)
            needed = {other.leaf for other in self.index.sessions()}
            for node, _ in reversed(chain):
                if node.key in needed or self.index.children(node.key):
                    break
                self.forget(node.key)
            self.index.checkpoint()

    def set_pinned(self, session: Session, pinned: bool) -> Session:
        """Pin a session, so that it is never removed to make room, or let it go again."""
        with self.lock.held():
            changed = replace(session, pinned=pinned)
            self._write_session(changed)
            self.index.put_session(changed)
            if not pinned and changed.name is None:
                self._session_path(changed.id).unlink(missing_ok=True)
            return changed

    def sweep(self) -> int:
        """Bring files and index in line after a crash; return how many of either were removed.

        A file without a row was renamed by a turn that was never committed; a row without a file
        lost it; a block without its parent can never be reached.
        """
        with self.lock.held():
            known = self.index.keys()
            n_swept = 0
            present: set[bytes] = set()
            for path in (self.folder / "blocks").glob("*/*"):
                key = _key_of(path)
                if key is not None and key in known:
                    present.add(key)
                else:
                    path.unlink(missing_ok=True)
                    n_swept += 1
            for key in known - present:
                self.forget(key)
                n_swept += 1
            for key in self.index.unreachable():
                self.forget(key)
                n_swept += 1
            sessions = {f"{session.id}.json" for session in self.index.sessions()}
            for path in (self.folder / "sessions").glob("*"):
                if path.name not in sessions:
                    path.unlink(missing_ok=True)
                    n_swept += 1
            return n_swept


def _move_aside(path: Path, target: Path, about: dict[str, str]) -> None:
    """Move a file, and put beside it what is to be known of it."""
    make_private(target.parent)
    note = target.with_suffix(".json")
    try:
        with os.fdopen(os.open(note, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            json.dump({**about, "time": time.time()}, file)
        os.replace(path, target)
    except BaseException:
        note.unlink(missing_ok=True)
        raise


def _key_of(path: Path) -> bytes | None:
    """Return the key that a block file is named by; None for a temporary name."""
    try:
        return bytes.fromhex(path.name.removesuffix(".safetensors"))
    except ValueError:
        return None
