"""The SQLite file of an index: opening it, knowing whether it is sound, replacing its content."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ..errors import StoreFormatError

__all__ = ["INDEX_FORMAT", "IndexFile", "is_damage"]

INDEX_FORMAT = 2
"""Of the store as a whole: a version that reads less would count and remove too little.

2 added parts.
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS roots (
    key BLOB PRIMARY KEY,
    about TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks (
    key BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    root BLOB NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL,
    text TEXT NOT NULL,
    pending BLOB NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS blocks_by_text ON blocks (parent, text);
CREATE INDEX IF NOT EXISTS blocks_by_use ON blocks (used);
CREATE TABLE IF NOT EXISTS parts (
    key BLOB PRIMARY KEY,
    block BLOB NOT NULL,
    kind TEXT NOT NULL,
    n_tokens INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS parts_by_block ON parts (block, kind, n_tokens, n_bytes);
CREATE INDEX IF NOT EXISTS parts_by_use ON parts (used, key, block);
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY,
    root BLOB NOT NULL,
    name TEXT,
    leaf BLOB NOT NULL,
    n_tokens INTEGER NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    used REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS sessions_by_name ON sessions (root, name);
CREATE INDEX IF NOT EXISTS sessions_by_leaf ON sessions (leaf);
CREATE TABLE IF NOT EXISTS replies (
    root BLOB NOT NULL,
    digest BLOB NOT NULL,
    ids BLOB NOT NULL,
    used REAL NOT NULL,
    PRIMARY KEY (root, digest)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS file_hashes (
    path TEXT PRIMARY KEY,
    stamp TEXT NOT NULL,
    hash TEXT NOT NULL
);
"""
_APPLICATION_ID = 0x6B767000
"""SQLite's name for what a database is of, "kvp"; with the format in its last byte."""
_NOT_DAMAGE = ("locked", "unable to open", "readonly", "I/O error", "is full", "interrupted")
"""What sqlite3 says of a disk or of other processes (Python 3.10 shows no error codes)."""


class _Own:
    """A thread's connection, closed when the thread ends.

    A connection alone would stay until the next garbage collection: it and its statements refer
    to each other.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __del__(self) -> None:
        self.db.close()


class IndexFile:
    """An SQLite database in WAL mode, with a connection for each thread.

    A thread's connection is closed by that thread: when the thread ends, when it closes the index,
    or when it next asks an index that another thread has closed.

    Opening makes it where it is missing. Raises StoreFormatError when a newer version wrote it
    and sqlite3.DatabaseError when it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._is_closed = False
        path.touch(mode=0o600)
        self._inode = path.stat().st_ino
        try:
            self._prepare()
        except UnicodeDecodeError as error:
            # A message of SQLite's that quotes a damaged schema.
            self.close()
            raise sqlite3.DatabaseError(f"its schema is damaged: {error.object!r}") from error
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        db = self._db
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (made_for,) = db.execute("PRAGMA application_id").fetchone()
        claims_more = version > INDEX_FORMAT
        if claims_more and 0 < made_for - _APPLICATION_ID <= INDEX_FORMAT:
            raise sqlite3.DatabaseError(
                f"an index of format {made_for - _APPLICATION_ID} that claims to be {version}"
            )
        if claims_more:
            raise StoreFormatError(
                f"{self.path} was written in format {version}; this version reads up to "
                f"{INDEX_FORMAT}. "
                "Upgrade mlx-lm-kvpersist, or choose another folder with --kvpersist-dir."
            )
        if version < INDEX_FORMAT:
            # Whatever is missing; an older store goes on with what is new in it empty.
            with db:
                db.executescript(_SCHEMA)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID + INDEX_FORMAT}")
                db.execute(f"PRAGMA user_version = {INDEX_FORMAT}")
        (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        with closing(sqlite3.connect(":memory:")) as as_made:
            as_made.executescript(_SCHEMA)
            if not _statements(as_made) <= _statements(db):
                raise sqlite3.DatabaseError("its tables are not as they were made")

    @property
    def _db(self) -> sqlite3.Connection:
        if self._is_closed:
            self.close()
            raise sqlite3.OperationalError(f"unable to open {self.path}: the index was closed")
        own: _Own | None = getattr(self._local, "own", None)
        if own is None:
            own = self._local.own = _Own(self._connect())
        return own.db

    def _connect(self) -> sqlite3.Connection:
        # A reader must not make the file anew where somebody removed it.
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        # Another thread closes it only where nobody has this index any more.
        db = sqlite3.connect(uri, uri=True, timeout=30, check_same_thread=False)
        # A small log: it counts towards the disk budget like every other file.
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 64")
        db.execute("PRAGMA journal_size_limit = 262144")
        # What is removed is overwritten: a page may have held a conversation's text.
        db.execute("PRAGMA secure_delete = ON")
        return db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Change the index, all or nothing. A transaction inside another one is part of it."""
        db = self._db
        if db.in_transaction:
            yield db
            return
        with db:
            db.execute("BEGIN IMMEDIATE")
            yield db

    def close(self) -> None:
        """Answer no more, and close this thread's connection. Any thread.

        SQLite would crash under a thread whose connection another thread closes.
        """
        self._is_closed = True
        self._local.__dict__.clear()

    def checkpoint(self) -> None:
        """Empty the log into the index, as far as other readers allow."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def is_current(self) -> bool:
        """Say whether the file is still where it was opened."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def format(self) -> int:
        """Return the format of the store."""
        version: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        return version

    def take_over(self, path: Path) -> None:
        """Replace what the files say by the content of the index at `path`, in one transaction.

        What the files do not say is kept where it still applies: sessions that have neither name
        nor pin, times of use, remembered replies. Others read the old content until it is done.
        """
        db = self._db
        db.execute("ATTACH ? AS fresh", (str(path),))
        try:
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.execute(
                    "UPDATE fresh.blocks SET used = max(used, "
                    "(SELECT old.used FROM main.blocks AS old WHERE old.key = blocks.key)) "
                    "WHERE key IN (SELECT key FROM main.blocks)"
                )
                db.execute(
                    "INSERT OR REPLACE INTO fresh.sessions SELECT * FROM main.sessions AS s "
                    "WHERE EXISTS (SELECT 1 FROM fresh.blocks WHERE key = s.leaf AND root = s.root)"
                )
                db.execute(
                    "UPDATE fresh.parts SET used = max(used, "
                    "(SELECT old.used FROM main.parts AS old WHERE old.key = parts.key)) "
                    "WHERE key IN (SELECT key FROM main.parts)"
                )
                for table in ("roots", "blocks", "parts", "sessions"):
                    db.execute(f"DELETE FROM main.{table}")
                    db.execute(f"INSERT INTO main.{table} SELECT * FROM fresh.{table}")
        finally:
            db.execute("DETACH fresh")

    def copy_outline(self, path: Path) -> None:
        """Fill this empty index from the one at `path`: its tree and sizes, no texts, no names."""
        db = self._db
        db.execute("ATTACH ? AS other", (str(path),))
        try:
            with db:
                db.execute(
                    "INSERT INTO main.blocks SELECT key, parent, root, start, x'', '', x'', "
                    "n_bytes, used FROM other.blocks"
                )
                db.execute("INSERT INTO main.parts SELECT * FROM other.parts")
                db.execute(
                    "INSERT INTO main.sessions SELECT id, root, NULL, leaf, n_tokens, pinned, "
                    "created, used FROM other.sessions"
                )
        finally:
            db.execute("DETACH other")


def is_damage(error: sqlite3.Error) -> bool:
    """Say whether an error tells of the index itself, and not of the disk or another process."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.DatabaseError)
    return not any(words in str(error) for words in _NOT_DAMAGE)


def _statements(db: sqlite3.Connection) -> set[tuple[str, str]]:
    rows = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {(name, sql) for name, sql in rows}
