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
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
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
from .records import Commit, Gone, NewFile, Saved, StoreLimits, sidecar_path
from .seal import PLAIN, Sealing
from .stored_files import StoredFiles

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")

_PAGE_BYTES = 4096


@dataclass(eq=False)
class _Job:
    """A commit on its way to the disk."""

    make: Callable[[], Commit]
    """Returns the commit to be planned."""
    result: Saved | Exception | None = None
    commit: Commit = field(init=False)
    """As it was planned last, and the `files` that were missing then."""
    files: list[NewFile] = field(default_factory=list)
    needed_bytes: int = 0
    """Room that was made for the files that are written now."""
    reserved_bytes: int = 0
    """Room that was made for all files."""
    paths: dict[bytes, Path] = field(default_factory=dict)
    """Where files were moved, by key."""
    session: Session | None = None
    removed: Collection[bytes] = ()
    """Keys of superseded checkpoints, whose rows are gone."""

    def todo(self, staging: Staging) -> list[NewFile]:
        """Return the missing files that are not written yet."""
        return [file for file in self.files if file.block.key not in staging.sizes]


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
        commits: Sequence[Callable[[], Commit]],
        file_of: Callable[[Root, Record], NewFile | None],
        block_of: Callable[[bytes], Block | None] = lambda key: None,
        keep: Collection[bytes] = (),
        before_file: Callable[[], None] = lambda: None,
        damaged: Collection[bytes] = (),
    ) -> list[Saved | Exception | None]:
        """Write the missing files of commits, and commit each of them: whole or not at all.

        The commits share one transaction. If one of them fails, the rest is saved.

        The lock is held to plan, make room and commit, and not while files are written. The plan is
        then made again: another process may have changed something, or blocks were evicted to make
        room.

        `commits` return the commits; they are called under the lock, before each plan. `file_of`
        returns the file of a record that is in RAM, and `block_of` a block that is in RAM: the
        blocks that a commit continues are written again if they are no longer on disk. `keep` is
        not evicted: later commits are built on these keys. Files of `damaged` blocks and
        checkpoints are replaced. `before_file` may take its time.

        Return the result of each commit. Checkpoints that are gone, or whose block is not on disk,
        are left out, and then the commit supersedes nothing. The result is None, with a line in the
        log, if a block was on disk only and has been removed. It is a StoreError if the commit is
        too big for the limits, and another exception if the disk refuses.
        """
        jobs = [_Job(make) for make in commits]
        left, plan = jobs, partial(self._plan, file_of, block_of, damaged)
        with closing(Staging(self.folder, self.sealing)) as staging:
            while left:
                try:
                    with self.lock.held():
                        self.follow_folder()
                        left = self._commit_written(left, plan, staging)
                        self._make_room(left, keep, staging)
                        left = [job for job in left if job.result is None]
                        if not left:
                            staging.close()  # under the lock: no room is made for files in place
                except Exception as error:  # the lock or the whole transaction has failed
                    for job in left:
                        job.result = error
                for job in left:
                    if job.result is None:
                        self._write_files(job, staging, before_file)
                left = [job for job in left if job.result is None]
        return [job.result for job in jobs]

    def _commit_written(
        self,
        jobs: Sequence[_Job],
        plan: Callable[[Commit], tuple[Commit, list[NewFile]] | None],
        staging: Staging,
    ) -> list[_Job]:
        """Plan commits, and commit up to the first that lacks files; return the jobs that are left.

        Raises an exception, and changes nothing, if the transaction fails as a whole.
        """
        left: list[_Job] = []
        done: list[_Job] = []
        try:
            with self.index.database.transaction() as db:
                for job in jobs:
                    job.paths.clear()
                    try:
                        planned = plan(job.make())
                        if planned is None:
                            continue
                        job.commit, job.files = planned
                        if left or job.todo(staging):  # in order: a turn may replace blocks
                            left.append(job)
                        else:
                            self._move_in(job, staging)
                            done.append(job)
                    except Exception as error:
                        self._move_out(job, staging)
                        job.result = error
                        if not db.in_transaction:  # SQLite has rolled back the transaction
                            raise
        except BaseException:
            for job in done:
                self._move_out(job, staging)
            raise
        for job in done:
            self._clean_up(job)
            staging.announce(-job.reserved_bytes)
            job.result = Saved(job.commit, [file.block for file in job.files])
        return left

    def _make_room(self, jobs: Sequence[_Job], keep: Collection[bytes], staging: Staging) -> None:
        """Make room for the files that commits lack. If that fails, it is the job's result."""
        kept = {*keep, *chain.from_iterable(job.commit.keys() for job in jobs)}
        counted, n_bytes = set[bytes](), 0
        for job in jobs:
            # A block that several of the commits need is written once.
            todo = [file for file in job.todo(staging) if file.block.key not in counted]
            counted.update(file.block.key for file in todo)
            # The rows of a long commit take more than what is reserved for them.
            rows = max(0, sum(_row_bytes(file.block) for file in todo) - self.files.reserve_bytes)
            job.needed_bytes = sum(file.n_bytes for file in todo) + rows
            try:
                self._reserve(job.needed_bytes, kept, job.commit.root)
                staging.announce(job.needed_bytes)
                job.reserved_bytes += job.needed_bytes
                n_bytes += job.needed_bytes
            except Exception as error:
                job.result = error
        if n_bytes:
            self.index.state.count_write(n_bytes)

    def _write_files(self, job: _Job, staging: Staging, before_file: Callable[[], None]) -> None:
        """Write the files that a commit lacks. If that fails, it is the job's result."""
        n_before = self.n_written_bytes
        try:
            for file in job.todo(staging):
                before_file()
                self.n_written_bytes += staging.write(file.block.key, file.write)
        except BaseException as error:
            with suppress(OSError, sqlite3.Error), self.lock.held():
                # Bytes that were not written do not count for this hour.
                n_written = self.n_written_bytes - n_before
                self.index.state.count_write(n_written - job.needed_bytes)
            if not isinstance(error, Exception):
                raise
            job.result = error

    def _plan(
        self,
        file_of: Callable[[Root, Record], NewFile | None],
        block_of: Callable[[bytes], Block | None],
        damaged: Collection[bytes],
        commit: Commit,
    ) -> tuple[Commit, list[NewFile]] | None:
        """Return what can be committed now, and the files that it lacks."""
        files: list[NewFile] = []

        def has(record: Record) -> bool:
            if record.key not in damaged and self._is_there(record.key, record.folder):
                return True
            if (file := file_of(commit.root, record)) is not None:
                files.append(file)
            return file is not None

        blocks, parent = list(commit.blocks), commit.parent
        while parent != commit.root.key and (parent in damaged or not self._is_there(parent)):
            if (block := block_of(parent)) is None:
                self._report_missing(parent)
                return None
            blocks.insert(0, block)
            parent = block.parent
        for block in blocks:
            if not has(block):
                self._report_missing(block.key)
                return None
        own = {block.key for block in blocks}
        checkpoints = tuple(
            checkpoint
            for checkpoint in commit.checkpoints
            if (checkpoint.block in own or self._is_there(checkpoint.block)) and has(checkpoint)
        )
        superseded = commit.superseded if len(checkpoints) == len(commit.checkpoints) else ()
        whole = replace(
            commit, blocks=tuple(blocks), checkpoints=checkpoints, superseded=superseded
        )
        return whole, files

    def _report_missing(self, key: bytes) -> None:
        """Log that a turn is not saved, because a block is missing."""
        gone = self.files.gone.get(key)
        why = (
            f"was {gone.value} meanwhile"
            if gone
            else "was removed by another process, or with its session"
        )
        logger.warning("a turn is not saved: %s, which it needs, %s", f"block {key.hex()}", why)

    def new_file(self, root: Root, block: Record, arrays: Arrays) -> NewFile:
        """Return the file of a block or checkpoint."""
        write = partial(write_block, block=block, root=root, arrays=arrays, sealing=self.sealing)
        return NewFile(block, file_bytes(metadata_of(block, root), arrays), write)

    def _reserve(self, n_bytes: int, keep: Collection[bytes], root: Root) -> None:
        """Make room for what is to be written. Raises StoreError when it is too much."""
        if not self.files.make_room(n_bytes, keep, root):
            raise StoreError(
                f"a turn of {show_bytes(n_bytes)} does not fit into --kvpersist-disk "
                f"({show_bytes(self.limits.max_disk_bytes)}) and --kvpersist-min-free "
                f"({show_bytes(self.limits.min_free_bytes)})"
            )

    def _is_there(self, key: bytes, name: str = Block.folder) -> bool:
        """Say whether a block or a checkpoint has its row and its file, neither alone."""
        return key in self.index and self.files.path_of(key, name).exists()

    def content_of(self, record: Record) -> bytes:
        """Return what the file of a block or checkpoint holds. Raises BlockCorrupt and OSError."""
        return content_of(self.files.path_of(record.key, record.folder), self.sealing)

    def _move_in(self, job: _Job, staging: Staging) -> None:
        """Move the files of a commit into place, then change the index."""
        for file in job.files:
            path = self.files.path_of(file.block.key, file.block.folder)
            move(self.folder, staging.path(file.block.key), path)
            job.paths[file.block.key] = path
        job.session = self._session_of(job.commit)
        sizes = [(file.block, staging.sizes[file.block.key]) for file in job.files]
        job.removed = self.index.commit(job.commit, sizes, job.session)

    def _move_out(self, job: _Job, staging: Staging) -> None:
        """Remove the files of a commit that the index has not taken."""
        for key, path in job.paths.items():
            remove(self.folder, path)
            del staging.sizes[key]
        if (session := job.session) is not None:
            before = self.index.session(session.id)
            self.files.write_sidecar(before) if before else self.files.remove_sidecar(session.id)

    def _clean_up(self, job: _Job) -> None:
        """Remove files that a commit has superseded or replaced."""
        for key in job.removed:
            remove(self.folder, self.files.path_of(key, Checkpoint.folder))
        for file in job.files:
            was_evicted = self.files.gone.pop(file.block.key, None) is Gone.EVICTED
            if was_evicted and isinstance(file.block, Block):
                self.files.asked_again_tokens += file.block.n_tokens
        for replaced, successor in job.commit.leaf.replaced if job.commit.leaf else ():
            self.files.forget(replaced)
            for moved in self.index.sessions_at(successor):
                self.files.write_sidecar(moved)

    def _session_of(self, commit: Commit) -> Session | None:
        if commit.leaf is None or not commit.leaf.is_session:
            return None
        now, leaf = self.index.now(), commit.leaf
        session = self.index.session_of(commit)
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
