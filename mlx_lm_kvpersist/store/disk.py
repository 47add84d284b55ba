"""The store on disk: files first, then the index, within the budgets, one process at a time.

    index.sqlite      what the files say, quick to ask; can be rebuilt from them
    blocks/ab/        a safetensors file for each block whose key begins with ab
    checkpoints/ab/   the same for checkpoints, which may be evicted before their blocks
    sessions/         what only a session knows (its name, its pin), a JSON file each
    quarantine/       what failed a check, each file with the reason
    writing/          what is being written, before it is moved to blocks/ and checkpoints/
    kvpersist-store   says that the folder is a store
    lock              held while anything of this changes

Everything here is synchronous; the writer thread and the command line call it.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..block import Block, Checkpoint, Record, Root
from ..errors import StoreError
from ..units import show_bytes
from .database import is_empty, is_locked
from .files import Arrays, content_of, file_bytes, metadata_of, write_block
from .folder import move, remove, take_into_use
from .index import Index, Session
from .index_schema import is_damage
from .lock import Staging, StoreLock
from .rebuild import rebuild_index
from .records import Commit, Gone, NewFile, StoreLimits, sidecar_path
from .seal import PLAIN, Sealing
from .stored_files import StoredFiles

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")

_PAGE_BYTES = 4096


class DiskStore:
    """The folder of a store: its index, and its files within limits.

    Opening takes the folder into use: it is made, 0700, when missing, and its index is rebuilt
    when that is missing or damaged; only then is the lock taken. Damage within it is found if the
    `whole` is read, which takes longer the more the store holds; else by `check_index`. All that
    tells of conversations is sealed. Raises StoreError when the folder cannot be used.
    """

    def __init__(
        self, folder: Path, limits: StoreLimits, *, whole: bool = True, sealing: Sealing = PLAIN
    ) -> None:
        self.folder = folder
        self.sealing = sealing
        self.limits = limits
        self.lock = StoreLock(folder / "lock")
        self.n_written_bytes = 0
        """Bytes of files that this process wrote."""
        try:
            take_into_use(folder, sealing)
            if not os.access(folder, os.W_OK):  # SQLite would say less
                raise PermissionError(errno.EACCES, "Permission denied", str(folder))
            index = partial(Index, folder / "index.sqlite", whole=whole, sealing=sealing)
            self.index = self._opened(index)
        except (OSError, sqlite3.Error) as error:
            if is_locked(error):
                raise StoreError(f"the store {folder} cannot be used: {error}") from error
            raise StoreError(
                f"the store {folder} cannot be used: {error}. "
                "Choose a writable folder with --kvpersist-dir."
            ) from error
        self.files = StoredFiles(folder, self.index, self.lock, limits)

    def close(self) -> None:
        self.index.close()

    def check_index(self) -> None:
        """Read all of the index, and rebuild it if it is damaged. Serving threads go on."""
        self._opened(self.index.reopen)

    def _opened(self, open_index: Callable[..., Opened]) -> Opened:
        """Open the index. Where it is missing or damaged, the lock is taken and it is rebuilt."""
        path = self.folder / "index.sqlite"
        try:
            return open_index(create=False)
        except (FileNotFoundError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and not is_damage(error):
                raise
        with self.lock.held():
            # An empty file counts as missing: by an empty index, a sweep would remove all blocks.
            if is_empty(path) and (self.folder / "blocks").exists():
                rebuild_index(self.folder, self.sealing)
            try:
                return open_index()
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                logger.warning("the index of the store is damaged (%s); it is rebuilt", error)
                rebuild_index(self.folder, self.sealing)
                return open_index()

    def save(
        self,
        commit_now: Callable[[], Commit],
        file_of: Callable[[Record], NewFile | None],
        keep: Collection[bytes] = (),
        before_file: Callable[[], None] = lambda: None,
        damaged: Collection[bytes] = (),
    ) -> tuple[Commit, list[Record]] | None:
        """Write a commit's missing blocks and checkpoints and commit it: whole, or not at all.

        The lock is held to plan, make room and commit, and not while files are written. What
        another process changed meanwhile, or what went to make room, is found by planning again.

        `commit_now` returns the commit; it is called under the lock, before each plan. `keep` is
        not removed to make room: commits to come are built on it. Files of `damaged` blocks and
        checkpoints are replaced. `before_file` may take its time.

        Return the commit as it was made, and what was written: checkpoints that are gone, or whose
        block is not there, are left out, and then it supersedes nothing. None, with a line in the
        log, when one of its blocks was on disk only and has been removed since. Raises StoreError
        when it is too big for what the store may use, and OSError or RuntimeError when the disk
        refuses.
        """
        with closing(Staging(self.folder, self.sealing)) as staging:
            while True:
                with self.lock.held():
                    self.follow_folder()
                    planned = self._plan(commit_now(), file_of, damaged)
                    if planned is None:
                        return None
                    whole, files = planned
                    todo = [file for file in files if file.block.key not in staging.sizes]
                    if not todo:
                        self._commit(whole, files, staging)
                        staging.close()  # under the lock: no room is made for what has come
                        return whole, [file.block for file in files]
                    # The rows of a long commit take more than what is reserved for them.
                    rows = sum(_row_bytes(file.block) for file in todo)
                    rows = max(0, rows - self.files.reserve_bytes)
                    needed = sum(file.n_bytes for file in todo) + rows
                    self._reserve(needed, {*keep, *whole.keys()}, whole.root)
                    staging.announce(needed)
                n_before = self.n_written_bytes
                try:
                    for file in todo:
                        before_file()
                        self.n_written_bytes += staging.write(file.block.key, file.write)
                except BaseException:
                    with suppress(OSError, sqlite3.Error), self.lock.held():
                        # What was not written does not count for this hour.
                        self.index.state.count_write(self.n_written_bytes - n_before - needed)
                    raise

    def _plan(
        self,
        commit: Commit,
        file_of: Callable[[Record], NewFile | None],
        damaged: Collection[bytes],
    ) -> tuple[Commit, list[NewFile]] | None:
        """Return what can be committed now, and the files that it lacks."""
        files: list[NewFile] = []

        def has(record: Record) -> bool:
            if record.key not in damaged and self._is_there(record.key, record.folder):
                return True
            if (file := file_of(record)) is not None:
                files.append(file)
            return file is not None

        for block in commit.blocks:
            if not has(block):
                gone = self.files.gone.get(block.key)
                why = (
                    f"was {gone.value} meanwhile"
                    if gone
                    else "was removed by another process, or with its session"
                )
                logger.warning("a turn is not saved: %s, which it needs, %s", block, why)
                return None
        chain = {block.key for block in commit.blocks}
        checkpoints = tuple(
            one
            for one in commit.checkpoints
            if (one.block in chain or self._is_there(one.block)) and has(one)
        )
        if len(checkpoints) < len(commit.checkpoints):
            commit = replace(commit, checkpoints=checkpoints, superseded=())
        return commit, files

    def new_file(
        self, root: Root, arrays_of: Callable[[bytes], Arrays | None], block: Record
    ) -> NewFile | None:
        """Return the file of a block or checkpoint; None without its arrays."""
        if (arrays := arrays_of(block.key)) is None:
            return None
        write = partial(write_block, block=block, root=root, arrays=arrays, sealing=self.sealing)
        return NewFile(block, file_bytes(metadata_of(block, root), arrays), write)

    def _reserve(self, n_bytes: int, keep: Collection[bytes], root: Root) -> None:
        """Make room for what is to be written. Raises StoreError when it is too much."""
        limit, state = self.limits.max_hourly_bytes, self.index.state
        if limit is not None and state.written_last_hour() + n_bytes > limit:
            raise StoreError(
                f"--kvpersist-max-writes-per-hour ({show_bytes(limit)}) is used up; "
                "turns stay in memory for now"
            )
        if not self.files.make_room(n_bytes, keep, root):
            raise StoreError(
                f"a turn of {show_bytes(n_bytes)} does not fit into --kvpersist-disk "
                f"({show_bytes(self.limits.max_disk_bytes)}) and --kvpersist-min-free "
                f"({show_bytes(self.limits.min_free_bytes)})"
            )
        state.count_write(n_bytes)

    def _is_there(self, key: bytes, name: str = Block.folder) -> bool:
        """Say whether a block or a checkpoint has its row and its file, neither alone."""
        return key in self.index and self.files.path_of(key, name).exists()

    def content_of(self, record: Record) -> bytes:
        """Return what the file of a block or checkpoint holds. Raises BlockCorrupt and OSError."""
        return content_of(self.files.path_of(record.key, record.folder), self.sealing)

    def _commit(self, commit: Commit, files: Sequence[NewFile], staging: Staging) -> None:
        """Move the files of a commit into place, then change the index: all of it or nothing."""
        paths = [self.files.path_of(file.block.key, file.block.folder) for file in files]
        session: Session | None = None
        try:
            for file, path in zip(files, paths, strict=True):
                move(self.folder, staging.path(file.block.key), path)
            session = self._session_of(commit)
            sizes = [(file.block, staging.sizes[file.block.key]) for file in files]
            removed = self.index.commit(commit, sizes, session)
        except BaseException:
            for path in paths:
                remove(self.folder, path)
            if session is not None:
                before = self.index.session(session.id)
                self.files.write_sidecar(before) if before else self.files.remove_sidecar(
                    session.id
                )
            raise
        for key in removed:
            remove(self.folder, self.files.path_of(key, Checkpoint.folder))
        for file in files:
            was_evicted = self.files.gone.pop(file.block.key, None) is Gone.EVICTED
            if was_evicted and isinstance(file.block, Block):
                self.files.asked_again_tokens += file.block.n_tokens
        for replaced, successor in commit.leaf.replaced if commit.leaf else ():
            self.files.forget(replaced)
            for moved in self.index.sessions_at(successor):
                self.files.write_sidecar(moved)

    def _session_of(self, commit: Commit) -> Session | None:
        if commit.leaf is None or not commit.leaf.is_session:
            return None
        now, leaf = self.index.now(), commit.leaf
        session = self.index.session_at(commit.root, leaf)
        if session is None:
            session_id = self._free_id()
            session = Session(session_id, commit.root.key, leaf.name, leaf.key, 0, False, now, now)
        session = replace(session, leaf=leaf.key, n_tokens=leaf.n_tokens, used=now)
        self.files.write_sidecar(session)
        return session

    def _free_id(self) -> str:
        """Draw an id of 64 bits that no other session's row or sidecar has. Under the lock."""
        for _ in range(100):
            drawn = secrets.token_hex(8)
            has_row = self.index.ask("SELECT 1 FROM sessions WHERE id = ?", drawn)
            if not has_row and not os.path.lexists(sidecar_path(self.folder, drawn)):
                return drawn
        raise StoreError("a hundred ids were drawn for a session, and other sessions have them all")

    def follow_folder(self) -> None:
        """Use the index that is in the folder now, and a folder that was removed under us."""
        if self.index.database.is_current():
            return
        logger.warning("the index of %s was removed or replaced; it is opened anew", self.folder)
        take_into_use(self.folder, self.sealing)
        self._opened(self.index.reopen)


def _row_bytes(block: Record) -> int:
    """Return the most that a row adds to the index and its log, in bytes.

    A block's ids and text stand in the table and in an order each. What does not fit beside others
    begins a page of its own. The log has every page once more.
    """
    n_ids = n_text = 0
    if isinstance(block, Block):
        n_ids, n_text = len(block.packed_ids), len(block.text.encode())
    entries = (n_ids, n_text, n_ids + n_text)
    return 2 * sum(64 + n + (_PAGE_BYTES if n > _PAGE_BYTES // 5 else 0) for n in entries)
