"""The index of the store: which blocks are on disk, and which sessions end where (SQLite, WAL).

Any thread may read; each gets a connection of its own. Only the writer changes it, and only while
it holds the store's lock. What it says of blocks can be rebuilt from their files.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import xxhash

from ..match.keys import Root, block_key
from ..match.tree import Node, common_prefix
from .index_parts import PartIndex
from .index_requests import RequestIndex
from .part import Part

_MAX_REPLIES = 10_000
_FEW = 16
"""Children of a block that are looked at one by one."""
_MAX_KEY_CHARS = 4096
"""Of the text ahead that is compared in SQL; few blocks have a longer text."""
_MAX_STEPS = 64
_SEAL_BYTES = 8
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


@dataclass(frozen=True)
class Forgotten:
    """What went with a block or a part: sessions (ids), parts (keys); bytes of files in all."""

    n_bytes: int
    sessions: tuple[str, ...]
    parts: tuple[bytes, ...]


class Index(PartIndex, RequestIndex):
    """What is on disk, in rows. Opens and fails as `IndexFile` does."""

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

    def chain_size(self, leaf: bytes) -> tuple[int, int, int]:
        """Return how many blocks lead to `leaf`, itself included, their parts, and all bytes."""
        n_blocks, block_bytes, n_parts, part_bytes = self._db.execute(
            "WITH RECURSIVE up(key) AS (VALUES (?) UNION "
            "SELECT b.parent FROM blocks AS b JOIN up ON b.key = up.key) "
            "SELECT count(*), coalesce(sum(b.n_bytes), 0), "
            "coalesce(sum((SELECT count(*) FROM parts WHERE block = b.key)), 0), "
            "coalesce(sum((SELECT sum(n_bytes) FROM parts WHERE block = b.key)), 0) "
            "FROM blocks AS b JOIN up ON b.key = up.key",
            (leaf,),
        ).fetchone()
        return n_blocks, n_parts, block_bytes + part_bytes

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
        """Return the size of all files of blocks and parts, in bytes."""
        total: int = self._db.execute("SELECT coalesce(sum(n_bytes), 0) FROM blocks").fetchone()[0]
        return total + self.n_part_bytes()

    def n_blocks(self) -> int:
        count: int = self._db.execute("SELECT count(*) FROM blocks").fetchone()[0]
        return count

    def unused_leaves(self) -> Iterator[tuple[float, bytes]]:
        """Yield time of use and key of leaf blocks that no pinned session ends in, oldest first."""
        with closing(
            self._db.execute(
                "SELECT used, key FROM blocks AS b "
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
        with self.transaction() as db:
            self._add_blocks(db, root, blocks, time.time() if used is None else used)

    def commit_turn(
        self,
        root: Root,
        blocks: Sequence[tuple[Node, int]],
        session: Session | None,
        leaf: Leaf | None,
        replies: Iterable[StoredReply] = (),
        chain: Iterable[Node] = (),
        new_parts: Iterable[tuple[Part, int]] = (),
        parts: Iterable[Part] = (),
        superseded: Collection[bytes] = (),
    ) -> list[bytes]:
        """Add blocks and parts whose files are in place, and move the session: all or none.

        Without session and leaf the blocks belong to a turn that has not ended. Rows of `chain`
        and `parts` that say something else than those do are put right. The parts in
        `superseded` and those of replaced blocks are removed; return their keys.
        """
        now = time.time()
        with self.transaction() as db:
            self._add_blocks(db, root, blocks, now)
            self._add_parts(db, new_parts, now)
            self._use_parts(db, parts, now)
            replaced = [old for old, _ in leaf.replaced] if leaf is not None else []
            removed = self._remove_parts(db, superseded, replaced)
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
                db.executemany("DELETE FROM blocks WHERE key = ?", [(old,) for old in replaced])
                db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, leaf.key))
        return [key for key, _ in removed]

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
        with self.transaction() as db:
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
        with self.transaction() as db:
            db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def touch(self, key: bytes, parts: Iterable[Part] = ()) -> None:
        """Mark a block and parts as used now."""
        now = time.time()
        with self.transaction() as db:
            db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, key))
            self._use_parts(db, parts, now)

    def forget(self, key: bytes) -> Forgotten:
        """Remove a part, or a block with its parts and the sessions that end in it.

        A block's parent is then as recent as it was.
        """
        with self.transaction() as db:
            db.execute(
                "UPDATE blocks SET used = max(used, (SELECT used FROM blocks WHERE key = ?1)) "
                "WHERE key = (SELECT parent FROM blocks WHERE key = ?1)",
                (key,),
            )
            ended = db.execute("SELECT id FROM sessions WHERE leaf = ?", (key,)).fetchall()
            sizes = db.execute("SELECT n_bytes FROM blocks WHERE key = ?", (key,)).fetchall()
            db.execute("DELETE FROM sessions WHERE leaf = ?", (key,))
            db.execute("DELETE FROM blocks WHERE key = ?", (key,))
            parts = self._remove_parts(db, [key], [key])
        return Forgotten(
            sum(n_bytes for (n_bytes,) in sizes) + sum(n_bytes for _, n_bytes in parts),
            tuple(session_id for (session_id,) in ended),
            tuple(part for part, _ in parts),
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

    def keep_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO file_hashes VALUES (?, ?, ?)", (path, stamp, content_hash)
            )


def _seal(root: bytes, digest: bytes, ids: bytes) -> bytes:
    """Return a reply's ids with a checksum behind them.

    What else the index says of ids is proved by the keys and files of blocks. These go into a
    prompt as they are.
    """
    return ids + xxhash.xxh3_64_digest(root + digest + ids)


def _session(row: tuple[str, bytes, str | None, bytes, int, int, float, float]) -> Session:
    session_id, root, name, leaf, n_tokens, pinned, created, used = row
    return Session(session_id, root, name, leaf, n_tokens, bool(pinned), created, used)
