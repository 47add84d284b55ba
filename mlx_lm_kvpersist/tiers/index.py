"""The index of the store: which blocks are on disk, and which sessions end where (SQLite, WAL).

Any thread may read; each gets a connection of its own. Only the writer changes it, and only while
it holds the store's lock. It can be rebuilt from the files: nothing stands in it alone.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..errors import StoreFormatError
from ..match.keys import Root, block_key
from ..match.tree import Node, common_prefix
from .files import FORMAT

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
_MAX_REPLIES = 10_000
_FEW = 16
"""Children of a block that are looked at one by one."""
_MAX_KEY_CHARS = 4096
"""Of the text ahead that is compared in SQL; few blocks have a longer text."""
_MAX_STEPS = 64
_APPLICATION_ID = 0x6B767000
"""SQLite's name for what a database is of, "kvp"; with the format in its last byte."""
_SEAL_BYTES = 8
_NOT_DAMAGE = ("locked", "unable to open", "readonly", "I/O error", "is full", "interrupted")
"""What sqlite3 says of a disk or of other processes (Python 3.10 shows no error codes)."""
_SESSION_COLUMNS = "id, root, name, leaf, n_tokens, pinned, created, used"


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


@dataclass(frozen=True)
class Session:
    """A conversation on disk. `created` and `used` are seconds since the epoch."""

    id: str
    root: bytes
    name: str | None
    leaf: bytes
    n_tokens: int
    pinned: bool
    created: float
    used: float


