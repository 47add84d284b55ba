"""What any thread may ask the index: which blocks are on disk, and which sessions end where.

SQLite in WAL mode. Each thread gets a connection of its own.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from ..match.block import Block, Root
from ..match.tree import FEW, MAX_ALIKE, nearest
from .records import (
    SESSION_COLUMNS,
    Leaf,
    Session,
    Totals,
    read_root,
    read_session,
    read_text,
    unsealed,
)

INCREMENTAL = 2
"""The index gives free pages back when it is asked to, so that it shrinks with the store."""
_BLOCK_COLUMNS = "key, parent, start, ids, text, pending"
_BLOCK_TYPES = (bytes, bytes, int, bytes, str, bytes)
_AT_ONCE = 500
"""Keys in one statement; SQLite takes 999 or more."""
_MAX_BRANCHES = 4
"""Of a session that are preferred to others of equal length: those used last."""
_ORDERED = {">": "> ? ORDER BY {0}", "<=": "<= ? ORDER BY {0} DESC", "=": "= ?"}


class _Own:
    """A thread's connection, closed when the thread ends.

    A connection alone would stay until the next garbage collection: it and its statements refer
    to each other.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db

    def __del__(self) -> None:
        self.db.close()


class IndexReader:
    """An index that is there, with a connection for each thread.

    A thread's connection is closed by that thread: when the thread ends, when it closes the index,
    or when it next asks an index that another thread has closed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._local = threading.local()
        self._is_closed = False

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
        db.text_factory = read_text
        if not self.path.stat().st_size:  # else this would write
            db.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 64")
        db.execute("PRAGMA journal_size_limit = 262144")
        # What is removed is overwritten: a page may have held a conversation's text.
        db.execute("PRAGMA secure_delete = ON")
        return db

    def close(self) -> None:
        """Answer no more, and close this thread's connection. Any thread.

        SQLite would crash under a thread whose connection another thread closes.
        """
        self._is_closed = True
        self.disconnect()

    def disconnect(self) -> None:
        """Close this thread's connection; if the thread asks again, it gets another."""
        self._local.__dict__.clear()

    # Blocks.

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        """Return the blocks that continue `parent`, at most `limit`.

        With the text or the packed ids that lie ahead, and where there are many, only the nearest
        to them are returned. A damaged index may lie; the walk of the tree checks those blocks
        that it means to use.
        """
        if ahead is not None:
            limit = FEW + 1
        nodes = self._nodes("parent = ? LIMIT ?", parent, -1 if limit is None else limit)
        if ahead is None or len(nodes) <= FEW:
            return nodes
        column = "text" if isinstance(ahead, str) else "ids"

        def find(how: str, content: str | bytes) -> list[Block]:
            where = f"parent = ? AND {column} {_ORDERED[how].format(column)} LIMIT ?"
            return self._nodes(where, parent, content, MAX_ALIKE if how == "=" else 1)

        return nearest(ahead, find)

    def branches(self, path: Mapping[bytes, bytes]) -> set[bytes]:
        """Return, of these parents and a child of each, the parents that have another child."""
        found: set[bytes] = set()
        steps = list(path.items())
        for first in range(0, len(steps), _AT_ONCE // 2):
            part = steps[first : first + _AT_ONCE // 2]
            rows = self._db.execute(
                f"WITH step(parent, child) AS (VALUES {','.join(['(?, ?)'] * len(part))}) "
                "SELECT parent FROM step WHERE EXISTS (SELECT 1 FROM blocks "
                "WHERE blocks.parent = step.parent AND blocks.key != step.child)",
                [key for step in part for key in step],
            )
            found.update(parent for (parent,) in rows)
        return found

    def _nodes(self, where: str, *values: Any) -> list[Block]:
        rows = self._db.execute(f"SELECT {_BLOCK_COLUMNS} FROM blocks WHERE {where}", values)
        # A damaged index may hold anything.
        return [
            Block(*row)
            for row in rows
            if all(map(isinstance, row, _BLOCK_TYPES)) and len(row[3]) % 4 == 0
        ]

    def __contains__(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

    def block(self, key: bytes) -> tuple[Block, bytes, int] | None:
        """Return what is known of a block: its node, its root's key, its file's size."""
        nodes = self._nodes("key = ?", key)
        row = self._db.execute("SELECT root, n_bytes FROM blocks WHERE key = ?", (key,)).fetchone()
        if not nodes or not row or not all(map(isinstance, row, (bytes, int))):
            return None
        return nodes[0], row[0], row[1]

    def chain(self, leaf: bytes) -> list[tuple[Block, int]]:
        """Return the blocks from the root to `leaf` with their sizes; empty if one is missing."""
        chain: list[tuple[Block, int]] = []
        key = leaf
        while (found := self.block(key)) is not None:
            node, root, n_bytes = found
            if chain and node.start >= chain[-1][0].start:
                break  # a damaged index may go round in circles
            chain.append((node, n_bytes))
            if node.parent == root:
                return chain[::-1]
            key = node.parent
        return []

    def chain_size(self, leaf: bytes) -> tuple[int, int, int]:
        """Return how many blocks lead to `leaf`, itself included; their checkpoints; all bytes."""
        n_blocks, block_bytes, n_checkpoints, checkpoint_bytes = self._db.execute(
            "WITH RECURSIVE up(key) AS (VALUES (?) UNION "
            "SELECT b.parent FROM blocks AS b JOIN up ON b.key = up.key) "
            "SELECT count(*), coalesce(sum(b.n_bytes), 0), "
            "coalesce(sum((SELECT count(*) FROM parts WHERE block = b.key)), 0), "
            "coalesce(sum((SELECT sum(n_bytes) FROM parts WHERE block = b.key)), 0) "
            "FROM blocks AS b JOIN up ON b.key = up.key",
            (leaf,),
        ).fetchone()
        return n_blocks, n_checkpoints, block_bytes + checkpoint_bytes

    def outline(self, leaves: Sequence[bytes]) -> list[tuple[bytes, bytes, int, int, int]]:
        """Return all blocks on the way to these leaves, parents before children.

        Of each: its key, its parent's key, its start, its tokens, its bytes with its checkpoints'.
        `leaves` are at most 500.
        """
        rows = self._db.execute(
            f"WITH RECURSIVE up(key) AS (VALUES {','.join(['(?)'] * len(leaves)) or '(NULL)'} "
            "UNION SELECT b.parent FROM blocks AS b JOIN up ON b.key = up.key) "
            "SELECT key, parent, start, length(ids) / 4, n_bytes + coalesce("
            "(SELECT sum(n_bytes) FROM parts WHERE block = b.key), 0) "
            "FROM blocks AS b JOIN up USING (key) ORDER BY start",
            leaves,
        )
        types = (bytes, bytes, int, int, int)  # a damaged index may hold anything
        return [row for row in rows if all(map(isinstance, row, types))]

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks."""
        return {
            key for (key,) in self._db.execute("SELECT key FROM blocks WHERE typeof(key) = 'blob'")
        }

    def unused_leaves(self) -> Iterator[tuple[float, bytes]]:
        """Yield time of use and key of leaf blocks that no pinned session ends in, oldest first."""
        with closing(
            self._db.execute(
                "SELECT CAST(used AS REAL), key FROM blocks AS b WHERE n_children = 0 "
                # Once more, because a damaged index may lie.
                "AND NOT EXISTS (SELECT 1 FROM blocks WHERE parent = b.key) "
                "AND NOT EXISTS (SELECT 1 FROM sessions WHERE leaf = b.key AND pinned) "
                "ORDER BY used, start DESC"
            )
        ) as rows:
            yield from rows

    def unreachable(self) -> list[bytes]:
        """Return the keys of what is never reached.

        These are blocks whose parent is neither a root nor there, all blocks that follow them, and
        checkpoints whose block is not there.
        """
        rows = self._db.execute(
            "WITH RECURSIVE lost(key) AS ("
            "SELECT key FROM blocks AS b WHERE parent != root AND NOT EXISTS "
            "(SELECT 1 FROM blocks WHERE key = b.parent) "
            "UNION SELECT b.key FROM blocks AS b JOIN lost ON b.parent = lost.key) "
            "SELECT key FROM lost UNION ALL SELECT key FROM parts AS p "
            "WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE key = p.block)"
        )
        return [key for (key,) in rows]

    # Checkpoints.

    def checkpoints(self, blocks: Sequence[bytes]) -> list[tuple[Block, int]]:
        """Return the checkpoints of these blocks with the sizes of their files, in bytes."""
        found: list[tuple[Block, int]] = []
        for first in range(0, len(blocks), _AT_ONCE):
            some = blocks[first : first + _AT_ONCE]
            where = f"block IN ({','.join('?' * len(some))}) ORDER BY block, kind, n_tokens"
            found += self._checkpoints(where, *some)
        return found

    def checkpoint(self, key: bytes) -> tuple[Block, int] | None:
        """Return a checkpoint and the size of its file."""
        return next(iter(self._checkpoints("key = ?", key)), None)

    def _checkpoints(self, where: str, *values: Any) -> list[tuple[Block, int]]:
        columns = "key, block, kind, n_tokens, n_bytes"
        found = []
        for row in self._db.execute(f"SELECT {columns} FROM parts WHERE {where}", values):
            # A damaged index may hold anything.
            if all(map(isinstance, row, (bytes, bytes, str, int, int))) and abs(row[3]) < 1 << 31:
                block = Block(row[0], row[1], kind=row[2], n_covered=row[3])
                if block.is_genuine:
                    found.append((block, row[4]))
        return found

    def has_checkpoint(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM parts WHERE key = ?", (key,)).fetchone() is not None

    def checkpoint_keys(self) -> set[bytes]:
        """Return the keys of all checkpoints."""
        return {
            key for (key,) in self._db.execute("SELECT key FROM parts WHERE typeof(key) = 'blob'")
        }

    def unused_checkpoints(self) -> Iterator[tuple[float, bytes, bytes]]:
        """Yield time of use, key and block of all checkpoints, the oldest first."""
        with closing(
            self._db.execute("SELECT CAST(used AS REAL), key, block FROM parts ORDER BY used, key")
        ) as rows:
            yield from rows

    # Sessions.

    def sessions(self, limit: int = -1) -> list[Session]:
        """Return all sessions, or so many, the most recently used first."""
        return self._sessions("1 ORDER BY used DESC LIMIT ?", limit)

    def session(self, session_id: str) -> Session | None:
        return next(iter(self._sessions("id = ?", session_id)), None)

    def sessions_at(self, leaf: bytes) -> list[Session]:
        """Return the sessions that end in a block."""
        return self._sessions("leaf = ?", leaf)

    def sessions_named(self, name: str) -> list[Session]:
        """Return the sessions with this name, of any root, the most recently used first."""
        return self._sessions("name = ? ORDER BY used DESC", name)

    def session_at(self, root: Root, leaf: Leaf) -> Session | None:
        """Return the session that this leaf continues: the one whose end lies on its chain."""
        ends = [*leaf.chain, *(old for old, _ in leaf.replaced)]
        found: list[Session] = []
        for first in range(0, len(ends), _AT_ONCE):
            part = ends[first : first + _AT_ONCE]
            # Thousands of sessions may share a name: `+` keeps SQLite from searching by it.
            where = f"+root = ? AND +name IS ? AND leaf IN ({','.join('?' * len(part))})"
            found += self._sessions(where, root.key, leaf.name, *part)
        return max(found, key=lambda session: session.n_tokens, default=None)

    def _sessions(self, where: str, *values: Any) -> list[Session]:
        rows = self._db.execute(f"SELECT {SESSION_COLUMNS} FROM sessions WHERE {where}", values)
        return [session for row in rows if (session := read_session(row)) is not None]

    def session_blocks(self, root: bytes, name: str) -> set[bytes]:
        """Return the keys of all blocks of the branches of a session that were used last."""
        rows = self._db.execute(
            "WITH RECURSIVE up(key) AS ("
            "SELECT leaf FROM (SELECT leaf FROM sessions WHERE root = ? AND name = ? "
            "ORDER BY used DESC LIMIT ?) "
            "UNION SELECT parent FROM blocks JOIN up ON blocks.key = up.key) SELECT key FROM up",
            (root, name, _MAX_BRANCHES),
        )
        return {key for (key,) in rows}

    def pinned_blocks(self) -> set[bytes]:
        """Return the blocks of all pinned sessions."""
        rows = self._db.execute(
            "WITH RECURSIVE up(key) AS (SELECT leaf FROM sessions WHERE pinned "
            "UNION SELECT parent FROM blocks JOIN up ON blocks.key = up.key) SELECT key FROM up"
        )
        return {key for (key,) in rows}

    # All else.

    def roots(self, limit: int = -1) -> list[tuple[Root, Totals]]:
        """Return the roots with most in them, with what they have."""
        rows = self._db.execute(
            "SELECT key, about, n_blocks, block_bytes, n_checkpoints, checkpoint_bytes FROM totals "
            "JOIN roots ON key = totals.root ORDER BY block_bytes DESC LIMIT ?",
            (limit,),
        )
        read = ((read_root(key, about), Totals(*numbers)) for key, about, *numbers in rows)
        return [(root, totals) for root, totals in read if root is not None]

    def root(self, key: bytes) -> Root | None:
        row = self._db.execute("SELECT about FROM roots WHERE key = ?", (key,)).fetchone()
        return read_root(key, row[0]) if row else None

    def totals(self) -> Totals:
        """Return numbers and bytes of all blocks and checkpoints."""
        row = self._db.execute(
            "SELECT n_blocks, block_bytes, n_checkpoints, checkpoint_bytes FROM totals "
            "WHERE root = x''"
        ).fetchone()
        return Totals(*(n if isinstance(n, int) else 0 for n in row or ()))

    def n_bytes(self) -> int:
        """Return the size of all files of blocks and checkpoints, in bytes."""
        return self.totals().n_bytes

    def n_blocks(self) -> int:
        return self.totals().n_blocks

    def n_checkpoints(self) -> int:
        return self.totals().n_checkpoints

    def reply_ids(self, root: bytes, digest: bytes) -> bytes | None:
        row = self._db.execute(
            "SELECT ids FROM replies WHERE root = ? AND digest = ?", (root, digest)
        ).fetchone()
        return None if row is None else unsealed(root, digest, row[0])

    def file_hash(self, path: str, stamp: str) -> str | None:
        row = self._db.execute(
            "SELECT hash FROM file_hashes WHERE path = ? AND stamp = ?", (path, stamp)
        ).fetchone()
        return row[0] if row and isinstance(row[0], str) else None

    def requests(self) -> list[dict[str, Any]]:
        """Return the records, the newest first. Those that cannot be read are left out."""
        records = []
        for (about,) in self._db.execute("SELECT about FROM requests ORDER BY number DESC"):
            try:
                record = json.loads(about)
            except (TypeError, ValueError):
                continue
            if isinstance(record, dict) and "sentence" in record:
                records.append(record)
        return records

    def format(self) -> int:
        """Return the format of the store."""
        version: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        return version
