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
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..match.block import Block
from ..match.keys import Root
from ..units import show_bytes
from .budget import Space, StoreLimits, WriteMeter, free_bytes
from .files import (
    Arrays,
    block_path,
    checkpoint_path,
    file_bytes,
    key_of,
    metadata_of,
    path_of,
    write_block,
)
from .folder import INDEX_FILES, move, own_bytes, own_files, remove, sync, take_into_use
from .index import Forgotten, Index, Session
from .index_file import is_damage
from .index_rows import row_bytes
from .lock import StoreLock
from .quarantine import Quarantine
from .rebuild import rebuild_index
from .session_notes import session_path, write_session
from .staging import Staging, staged_bytes, sweep_staged
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
        self.aside = Quarantine(folder)
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self.lock = StoreLock(folder / "lock")
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

    def close(self) -> None:
        self.index.close()

    # Saving.

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
            for block in turn.blocks:
                if not is_there(block):
                    arrays = arrays_of(block.key)
                    if arrays is None:
                        return None
                    files.append(self._new_file(block, turn.root, arrays))
            chain = {block.key for block in turn.blocks}
            checkpoints: list[Block] = []
            for block in turn.checkpoints:
                if block.parent not in chain and not self._is_block_there(block.parent):
                    continue
                if not is_there(block):
                    arrays = arrays_of(block.key)
                    if arrays is None:
                        continue
                    files.append(self._new_file(block, turn.root, arrays))
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
        with Staging(self.folder) as staging:
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
                        return turn, session, [file.block for file in files]
                    # The rows of a long turn take more than what is reserved for them.
                    rows = sum(row_bytes(file.block) for file in todo)
                    needed = sum(file.n_bytes for file in todo) + max(0, rows - self.reserve_bytes)
                    self._check_wear(needed)
                    self._make_room_for(needed, {*keep, *turn.keys()})
                    staging.announce(needed)
                for file in todo:
                    started = time.perf_counter()
                    self.written.add(staging.write(file.block.key, file.write))
                    after_file(time.perf_counter() - started)

    def _make_room_for(self, n_bytes: int, keep: Collection[bytes]) -> None:
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
        try:
            for file, path in zip(files, paths, strict=True):
                move(self.folder, staging.path(file.block.key), path)
            if self.limits.fsync:
                for folder in {path.parent for path in paths}:
                    sync(folder)
            sizes = [(file.block, staging.sizes[file.block.key]) for file in files]
            session = self._session_of(turn)
            removed = self.index.commit_turn(
                turn.root,
                [(block, size) for block, size in sizes if not block.is_checkpoint],
                session,
                turn.leaf,
                turn.replies,
                chain=turn.blocks,
                new_checkpoints=[(block, size) for block, size in sizes if block.is_checkpoint],
                checkpoints=turn.checkpoints,
                superseded={block.key for block in turn.superseded} - turn.keys(),
            )
        except BaseException:
            for path in paths:
                remove(self.folder, path)
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
        session = replace(session, leaf=leaf.key, n_tokens=leaf.n_tokens, used=now)
        self._write_session(session)
        return session

    def _write_session(self, session: Session) -> None:
        write_session(self.folder, session, fsync=self.limits.fsync)

    def _remove_note(self, session_id: str) -> None:
        remove(self.folder, session_path(self.folder, session_id))

    def _follow_folder(self) -> None:
        """Take a folder that was removed under us into use again."""
        if self.index.is_current():
            return
        logger.warning("the store %s was removed; it is made anew", self.folder)
        take_into_use(self.folder)
        # Not closed: another thread may be reading, and SQLite would crash under it. The last
        # one who holds the old index lets go of its connections.
        self.index = self._open_index()

    # Budgets.

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

    def _check_wear(self, n_bytes: int) -> None:
        limit = self.limits.max_hourly_bytes
        if limit is not None and self.written.last_hour_bytes() + n_bytes > limit:
            raise StoreError(
                f"--kvpersist-max-writes-per-hour ({show_bytes(limit)}) is used up; "
                "turns stay in memory for now"
            )

    # Removing.

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
                self.aside.take(path, key, reason)
            self.forget(key)

    def _empty_quarantine(self) -> None:
        self.aside.empty()

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

    def set_pinned(self, session: Session, pinned: bool) -> Session:
        """Pin a session, so that it is never removed to make room, or let it go again."""
        with self.lock.held():
            changed = replace(session, pinned=pinned)
            self._write_session(changed)
            self.index.put_session(changed)
            if not pinned and changed.name is None:
                self._remove_note(changed.id)
            return changed

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
            for lost in (self.index.unreachable, self.index.stray_checkpoints):
                for key in lost():
                    self.forget(key)
                    n_swept += 1
            sessions = {f"{session.id}.json" for session in self.index.sessions()}
            for path in own_files(self.folder, "sessions"):
                if path.name not in sessions:
                    n_swept += remove(self.folder, path)
            return n_swept
