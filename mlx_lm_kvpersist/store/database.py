"""The SQLite file of the index, in WAL mode, with a connection for each thread.

Each thread closes its own connection: SQLite would crash in a thread if another thread closed its
connection.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from .folder import OwnFiles

_WAIT_S = 30.0
_TURN_S = 5.0
"""How long a thread waits for the lent connection before it opens its own."""
_LAST_TURN_S = 1.0
"""How long closing waits for a thread that has the lent connection."""
_MOST_AT_ONCE = 400
"""Rows in one statement: SQLite allows at least 999 variables."""


class _ThreadConnection:
    """Closes a thread's connection when the thread ends, without waiting for the GC."""

    def __init__(self, db: sqlite3.Connection, n_opened: int) -> None:
        self.db = db
        self.n_opened = n_opened

    def __del__(self) -> None:
        self.db.close()


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def is_empty(path: Path) -> bool:
    """Say whether SQLite would make a new database of a file: it has at most one byte."""
    return not path.exists() or path.stat().st_size <= 1


def is_locked(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "is locked" in str(error)


class Database:
    """An SQLite file that exists; `files` opens it. Call `reopen` before the first use."""

    def __init__(self, path: Path, files: OwnFiles) -> None:
        self.path = path
        self.files = files
        self._local = threading.local()
        self._lent = SimpleQueue[_ThreadConnection | None]()
        """The connection that threads borrow, if it is open; empty while a thread has it."""
        self._lent.put(None)
        self._is_closed = False
        self._n_opened = 0
        self._inode = 0
        self.opening = threading.RLock()
        """Held while a thread opens the file, or makes it again. A connection to a removed file
        would truncate the shared memory of the new file. Other connections have mapped this memory,
        so the process would end with SIGBUS."""

    def reopen(self) -> None:
        """Use the file that is at the path now."""
        self._inode = self.path.stat().st_ino
        self._n_opened += 1

    def leave(self) -> None:
        """Answer no questions until `reopen`: the file that is at the path must not be used."""
        self._inode = 0
        self._n_opened += 1

    def is_current(self) -> bool:
        """Say whether the path still leads to the file that was opened."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    @property
    def connection(self) -> sqlite3.Connection:
        if self._is_closed:
            self.disconnect()
            raise sqlite3.OperationalError(f"unable to open {self.path}: the index was closed")
        own: _ThreadConnection | None = getattr(self._local, "own", None)
        if own is None or own.n_opened != self._n_opened:
            with self.opening:
                own = self._local.own = _ThreadConnection(self._connect(), self._n_opened)
        return own.db

    def _connect(self) -> sqlite3.Connection:
        db = self.files.encryption.connect(self.path)
        try:
            db.text_factory = _text
            if is_empty(self.path):  # otherwise this would write
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            # Only for macOS, where `fsync` leaves pages in the cache of the drive.
            db.execute("PRAGMA checkpoint_fullfsync = ON")
            # A small log: it counts towards the disk budget like every other file.
            db.execute("PRAGMA wal_autocheckpoint = 112")
            db.execute("PRAGMA journal_size_limit = 524288")
            # Removed rows are overwritten: a page may have held a conversation's text.
            db.execute("PRAGMA secure_delete = ON")
            db.execute(f"PRAGMA busy_timeout = {_WAIT_S * 1000:.0f}")
            if not self.is_current():
                raise sqlite3.OperationalError(f"{self.path} was removed or replaced")
        except BaseException as error:
            db.close()
            self._explain(error)
            raise
        return db

    def close(self) -> None:
        """Answer no more queries; close this thread's and the lent connection. Any thread.

        A thread that still has the lent connection closes it afterwards.
        """
        with suppress(Empty):
            self._lent.get(timeout=_LAST_TURN_S)
        self._is_closed = True
        self.disconnect()
        self._lent.put(None)

    def disconnect(self) -> None:
        """Close this thread's connection; a later query of the thread opens another."""
        self._local.__dict__.clear()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lend a connection to a short-lived thread. Such threads take turns.

        A thread that waits too long opens its own: the borrower may wait for a disk.
        """
        has_turn, own = True, None
        try:
            own = self._lent.get(timeout=_TURN_S)
        except Empty:
            has_turn = False
        if own is not None:
            self._local.own = own
        try:
            yield
        finally:
            own = self._local.__dict__.pop("own", None)
            if has_turn:
                self._lent.put(None if self._is_closed else own)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Change the file, all or nothing. An inner transaction is a part of the outer."""
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
        """Raise a clearer error if another program keeps the file locked."""
        if is_locked(error):
            advice = "another program has it open, such as a database browser or a backup; close it"
            raise sqlite3.OperationalError(f"{self.path} is locked: {advice}") from error

    def empty_log(self) -> None:
        """Return free pages to the volume, and empty the log, as far as other readers allow."""
        # executescript() runs to the end; execute() would stop after one page.
        self.connection.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")


class Rows:
    """Queries to a database. Any thread.

    If a query fails, `failed` is called with an action and the error, and the result is empty;
    without `failed`, the error is raised.
    """

    def __init__(
        self, database: Database, failed: Callable[[str, Exception], None] | None = None
    ) -> None:
        self.database = database
        self._failed = failed

    def ask(self, sql: str, *values: Any, types: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a query; with `types`, only rows whose values have these types."""
        try:
            rows = self.database.connection.execute(sql, values).fetchall()
        except (OSError, sqlite3.Error) as error:
            if self._failed is None:
                raise
            self._failed("read the index", error)
            return []
        return [row for row in rows if all(map(isinstance, row, types))]

    def ask_in(
        self, sql: str, keys: Iterable[Sequence[Any]], *values: Any, types: Sequence[Any] = ()
    ) -> list[Any]:
        """Return the rows for any number of keys; `sql` takes `values` first, then `VALUES {}`."""
        answers: list[Any] = []
        left = iter(keys)
        while some := list(islice(left, _MOST_AT_ONCE)):
            rows = ", ".join(f"({', '.join('?' * len(row))})" for row in some)
            answers += self.ask(sql.format(rows), *values, *chain.from_iterable(some), types=types)
        return answers
