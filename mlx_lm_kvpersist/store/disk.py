"""The store on disk: files first, then the index, within the budgets, one process at a time.

    index.sqlite      what the files say, quick to ask; can be rebuilt from them
    blocks/ab/        a safetensors file for each block whose key begins with ab
    parts/ab/         the same for checkpoints, which may be evicted before their blocks
    sessions/         what only a session knows (its name, its pin), a JSON file each
    quarantine/       what failed a check, each file with the reason
    writing/          what is being written, before it is moved to blocks/ and parts/
    kvpersist-store   says that the folder is a store
    lock              held while anything of this changes

Everything here is synchronous; the writer thread and the command line call it.
"""

from __future__ import annotations

import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..match.block import Block, Root
from ..units import show_bytes
from .budget import StoreLimits, WriteMeter
from .eviction import StoredFiles
from .files import (
    Arrays,
    block_path,
    checkpoint_path,
    file_bytes,
    metadata_of,
    path_of,
    write_block,
)
from .folder import move, remove, sync, take_into_use
from .index import Index, Session
from .index_schema import is_damage
from .lock import Staging, StoreLock
from .rebuild import rebuild_index
from .records import MAX_PINNED, NewFile, Turn, write_note

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096


class DiskStore(StoredFiles):
    """The folder of a store.

    Opening takes the folder into use: it is made, 0700, when missing, and its index is rebuilt
    when that is missing or damaged. Raises StoreError when the folder cannot be used.
    """

    def __init__(self, folder: Path, limits: StoreLimits) -> None:
        super().__init__(folder, limits, StoreLock(folder / "lock"))
        self.written = WriteMeter()
        try:
            take_into_use(folder)
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

    def save(
        self,
        turn: Turn,
        arrays_of: Callable[[bytes], Arrays | None],
        keep: Collection[bytes] = (),
        after_file: Callable[[float], None] = lambda seconds: None,
        damaged: Collection[bytes] = (),
    ) -> Turn | None:
        """Write a turn's missing blocks and checkpoints and commit it: whole, or not at all.

        `keep` is not removed to make room: turns to come are built on it. Files of `damaged` blocks
        and checkpoints are replaced. `after_file` is told how long each file took, and may take its
        time: the store's lock is not held meanwhile.

        Return the turn as it was committed: checkpoints that are gone, or whose block is not there,
        are left out, and then it supersedes nothing. None when one of its blocks, which another
        process had stored, has been removed or replaced since. Raises StoreError when it is too
        big for what the store may use, and OSError or RuntimeError when the disk refuses.
        """

        def is_there(block: Block) -> bool:
            return block.key not in damaged and self._is_there(block)

        def plan() -> tuple[Turn, list[NewFile]] | None:
            files: list[NewFile] = []
            chain = {block.key for block in turn.blocks}
            checkpoints: list[Block] = []
            for block in (*turn.blocks, *turn.checkpoints):
                part = block.is_checkpoint
                if part and block.parent not in chain and not self._is_block_there(block.parent):
                    continue
                if not is_there(block):
                    arrays = arrays_of(block.key)
                    if arrays is None and part:
                        continue
                    if arrays is None:
                        return None
                    files.append(self._new_file(block, turn.root, arrays))
                if part:
                    checkpoints.append(block)
            if len(checkpoints) < len(turn.checkpoints):
                return replace(turn, checkpoints=tuple(checkpoints), superseded=()), files
            return turn, files

        done = self._write(plan, keep, after_file)
        return done and done[0]

    def _new_file(self, block: Block, root: Root, arrays: Arrays) -> NewFile:
        write = partial(write_block, block=block, root=root, arrays=arrays, fsync=self.limits.fsync)
        return NewFile(block, file_bytes(metadata_of(block, root), arrays), write)

    def adopt(
        self, turn: Callable[[], Turn], files: Sequence[NewFile]
    ) -> tuple[Session | None, list[Block]]:
        """Commit a turn that comes with files of its own, whole or not at all.

        `turn` is called with the lock held. Return the turn's session and what was missing, and so
        written. Raises what `save` does.
        """
        done = self._write(
            lambda: (turn(), [file for file in files if not self._is_there(file.block)])
        )
        assert done is not None  # what is missing comes with the turn
        _, session, written = done
        return session, written

    def _write(
        self,
        plan: Callable[[], tuple[Turn, list[NewFile]] | None],
        keep: Collection[bytes] = (),
        after_file: Callable[[float], None] = lambda seconds: None,
    ) -> tuple[Turn, Session | None, list[Block]] | None:
        """Write the files that a turn lacks, then commit it; None when there is no plan for it.

        The lock is held to plan, make room and commit, and not while files are written. What
        another process changed meanwhile is found by planning again.
        """
        with closing(Staging(self.folder)) as staging:
            while True:
                with self.lock.held():
                    self._follow_folder()
                    planned = plan()
                    if planned is None:
                        return None
                    turn, files = planned
                    todo = [file for file in files if file.block.key not in staging.sizes]
                    if not todo:
                        session = self._commit(turn, files, staging)
                        staging.close()  # under the lock: no room is made for what has come
                        return turn, session, [file.block for file in files]
                    # The rows of a long turn take more than what is reserved for them.
                    rows = sum(_row_bytes(file.block) for file in todo)
                    needed = sum(file.n_bytes for file in todo) + max(0, rows - self.reserve_bytes)
                    self._check_limits(needed, {*keep, *turn.keys()})
                    staging.announce(needed)
                for file in todo:
                    started = time.perf_counter()
                    self.written.add(staging.write(file.block.key, file.write))
                    after_file(time.perf_counter() - started)

    def _check_limits(self, n_bytes: int, keep: Collection[bytes]) -> None:
        """Make room for what is to be written. Raises StoreError when it is too much."""
        limit = self.limits.max_hourly_bytes
        if limit is not None and self.written.last_hour_bytes() + n_bytes > limit:
            raise StoreError(
                f"--kvpersist-max-writes-per-hour ({show_bytes(limit)}) is used up; "
                "turns stay in memory for now"
            )
        if not self.make_room(n_bytes, keep):
            raise StoreError(
                f"a turn of {show_bytes(n_bytes)} does not fit into --kvpersist-disk "
                f"({show_bytes(self.limits.max_disk_bytes)}) and --kvpersist-min-free "
                f"({show_bytes(self.limits.min_free_bytes)})"
            )

    def _is_there(self, block: Block) -> bool:
        """Say whether a block or a checkpoint has its row and its file, neither alone."""
        if block.is_checkpoint:
            known = self.index.has_checkpoint(block.key)
            return known and path_of(self.folder, block).exists()
        return self._is_block_there(block.key)

    def _is_block_there(self, key: bytes) -> bool:
        return key in self.index and block_path(self.folder, key).exists()

    def _commit(self, turn: Turn, files: Sequence[NewFile], staging: Staging) -> Session | None:
        """Move the files of a turn into place, then change the index: all of it or nothing."""
        paths = [path_of(self.folder, file.block) for file in files]
        session: Session | None = None
        try:
            for file, path in zip(files, paths, strict=True):
                move(self.folder, staging.path(file.block.key), path)
            if self.limits.fsync:
                for folder in {path.parent for path in paths}:
                    sync(folder)
            session = self._session_of(turn)
            sizes = [(file.block, staging.sizes[file.block.key]) for file in files]
            removed = self.index.commit_turn(turn, sizes, session)
        except BaseException:
            for path in paths:
                remove(self.folder, path)
            if session is not None:
                before = self.index.session(session.id)
                self._write_session(before) if before else self._remove_note(session.id)
            raise
        for key in removed:
            remove(self.folder, checkpoint_path(self.folder, key))
        for replaced, successor in turn.leaf.replaced if turn.leaf else ():
            self.forget(replaced)
            for moved in self.index.sessions_at(successor):
                self._write_session(moved)
        return session

    def _session_of(self, turn: Turn) -> Session | None:
        if turn.leaf is None:
            return None
        now, leaf = self.index.now(), turn.leaf
        session = self.index.session_at(turn.root, leaf)
        if session is None:
            session = Session(
                uuid.uuid4().hex[:8], turn.root.key, leaf.name, leaf.key, 0, False, now, now
            )
        if leaf.pinned and not session.pinned:
            self._unpin_oldest(leaf.name)
        pinned = session.pinned or leaf.pinned
        session = replace(session, leaf=leaf.key, n_tokens=leaf.n_tokens, pinned=pinned, used=now)
        self._write_session(session)
        return session

    def _unpin_oldest(self, name: str | None) -> None:
        """Make place for one more pinned session of this name."""
        named = [one for one in self.index.sessions() if one.name == name and one.pinned]
        named.sort(key=lambda session: session.used)
        for session in named[: max(0, len(named) - MAX_PINNED + 1)]:
            self.set_pinned(session, False)

    def _write_session(self, session: Session) -> None:
        write_note(self.folder, session, fsync=self.limits.fsync)

    def set_pinned(self, session: Session, pinned: bool) -> Session:
        """Pin a session, so that it is never removed to make room, or let it go again."""
        with self.lock.held():
            changed = replace(session, pinned=pinned)
            self._write_session(changed)
            self.index.put_session(changed)
            if not pinned and changed.name is None:
                self._remove_note(changed.id)
            return changed

    def _follow_folder(self) -> None:
        """Take a folder that was removed under us into use again."""
        if self.index.is_current():
            return
        logger.warning("the store %s was removed; it is made anew", self.folder)
        take_into_use(self.folder)
        # Not closed: another thread may be reading, and SQLite would crash under it. The last
        # one who holds the old index lets go of its connections.
        self.index = self._open_index()


def _row_bytes(block: Block) -> int:
    """Return the most that a row adds to the index and its log, in bytes.

    A block's ids and text stand in the table and in an order each. What does not fit beside others
    begins a page of its own. The log has every page once more.
    """
    n_ids, n_text = len(block.packed_ids), len(block.text.encode())
    entries = (n_ids, n_text, n_ids + n_text)
    return 2 * sum(64 + n + (_PAGE_BYTES if n > _PAGE_BYTES // 5 else 0) for n in entries)
