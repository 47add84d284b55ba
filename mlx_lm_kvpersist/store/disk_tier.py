"""The disk as a tier below RAM. The writer changes the index; serving threads read a view of it.

A commit's files are written first; then one transaction changes the index. The lock is not held
while files are written, so the commit is planned again afterwards.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..block import Block, Checkpoint, Record, Root
from ..errors import BlockCorrupt, StoreError
from ..units import show_bytes
from .disk import DiskStore
from .files import Arrays, read_file
from .folder import Staging
from .records import DISK, Commit, Gone, KVBlock, NewFile, Saved, Session, write_sidecar
from .writer import Writer

logger = logging.getLogger(__name__)

_PAGE_BYTES = 4096
_REMOVE = "remove a file"


@dataclass(eq=False)
class _Job:
    make: Callable[[], Commit]
    result: Saved | Exception | None = None
    commit: Commit = field(init=False)
    """The planned commit. `files` were not on disk when it was planned."""
    files: list[NewFile] = field(default_factory=list)
    reserved_bytes: int = 0
    sizes: dict[Path, int] = field(default_factory=dict)
    """Sizes in bytes of the files that were moved into place."""
    session: Session | None = None
    removed: Collection[bytes] = ()


class Saving:
    """Saves commits that share one transaction. Each commit is saved completely or not at all.

    `file_of` returns a record's new file, and `block_of` returns the block of a key, or None.
    Earlier blocks that are no longer on disk are written again. Keys in `keep` are not evicted.
    Files of `damaged` records are replaced. `before_file` may wait before each file.
    """

    def __init__(
        self,
        disk: DiskStore,
        file_of: Callable[[Root, Record], NewFile | None],
        block_of: Callable[[bytes], Block | None] = lambda key: None,
        keep: Collection[bytes] = (),
        before_file: Callable[[], None] = lambda: None,
        damaged: Collection[bytes] = (),
    ) -> None:
        self._disk, self._index = disk, disk.index
        self._file_of, self._block_of = file_of, block_of
        self._keep, self._before_file, self._damaged = keep, before_file, damaged
        self._staging = Staging(disk.files)
        self._files: dict[bytes, NewFile] = {}

    def save(self, commits: Sequence[Callable[[], Commit]]) -> list[Saved | Exception | None]:
        """Write the missing files of commits, and commit them; return the results.

        Each function in `commits` is called under the lock, before each plan. A checkpoint is
        left out if it or its block is missing; then no superseded checkpoints are removed. A result
        is None if a needed block is neither on disk nor in RAM. It is a StoreError if the commit is
        too big, and another exception if the disk refuses.
        """
        jobs = left = [_Job(make) for make in commits]
        with self._continuing(_REMOVE), closing(self._staging) as staging:
            while left:
                try:
                    with self._disk.lock.held():
                        self._disk.follow_folder()
                        left = self._commit_written(left)
                        self._make_room(left)
                        left = [job for job in left if job.result is None]
                        if not left:
                            with self._continuing(_REMOVE):
                                staging.close()  # under the lock, or moved files may count twice
                except Exception as error:
                    # If no job failed, the lock or the transaction failed.
                    for job in left if all(job.result is None for job in left) else ():
                        job.result = error
                else:
                    for job in left:
                        self._write_files(job)
                left = [job for job in left if job.result is None]
        return [job.result for job in jobs]

    def _unwritten(self, job: _Job) -> list[NewFile]:
        return [file for file in job.files if file.block.key not in self._staging.sizes]

    def _commit_written(self, jobs: Sequence[_Job]) -> list[_Job]:
        """Plan all jobs. Commit jobs until a job lacks files; return the jobs still to commit.

        If a plan, a commit or the transaction fails, nothing is changed, and the error is raised.
        """
        left, begun = list[_Job](), list[_Job]()
        try:
            with ExitStack() as transaction:
                for job in jobs:
                    try:
                        if not self._plan(job):
                            continue
                        lacks_room = bool(job.commit.replies) and not job.reserved_bytes
                        # Commits stay in order: a turn may replace earlier blocks.
                        if left or self._unwritten(job) or lacks_room:
                            left.append(job)
                            continue
                        if not begun:
                            transaction.enter_context(self._index.database.transaction())
                        begun.append(job)
                        self._move_in(job)
                    except Exception as error:
                        job.result = error
                        raise
                written = sum(sum(job.sizes.values()) for job in begun)
                self._index.state.count_write(written)
        except BaseException:
            for job in begun:
                self._move_out(job)
                with self._continuing("give back reserved space"):
                    self._staging.announce(-job.reserved_bytes)
                job.reserved_bytes = 0
            raise
        for job in begun:
            job.result = Saved(job.commit, [file.block for file in job.files])
            with self._continuing("remember what was saved"):
                self._staging.announce(-job.reserved_bytes)
                self._disk.set_whole(job.commit.parent, *(block.key for block in job.commit.blocks))
            self._clean_up(job)
        return left

    @staticmethod
    @contextmanager
    def _continuing(what: str) -> Iterator[None]:
        """Log a failure that must not fail a commit. Files may then stay until a sweep."""
        try:
            yield
        except (OSError, StoreError, sqlite3.Error) as error:
            logger.warning("kvpersist: cannot %s: %s", what, error)

    def _plan(self, job: _Job) -> bool:
        """Plan what can be committed now. If a block is missing, log this and return False."""
        commit, files = job.make(), list[NewFile]()
        root = commit.root

        def has(record: Record) -> bool:
            if record.key not in self._damaged and self._disk.has(record.key, record.folder):
                return True
            file = self._files.get(record.key) or self._file_of(root, record)
            if file is not None:
                self._files[record.key] = file
                files.append(file)
            return file is not None

        blocks, parent = list(commit.blocks), commit.parent
        while parent != root.key and (parent in self._damaged or not self._disk.has(parent)):
            if (block := self._block_of(parent)) is None:
                return self._report_missing(parent)
            blocks.insert(0, block)
            parent = block.parent
        gap = self._disk.gap(parent, root)
        while gap is not None:  # another process has removed a block of the chain
            if (block := self._block_of(gap)) is None or not has(block):
                return self._report_missing(gap)
            gap = self._disk.gap(block.parent, root)
        for block in blocks:
            if not has(block):
                return self._report_missing(block.key)
        own = {block.key for block in blocks}
        on_disk = (c for c in commit.checkpoints if c.block in own or self._disk.has(c.block))
        checkpoints = tuple(filter(has, on_disk))
        superseded = commit.superseded if len(checkpoints) == len(commit.checkpoints) else ()
        job.files = files
        job.commit = replace(
            commit, blocks=tuple(blocks), checkpoints=checkpoints, superseded=superseded
        )
        return True

    def _report_missing(self, key: bytes) -> bool:
        why = "was removed by another process, or with its session"
        if gone := self._disk.gone.get(key):
            why = f"has been {gone.value}"
        logger.warning(
            "kvpersist: a turn is not saved: block %s, which it needs, %s", key.hex(), why
        )
        return False

    def _make_room(self, jobs: Sequence[_Job]) -> None:
        """Make room for the files that commits lack. If a job fails, the error is its result."""
        disk = self._disk
        keep = set(self._keep).union(*(job.commit.keys() for job in jobs))
        counted: set[bytes] = set()
        for job in jobs:
            # A block that several commits need is written once.
            files = [file for file in self._unwritten(job) if file.block.key not in counted]
            replies = () if job.reserved_bytes else job.commit.replies.values()
            if not files and not replies:
                continue
            counted.update(file.block.key for file in files)
            n_bytes = sum(file.n_bytes + _row_bytes(file.block) for file in files)
            n_bytes += sum(_entries_bytes(len(packed), 0) for packed in replies)
            try:
                if not disk.make_room(n_bytes, keep, job.commit.root):
                    raise StoreError(
                        f"{show_bytes(n_bytes)} of a turn do not fit into --kvpersist-disk "
                        f"({show_bytes(disk.limits.max_disk_bytes)}, of which "
                        f"{show_bytes(disk.used_bytes())} are used), or would leave less free than "
                        f"--kvpersist-min-free ({show_bytes(disk.limits.min_free_bytes)}; "
                        f"{show_bytes(disk.free_bytes())} are free); raise the first or lower "
                        "the second"
                    )
                self._staging.announce(n_bytes)
                job.reserved_bytes += n_bytes
            except Exception as error:
                job.result = error

    def _write_files(self, job: _Job) -> None:
        for file in self._unwritten(job):
            path = self._staging.path(file.block.key)
            try:
                self._before_file()
                size = file.write(path)
            except Exception as error:
                job.result = error
                with self._continuing(_REMOVE):  # so that another commit can write it
                    self._disk.files.remove(path)
                return
            self._staging.sizes[file.block.key] = size
            self._disk.n_written_bytes += size

    def _move_in(self, job: _Job) -> None:
        new = list[tuple[Record, int]]()
        for file in job.files:
            key = file.block.key
            path = self._disk.files.path_of(key, file.block.folder)
            self._disk.files.move(self._staging.path(key), path)
            job.sizes[path] = self._staging.sizes.pop(key)
            new.append((file.block, job.sizes[path]))
        job.commit, job.session = self._disk.session_of(job.commit)
        if (leaf := job.commit.leaf) and leaf.replaced:
            at_ends = self._index.sessions_at(*(old for old, _ in leaf.replaced))
            own = job.session.id if job.session else None
            needed = {session.leaf for session in at_ends if session.id != own}
            replaced = tuple(pair for pair in leaf.replaced if pair[0] not in needed)
            job.commit = replace(job.commit, leaf=replace(leaf, replaced=replaced))
        n_bytes = write_sidecar(job.session, self._disk.files) if job.session else 0
        job.removed = self._index.commit(job.commit, new, job.session, n_bytes)

    def _move_out(self, job: _Job) -> None:
        for path in job.sizes:
            with self._continuing(_REMOVE):
                self._disk.files.remove(path)
        job.sizes.clear()
        if (session := job.session) is None:
            return
        with self._continuing("write a session's file"):
            if before := self._index.session(session.id):
                write_sidecar(before, self._disk.files)
            else:
                self._disk.remove_sidecar(session.id)

    def _clean_up(self, job: _Job) -> None:
        for key in job.removed:
            with self._continuing(_REMOVE):
                self._disk.files.remove(self._disk.files.path_of(key, Checkpoint.folder))
        for file in job.files:
            was_evicted = self._disk.gone.pop(file.block.key, None) is Gone.EVICTED
            if was_evicted and isinstance(file.block, Block):
                self._disk.asked_again_tokens += file.block.n_tokens
        for replaced, _ in job.commit.leaf.replaced if job.commit.leaf else ():
            if not self._disk.files.path_of(replaced, Block.folder).exists():
                continue  # it was only in RAM
            with self._continuing(_REMOVE):
                self._disk.forget(replaced)


def _row_bytes(block: Record) -> int:
    """Return the most bytes that a row, with two SQL index entries, adds to file and log."""
    n_ids = n_text = 0
    if isinstance(block, Block):
        n_ids, n_text = len(block.packed_ids), len(block.text.encode())
    return _entries_bytes(n_ids, n_text, n_ids + n_text)


def _entries_bytes(*sizes: int) -> int:
    """Return the bytes that entries of the given sizes may add to the index and its log."""
    return 2 * sum(64 + n + (_PAGE_BYTES if n > _PAGE_BYTES // 5 else 0) for n in sizes)


class DiskTier:
    """A store's folder as a tier below RAM. `failed` gets what failed, and the error."""

    name = DISK

    def __init__(
        self, disk: DiskStore, writer: Writer, failed: Callable[[str, Exception], None]
    ) -> None:
        self.disk = disk
        self._lost: set[bytes] = set()
        """Keys of damaged or missing records, until they are removed or written again."""
        self.view = disk.index.view(failed, self._lost)
        self.children, self.branches = self.view.children, self.view.branches
        self._writer = writer
        self._failed = failed

    def checkpoints(self, blocks: Sequence[bytes]) -> list[Checkpoint]:
        return [checkpoint for checkpoint, _ in self.view.checkpoints(blocks)]

    def chain(self, leaf: bytes) -> list[Block]:
        return [block for block, _ in self.view.chain(leaf)]

    def __contains__(self, key: bytes) -> bool:
        return key in self.view

    def load(self, block: Record, root: Root) -> Arrays:
        path = self.disk.files.path_of(block.key, block.folder)
        record, its_root, arrays = read_file(path, self.disk.files)
        if record != block:
            raise BlockCorrupt(f"{path.name}: file and index disagree")
        if its_root.key != root.key:
            raise BlockCorrupt(f"{block} belongs to another model")
        return arrays

    def content_of(self, record: Record) -> bytes:
        """Return the decrypted content of a record's file. Raises the errors of `OwnFiles.open`."""
        return self.disk.files.read(self.disk.files.path_of(record.key, record.folder))

    def store(
        self, commits: Sequence[Commit], entry_of: Callable[[bytes], KVBlock | None]
    ) -> list[Saved | Exception | None]:
        lost = self._lost.copy()
        # A commit of checkpoints protects no blocks: it is not written if they are evicted.
        waiting = (commit for commit in self._writer.commits() if commit.blocks)
        keep = {key for commit in waiting for key in commit.keys()}

        def file_of(root: Root, record: Record) -> NewFile | None:
            entry = entry_of(record.key)
            return self.disk.new_file(root, record, entry.arrays) if entry else None

        def block_of(key: bytes) -> Block | None:
            entry = entry_of(key)
            return entry.block if entry and isinstance(entry.block, Block) else None

        planned = [partial(lambda commit: commit, commit) for commit in commits]
        saving = Saving(self.disk, file_of, block_of, keep, self._writer.rest, lost)
        results = saving.save(planned)
        for saved in results:
            if isinstance(saved, Saved):
                # A record that was lost during the save may not have been written again.
                self._lost.difference_update(lost & {record.key for record in saved.commit.records})
        return results

    def remove(self, key: bytes, reason: str | None = None) -> None:
        self._lost.add(key)
        self._writer.submit(partial(self._remove, key, reason))

    def _remove(self, key: bytes, reason: str | None) -> None:
        if key not in self._lost:
            return  # it was written again
        if reason is None:
            remove = partial(self.disk.forget_missing, key)
        else:
            remove = partial(self.disk.quarantine, key, reason)
        if self.change("remove a block from the store", remove) or reason is None:
            self._lost.discard(key)  # after a failure the damaged file is still there

    def change(self, what: str, change: Callable[[], object]) -> bool:
        """Change files or index under the lock. Return False, and log `what`, if that fails."""
        try:
            with self.disk.lock.held():
                self.disk.follow_folder()
                change()
        except (OSError, StoreError, sqlite3.Error) as error:
            self._failed(what, error)
            return False
        return True

    def sweep(self) -> None:
        """Check the index, then remove leftovers of an interrupted run. Writer thread."""
        try:
            self.disk.check_index()
            with self.disk.lock.held():
                self.disk.follow_folder()  # with an old index, newer files would be removed
                n_swept = self.disk.sweep()
        except (OSError, StoreError, sqlite3.Error) as error:
            return self._failed("check what is stored", error)
        if n_swept:
            logger.info(
                "kvpersist: removed %d leftovers of an interrupted run from the store", n_swept
            )

    def stats(self) -> dict[str, Any]:
        """Return the tier's numbers from the index: no folder is read."""
        with self.disk.index.asked_once() as index:
            totals = index.totals()
        return {
            "blocks": totals.n_blocks,
            "checkpoints": totals.n_checkpoints,
            "bytes": totals.n_bytes,
            "checkpoint_bytes": totals.checkpoint_bytes,
            "evicted": self.disk.n_evicted,
            "asked_again_tokens": self.disk.asked_again_tokens,
            "max_bytes": self.disk.limits.max_disk_bytes,
            "written_bytes": self.disk.n_written_bytes,
        }
