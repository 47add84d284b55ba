"""Rebuild a store's index from the metadata of its files.

The new index is made aside and takes effect at once: an interrupted rebuild leaves the old index or
none, never half of one, which a sweep would take at its word.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple
from pathlib import Path

from ..block import Block, Checkpoint
from ..errors import BlockCorrupt, StoreFormatError
from .database import is_empty
from .files import read_record
from .folder import OwnFiles, make_private
from .index import Index
from .index_schema import OTHER_TABLES, TABLES_OF_FILES, is_damage, recount, sound
from .records import read_sidecar

logger = logging.getLogger(__name__)

_SUFFIXES = ("", "-wal", "-shm")


def rebuild_index(
    files: OwnFiles, progress: Callable[[int, int], None] = lambda done, total: None
) -> int:
    """Make the index of a store anew and put it in place; return the number of blocks.

    The rows of an index that can still be read are replaced by one transaction, because a server
    may have it open: SQLite forbids to move a file that is in use. Any other index goes to
    quarantine, and some small state is lost with it. The caller holds the store's lock.

    What is damaged is left out. `progress` is called with the files read and all files.
    Raises OSError when a file cannot be read now, because what is left out is swept, and
    StoreFormatError when index or blocks were written by another version.
    """
    folder = files.folder
    aside = folder / "quarantine"
    make_private(aside)
    fresh_path = aside / f"rebuild-{time.time_ns()}.sqlite"
    fresh = Index(fresh_path, files)
    try:
        fill(fresh, progress)
        n_blocks = fresh.totals().n_blocks
        fresh.state.salvage(folder / "index.sqlite")
        fresh.close()
        if not _replaced_within(folder / "index.sqlite", fresh_path, files):
            for suffix in _SUFFIXES:  # a log left behind would be read into the new index
                path = folder / f"index.sqlite{suffix}"
                if path.exists():
                    files.move(path, aside / f"index-{time.time_ns()}.sqlite{suffix}")
            files.move(fresh_path, folder / "index.sqlite")
    finally:
        fresh.close()
        for suffix in _SUFFIXES:
            files.remove(Path(f"{fresh_path}{suffix}"))
    return n_blocks


def _replaced_within(path: Path, fresh_path: Path, files: OwnFiles) -> bool:
    """Put the rows of a fresh index into the one at `path`; False when it is missing or damaged.

    Other processes read the old rows until the transaction ends. What the files do not say is kept
    if it can be read: sessions without name and pin, times of use, and all small state.
    """
    if is_empty(path):
        return False
    try:
        live = Index(path, files)
        with closing(live), closing(live.database.connection) as db, db:
            files.encryption.attach(db, fresh_path, "fresh")
            db.execute("BEGIN IMMEDIATE")
            for table in ("blocks", "checkpoints"):
                db.execute(
                    f"UPDATE fresh.{table} SET used = (SELECT max({table}.used, old.used) "
                    f"FROM main.{table} AS old WHERE old.key = {table}.key) "
                    f"WHERE key IN (SELECT key FROM main.{table} WHERE {sound(db, table)})"
                )
            db.execute(
                # A file that has this id belongs to another session.
                "UPDATE main.sessions AS old SET id = lower(hex(randomblob(8))) WHERE EXISTS "
                "(SELECT 1 FROM fresh.sessions AS own WHERE own.id = old.id AND "
                "(own.root, own.name, own.created) IS NOT (old.root, old.name, old.created))"
            )
            db.executemany(
                "INSERT OR REPLACE INTO fresh.sessions SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, "
                "coalesce((SELECT sidecar_bytes FROM fresh.sessions WHERE id = ?1), 0) "
                "WHERE EXISTS (SELECT 1 FROM fresh.blocks WHERE root = ?2 AND key = ?4)",
                map(astuple, live.sessions()),
            )
            for table in OTHER_TABLES:
                db.execute(f"DELETE FROM main.{table} WHERE NOT ({sound(db, table)})")
            for table in TABLES_OF_FILES:
                db.execute(f"DELETE FROM main.{table}")
            for table in TABLES_OF_FILES:
                db.execute(f"INSERT INTO main.{table} SELECT * FROM fresh.{table}")
            recount(db)
    except sqlite3.Error as error:
        # A disk that is full or a lock that is held says nothing about the index.
        if not is_damage(error):
            raise
        logger.warning("kvpersist: the old index cannot be read (%s); it goes to quarantine", error)
        return False
    return True


def fill(index: Index, progress: Callable[[int, int], None]) -> None:
    """Add all that its files say to an empty index, in one transaction."""
    files = index.files
    paths = [path for name in ("blocks", "checkpoints") for path in sorted(files.paths(name))]
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
                    index.add_blocks(root, [(record, stat.st_size)], stat.st_mtime)
            progress(number + 1, len(paths))
        for path in sorted(files.paths("sessions")):
            if path.suffix != ".json":
                continue
            try:
                session = read_sidecar(path, files)
            except (ValueError, TypeError, KeyError) as error:
                bad.append(f"{path.name}: {error}")
                continue
            if session.leaf in index:
                index.put_session(session, path.stat().st_size)
    if bad:
        logger.warning(
            "kvpersist: %d files are not taken into the index, such as %s", len(bad), bad[0]
        )
