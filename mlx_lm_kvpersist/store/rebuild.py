"""Rebuild a store's index from the metadata of its files.

The new rows take effect at once: an interrupted rebuild leaves the old index or none, never an
incomplete index, by which a sweep would remove good files.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

from ..block import Block, Checkpoint
from ..errors import BlockCorrupt, StoreFormatError
from .database import is_empty
from .files import FOLDERS, read_record
from .folder import INDEX_FILES, OwnFiles, make_private
from .index import Index
from .index_schema import OTHER_TABLES, TABLES_OF_FILES, is_damage, recount, sound
from .records import read_sidecar

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the number of files read, and of all files."""


def rebuild_index(files: OwnFiles, progress: Progress = lambda done, total: None) -> int:
    """Rebuild the index of a store and put it in place; return the number of blocks.

    If the old index can be read, one transaction replaces its rows: a server may have it open, and
    SQLite forbids moving a file in use. Otherwise the index goes to quarantine, and some small
    state is lost with it. The caller holds the store's lock.

    Damaged files are left out. Raises OSError when a file cannot be read now, because files without
    rows are later removed, and StoreFormatError when index or blocks were written by another
    version.
    """
    path = files.folder / "index.sqlite"
    if not is_empty(path):
        try:
            with closing(Index(path, files)) as index:
                return _refill(index, progress)
        except sqlite3.Error as error:
            # A full disk or a held lock does not mean that the index is damaged.
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

    Other processes read the old rows until the transaction ends. Data that files lack are kept if
    they can be read: sessions without name and pin, times of use, and all small state.
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
            except sqlite3.IntegrityError:  # a file that has this id belongs to another session
                index.put_session(replace(session, id=secrets.token_hex(8)))
        recount(db)
        return index.totals().n_blocks


def fill(index: Index, progress: Progress, used: Mapping[bytes, float] | None = None) -> None:
    """Add the records of all files to an empty index, in one transaction.

    A record was last used at its time in `used`, or when its file was written, if that is later.
    """
    files, used = index.files, used or {}
    paths = [path for name in FOLDERS for path in sorted(files.paths(name))]
    bad: list[str] = []
    with index.database.transaction():
        for number, path in enumerate(paths):
            try:
                (record, root, _), stat = read_record(path, files), path.stat()
            except StoreFormatError as error:
                raise StoreFormatError(f"{path}: {error}") from error
            except (BlockCorrupt, FileNotFoundError) as error:
                bad.append(f"{path.name}: {error}")
            else:
                parent = index.block(record.block) if isinstance(record, Checkpoint) else None
                if isinstance(record, Block) or (parent is not None and parent[1] == root.key):
                    last_s = max(stat.st_mtime, used.get(record.key, 0.0))
                    index.add_blocks(root, [(record, stat.st_size)], last_s)
            progress(number + 1, len(paths))
        for path in sorted(files.paths("sessions")):
            if path.suffix != ".json":
                continue
            try:
                session = read_sidecar(path, files)
            except ValueError as error:
                bad.append(f"{path.name}: {error}")
                continue
            if session.leaf in index:
                index.put_session(session, path.stat().st_size)
    if bad:
        logger.warning(
            "kvpersist: %d files are not taken into the index, such as %s", len(bad), bad[0]
        )
