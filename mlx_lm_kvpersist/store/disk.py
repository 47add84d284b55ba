"""The store on disk: files and an index, within budgets. One process changes it at a time.

index.sqlite      the files' metadata, for quick queries, and some data that no file has
blocks/ab/        a safetensors file for each block whose file name begins with ab
checkpoints/ab/   the same for checkpoints, which may be evicted before their blocks
sessions/         a JSON file for each session with a name or a pin
quarantine/       files that failed a check, each with the reason
writing/          files that are being written, before they are moved to blocks/ and checkpoints/
kvpersist-store   says that the folder is a store
lock              locked while these files change, except those in writing/
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..block import Block, Checkpoint, Record, Root
from ..errors import BlockCorrupt, StoreError, StoreFormatError
from ..units import show_bytes
from .database import OTHER_TABLES, TABLES_OF_FILES, is_damage, is_empty, is_locked, recount, sound
from .files import FOLDERS, Arrays, file_bytes, metadata_of, read_record, write_block
from .folder import (
    INDEX_FILES,
    PLAIN,
    Encryption,
    OwnFiles,
    StoreLock,
    Volume,
    check_writable,
    make_private,
    staged_bytes,
    sweep_staged,
)
from .index import Index
from .records import (
    Commit,
    Gone,
    NewFile,
    Session,
    StoreLimits,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")

_MAX_REMEMBERED = 10_000
_INDEX_RESERVE_BYTES = 768 << 10
_REPLIES_SHARE = 8
"""In a full store, remembered replies may take the budget divided by this number."""
Progress = Callable[[int, int], None]
"""Called with the numbers of files read and of all files."""


class DiskStore:
    """The folder of a store: its index, and the files of blocks and checkpoints.

    Files are evicted to stay within `limits`. Opening makes a missing folder (mode 0700), and
    rebuilds a missing or damaged index. `check_all` reads the whole index to find damage. Raises
    StoreError when the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        limits: StoreLimits,
        *,
        check_all: bool = True,
        encryption: Encryption = PLAIN,
    ) -> None:
        self.folder = folder
        self.files = OwnFiles(folder, encryption)
        self.limits = limits
        self.lock = StoreLock(folder / "lock")
        self.n_written_bytes = 0
        self.n_evicted = 0
        self.asked_again_tokens = 0
        self.forgotten: Callable[[Collection[bytes]], None] = lambda keys: None
        """Called with the keys of blocks and checkpoints that are no longer on disk."""
        self._whole = set[bytes]()
        """Blocks whose chain is complete in this version of the index."""
        self._version = 0
        self.gone: OrderedDict[bytes, Gone] = OrderedDict()
        """Why this process recently removed blocks and checkpoints, by key. Any thread."""
        try:
            self.files.take_into_use(self.lock)
            self._volume = Volume(folder)
            check_writable(folder)  # SQLite's error would say less
            index = partial(Index, folder / "index.sqlite", self.files, check_all=check_all)
            self.index = self._opened(index)
            self.lock.check_missing = self._check_volume
        except (OSError, sqlite3.Error) as error:
            advice = "" if is_locked(error) else ". Choose a writable folder with --kvpersist-dir."
            raise StoreError(f"the store {folder} cannot be used: {error}{advice}") from error

    def close(self) -> None:
        self.index.close()

    def check_index(self) -> None:
        """Read all of the index, and rebuild it if it is damaged. Serving threads continue."""
        self._opened(self.index.reopen)

    def _opened(self, open_index: Callable[..., Opened]) -> Opened:
        path = self.folder / "index.sqlite"
        try:
            return open_index(create=False)
        except (FileNotFoundError, sqlite3.Error) as error:
            if isinstance(error, sqlite3.Error) and not is_damage(error):
                raise
        with self.lock.held():
            try:
                # With an empty index, a sweep would remove all blocks.
                if not is_empty(path) or not (self.folder / "blocks").exists():
                    return open_index()
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                logger.warning(
                    "kvpersist: the index of the store is damaged (%s); it is rebuilt", error
                )
            rebuild_index(self.files)
            return open_index()

    def follow_folder(self) -> None:
        """Open the index that is in the folder now; make the folder again if it was removed.

        Raises OSError if the folder's volume is no longer mounted.
        """
        if self.index.database.is_current():
            return
        self._check_volume()
        self._whole.clear()
        self.files.take_into_use(self.lock)
        self._volume = Volume(self.folder)
        self._opened(self.index.reopen)
        logger.warning(
            "kvpersist: the index of %s was removed or replaced; it was opened again", self.folder
        )

    def _check_volume(self) -> None:
        try:
            self._volume.check()
        except OSError:
            self.index.database.leave()  # opened again when the volume is back
            raise

    # Files and rows.

    def new_file(self, root: Root, block: Record, arrays: Arrays) -> NewFile:
        write = partial(write_block, block=block, root=root, arrays=arrays, files=self.files)
        return NewFile(block, file_bytes(metadata_of(block, root), arrays), write)

    def has(self, key: bytes, name: str = Block.folder) -> bool:
        return os.path.exists(self.files.path_of(key, name)) and key in self.index

    def gap(self, leaf: bytes, root: Root) -> bytes | None:
        """Return the key of the last missing block up to `leaf`; None if the chain is complete.

        A complete chain is checked again only after a block that has children was removed, or
        another thread or process changed the index.
        """
        if (version := self.index.version()) != self._version:
            self._whole.clear()
            self._version = version
        if leaf == root.key or leaf in self._whole:
            return None
        gap = self.index.gap(leaf, root.key)
        if gap is None:
            self.set_whole(leaf)
        return gap

    def set_whole(self, *chain: bytes) -> None:
        if len(self._whole) > _MAX_REMEMBERED:
            self._whole.clear()
        self._whole.update(chain)

    def forget(self, key: bytes, why: Gone | None = None) -> dict[bytes, int]:
        """Remove a checkpoint, or a block with its checkpoints and the sessions that end in it.

        Return the sizes of the removed files, by key. If a file cannot be removed, the rows stay,
        so that the file's bytes are still counted.
        """
        with self.lock.held():
            with self.index.database.transaction():
                sizes, ended = self.index.forget(key)
                if self.index.children(key, limit=1):
                    self._whole.clear()  # a chain may contain the block
                keys = {key, *sizes}
                self.forgotten(keys)
                for removed_key in keys:
                    self.files.remove(self.files.path_of(removed_key, Checkpoint.folder))
                self.files.remove(self.files.path_of(key, Block.folder))
                for session_id in ended:
                    self.remove_sidecar(session_id)
            if why is not None:
                self.gone.update(dict.fromkeys(keys, why))
            while len(self.gone) > _MAX_REMEMBERED:
                self.gone.popitem(last=False)
            return sizes

    def forget_missing(self, key: bytes) -> None:
        with self.lock.held():
            if not any(self.files.path_of(key, name).exists() for name in FOLDERS):
                self.forget(key)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move a bad record to quarantine. Blocks that continue it become unreachable."""
        with self.lock.held():
            for name in FOLDERS:
                if (path := self.files.path_of(key, name)).exists():
                    self._set_aside(path, key, reason)
            self.forget(key, Gone.QUARANTINED)

    def _set_aside(self, path: Path, key: bytes, reason: str) -> None:
        target = self.folder / "quarantine" / f"{path.stem}-{time.time_ns()}.safetensors"
        sidecar = target.with_suffix(".json")
        try:
            note = {"key": key.hex(), "reason": reason, "time": time.time()}
            self.files.write(sidecar, json.dumps(note).encode())
            self.files.move(path, target)
        except (OSError, StoreError) as error:
            logger.warning("kvpersist: %s cannot be moved to quarantine: %s", path.name, error)
            self.files.remove(sidecar)
            self.files.remove(path)

    def sweep(self) -> int:
        """Remove unreachable records, files without rows, rows without files; return how many."""
        with self.lock.held():
            n_swept = sweep_staged(self.files)
            if self.index.faults():  # otherwise, the files of damaged rows would be removed
                rebuild_index(self.files)
            for name in FOLDERS:
                indexed = self.index.keys(name)
                keys = {p: self.files.encryption.key_of(p.stem) for p in self.files.paths(name)}
                n_swept += sum(self.files.remove(p) for p in keys if keys[p] not in indexed)
                for key in indexed.difference(keys.values()):
                    self.forget(key)
                    n_swept += 1
            for key in self.index.unreachable():
                self.forget(key)
                n_swept += 1
            self.index.state.forget_lost_notes()
            sessions = {f"{session.id}.json" for session in self.index.sessions()}
            for path in self.files.paths("sessions"):
                if path.name not in sessions:
                    n_swept += self.files.remove(path)
            return n_swept

    # Room.

    def used_bytes(self) -> int:
        """Return the bytes of the store's files, with announced bytes (`Staging.announce`)."""
        totals = self.index.totals()
        other_bytes = self.files.n_bytes(*INDEX_FILES, "quarantine")
        announced, _ = staged_bytes(self.files)
        return totals.n_bytes + totals.sidecar_bytes + other_bytes + announced

    def free_bytes(self) -> int:
        """Return the volume's free bytes, less bytes that are announced and not yet written."""
        announced, written = staged_bytes(self.files)
        return shutil.disk_usage(self.folder).free - (announced - written)

    def __str__(self) -> str:
        free, limits = self.free_bytes(), self.limits
        used = f"{show_bytes(self.used_bytes())} of {show_bytes(limits.max_disk_bytes)}"
        text = f"{self.folder} ({used}, {show_bytes(free)} free"
        if free < limits.min_free_bytes:
            floor = show_bytes(limits.min_free_bytes)
            effect = "blocks are evicted before new blocks are stored"
            # Roughly as in `make_room`, which also counts the new bytes.
            if self._below_floor(0) > self.index.totals().n_bytes:
                effect = "nothing new is stored"
            text += f"; less than the {floor} of --kvpersist-min-free, so {effect}"
        return f"{text})"

    @property
    def reserve_bytes(self) -> int:
        """Bytes that the index and its log may grow by while a turn is saved."""
        return min(_INDEX_RESERVE_BYTES, self.limits.max_disk_bytes // 4)

    def make_room(
        self, n_bytes: int, keep: Collection[bytes] = (), root: Root | None = None
    ) -> bool:
        """Evict until `n_bytes` of new records of `root` fit; return False if they cannot fit.

        Quarantined files and old replies are removed first, then the least recently used leaves and
        checkpoints. While the model with the most bytes exceeds its share, its records go first.
        Pinned sessions and the keys in `keep` stay.
        """
        n_bytes += self.reserve_bytes if n_bytes else 0
        if n_bytes > self.limits.max_disk_bytes:
            return False
        with self.lock.held():
            too_much = self._excess(n_bytes)
            if too_much > 0:
                sweep_staged(self.files)  # removes ended processes' announcements
                too_much = self._excess(n_bytes)
            if too_much > 0:
                self.index.state.trim_replies(self.limits.max_disk_bytes // _REPLIES_SHARE)
                for path in self.files.paths("quarantine"):
                    self.files.remove(path)
                self.index.database.empty_log()
                too_much = self._excess(n_bytes)
            if too_much <= 0:
                return True
            if self._below_floor(n_bytes) > self.index.totals().n_bytes:
                return False  # other files fill the volume: an empty store would not help
            pinned = self.index.pinned_blocks()
            model, over_share = self._over_share(n_bytes, root, too_much)
            first = {name: self._first(name, keep, pinned) for name in self.index.models()}
            failure: OSError | None = None
            while too_much > 0:
                victims = {name: victim for name, victim in first.items() if victim is not None}
                if not victims:
                    if failure is not None:
                        raise failure
                    self.index.database.empty_log()  # until then, evicted rows take space
                    return self._excess(n_bytes) <= 0
                has_own = over_share > 0 and model in victims
                of = model if has_own else min(victims, key=victims.__getitem__)
                *_, key, _ = victims[of]
                try:
                    sizes = self.forget(key, Gone.EVICTED)
                except OSError as error:
                    if failure is None:
                        logger.warning("kvpersist: cannot evict %s: %s", key.hex(), error)
                    failure, keep = error, {*keep, key}
                else:
                    self.n_evicted += len(sizes)
                    too_much -= sum(sizes.values())
                    over_share -= sum(sizes.values())
                first[of] = self._first(of, keep, pinned)
                if too_much <= 0:
                    self.index.database.empty_log()  # removing rows has made the log longer
                    too_much = self._excess(n_bytes)
        return True

    def _over_share(self, n_bytes: int, root: Root | None, too_much: int) -> tuple[str, float]:
        """Return the model with the most bytes, and its bytes above its share of the space."""
        sizes = Counter({root.fingerprint: n_bytes} if root is not None else {})
        for own_root, totals in self.index.roots():
            sizes[own_root.fingerprint] += totals.n_bytes
        if len(sizes) < 2:
            return "", 0
        ((model, most),) = sizes.most_common(1)
        room = self.used_bytes() + n_bytes - too_much
        return model, most - self.limits.model_share * room

    def _first(
        self, model: str, keep: Collection[bytes], pinned: Collection[bytes]
    ) -> tuple[float, bool, int, bytes, bytes] | None:
        """Return a model's next record to evict. After a leaf, its parent may be next."""
        for victim in self.index.unused(model):
            _, is_checkpoint, _, key, block = victim
            if key not in keep and not (is_checkpoint and block in pinned):
                return victim
        return None

    def _excess(self, n_bytes: int) -> int:
        over_budget = self.used_bytes() + n_bytes - self.limits.max_disk_bytes
        return max(over_budget, self._below_floor(n_bytes))

    def _below_floor(self, n_bytes: int) -> int:
        """Return how many bytes below `min_free_bytes` the volume would be after `n_bytes` more."""
        if not self.limits.min_free_bytes:
            return -n_bytes
        return self.limits.min_free_bytes + n_bytes - self.free_bytes()

    # Sessions.

    def session_of(self, commit: Commit) -> tuple[Commit, Session | None]:
        """Return the commit and its session.

        If an interrupted turn has saved a longer block than the session's last block, the returned
        commit replaces the last block (`Index.passed_tail`).
        """
        now, leaf = self.index.now(), commit.leaf
        if leaf is None or not leaf.is_session:
            return commit, None
        session = self.index.session_of(commit)
        if session is None and (passed := self.index.passed_tail(commit)):
            commit = replace(commit, leaf=replace(leaf, replaced=(*leaf.replaced, passed)))
            session = self.index.session_of(commit)
        if session is None:
            drawn = secrets.token_hex(8)
            session = Session(drawn, commit.root.key, leaf.name, leaf.key, 0, False, now, now)
        return commit, replace(session, leaf=leaf.key, n_tokens=leaf.n_tokens, used=now)

    def remove_session(self, session: Session) -> list[Block]:
        """Remove a session, and the records and replies that only it and its draft model need.

        Return the removed blocks. Their text is overwritten when the caller empties the log.
        """
        removed = list[Block]()
        # If a file cannot be removed, no row changes, so that the session can be removed again.
        with self.lock.held(), self.index.database.transaction():
            chain = [block for block, _ in self.index.chain(session.leaf)]
            own = self.index.root(session.root)
            roots = [root for root, _ in self.index.roots(tenant=own)] if own else []
            other_roots = [r for r in roots if own and own != r and own.shares_tenant(r)]
            self.index.remove_session(session.id)
            same = {root.key: self._same_tokens(chain, root) for root in other_roots}
            for root_key, blocks in {session.root: chain, **same}.items():
                n_kept = len(blocks)
                while n_kept:
                    key = blocks[n_kept - 1].key
                    if self.index.sessions_at(key) or self.index.children(key, limit=1):
                        break
                    self.forget(key)
                    n_kept -= 1
                removed += reversed(blocks[n_kept:])
                if n_kept < len(blocks):
                    self.index.state.forget_replies(root_key, blocks, n_kept)
            self.remove_sidecar(session.id)
        return removed

    def _same_tokens(self, chain: Sequence[Block], root: Root) -> list[Block]:
        """Return the longest chain of another root that begins with the same tokens."""
        same: list[Block] = []
        for block in chain:
            parent = same[-1].key if same else root.key
            children = self.index.children(parent, block.packed_ids)
            beginnings = [c for c in children if block.packed_ids.startswith(c.packed_ids)]
            if not beginnings:
                break
            same.append(max(beginnings, key=lambda block: block.n_tokens))
        return same

    def remove_sidecar(self, session_id: str) -> None:
        self.files.remove(sidecar_path(self.folder, session_id))

    def set_pinned(self, session: Session, pinned: bool) -> Session:
        """Pin or unpin a session. Raises StoreError if it was removed."""
        with self.lock.held():
            current = self.index.session(session.id)  # another process may have moved its leaf
            if current is None:
                raise StoreError(f"session {session.id} was removed at the same time")
            changed = replace(current, pinned=pinned)
            self.index.put_session(changed, write_sidecar(changed, self.files))
            if not pinned and changed.name is None:
                self.remove_sidecar(changed.id)
            return changed


# Rebuild an index from the metadata of the files. All new rows appear together: an interrupted
# rebuild leaves the old index or none. With an incomplete index, a sweep would remove good files.


def rebuild_index(files: OwnFiles, progress: Progress = lambda done, total: None) -> int:
    """Rebuild the index of a store and put it in place; return the number of blocks.

    If the old index can be read, one transaction replaces its rows: a server may have it open, and
    SQLite forbids moving a file in use. Otherwise the index goes to quarantine, and a part of
    `SmallState` is lost. The caller holds the store's lock. Damaged files are left out.

    Raises OSError if a file cannot be read now: without its row, a sweep would remove the file.
    Raises StoreFormatError if another version wrote the index or blocks.
    """
    path = files.folder / "index.sqlite"
    if not is_empty(path):
        try:
            with closing(Index(path, files)) as index:
                return _refill(index, progress)
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            logger.warning(
                "kvpersist: the old index cannot be read (%s); it goes to quarantine", error
            )
    aside = files.folder / "quarantine"
    make_private(aside)
    fresh_path = aside / f"rebuild-{time.time_ns()}.sqlite"
    try:
        with closing(Index(fresh_path, files)) as fresh:
            fill(fresh, progress)
            n_blocks = fresh.totals().n_blocks
            fresh.state.salvage(path)
        for name in INDEX_FILES:  # otherwise an old log would be read into the new index
            if (old := files.folder / name).exists():
                files.move(old, aside / name.replace("index", f"index-{time.time_ns()}"))
        files.move(fresh_path, path)
    finally:
        for name in INDEX_FILES:
            files.remove(aside / name.replace("index", fresh_path.stem))
    return n_blocks


def _refill(index: Index, progress: Progress) -> int:
    """Replace the rows of an index by the files' metadata; return the number of blocks.

    Readable data that no file holds stay: sessions without name or pin, times of use, small state.
    """
    with index.database.transaction() as db:
        used: dict[bytes, float] = {}
        for table in FOLDERS:
            used.update(db.execute(f"SELECT key, used FROM {table} WHERE {sound(db, table)}"))
        sessions = index.sessions()
        for table in OTHER_TABLES:
            db.execute(f"DELETE FROM {table} WHERE NOT ({sound(db, table)})")
        for table in (*TABLES_OF_FILES, "totals"):
            db.execute(f"DELETE FROM {table}")
        fill(index, progress, used)
        sizes = dict(db.execute("SELECT id, sidecar_bytes FROM sessions"))
        for session in sessions:
            end = index.block(session.leaf)
            if end is None or end[1] != session.root:
                continue
            try:
                index.put_session(session, sizes.get(session.id, 0))
            except sqlite3.IntegrityError:  # another session, read from a file, has this id
                index.put_session(replace(session, id=secrets.token_hex(8)))
        recount(db)
        return index.totals().n_blocks


def fill(index: Index, progress: Progress, used: Mapping[bytes, float] | None = None) -> None:
    """Add the records of all files to an empty index, in one transaction."""
    files, used = index.files, used or {}
    paths = [path for name in (*FOLDERS, "sessions") for path in sorted(files.paths(name))]
    paths = [path for path in paths if path.suffix != ".tmp"]
    bad: list[str] = []
    with index.database.transaction():
        for number, path in enumerate(paths, start=1):
            try:
                if path.suffix == ".json":
                    session = read_sidecar(path, files)
                    if session.leaf in index:
                        index.put_session(session, path.stat().st_size)
                else:
                    (record, root, _), stat = read_record(path, files), path.stat()
                    parent = index.block(record.block) if isinstance(record, Checkpoint) else None
                    if isinstance(record, Block) or (parent is not None and parent[1] == root.key):
                        last_s = max(stat.st_mtime, used.get(record.key, 0.0))
                        index.add_blocks(root, [(record, stat.st_size)], last_s)
            except StoreFormatError as error:
                raise StoreFormatError(f"{path}: {error}") from error
            except (BlockCorrupt, FileNotFoundError, ValueError) as error:
                bad.append(f"{path.name}: {error}")
            except OSError as error:
                error.filename = error.filename or str(path)
                raise
            progress(number, len(paths))
    if bad:
        logger.warning(
            "kvpersist: %d files are not taken into the index, such as %s", len(bad), bad[0]
        )
