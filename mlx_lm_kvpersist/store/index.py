"""The index of the store: which blocks are on disk, and which sessions end where (SQLite, WAL).

Any thread may read; each gets a connection of its own. Only the writer changes it, and only while
it holds the store's lock. What it says of blocks can be rebuilt from their files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import astuple
from typing import Any

from ..match.block import Block
from ..match.keys import Root
from ..match.siblings import FEW, MAX_ALIKE, nearest
from .index_checkpoints import CheckpointIndex
from .index_rows import (
    BLOCK_COLUMNS,
    SESSION_COLUMNS,
    Forgotten,
    Leaf,
    Session,
    StoredReply,
    Totals,
    read_block,
    read_root,
    read_session,
    seal,
    unsealed,
)

__all__ = ["Forgotten", "Index", "Leaf", "Session", "StoredReply"]

_MAX_REPLIES = 10_000
KEPT = 100
"""Records of requests."""
_MAX_RECORD_CHARS = 4096
_MAX_BRANCHES = 4
"""Of a session that are preferred to others of equal length: those used last."""
_ORDERED = {">": "> ? ORDER BY {0}", "<=": "<= ? ORDER BY {0} DESC", "=": "= ?"}


class Index(CheckpointIndex):
    """What is on disk, in rows. Opens and fails as `IndexFile` does."""

    # Reading.

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

    def _nodes(self, where: str, *values: Any) -> list[Block]:
        rows = self._db.execute(f"SELECT {BLOCK_COLUMNS} FROM blocks WHERE {where}", values)
        return [node for row in rows if (node := read_block(row)) is not None]

    def __contains__(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM blocks WHERE key = ?", (key,)).fetchone() is not None

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

    def block(self, key: bytes) -> tuple[Block, bytes, int] | None:
        """Return what is known of a block: its node, its root's key, its file's size."""
        row = self._db.execute(
            f"SELECT {BLOCK_COLUMNS}, root, n_bytes FROM blocks WHERE key = ?", (key,)
        ).fetchone()
        if row is None or (node := read_block(row[:-2])) is None:
            return None
        is_read = isinstance(row[-2], bytes) and isinstance(row[-1], int)
        return (node, row[-2], row[-1]) if is_read else None

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

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks."""
        return {
            key for (key,) in self._db.execute("SELECT key FROM blocks WHERE typeof(key) = 'blob'")
        }

    def sessions(self) -> list[Session]:
        """Return all sessions, the most recently used first."""
        return self._sessions("1 ORDER BY used DESC")

    def session(self, session_id: str) -> Session | None:
        return next(iter(self._sessions("id = ?", session_id)), None)

    def sessions_at(self, leaf: bytes) -> list[Session]:
        """Return the sessions that end in a block."""
        return self._sessions("leaf = ?", leaf)

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

    def reply_ids(self, root: bytes, digest: bytes) -> bytes | None:
        row = self._db.execute(
            "SELECT ids FROM replies WHERE root = ? AND digest = ?", (root, digest)
        ).fetchone()
        return None if row is None else unsealed(root, digest, row[0])

    def n_bytes(self) -> int:
        """Return the size of all files of blocks and parts, in bytes."""
        totals = self.totals()
        return totals.block_bytes + totals.checkpoint_bytes

    def n_blocks(self) -> int:
        return self.totals().n_blocks

    def n_checkpoints(self) -> int:
        return self.totals().n_checkpoints

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

    def file_hash(self, path: str, stamp: str) -> str | None:
        row = self._db.execute(
            "SELECT hash FROM file_hashes WHERE path = ? AND stamp = ?", (path, stamp)
        ).fetchone()
        return row[0] if row and isinstance(row[0], str) else None

    # Writing.

    def add_blocks(
        self, root: Root, blocks: Sequence[tuple[Block, int]], used: float | None = None
    ) -> None:
        """Add blocks whose files are in place, with their sizes."""
        with self.transaction() as db:
            if blocks:
                db.execute("INSERT OR IGNORE INTO roots VALUES (?, ?)", (root.key, root.to_json()))
            used = self.now() if used is None else used
            rows = [
                (n.key, n.parent, root.key, n.start, n.packed_ids, n.text, n.pending, size, used)
                for n, size in blocks
            ]
            db.executemany(
                "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0) "
                # There where a damaged or missing file is written anew.
                "ON CONFLICT (key) DO UPDATE SET n_bytes = excluded.n_bytes",
                rows,
            )

    def commit_turn(
        self,
        root: Root,
        blocks: Sequence[tuple[Block, int]],
        session: Session | None,
        leaf: Leaf | None,
        replies: Iterable[StoredReply] = (),
        chain: Iterable[Block] = (),
        new_checkpoints: Collection[tuple[Block, int]] = (),
        checkpoints: Collection[Block] = (),
        superseded: Collection[bytes] = (),
    ) -> list[bytes]:
        """Add blocks and checkpoints whose files are in place, and move the session: all or none.

        Without session and leaf the blocks belong to a turn that has not ended. Rows of `chain`
        and `checkpoints` that say something else than those do are put right. The checkpoints in
        `superseded` and those of replaced blocks are removed; return their keys.
        """
        with self.transaction() as db:
            now = self.now()
            self.add_blocks(root, blocks, now)
            self.add_checkpoints(root.key, new_checkpoints, now)
            self._use_checkpoints(db, checkpoints, now)
            replaced = [old for old, _ in leaf.replaced] if leaf is not None else []
            removed = self._remove_checkpoints(db, superseded, replaced)
            db.executemany(
                "UPDATE blocks SET start = ?1, text = ?2, pending = ?3, ids = ?4 WHERE key = ?5 "
                "AND (start, text, pending, ids) IS NOT (?1, ?2, ?3, ?4)",
                [(n.start, n.text, n.pending, n.packed_ids, n.key) for n in chain],
            )
            db.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
                [
                    (root.key, reply.digest, seal(root.key, reply.digest, reply.packed_ids), now)
                    for reply in replies
                ],
            )
            db.execute(
                "DELETE FROM replies WHERE used <= "
                "(SELECT used FROM replies ORDER BY used DESC LIMIT 1 OFFSET ?)",
                (_MAX_REPLIES,),
            )
            if session is not None and leaf is not None:
                self.put_session(session)
                db.executemany(
                    "UPDATE sessions SET leaf = ? WHERE leaf = ?",
                    [(new, old) for old, new in leaf.replaced],
                )
                # Now, not after the commit: a crash in between would leave them for good.
                db.executemany("DELETE FROM blocks WHERE key = ?", [(old,) for old in replaced])
                db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, leaf.key))
        return [key for key, _ in removed]

    def session_at(self, root: Root, leaf: Leaf) -> Session | None:
        """Return the session that this leaf continues: the one whose end lies on its chain."""
        ends = [*leaf.chain, *(old for old, _ in leaf.replaced)]
        found: list[Session] = []
        for first in range(0, len(ends), 500):
            part = ends[first : first + 500]
            # By the leaf: thousands may have the name, and the plus keeps SQLite from them.
            where = f"+root = ? AND +name IS ? AND leaf IN ({','.join('?' * len(part))})"
            found += self._sessions(where, root.key, leaf.name, *part)
        return max(found, key=lambda session: session.n_tokens, default=None)

    def put_session(self, session: Session) -> None:
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(session)
            )

    def remove_session(self, session_id: str) -> None:
        with self.transaction() as db:
            db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def touch(self, key: bytes, checkpoints: Collection[Block] = ()) -> None:
        """Mark a block and checkpoints as used now."""
        with self.transaction() as db:
            now = self.now()
            db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, key))
            self._use_checkpoints(db, checkpoints, now)

    def forget(self, key: bytes) -> Forgotten:
        """Remove a checkpoint, or a block with its checkpoints and the sessions that end in it.

        A block's parent is then as recent as it was.
        """
        with self.transaction() as db:
            db.execute(
                "UPDATE blocks SET used = max(used, (SELECT used FROM blocks WHERE key = ?1)) "
                "WHERE key = (SELECT parent FROM blocks WHERE key = ?1)",
                (key,),
            )
            ended = db.execute("SELECT id FROM sessions WHERE leaf = ?", (key,)).fetchall()
            sizes = db.execute(
                "SELECT CAST(n_bytes AS INTEGER) FROM blocks WHERE key = ?", (key,)
            ).fetchall()
            db.execute("DELETE FROM sessions WHERE leaf = ?", (key,))
            db.execute("DELETE FROM blocks WHERE key = ?", (key,))
            checkpoints = self._remove_checkpoints(db, [key], [key])
        return Forgotten(
            sum(n_bytes for (n_bytes,) in sizes) + sum(n_bytes for _, n_bytes in checkpoints),
            tuple(session_id for (session_id,) in ended),
            tuple(checkpoint for checkpoint, _ in checkpoints),
        )

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

    def set_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO file_hashes VALUES (?, ?, ?)", (path, stamp, content_hash)
            )

    # What the last requests reused, as JSON.

    def add_request(self, record: dict[str, Any]) -> None:
        """Keep a record and no more than the last `KEPT`; one of over 4,096 characters is not."""
        about = json.dumps(record)
        if len(about) > _MAX_RECORD_CHARS:
            return
        with self.transaction() as db:
            db.execute("INSERT INTO requests (about) VALUES (?)", (about,))
            db.execute(
                "DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?",
                (KEPT,),
            )

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

    def forget_requests(self) -> None:
        """Remove all records: they name sessions and may quote prompts."""
        with self.transaction() as db:
            db.execute("DELETE FROM requests")
