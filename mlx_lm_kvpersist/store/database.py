"""The SQLite file of the index: a connection for each thread, transactions, and the file itself.

The file is in WAL mode. A thread's connection is closed by that thread: when the thread ends, when
it closes the database, or when it next asks after another thread has closed or reopened it. SQLite
would crash under a thread whose connection another thread closes.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN_S, _WAIT_S = 5.0, 30.0
"""How long a file that another connection has locked is waited for: to open it, to change it."""
INCREMENTAL = 2
"""The file gives free pages back when it is asked to, so that it shrinks with the store."""


class _ThreadConnection:
    """A thread's connection, closed when the thread ends.

    A connection alone would stay until the next garbage collection: it and its statements refer
    to each other.
    """

    def __init__(self, db: sqlite3.Connection, n_opened: int) -> None:
        self.db = db
        self.n_opened = n_opened

    def __del__(self) -> None:
        self.db.close()


def _text(raw: bytes) -> str | bytes:
    """Read a text; the bytes of a damaged one, which is then no text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def is_locked(error: BaseException) -> bool:
    """Say whether an error means that another connection has the file locked."""
    return isinstance(error, sqlite3.OperationalError) and "is locked" in str(error)


class Database:
    """An SQLite file that is there; `reopen` before the first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._is_closed = False
        self._n_opened = 0
        self._inode = 0

    def reopen(self) -> None:
        """Use the file that is at the path now."""
        self._inode = self.path.stat().st_ino
        self._n_opened += 1

    def is_current(self) -> bool:
        """Say whether the file is still where it was opened."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection of the calling thread."""
        if self._is_closed:
            self.close()
            raise sqlite3.OperationalError(f"unable to open {self.path}: the index was closed")
        own: _ThreadConnection | None = getattr(self._local, "own", None)
        if own is None or own.n_opened != self._n_opened:
            n_opened = self._n_opened
            own = self._local.own = _ThreadConnection(self._connect(), n_opened)
        return own.db

    def _connect(self) -> sqlite3.Connection:
        # A reader must not make the file anew where somebody removed it.
        uri = f"{self.path.absolute().as_uri()}?mode=rw"
        # Another thread closes it only when nobody has this database any more.
        db = sqlite3.connect(uri, uri=True, timeout=_OPEN_S, check_same_thread=False)
        try:
            db.text_factory = _text
            if not self.path.stat().st_size:  # else this would write
                db.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            # A small log: it counts towards the disk budget like every other file.
            db.execute("PRAGMA wal_autocheckpoint = 64")
            db.execute("PRAGMA journal_size_limit = 262144")
            # What is removed is overwritten: a page may have held a conversation's text.
            db.execute("PRAGMA secure_delete = ON")
            db.execute(f"PRAGMA busy_timeout = {_WAIT_S * 1000:.0f}")
        except BaseException as error:
            db.close()
            self._explain(error)
            raise
        return db

    def close(self) -> None:
        """Answer no more, and close this thread's connection. Any thread."""
        self._is_closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """Close this thread's connection; if the thread asks again, it gets another."""
        self._local.__dict__.clear()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Change the file, all or nothing. A transaction inside another one is part of it."""
        db = self.connection
        if db.in_transaction:
            yield db
            return
        try:
            with db:
                db.execute("BEGIN IMMEDIATE")
                yield db
        except sqlite3.OperationalError as error:
            self._explain(error)
            raise

    def _explain(self, error: BaseException) -> None:
        """Raise an error that says what to do, if another program keeps the file locked."""
        if is_locked(error):
            advice = "another program has it open, such as a database browser or a backup; close it"
            raise sqlite3.OperationalError(f"{self.path} is locked: {advice}") from error

    def empty_log(self) -> None:
        """Give back the pages that are free, and empty the log, as far as other readers allow."""
        # A script runs to its end; execute() would stop after one page.
        self.connection.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")
