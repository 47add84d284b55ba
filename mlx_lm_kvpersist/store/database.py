"""The SQLite file of the index: connections, tables, and checks for damage.

A connection is closed only while no other thread uses it: otherwise SQLite would crash.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ..errors import IndexDamaged, StoreFormatError
from .folder import OwnFiles
from .records import SESSION_COLUMNS, read_root, read_sessions

_WAIT_S = 30.0
_READERS_MS = 50
"""How long emptying the log waits for readers. A query takes less; a backup may take hours."""
_TURN_S = 5.0
"""How long a thread waits for the lent connection before it opens its own: the thread that has the
connection may be waiting for a disk."""
_LAST_TURN_S = 1.0
"""How long closing waits for a thread that has the lent connection."""
_MOST_AT_ONCE = 400
"""Rows in one statement: SQLite allows at least 999 variables."""
INDEX_FORMAT = 7
"""The format of the index. Indexes of other formats are refused."""
APPLICATION_ID = 0x6B767000
"""Marks a database as a store's ("kvp"). The last byte of the mark is the format."""

_ERROR, _CORRUPT, _NOT_A_DATABASE = 1, 11, 26
"""Primary result codes of SQLite (https://www.sqlite.org/rescode.html)."""
_DAMAGE = re.compile(
    "database disk image is malformed|malformed database schema .*|unsupported file format"
    "|file is (encrypted or is )?not a database|",
    re.DOTALL,
)
"""Messages that mean damage. Errors have no codes in Python 3.10, and a wrong file format has a
general code. If a schema is not UTF-8, Python 3.10 gives an empty message."""


@dataclass
class _ThreadConnection:
    """Closes a thread's connection when the thread ends, without waiting for the GC."""

    db: sqlite3.Connection
    n_opened: int

    def __del__(self) -> None:
        self.db.close()


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def is_empty(path: Path) -> bool:
    """Say whether SQLite would make a new database: the file is missing or has at most one byte."""
    return not path.exists() or path.stat().st_size <= 1


def is_locked(error: BaseException) -> bool:
    return isinstance(error, sqlite3.OperationalError) and "is locked" in str(error)


class Database:
    """An existing SQLite file, perhaps encrypted. Call `reopen` before the first use."""

    def __init__(self, path: Path, files: OwnFiles) -> None:
        self.path = path
        self.files = files
        self._local = threading.local()
        self._lent = SimpleQueue[_ThreadConnection | None]()
        """Holds the connection that threads borrow (None: not open); empty while it is lent."""
        self._lent.put(None)
        self._is_closed = False
        self._n_opened = 0
        self._inode = 0
        self.opening = threading.RLock()
        """Held while a thread opens the file, or makes it again. A connection to a removed file
        would truncate the shared memory of the new file, which other connections have mapped: the
        process would end with SIGBUS."""

    def reopen(self) -> None:
        """Use the file that is at the path now."""
        self._inode = self.path.stat().st_ino
        self._n_opened += 1

    def leave(self) -> None:
        """Answer no queries until `reopen`: the file that is at the path must not be used."""
        self._inode = 0
        self._n_opened += 1

    def is_current(self) -> bool:
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
            if is_empty(self.path):  # otherwise the pragma would write
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
        """Answer no more queries; close this thread's and the lent connection. Any thread."""
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
        """Lend a connection to a short-lived thread. Such threads take turns."""
        try:
            self._local.own, has_turn = self._lent.get(timeout=_TURN_S), True
        except Empty:
            has_turn = False
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

    def empty_log(self) -> bool:
        """Give free pages back to the volume, and empty the log; return whether the log is empty.

        If a reader keeps the log from being emptied, the database's files may still contain removed
        rows.
        """
        db = self.connection
        # executescript() runs to the end; execute() would stop after one page.
        db.executescript(f"PRAGMA incremental_vacuum; PRAGMA busy_timeout = {_READERS_MS};")
        try:
            ((is_busy, *_),) = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        finally:
            db.execute(f"PRAGMA busy_timeout = {_WAIT_S * 1000:.0f}")
        return not is_busy


