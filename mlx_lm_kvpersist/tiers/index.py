"""The index of the store: which blocks are on disk, and which sessions end where (SQLite, WAL).

Any thread may read; each gets a connection of its own. Only the writer thread writes.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreFormatError
from ..match.tree import Node
from .files import FORMAT

_SCHEMA = """
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
CREATE INDEX IF NOT EXISTS blocks_by_parent ON blocks (parent);
CREATE INDEX IF NOT EXISTS blocks_by_use ON blocks (used);
CREATE TABLE IF NOT EXISTS sessions (
    id INTEGER PRIMARY KEY,
    root BLOB NOT NULL,
    name TEXT,
    leaf BLOB NOT NULL,
    n_tokens INTEGER NOT NULL,
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
_MAX_REPLIES = 10_000


@dataclass(frozen=True)
class Leaf:
    """The end of one conversation: `n_tokens` tokens, the last of them in block `key`.

    `name` is what the client calls it, if anything. `chain` are the keys of all its blocks and
    `replaced` those whose content is now part of longer blocks, with what took their place: the
    session that ended in one of them is the one that moves.
    """

    name: str | None
    key: bytes
    n_tokens: int
    chain: tuple[bytes, ...]
    replaced: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(frozen=True)
class StoredReply:
    """The ids of a reply whose text, as the client saw it, is not what they decode to."""

    digest: bytes
    packed_ids: bytes


class Index:
    """The SQLite file of a store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        path.touch(mode=0o600)
        db = self._db
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > FORMAT:
            raise StoreFormatError(
                f"{path} was written in format {version}; this version reads up to {FORMAT}. "
                "Upgrade mlx-lm-kvpersist, or choose another folder with --kvpersist-dir."
            )
        with db:
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA user_version = {FORMAT}")

    @property
    def _db(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            self._local.db = db
            with self._lock:
                self._connections.append(db)
        return db

    def close(self) -> None:
        with self._lock:
            for db in self._connections:
                db.close()
            self._connections.clear()

    # Reading.

    def children(self, parent: bytes) -> list[Node]:
        rows = self._db.execute(
            "SELECT key, start, ids, text, pending FROM blocks WHERE parent = ?", (parent,)
        )
        return [
            Node(key, parent, start, ids, text, pending) for key, start, ids, text, pending in rows
        ]

    def __contains__(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def session_leaves(self, root: bytes, name: str) -> list[bytes]:
        rows = self._db.execute(
            "SELECT leaf FROM sessions WHERE root = ? AND name = ?", (root, name)
        )
        return [leaf for (leaf,) in rows]

    def reply_ids(self, root: bytes, digest: bytes) -> bytes | None:
        row = self._db.execute(
            "SELECT ids FROM replies WHERE root = ? AND digest = ?", (root, digest)
        ).fetchone()
        return row[0] if row else None

    def n_bytes(self) -> int:
        """Return the size of all block files, in bytes."""
        total: int = self._db.execute("SELECT coalesce(sum(n_bytes), 0) FROM blocks").fetchone()[0]
        return total

    def n_blocks(self) -> int:
        count: int = self._db.execute("SELECT count(*) FROM blocks").fetchone()[0]
        return count

    def least_recently_used_leaf(self) -> tuple[bytes, int] | None:
        """Return key and size of the leaf block that has been unused for the longest time."""
        row: tuple[bytes, int] | None = self._db.execute(
            "SELECT key, n_bytes FROM blocks AS leaf WHERE NOT EXISTS "
            "(SELECT 1 FROM blocks WHERE parent = leaf.key) ORDER BY used LIMIT 1"
        ).fetchone()
        return row

    def file_hash(self, path: str, stamp: str) -> str | None:
        row = self._db.execute(
            "SELECT hash FROM file_hashes WHERE path = ? AND stamp = ?", (path, stamp)
        ).fetchone()
        return row[0] if row else None

    # Writing.

    def commit_turn(
        self,
        root: bytes,
        blocks: Sequence[tuple[Node, int]],
        leaf: Leaf | None,
        replies: Iterable[StoredReply] = (),
    ) -> None:
        """Add blocks whose files are in place, with their sizes, and move the session: all or none.

        Without a leaf the blocks belong to a turn that has not ended.
        """
        now = time.time()
        with self._db as db:
            db.executemany(
                "INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (n.key, n.parent, root, n.start, n.packed_ids, n.text, n.pending, size, now)
                    for n, size in blocks
                ],
            )
            db.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
                [(root, reply.digest, reply.packed_ids, now) for reply in replies],
            )
            db.execute(
                "DELETE FROM replies WHERE used <= "
                "(SELECT used FROM replies ORDER BY used DESC LIMIT 1 OFFSET ?)",
                (_MAX_REPLIES,),
            )
            if leaf is not None:
                self._move_session(db, root, leaf, now)

    def _move_session(self, db: sqlite3.Connection, root: bytes, leaf: Leaf, now: float) -> None:
        ends = [*leaf.chain, *(old for old, _ in leaf.replaced)]
        marks = ",".join("?" * len(ends))
        row = db.execute(
            f"SELECT id FROM sessions WHERE root = ? AND name IS ? AND leaf IN ({marks}) "
            "ORDER BY n_tokens DESC LIMIT 1",
            (root, leaf.name, *ends),
        ).fetchone()
        if row:
            db.execute(
                "UPDATE sessions SET leaf = ?, n_tokens = ?, used = ? WHERE id = ?",
                (leaf.key, leaf.n_tokens, now, row[0]),
            )
        else:
            db.execute(
                "INSERT INTO sessions (root, name, leaf, n_tokens, created, used) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (root, leaf.name, leaf.key, leaf.n_tokens, now, now),
            )
        db.executemany(
            "UPDATE sessions SET leaf = ? WHERE leaf = ?",
            [(new, old) for old, new in leaf.replaced],
        )
        db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, leaf.key))

    def touch(self, key: bytes) -> None:
        """Mark a block as used now."""
        with self._db as db:
            db.execute("UPDATE blocks SET used = ? WHERE key = ?", (time.time(), key))

    def forget_block(self, key: bytes) -> None:
        """Remove a block and the sessions that end in it. Its parent is as recent as it was."""
        with self._db as db:
            db.execute(
                "UPDATE blocks SET used = max(used, (SELECT used FROM blocks WHERE key = ?1)) "
                "WHERE key = (SELECT parent FROM blocks WHERE key = ?1)",
                (key,),
            )
            db.execute("DELETE FROM sessions WHERE leaf = ?", (key,))
            db.execute("DELETE FROM blocks WHERE key = ?", (key,))

    def keep_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        with self._db as db:
            db.execute(
                "INSERT OR REPLACE INTO file_hashes VALUES (?, ?, ?)", (path, stamp, content_hash)
            )