class Index:
    """The SQLite file of a store.

    Opening makes it where it is missing. Raises StoreFormatError when a newer version wrote it
    and sqlite3.DatabaseError when it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
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
        if version > FORMAT and made_for == _APPLICATION_ID + FORMAT:
            raise sqlite3.DatabaseError(f"an index of format {FORMAT} that claims to be {version}")
        if version > FORMAT:
            raise StoreFormatError(
                f"{self.path} was written in format {version}; this version reads up to {FORMAT}. "
                "Upgrade mlx-lm-kvpersist, or choose another folder with --kvpersist-dir."
            )
        if version < FORMAT:
            with db:
                db.executescript(_SCHEMA)
                db.execute(f"PRAGMA application_id = {_APPLICATION_ID + FORMAT}")
                db.execute(f"PRAGMA user_version = {FORMAT}")
        (verdict,) = db.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(verdict)
        with closing(sqlite3.connect(":memory:")) as as_made:
            as_made.executescript(_SCHEMA)
            if not _statements(as_made) <= _statements(db):
                raise sqlite3.DatabaseError("its tables are not as they were made")

    @property
    def _db(self) -> sqlite3.Connection:
        db: sqlite3.Connection | None = getattr(self._local, "db", None)
        if db is None:
            db = sqlite3.connect(self.path, timeout=30, check_same_thread=False)
            # A small log: it counts towards the disk budget like every other file.
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA wal_autocheckpoint = 64")
            db.execute("PRAGMA journal_size_limit = 262144")
            # What is removed is overwritten: a page may have held a conversation's text.
            db.execute("PRAGMA secure_delete = ON")
            self._local.db = db
            with self._lock:
                self._connections.append(db)
        return db

    def close(self) -> None:
        with self._lock:
            for db in self._connections:
                db.close()
            self._connections.clear()

    def checkpoint(self) -> None:
        """Empty the log into the index, as far as other readers allow."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def is_current(self) -> bool:
        """Say whether the file is still where it was opened."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    # Reading.

    def children(self, parent: bytes, ahead: str | None = None) -> list[Node]:
        """Return the blocks that continue `parent`, as they stand here.

        With the text that lies ahead, and where there are many, only those are returned whose
        text is near to it: see `_near`. A damaged index may lie; the walk of the tree checks
        those blocks that it means to use.
        """
        limit = -1 if ahead is None else _FEW + 1
        nodes = self._nodes(parent, "LIMIT ?", limit)
        if ahead is None or len(nodes) <= _FEW:
            return nodes
        return self._near(parent, ahead)

    def _near(self, parent: bytes, ahead: str) -> list[Node]:
        """Return the children whose text has most in common with what lies ahead.

        In sorted order, these stand next to it: the one behind, and the one before. A child
        whose whole text stands ahead can be farther up, but then it begins the one before; so the
        search goes on with what that one has in common with the text ahead.
        """
        key = ahead[:_MAX_KEY_CHARS]
        nodes = self._nodes(parent, "AND text > ? ORDER BY text LIMIT 1", key)
        for _ in range(_MAX_STEPS):
            found = self._nodes(parent, "AND text <= ? ORDER BY text DESC LIMIT 1", key)
            if not found:
                break
            text = found[0].text
            nodes += self._nodes(parent, "AND text = ?", text)
            n_common = common_prefix(text, ahead, 0)
            # Behind a child that stands ahead as a whole, only shorter ones are of interest.
            key = ahead[: n_common - 1 if n_common == len(text) else n_common]
            if not key:
                break
        return nodes

    def _nodes(self, parent: bytes, where: str, value: str | int) -> list[Node]:
        rows = self._db.execute(
            f"SELECT key, start, ids, text, pending FROM blocks WHERE parent = ? {where}",
            (parent, value),
        )
        return [
            Node(key, parent, start, ids, text, pending) for key, start, ids, text, pending in rows
        ]

    def __contains__(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def chain(self, leaf: bytes) -> list[tuple[Node, int]]:
        """Return the blocks from the root to `leaf` with their sizes; empty if one is missing."""
        chain: list[tuple[Node, int]] = []
        key = leaf
        while True:
            row = self._db.execute(
                "SELECT parent, root, start, ids, text, pending, n_bytes FROM blocks WHERE key = ?",
                (key,),
            ).fetchone()
            if row is None:
                return []
            parent, root, start, ids, text, pending, n_bytes = row
            if chain and start >= chain[-1][0].start:
                return []  # a damaged index may go round in circles
            chain.append((Node(key, parent, start, ids, text, pending), n_bytes))
            if parent == root:
                return chain[::-1]
            key = parent

    def chain_size(self, leaf: bytes) -> tuple[int, int]:
        """Return how many blocks lead to `leaf`, itself included, and the bytes of their files."""
        n_blocks, n_bytes = self._db.execute(
            "WITH RECURSIVE chain(key) AS (VALUES (?) UNION "
            "SELECT b.parent FROM blocks AS b JOIN chain ON b.key = chain.key) "
            "SELECT count(*), coalesce(sum(b.n_bytes), 0) "
            "FROM blocks AS b JOIN chain ON b.key = chain.key",
            (leaf,),
        ).fetchone()
        return n_blocks, n_bytes

    def block(self, key: bytes) -> tuple[Node, bytes, int] | None:
        """Return what is known of a block: its node, its root's key, its file's size."""
        row = self._db.execute(
            "SELECT parent, root, start, ids, text, pending, n_bytes FROM blocks WHERE key = ?",
            (key,),
        ).fetchone()
        if row is None:
            return None
        parent, root, start, ids, text, pending, n_bytes = row
        return Node(key, parent, start, ids, text, pending), root, n_bytes

    def roots(self) -> list[tuple[Root, int, int]]:
        """Return every root that has blocks, with their number and the bytes of their files."""
        rows = self._db.execute(
            "SELECT r.about, count(*), sum(b.n_bytes) FROM roots AS r "
            "JOIN blocks AS b ON b.root = r.key GROUP BY r.key ORDER BY sum(b.n_bytes) DESC"
        )
        return [(Root.from_json(about), count, n_bytes) for about, count, n_bytes in rows]

    def format(self) -> int:
        """Return the format of the store."""
        version: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        return version

    def root(self, key: bytes) -> Root | None:
        row = self._db.execute("SELECT about FROM roots WHERE key = ?", (key,)).fetchone()
        return Root.from_json(row[0]) if row else None

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks."""
        return {key for (key,) in self._db.execute("SELECT key FROM blocks")}

    def sessions(self) -> list[Session]:
        """Return all sessions, the most recently used first."""
        rows = self._db.execute(f"SELECT {_SESSION_COLUMNS} FROM sessions ORDER BY used DESC")
        return [_session(row) for row in rows]

    def session(self, session_id: str) -> Session | None:
        row = self._db.execute(
            f"SELECT {_SESSION_COLUMNS} FROM sessions WHERE id = ?", (session_id,)
        ).fetchone()
        return _session(row) if row else None

    def sessions_at(self, leaf: bytes) -> list[Session]:
        """Return the sessions that end in a block."""
        rows = self._db.execute(f"SELECT {_SESSION_COLUMNS} FROM sessions WHERE leaf = ?", (leaf,))
        return [_session(row) for row in rows]

    def session_leaves(self, root: bytes, name: str) -> list[bytes]:
        rows = self._db.execute(
            "SELECT leaf FROM sessions WHERE root = ? AND name = ?", (root, name)
        )
        return [leaf for (leaf,) in rows]

    def session_blocks(self, root: bytes, name: str) -> set[bytes]:
        """Return the keys of all blocks of all branches of a session."""
        rows = self._db.execute(
            "WITH RECURSIVE up(key) AS ("
            "SELECT leaf FROM sessions WHERE root = ? AND name = ? "
            "UNION SELECT parent FROM blocks JOIN up ON blocks.key = up.key) SELECT key FROM up",
            (root, name),
        )
        return {key for (key,) in rows}

    def tails(self, parent: bytes, max_tokens: int) -> list[Node]:
        """Return the blocks that continue `parent` and hold fewer than `max_tokens` tokens."""
        rows = self._db.execute(
            "SELECT key, start, ids, text, pending FROM blocks "
            "WHERE parent = ? AND length(ids) < ?",
            (parent, 4 * max_tokens),
        )
        return [
            Node(key, parent, start, ids, text, pending)
            for key, start, ids, text, pending in rows
            if block_key(parent, ids) == key
        ]

    def reply_ids(self, root: bytes, digest: bytes) -> bytes | None:
        row = self._db.execute(
            "SELECT ids FROM replies WHERE root = ? AND digest = ?", (root, digest)
        ).fetchone()
        if row is None or not isinstance(row[0], bytes):
            return None
        ids = row[0][:-_SEAL_BYTES]
        return ids if _seal(root, digest, ids) == row[0] else None

    def n_bytes(self) -> int:
        """Return the size of all block files, in bytes."""
        total: int = self._db.execute("SELECT coalesce(sum(n_bytes), 0) FROM blocks").fetchone()[0]
        return total

    def n_blocks(self) -> int:
        count: int = self._db.execute("SELECT count(*) FROM blocks").fetchone()[0]
        return count

    def unused_leaves(self) -> Iterator[tuple[bytes, int]]:
        """Yield key and size of leaf blocks that no pinned session ends in, the oldest first."""
        with closing(
            self._db.execute(
                "SELECT key, n_bytes FROM blocks AS b "
                "WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE parent = b.key) "
                "AND NOT EXISTS (SELECT 1 FROM sessions WHERE leaf = b.key AND pinned) "
                "ORDER BY used, start DESC"
            )
        ) as rows:
            yield from rows

    def file_hash(self, path: str, stamp: str) -> str | None:
        row = self._db.execute(
            "SELECT hash FROM file_hashes WHERE path = ? AND stamp = ?", (path, stamp)
        ).fetchone()
        return row[0] if row else None

    # Writing.

    def add_blocks(
        self, root: Root, blocks: Sequence[tuple[Node, int]], used: float | None = None
    ) -> None:
        """Add blocks whose files are in place, with their sizes."""
        with self._db as db:
            self._add_blocks(db, root, blocks, time.time() if used is None else used)

    def commit_turn(
        self,
        root: Root,
        blocks: Sequence[tuple[Node, int]],
        session: Session | None,
        leaf: Leaf | None,
        replies: Iterable[StoredReply] = (),
        chain: Iterable[Node] = (),
    ) -> None:
        """Add blocks whose files are in place, and move the session: all or none.

        Without session and leaf the blocks belong to a turn that has not ended. Rows of `chain`
        that say something else than its nodes do are put right.
        """
        now = time.time()
        with self._db as db:
            self._add_blocks(db, root, blocks, now)
            db.executemany(
                "UPDATE blocks SET start = ?1, text = ?2, pending = ?3, ids = ?4 WHERE key = ?5 "
                "AND (start, text, pending, ids) IS NOT (?1, ?2, ?3, ?4)",
                [(n.start, n.text, n.pending, n.packed_ids, n.key) for n in chain],
            )
            db.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
                [
                    (root.key, reply.digest, _seal(root.key, reply.digest, reply.packed_ids), now)
                    for reply in replies
                ],
            )
            db.execute(
                "DELETE FROM replies WHERE used <= "
                "(SELECT used FROM replies ORDER BY used DESC LIMIT 1 OFFSET ?)",
                (_MAX_REPLIES,),
            )
            if session is not None and leaf is not None:
                self._put_session(db, session)
                db.executemany(
                    "UPDATE sessions SET leaf = ? WHERE leaf = ?",
                    [(new, old) for old, new in leaf.replaced],
                )
                # Now, not after the commit: a crash in between would leave them for good.
                db.executemany(
                    "DELETE FROM blocks WHERE key = ?", [(old,) for old, _ in leaf.replaced]
                )
                db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, leaf.key))

    def _add_blocks(
        self, db: sqlite3.Connection, root: Root, blocks: Sequence[tuple[Node, int]], used: float
    ) -> None:
        db.execute("INSERT OR IGNORE INTO roots VALUES (?, ?)", (root.key, root.to_json()))
        db.executemany(
            "INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (n.key, n.parent, root.key, n.start, n.packed_ids, n.text, n.pending, size, used)
                for n, size in blocks
            ],
        )

    def session_at(self, root: Root, leaf: Leaf) -> Session | None:
        """Return the session that this leaf continues: the one whose end lies on its chain."""
        ends = [*leaf.chain, *(old for old, _ in leaf.replaced)]
        found: list[Session] = []
        for first in range(0, len(ends), 500):
            part = ends[first : first + 500]
            rows = self._db.execute(
                f"SELECT {_SESSION_COLUMNS} FROM sessions WHERE root = ? AND name IS ? "
                f"AND leaf IN ({','.join('?' * len(part))})",
                (root.key, leaf.name, *part),
            )
            found += map(_session, rows)
        return max(found, key=lambda session: session.n_tokens, default=None)

    def put_session(self, session: Session) -> None:
        with self._db as db:
            self._put_session(db, session)

    def _put_session(self, db: sqlite3.Connection, session: Session) -> None:
        db.execute(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                session.id,
                session.root,
                session.name,
                session.leaf,
                session.n_tokens,
                session.pinned,
                session.created,
                session.used,
            ),
        )

    def remove_session(self, session_id: str) -> None:
        with self._db as db:
            db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

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
                for table in ("roots", "blocks", "sessions"):
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
                db.execute(
                    "INSERT INTO main.sessions SELECT id, root, NULL, leaf, n_tokens, pinned, "
                    "created, used FROM other.sessions"
                )
        finally:
            db.execute("DETACH other")

    def touch(self, key: bytes) -> None:
        """Mark a block as used now."""
        with self._db as db:
            db.execute("UPDATE blocks SET used = ? WHERE key = ?", (time.time(), key))

    def forget_block(self, key: bytes) -> list[str]:
        """Remove a block and the sessions that end in it; return their ids.

        Its parent is then as recent as it was.
        """
        with self._db as db:
            db.execute(
                "UPDATE blocks SET used = max(used, (SELECT used FROM blocks WHERE key = ?1)) "
                "WHERE key = (SELECT parent FROM blocks WHERE key = ?1)",
                (key,),
            )
            ended = db.execute("SELECT id FROM sessions WHERE leaf = ?", (key,)).fetchall()
            db.execute("DELETE FROM sessions WHERE leaf = ?", (key,))
            db.execute("DELETE FROM blocks WHERE key = ?", (key,))
        return [session_id for (session_id,) in ended]

    def unreachable(self) -> list[bytes]:
        """Return blocks whose parent is neither a root nor there, and all that follows them."""
        rows = self._db.execute(
            "WITH RECURSIVE lost(key) AS ("
            "SELECT key FROM blocks AS b WHERE parent != root AND NOT EXISTS "
            "(SELECT 1 FROM blocks WHERE key = b.parent) "
            "UNION SELECT b.key FROM blocks AS b JOIN lost ON b.parent = lost.key) "
            "SELECT key FROM lost"
        )
        return [key for (key,) in rows]

    def keep_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        with self._db as db:
            db.execute(
                "INSERT OR REPLACE INTO file_hashes VALUES (?, ?, ?)", (path, stamp, content_hash)
            )


def is_damage(error: sqlite3.Error) -> bool:
    """Say whether an error tells of the index itself, and not of the disk or another process."""
    if not isinstance(error, sqlite3.OperationalError):
        return isinstance(error, sqlite3.DatabaseError)
    return not any(words in str(error) for words in _NOT_DAMAGE)


def _statements(db: sqlite3.Connection) -> set[tuple[str, str]]:
    rows = db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return {(name, sql) for name, sql in rows}


def _seal(root: bytes, digest: bytes, ids: bytes) -> bytes:
    """Return a reply's ids with a checksum behind them.

    What else the index says of ids is proved by the keys and files of blocks. These go into a
    prompt as they are.
    """
    return ids + xxhash.xxh3_64_digest(root + digest + ids)


def _session(row: tuple[str, bytes, str | None, bytes, int, int, float, float]) -> Session:
    session_id, root, name, leaf, n_tokens, pinned, created, used = row
    return Session(session_id, root, name, leaf, n_tokens, bool(pinned), created, used)