class Rows:
    """Queries to a database. Any thread.

    If a query fails, the result is empty, and `failed` gets what failed, and the error. Without
    `failed`, the error is raised.
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
        """Return the rows for any number of keys. In `sql`, `{}` must come after the last `?`."""
        answers: list[Any] = []
        left = iter(keys)
        while some := list(islice(left, _MOST_AT_ONCE)):
            rows = ", ".join(f"({', '.join('?' * len(row))})" for row in some)
            answers += self.ask(sql.format(rows), *values, *chain.from_iterable(some), types=types)
        return answers


SCHEMA = """
CREATE TABLE roots (
    key BLOB PRIMARY KEY,
    about TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE blocks (
    key BLOB PRIMARY KEY,
    parent BLOB NOT NULL,
    root BLOB NOT NULL,
    start INTEGER NOT NULL,
    ids BLOB NOT NULL,
    text TEXT NOT NULL,
    pending BLOB NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL,
    n_children INTEGER NOT NULL DEFAULT 0,
    model TEXT NOT NULL -- its fingerprint
);
CREATE INDEX blocks_by_text ON blocks (parent, text);
CREATE INDEX blocks_by_ids ON blocks (parent, ids);
CREATE INDEX blocks_by_use ON blocks (used);
CREATE INDEX leaves_by_use ON blocks (model, used, start DESC, key) WHERE n_children = 0;
CREATE TABLE checkpoints (
    key BLOB PRIMARY KEY,
    block BLOB NOT NULL,
    kind TEXT NOT NULL,
    n_tokens INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    used REAL NOT NULL,
    root BLOB NOT NULL,
    model TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX checkpoints_by_block ON checkpoints (block, kind, n_tokens, n_bytes);
CREATE INDEX checkpoints_by_use ON checkpoints (used);
CREATE INDEX checkpoints_of_model_by_use ON checkpoints (model, used, key, block);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    root BLOB NOT NULL,
    name TEXT,
    leaf BLOB NOT NULL,
    n_tokens INTEGER NOT NULL,
    pinned INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL,
    used REAL NOT NULL,
    sidecar_bytes INTEGER NOT NULL
);
CREATE INDEX sessions_by_name ON sessions (root, name, used);
CREATE INDEX sessions_by_leaf ON sessions (leaf);
CREATE TABLE replies (
    root BLOB NOT NULL,
    digest BLOB NOT NULL,
    ids BLOB NOT NULL,
    used REAL NOT NULL,
    PRIMARY KEY (root, digest)
) WITHOUT ROWID;
CREATE INDEX replies_by_use ON replies (used);
CREATE TABLE state (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE writes (
    minute INTEGER PRIMARY KEY,
    n_bytes INTEGER NOT NULL
);
CREATE TABLE requests (
    number INTEGER PRIMARY KEY,
    about TEXT NOT NULL
);
CREATE TABLE totals ( -- by root; the empty root stands for all
    root BLOB PRIMARY KEY,
    n_blocks INTEGER NOT NULL,
    block_bytes INTEGER NOT NULL,
    n_checkpoints INTEGER NOT NULL,
    checkpoint_bytes INTEGER NOT NULL,
    sidecar_bytes INTEGER NOT NULL -- for all roots together
) WITHOUT ROWID;
CREATE INDEX totals_by_bytes ON totals (block_bytes);
CREATE TRIGGER block_added AFTER INSERT ON blocks BEGIN
    INSERT INTO totals SELECT new.root, 0, 0, 0, 0, 0
        WHERE NOT EXISTS (SELECT 1 FROM totals WHERE root = new.root);
    UPDATE totals SET n_blocks = n_blocks + 1, block_bytes = block_bytes + new.n_bytes
        WHERE root IN (x'', new.root);
    UPDATE blocks SET n_children = n_children + 1 WHERE key = new.parent;
    UPDATE blocks SET n_children = (SELECT count(*) FROM blocks WHERE parent = new.key)
        WHERE key = new.key AND EXISTS (SELECT 1 FROM blocks WHERE parent = new.key);
END;
CREATE TRIGGER block_resized AFTER UPDATE OF n_bytes ON blocks BEGIN
    UPDATE totals SET block_bytes = block_bytes + new.n_bytes - old.n_bytes
        WHERE root IN (x'', new.root);
END;
CREATE TRIGGER block_removed AFTER DELETE ON blocks BEGIN
    UPDATE totals SET n_blocks = n_blocks - 1, block_bytes = block_bytes - old.n_bytes
        WHERE root IN (x'', old.root);
    UPDATE blocks SET n_children = n_children - 1 WHERE key = old.parent;
END;
CREATE TRIGGER checkpoint_added AFTER INSERT ON checkpoints BEGIN
    INSERT INTO totals SELECT new.root, 0, 0, 0, 0, 0
        WHERE NOT EXISTS (SELECT 1 FROM totals WHERE root = new.root);
    UPDATE totals SET n_checkpoints = n_checkpoints + 1,
        checkpoint_bytes = checkpoint_bytes + new.n_bytes
        WHERE root IN (x'', new.root);
END;
CREATE TRIGGER checkpoint_resized AFTER UPDATE OF n_bytes ON checkpoints BEGIN
    UPDATE totals SET checkpoint_bytes = checkpoint_bytes + new.n_bytes - old.n_bytes
        WHERE root IN (x'', new.root);
END;
CREATE TRIGGER checkpoint_removed AFTER DELETE ON checkpoints BEGIN
    UPDATE totals SET n_checkpoints = n_checkpoints - 1,
        checkpoint_bytes = checkpoint_bytes - old.n_bytes
        WHERE root IN (x'', old.root);
END;
CREATE TRIGGER root_removed AFTER UPDATE ON totals
WHEN new.root != x'' AND new.n_blocks <= 0 AND new.n_checkpoints <= 0 BEGIN
    DELETE FROM totals WHERE root = new.root;
    DELETE FROM roots WHERE key = new.root;
END;
CREATE TRIGGER session_added AFTER INSERT ON sessions BEGIN
    UPDATE totals SET sidecar_bytes = sidecar_bytes + new.sidecar_bytes WHERE root = x'';
END;
CREATE TRIGGER session_removed AFTER DELETE ON sessions BEGIN
    UPDATE totals SET sidecar_bytes = sidecar_bytes - old.sidecar_bytes WHERE root = x'';
END;
"""
TABLES_OF_FILES = ("roots", "blocks", "checkpoints", "sessions")
OTHER_TABLES = ("replies", "requests", "state", "writes")

_COUNTED = (
    "SELECT root, sum(b), sum(bb), sum(p), sum(pb), 0 FROM ("
    "SELECT root, 1 AS b, n_bytes AS bb, 0 AS p, 0 AS pb FROM blocks "
    "UNION ALL SELECT root, 0, 0, 1, n_bytes FROM checkpoints) GROUP BY root"
)
_SUMMED = (
    "SELECT x'', coalesce(sum(n_blocks), 0), coalesce(sum(block_bytes), 0), "
    "coalesce(sum(n_checkpoints), 0), coalesce(sum(checkpoint_bytes), 0), "
    "(SELECT coalesce(sum(sidecar_bytes), 0) FROM sessions) "
    "FROM totals WHERE root != x''"
)
_MISCOUNTED = (
    "FROM blocks WHERE n_children IS NOT "
    "(SELECT count(*) FROM blocks AS child WHERE child.parent = blocks.key)"
)


def prepare(db: sqlite3.Connection, path: Path, *, check_all: bool) -> None:
    """Check the index at `path`, and make its tables if it is empty.

    Raises StoreFormatError when another version wrote it and sqlite3.DatabaseError when it is
    damaged. `check_all` reads all pages; its time grows with the index.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (mark,) = db.execute("PRAGMA application_id").fetchone()
    if version != INDEX_FORMAT == mark - APPLICATION_ID:
        raise IndexDamaged(f"an index of format {INDEX_FORMAT} that claims to be {version}")
    if version not in (0, INDEX_FORMAT):
        age = "newer" if version > INDEX_FORMAT else "older"
        raise StoreFormatError(
            f"the store {path.parent} is {age} than this version of mlx-lm-kvpersist (format "
            f"{version}, expected {INDEX_FORMAT}); choose another folder with --kvpersist-dir, or "
            "remove this one"
        )
    if check_all:
        (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise IndexDamaged(verdict)
    if version == 0:
        with db:
            db.execute("BEGIN IMMEDIATE")
            if not _statements(db):  # otherwise another process made the tables first
                for sql in _as_made().values():
                    db.execute(sql)
                recount(db)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID + INDEX_FORMAT}")
            db.execute(f"PRAGMA user_version = {INDEX_FORMAT}")
    if not _as_made().items() <= _statements(db).items():
        raise IndexDamaged("its tables were changed")


def recount(db: sqlite3.Connection) -> None:
    db.execute(
        "UPDATE blocks SET n_children = "
        "(SELECT count(*) FROM blocks AS child WHERE child.parent = blocks.key) "
        f"WHERE key IN (SELECT key {_MISCOUNTED})"
    )
    db.execute("DELETE FROM totals")
    db.execute(f"INSERT INTO totals {_COUNTED}")
    db.execute("DELETE FROM totals WHERE root = x''")
    db.execute(f"INSERT INTO totals {_SUMMED}")


def faults(db: sqlite3.Connection) -> list[str]:
    """Return the faults of rows and totals, one line for each kind."""
    lines = []
    for table in (*TABLES_OF_FILES, *OTHER_TABLES, "totals"):
        where = f"FROM {table} WHERE NOT ({sound(db, table)})"
        (n_rows,) = db.execute(f"SELECT count(*) {where}").fetchone()
        if n_rows:
            lines.append(f"{n_rows} rows of {table} have values of a wrong type")
    sessions = db.execute(f"SELECT {SESSION_COLUMNS} FROM sessions").fetchall()
    if n_bad := len(sessions) - len(read_sessions(sessions)):
        lines.append(f"{n_bad} rows of sessions cannot be read")
    roots = dict(db.execute("SELECT key, about FROM roots"))
    n_bad = sum(read_root(key, root_json) is None for key, root_json in roots.items())
    n_missing = sum(key not in roots for (key,) in db.execute("SELECT root FROM totals") if key)
    if n_bad or n_missing:
        lines.append(f"{n_bad} rows of roots cannot be read, {n_missing} are missing")
    (n_wrong,) = db.execute(f"SELECT count(*) {_MISCOUNTED}").fetchone()
    counted = {*db.execute(_COUNTED), *db.execute(_SUMMED)}
    n_wrong += len(counted ^ set(db.execute("SELECT * FROM totals")))
    if n_wrong:
        lines.append(f"{n_wrong} totals do not match the rows")
    return lines


def sound(db: sqlite3.Connection, table: str) -> str:
    """Return the SQL condition that a row's values have the types that the table declares."""
    conditions = ["1"]
    for _, name, kind, is_not_null, _, place_in_key in db.execute(f"PRAGMA table_info({table})"):
        allowed = f"'{kind.lower()}'" + ("" if is_not_null or place_in_key else ", 'null'")
        conditions.append(f"typeof({table}.{name}) IN ({allowed})")
    return " AND ".join(conditions)


def _as_made() -> dict[tuple[str, str], str]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        return _statements(db)


def _statements(db: sqlite3.Connection) -> dict[tuple[str, str], str]:
    rows = db.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {(kind, name): sql for kind, name, sql in rows}


def is_damage(error: sqlite3.Error) -> bool:
    """Say whether an error means a damaged index, and not a lock or a full disk."""
    code = getattr(error, "sqlite_errorcode", None)
    if code is None or code == _ERROR:
        return isinstance(error, IndexDamaged) or bool(_DAMAGE.fullmatch(str(error)))
    return code & 0xFF in (_CORRUPT, _NOT_A_DATABASE)
