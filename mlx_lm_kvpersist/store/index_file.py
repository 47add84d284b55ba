"""The SQLite file of an index: opening it, knowing whether it is sound, replacing its content."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path

from ..errors import StoreFormatError
from .index_rows import SESSION_COLUMNS, read_session
from .index_schema import (
    APPLICATION_ID,
    INDEX_FORMAT,
    OTHER_TABLES,
    TABLES_OF_FILES,
    faults,
    is_as_made,
    make_tables,
    recount,
    sound,
)

__all__ = ["INDEX_FORMAT", "IndexFile", "is_damage"]

_INCREMENTAL = 2
"""The index gives free pages back when it is asked to, so that it shrinks with the store."""
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
        if version > INDEX_FORMAT:
            if 0 < made_for - APPLICATION_ID <= INDEX_FORMAT:
                raise sqlite3.DatabaseError(
                    f"an index of format {made_for - APPLICATION_ID} that claims to be {version}"
                )
            raise StoreFormatError(
                f"{self.path} was written in format {version}; this version reads up to "
                f"{INDEX_FORMAT}. "
                "Upgrade mlx-lm-kvpersist, or choose another folder with --kvpersist-dir."
            )
        (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        if version < INDEX_FORMAT:
            make_tables(db)
        if not is_as_made(db):
            raise sqlite3.DatabaseError("its tables are not as they were made")
        if db.execute("PRAGMA auto_vacuum").fetchone() != (_INCREMENTAL,):
            self._let_shrink(db)

    def _let_shrink(self, db: sqlite3.Connection) -> None:
        """Have an index of an older format give pages back from now on."""
        try:
            db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
            db.execute("VACUUM")
            self.empty_log()
        except sqlite3.OperationalError:
            pass  # others are reading it, or the disk is full: the next one who opens it tries

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
        db.text_factory = _read_text
        if not self.path.stat().st_size:  # else this would write
            db.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")
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
        self.disconnect()

    def disconnect(self) -> None:
        """Close this thread's connection; if the thread asks again, it gets another."""
        self._local.__dict__.clear()

    def empty_log(self) -> None:
        """Give back the pages that are free, and empty the log into the index.

        As far as other readers allow.
        """
        # A script runs to its end; execute() would stop after one page.
        self._db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")

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

    def faults(self) -> list[str]:
        """Return what is wrong with the rows in themselves, a line for each kind."""
        return faults(self._db)

    def recount(self) -> None:
        """Make totals and numbers of children anew."""
        with self.transaction() as db:
            recount(db)

    def take_over(self, path: Path) -> None:
        """Replace what the files say by the content of the index at `path`, in one transaction.

        What the files do not say is kept where it still applies and can be read: sessions that
        have neither name nor pin, times of use, remembered replies. Others read the old content
        until it is done.
        """
        db = self._db
        db.execute("ATTACH ? AS fresh", (str(path),))
        try:
            with self.transaction():
                for table in ("blocks", "parts"):
                    db.execute(
                        f"UPDATE fresh.{table} SET used = max(used, "
                        f"(SELECT old.used FROM main.{table} AS old WHERE old.key = {table}.key)) "
                        f"WHERE key IN (SELECT key FROM main.{table} WHERE typeof(used) = 'real')"
                    )
                sessions = map(
                    read_session, db.execute(f"SELECT {SESSION_COLUMNS} FROM main.sessions")
                )
                db.executemany(
                    "INSERT OR REPLACE INTO fresh.sessions SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8 "
                    "WHERE EXISTS (SELECT 1 FROM fresh.blocks WHERE root = ?2 AND key = ?4)",
                    [astuple(session) for session in sessions if session is not None],
                )
                for table in OTHER_TABLES:
                    db.execute(f"DELETE FROM main.{table} WHERE NOT ({sound(db, table)})")
                for table in TABLES_OF_FILES:
                    db.execute(f"DELETE FROM main.{table}")
                for table in TABLES_OF_FILES:
                    db.execute(f"INSERT INTO main.{table} SELECT * FROM fresh.{table}")
                recount(db)
        finally:
            db.execute("DETACH fresh")

    def copy_outline(self, path: Path) -> None:
        """Fill this empty index from the one at `path`: its tree and sizes, no texts, no names."""
        db = self._db
        db.execute("ATTACH ? AS other", (str(path),))
        try:
            with self.transaction():
                db.execute(
                    "INSERT INTO main.blocks SELECT key, parent, root, start, x'', '', x'', "
                    "n_bytes, used, 0 FROM other.blocks"
                )
                db.execute("INSERT INTO main.parts SELECT * FROM other.parts")
                db.execute(
                    "INSERT INTO main.sessions SELECT id, root, NULL, leaf, n_tokens, pinned, "
                    "created, used FROM other.sessions"
                )
                recount(db)
        finally:
            db.execute("DETACH other")


def is_damage(error: sqlite3.Error) -> bool:
    """Say whether an error tells of the index itself, and not of the disk or another process."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.DatabaseError)
    return not any(words in str(error) for words in _NOT_DAMAGE)


def _read_text(raw: bytes) -> str | bytes:
    """Read a text; the bytes of a damaged one, which is then no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw
