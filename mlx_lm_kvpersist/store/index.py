"""The index of the store: which blocks are on disk, and which sessions end where (SQLite, WAL).

Any thread may read the index. A thread that changes it holds the store's lock.
"""

from __future__ import annotations

import heapq
import math
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from ..block import Block, Checkpoint, Record, Root
from ..errors import IndexDamaged, StoreFormatError
from ..match import FEW, MAX_ALIKE, nearest
from .database import Database, Rows, faults, is_empty, prepare
from .folder import OwnFiles
from .records import SESSION_COLUMNS, Commit, Session, Totals, read_root, read_sessions
from .small_state import SmallState

_BLOCK_COLUMNS = "key, parent, start, ids, text, pending"
_SESSIONS = f"SELECT {SESSION_COLUMNS} FROM sessions WHERE"
_BLOCK_TYPES = (bytes, bytes, int, bytes, str, bytes)
_NEWEST_SESSIONS = 16
"""At most this number of sessions of a name is compared with a new conversation."""
_END = float(1 << 33)
"""The year 2242. A later time of use is damage."""


class Index(Rows):
    """The rows of a store: blocks, checkpoints, sessions, roots.

    The constructor makes a missing or empty file; without `create`, it raises FileNotFoundError.
    If the file has another format, the constructor raises StoreFormatError. If the file is damaged,
    the constructor raises sqlite3.DatabaseError. `check_all`: see `prepare`. `files` is the store's
    folder, by default not encrypted.
    """

    def __init__(
        self,
        path: Path,
        files: OwnFiles | None = None,
        *,
        create: bool = True,
        check_all: bool = True,
    ) -> None:
        self.path = path
        self.files = files or OwnFiles(path.parent)
        super().__init__(Database(path, self.files))
        self._hidden: Collection[bytes] = ()
        self.state = SmallState(self.database)
        try:
            self.reopen(create=create, check_all=check_all)
        except BaseException:
            self.close()
            raise

    def reopen(self, *, create: bool = True, check_all: bool = True) -> None:
        """Open the file that is at the path now. Raises the same errors as opening the index."""
        try:
            with self.database.opening:
                if create:
                    self.path.touch(mode=0o600)
                elif is_empty(self.path):
                    raise FileNotFoundError(self.path)
                self.database.reopen()
                db = self.database.connection
            prepare(db, self.path, check_all=check_all)
        except StoreFormatError:
            self.database.leave()
            raise
        except UnicodeDecodeError as error:
            # SQLite's message quotes a damaged schema.
            raise IndexDamaged(f"its schema is damaged: {error.object!r}") from error

    def close(self) -> None:
        """Answer no more queries. Any thread."""
        self.database.close()

    def view(self, failed: Callable[[str, Exception], None], hidden: Collection[bytes]) -> Index:
        """Return the index without `hidden` records. If a query fails, `failed` is called."""
        view = copy(self)
        view._failed, view._hidden = failed, hidden
        view.state = SmallState(self.database, failed)
        return view

    @contextmanager
    def asked_once(self) -> Iterator[Index]:
        """Yield the index for a short-lived thread; only one such thread is connected at a time."""
        with self.database.opening:
            try:
                yield self
            finally:
                self.database.disconnect()

    # Blocks.

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> list[Block]:
        """Return the blocks after `parent`, with unchecked keys; see `BlockSource.children`."""
        hidden = set(self._hidden)  # copied first: a key leaves `_hidden` after its row is removed
        most = FEW + 1 if ahead is not None else -1 if limit is None else limit
        nodes = self._nodes("parent = ? LIMIT ?", parent, most + len(hidden) * (most > 0))
        if ahead is not None and len(nodes) > FEW:
            column = "text" if isinstance(ahead, str) else "ids"

            def find(how: str, content: str | bytes) -> list[Block]:
                if how == ">":
                    where = f"parent = ? AND {column} > ? ORDER BY {column} LIMIT 1"
                    return self._nodes(where, parent, content)
                last = f"SELECT max({column}) FROM blocks WHERE parent = ?1 AND {column} <= ?2"
                where = f"parent = ?1 AND {column} = ({last}) LIMIT {MAX_ALIKE}"
                return self._nodes(where, parent, content)

            nodes = nearest(ahead, find)
        return [node for node in nodes if node.key not in hidden]

    def newest(self, root: Root, limit: int) -> list[Block]:
        """Return at most `limit` blocks of a tree, from all trees' `8 * limit` last used blocks."""
        newest = "SELECT rowid AS row, root AS its FROM blocks ORDER BY used DESC LIMIT ?"
        rows = f"SELECT row FROM ({newest}) WHERE its = ? LIMIT ?"
        where = f"rowid IN ({rows}) ORDER BY +used DESC, rowid DESC"
        return self._nodes(where, 8 * limit, root.key, limit)

    def branches(self, path: Mapping[bytes, bytes]) -> set[bytes]:
        rows = self.ask_in(
            "WITH step(parent, child) AS (VALUES {}) "
            "SELECT parent FROM step WHERE EXISTS (SELECT 1 FROM blocks "
            "WHERE blocks.parent = step.parent AND blocks.key != step.child)",
            path.items(),
        )
        return {parent for (parent,) in rows}

    def _nodes(self, where: str, *values: Any) -> list[Block]:
        query = f"SELECT {_BLOCK_COLUMNS} FROM blocks WHERE {where}"
        rows = self.ask(query, *values, types=_BLOCK_TYPES)
        return [Block(*row) for row in rows if len(row[3]) % 4 == 0]

    def __contains__(self, key: bytes) -> bool:
        tables = "SELECT key FROM blocks UNION ALL SELECT key FROM checkpoints"
        # `_hidden` first, as in `children`.
        return key not in self._hidden and bool(
            self.ask(f"SELECT 1 FROM ({tables}) WHERE key = ?", key)
        )

    def block(self, key: bytes) -> tuple[Block, bytes, int] | None:
        """Return a block, its root's key, and the size of its file in bytes."""
        query = f"SELECT {_BLOCK_COLUMNS}, root, n_bytes FROM blocks WHERE key = ?"
        for *row, root, n_bytes in self.ask(query, key, types=(*_BLOCK_TYPES, bytes, int)):
            return Block(*row), root, n_bytes
        return None

    def chain(self, leaf: bytes) -> list[tuple[Block, int]]:
        """Return the blocks from the root to `leaf` with their sizes; empty if one is missing."""
        chain: list[tuple[Block, int]] = []
        key = leaf
        while (row := self.block(key)) is not None:
            node, root, n_bytes = row
            if chain and node.start >= chain[-1][0].start:
                break  # a damaged index may contain a cycle
            chain.append((node, n_bytes))
            if node.parent == root:
                return chain[::-1]
            key = node.parent
        return []

    def gap(self, leaf: bytes, root: bytes) -> bytes | None:
        """Return the key of the last missing block from a root to `leaf`; None if all exist."""
        rows = self.ask(
            "WITH RECURSIVE up(key) AS (VALUES (?) "
            "UNION SELECT parent FROM up JOIN blocks USING (key)) "
            "SELECT key FROM up WHERE key != ? AND key NOT IN (SELECT key FROM blocks)",
            leaf,
            root,
            types=(bytes,),
        )
        return next((key for (key,) in rows), None)

    def version(self) -> int:
        """Return a number that changes when another thread or process changes the index."""
        return sum(version for (version,) in self.ask("PRAGMA data_version"))

    def outline(self, leaves: Iterable[bytes]) -> list[tuple[bytes, bytes, int, int, int]]:
        """Return all blocks between the roots and these leaves, parents before children.

        A row has the block's key, its parent's key, the size in bytes of its file and its
        checkpoints' files, and the numbers of its children and of its checkpoints.
        """
        rows = self.ask_in(
            "WITH RECURSIVE leaves(key) AS (VALUES {}), up(key) AS (SELECT key FROM leaves "
            "UNION SELECT b.parent FROM blocks AS b JOIN up ON b.key = up.key) "
            "SELECT b.key, parent, b.n_bytes + coalesce(sum(c.n_bytes), 0), n_children, "
            "count(c.key) FROM up JOIN blocks AS b USING (key) "
            "LEFT JOIN checkpoints AS c ON c.block = b.key GROUP BY b.key ORDER BY start",
            zip(leaves),
            types=(bytes, bytes, int, int, int),
        )
        return list({row[0]: row for row in rows}.values())

    def sizes(self) -> list[tuple[bytes, bytes, bytes, int, int, int, float]]:
        """Return a row for each block.

        A row has the keys of the block, its parent and its root; its first position; its number of
        tokens (each image adds 8 too many; at most 256); the size in bytes of its file and
        its checkpoints' files; and its time of use in seconds since the epoch.
        """
        return self.ask(
            "SELECT key, parent, root, start, min(length(ids) / 4, 256), n_bytes + "
            "(SELECT coalesce(sum(n_bytes), 0) FROM checkpoints WHERE block = b.key), used "
            "FROM blocks AS b",
            types=(bytes, bytes, bytes, int, int, int, float),
        )

    def keys(self, table: str = "blocks") -> set[bytes]:
        return {key for (key,) in self.ask(f"SELECT key FROM {table}", types=(bytes,))}

    def unused(self, model: str) -> Iterator[tuple[float, bool, int, bytes, bytes]]:
        """Yield the leaf blocks and the checkpoints of a model, the least recently used first.

        A row has the time of use, whether the record is a checkpoint, the negative start of a block
        (0 for a checkpoint), the record's key, and its block's key. If times are equal, the deepest
        leaf is first, and checkpoints are last. The leaves of pinned sessions are left out. `model`
        is a fingerprint.
        """
        leaves = (
            "SELECT CAST(used AS REAL), 0, CAST(-start AS INTEGER), key, key FROM blocks AS b "
            "WHERE model = ? AND n_children = 0 "
            # Checked again, because a damaged index may have a wrong `n_children`.
            "AND NOT EXISTS (SELECT 1 FROM blocks WHERE parent = b.key) "
            "AND NOT EXISTS (SELECT 1 FROM sessions WHERE leaf = b.key AND pinned) "
            "ORDER BY used, start DESC"
        )
        checkpoints = (
            "SELECT CAST(used AS REAL), 1, 0, key, block FROM checkpoints WHERE model = ? "
            "ORDER BY used, key"
        )
        with (
            closing(self.database.connection.execute(leaves, (model,))) as first,
            closing(self.database.connection.execute(checkpoints, (model,))) as second,
        ):
            yield from heapq.merge(first, second)

    def unreachable(self) -> list[bytes]:
        """Return the keys of blocks with a missing ancestor, and of checkpoints without a block."""
        rows = self.ask(
            "WITH RECURSIVE lost(key) AS ("
            "SELECT key FROM blocks AS b WHERE parent != root AND NOT EXISTS "
            "(SELECT 1 FROM blocks WHERE key = b.parent) "
            "UNION SELECT b.key FROM blocks AS b JOIN lost ON b.parent = lost.key) "
            "SELECT key FROM lost UNION ALL SELECT key FROM checkpoints AS p "
            "WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE key = p.block)"
        )
        return [key for (key,) in rows]

    # Checkpoints.

    def checkpoints(self, blocks: Sequence[bytes]) -> list[tuple[Checkpoint, int]]:
        """Return the checkpoints of these blocks with the sizes of their files, in bytes."""
        hidden = set(self._hidden)  # as in `children`
        rows = self.ask_in(
            "SELECT key, block, kind, n_tokens, n_bytes FROM checkpoints "
            "WHERE block IN (VALUES {}) ORDER BY block, kind, n_tokens",
            zip(blocks),
            types=(bytes, bytes, str, int, int),
        )
        checkpoints = [(Checkpoint(*row), n) for *row, n in rows if abs(row[3]) < 1 << 31]
        return [(c, n) for c, n in checkpoints if c.is_genuine and c.key not in hidden]

    # Sessions.

    def sessions(self, limit: int = -1, skip: int = 0) -> list[Session]:
        """Return `limit` sessions after the first `skip`, the most recently used first."""
        return self._sessions("1 ORDER BY used DESC LIMIT ? OFFSET ?", limit, skip)

    def n_sessions(self) -> int:
        return sum(n for (n,) in self.ask("SELECT count(*) FROM sessions"))

    def session(self, session_id: str) -> Session | None:
        return next(iter(self._sessions("id = ?", session_id)), None)

    def sessions_at(self, *leaves: bytes) -> list[Session]:
        return read_sessions(self.ask_in(f"{_SESSIONS} leaf IN (VALUES {{}})", zip(leaves)))

    def sessions_through(self, key: bytes) -> list[Session]:
        """Return the sessions that end in a block or after it, the most recently used first."""
        return self._sessions(
            "leaf IN (WITH RECURSIVE down(key) AS (VALUES (?) UNION SELECT blocks.key FROM blocks "
            "JOIN down ON parent = down.key) SELECT key FROM down) ORDER BY used DESC",
            key,
        )

    def sessions_named(self, *names: str) -> list[Session]:
        """Return the sessions with these names, the most recently used of each name first."""
        query = f"{_SESSIONS} name IN (VALUES {{}}) ORDER BY used DESC"
        return read_sessions(self.ask_in(query, zip(names)))

    def session_of(self, commit: Commit) -> Session | None:
        """Return the longest session of the commit's name that ends in the commit's chain.

        Blocks before the commit are searched only if no session ends in its own or replaced blocks.
        """
        root, leaf = commit.root.key, commit.leaf
        assert leaf is not None
        own = [*(block.key for block in commit.blocks), *(old for old, _ in leaf.replaced)]
        # Thousands of sessions may share a name: `+` keeps SQLite from searching by name.
        query = f"{_SESSIONS} +root = ? AND +name IS ? AND leaf IN"
        sessions = read_sessions(self.ask_in(f"{query} (VALUES {{}})", zip(own), root, leaf.name))
        named = "root = ? AND name = ? LIMIT 1"
        if not sessions and (leaf.name is None or self._sessions(named, root, leaf.name)):
            walk = (
                "WITH RECURSIVE up(key) AS (VALUES (?) UNION SELECT parent FROM up JOIN blocks "
                "USING (key) WHERE NOT EXISTS "
                "(SELECT 1 FROM sessions WHERE leaf = up.key AND +root = ? AND +name IS ?)) "
            )
            values = commit.parent, root, leaf.name, root, leaf.name
            sessions = read_sessions(self.ask(f"{walk}{query} (SELECT key FROM up)", *values))
        return max(sessions, key=lambda session: session.n_tokens, default=None)

    def passed_tail(self, commit: Commit) -> tuple[bytes, bytes] | None:
        """Return the keys of a session's last block, and of a longer block in the commit's chain.

        The session has the commit's name. The longer block begins with the tokens of the session's
        last block. An interrupted turn has saved the longer block, without moving the session. Only
        the newest sessions are searched.
        """
        root, leaf = commit.root.key, commit.leaf
        assert leaf is not None
        newest = "SELECT leaf FROM sessions WHERE root = ? AND name IS ? ORDER BY used DESC LIMIT ?"
        of_name = root, leaf.name, _NEWEST_SESSIONS
        # A tail is a session's last block that no other block continues.
        is_end = "NOT EXISTS (SELECT 1 FROM blocks AS after WHERE after.parent = blocks.key)"
        tails = self._nodes(f"key IN ({newest}) AND {is_end} ORDER BY start DESC", *of_name)
        # `+` keeps SQLite from searching among all children of these parents.
        where = (
            "key IN (WITH RECURSIVE up(key) AS (VALUES (?) UNION SELECT parent FROM up JOIN blocks "
            "USING (key)) SELECT key FROM up) "
            f"AND +parent IN (SELECT parent FROM blocks WHERE key IN ({newest}))"
        )
        before = self._nodes(where, commit.parent, *of_name) if tails else ()
        chain = {block.parent: block for block in (*before, *commit.blocks)}
        for tail in tails:
            longer = chain.get(tail.parent)
            if longer and tail.n_tokens < longer.n_tokens and tail.is_genuine:
                if longer.packed_ids.startswith(tail.packed_ids):
                    return tail.key, longer.key
        return None

    def _sessions(self, where: str, *values: Any) -> list[Session]:
        return read_sessions(self.ask(f"{_SESSIONS} {where}", *values))

    def pinned_blocks(self) -> set[bytes]:
        rows = self.ask(
            "WITH RECURSIVE up(key) AS (SELECT leaf FROM sessions WHERE pinned "
            "UNION SELECT parent FROM blocks JOIN up ON blocks.key = up.key) SELECT key FROM up"
        )
        return {key for (key,) in rows}

    # Roots and totals.

    def roots(self, limit: int = -1, tenant: Root | None = None) -> list[tuple[Root, Totals]]:
        """Return the largest roots, with totals.

        With `tenant`, only roots with the same namespace and session as `tenant` are returned.
        """
        tenant_json = tenant.tenant_json if tenant is not None else ""
        rows = self.ask(
            "SELECT key, about, n_blocks, block_bytes, n_checkpoints, checkpoint_bytes FROM totals "
            "JOIN roots ON key = totals.root WHERE instr(about, ?) "
            "ORDER BY block_bytes DESC LIMIT ?",
            tenant_json,
            limit,
        )
        read = ((read_root(key, root_json), Totals(*numbers)) for key, root_json, *numbers in rows)
        return [(root, totals) for root, totals in read if root is not None]

    def models(self) -> list[str]:
        """Return the fingerprints of the models that have blocks."""
        models: list[str] = []
        query = "SELECT min(model) FROM blocks WHERE n_children = 0 AND model > ?"
        while rows := self.ask(query, models[-1] if models else "", types=(str,)):
            models.append(rows[0][0])
        return models

    def namespace(self, session: Session) -> str | None:
        root = self.root(session.root)
        return root.namespace if root else None

    def root(self, key: bytes) -> Root | None:
        rows = self.ask("SELECT about FROM roots WHERE key = ?", key)
        return read_root(key, rows[0][0]) if rows else None

    def totals(self, root: bytes = b"") -> Totals:
        """Return the totals of a root, or of all roots."""
        columns = "n_blocks, block_bytes, n_checkpoints, checkpoint_bytes, sidecar_bytes"
        rows = self.ask(f"SELECT {columns} FROM totals WHERE root = ?", root)
        # A damaged number counts as 0.
        return Totals(*(n if isinstance(n, int) else 0 for n in rows[0])) if rows else Totals()

    def faults(self) -> list[str]:
        return faults(self.database.connection)

    # Changes.

    def add_blocks(
        self, root: Root, blocks: Collection[tuple[Record, int]], used: float | None = None
    ) -> None:
        """Add blocks and checkpoints whose files are in place, with their sizes."""
        with self.database.transaction() as db:
            same = self.now() if used is None else used, root.key, root.fingerprint
            if blocks:
                db.execute(
                    "INSERT INTO roots VALUES (?, ?) ON CONFLICT (key) DO NOTHING",
                    (root.key, root.to_json()),
                )
            db.executemany(
                "INSERT INTO blocks (key, parent, start, ids, text, pending, n_bytes, used, root, "
                "model) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
                # The row exists if a damaged or missing file has been written again.
                "ON CONFLICT (key) DO UPDATE SET n_bytes = excluded.n_bytes",
                [
                    (b.key, b.parent, b.start, b.packed_ids, b.text, b.pending, n, *same)
                    for b, n in blocks
                    if isinstance(b, Block)
                ],
            )
            db.executemany(
                "INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET n_bytes = excluded.n_bytes, used = excluded.used",
                [
                    (c.key, c.block, c.kind, c.n_tokens, n, *same)
                    for c, n in blocks
                    if isinstance(c, Checkpoint)
                ],
            )

    def commit(
        self,
        commit: Commit,
        new: Collection[tuple[Record, int]] = (),
        session: Session | None = None,
        sidecar_bytes: int = 0,
    ) -> list[bytes]:
        """Add records whose files are in place, and move the session, completely or not at all.

        `new` has the new records with the sizes of their files in bytes. `session` ends in the
        commit's leaf. No other session may end in a replaced block. A row that differs from the
        commit's block is corrected. Return the removed checkpoints' keys: superseded
        checkpoints and those of replaced blocks.
        """
        root, leaf = commit.root, commit.leaf
        with self.database.transaction() as db:
            now = session.used if session is not None else self.now()
            self.add_blocks(root, new, now)
            self._use_checkpoints(db, commit.checkpoints, now)
            replaced = [old for old, _ in leaf.replaced] if leaf is not None else []
            superseded = {block.key for block in commit.superseded} - commit.keys()
            removed = self._remove_checkpoints(db, superseded, replaced)
            db.executemany(
                "UPDATE blocks SET start = ?1, text = ?2, pending = ?3, ids = ?4 WHERE key = ?5 "
                "AND (start, text, pending, ids) IS NOT (?1, ?2, ?3, ?4)",
                [(n.start, n.text, n.pending, n.packed_ids, n.key) for n in commit.blocks],
            )
            self.state.add_replies(root.key, commit.replies, now)
            if session is not None and leaf is not None:
                self.put_session(session, sidecar_bytes)
                self.state.add_note(session.id, **leaf.note)
            if leaf is not None:
                # In the same transaction: after a crash, nothing else would remove these rows.
                db.executemany("DELETE FROM blocks WHERE key = ?", [(old,) for old in replaced])
                db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, leaf.key))
        return [key for key, _ in removed]

    def put_session(self, session: Session, sidecar_bytes: int = 0) -> None:
        """Add or change a session. Raises sqlite3.IntegrityError if another session has its id."""
        with self.database.transaction() as db:
            # Not INSERT OR REPLACE: the triggers would not count the replaced row as removed.
            # A session with another root, name or creation time is not replaced.
            db.execute(
                "DELETE FROM sessions WHERE id = ? AND root = ? AND name IS ? AND created = ?",
                (session.id, session.root, session.name, session.created),
            )
            db.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*vars(session).values(), sidecar_bytes),
            )

    def remove_session(self, session_id: str) -> None:
        with self.database.transaction() as db:
            db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
            self.state.forget_note(session_id)

    def touch(self, key: bytes, checkpoints: Iterable[Checkpoint] = ()) -> None:
        with self.database.transaction() as db:
            now = self.now()
            db.execute("UPDATE blocks SET used = ? WHERE key = ?", (now, key))
            self._use_checkpoints(db, checkpoints, now)

    def forget(self, key: bytes) -> tuple[dict[bytes, int], list[str]]:
        """Remove a checkpoint, or a block with its checkpoints and the sessions that end in it.

        Return the sizes of the removed records' files, by key, and the ids of removed sessions. The
        block's parent gets the block's time of use if that is later.
        """
        with self.database.transaction() as db:
            db.execute(
                "UPDATE blocks SET used = max(used, (SELECT used FROM blocks WHERE key = ?1)) "
                "WHERE key = (SELECT parent FROM blocks WHERE key = ?1)",
                (key,),
            )
            rows = db.execute("SELECT id FROM sessions WHERE leaf = ?", (key,))
            ended = [session_id for (session_id,) in rows]
            for session_id in ended:
                self.remove_session(session_id)
            size = "SELECT key, CAST(n_bytes AS INTEGER) FROM blocks WHERE key = ?"
            sizes = dict(db.execute(size, (key,)))
            db.execute("DELETE FROM blocks WHERE key = ?", (key,))
            sizes.update(self._remove_checkpoints(db, [key], [key]))
        return sizes, ended

    def _use_checkpoints(
        self, db: sqlite3.Connection, checkpoints: Iterable[Checkpoint], now: float
    ) -> None:
        db.executemany(
            "UPDATE checkpoints SET block = ?, kind = ?, n_tokens = ?, used = ? WHERE key = ?",
            [(p.block, p.kind, p.n_tokens, now, p.key) for p in checkpoints],
        )

    def _remove_checkpoints(
        self, db: sqlite3.Connection, keys: Collection[bytes], blocks: Collection[bytes] = ()
    ) -> list[tuple[bytes, int]]:
        removed: list[tuple[bytes, int]] = []
        for column, values in (("key", keys), ("block", blocks)):
            for value in values:
                where = f"FROM checkpoints WHERE {column} = ?"
                removed += db.execute(f"SELECT key, CAST(n_bytes AS INTEGER) {where}", (value,))
                db.execute(f"DELETE {where}", (value,))
        return removed

    def now(self) -> float:
        """Return a time (since the epoch) after each recorded use, even if a clock was set back."""
        newest = "SELECT used FROM {} WHERE used < ? ORDER BY used DESC LIMIT 1"
        tables = "blocks", "checkpoints"
        used = [row[0] for table in tables for row in self.ask(newest.format(table), _END)]
        return max([time.time(), *(math.nextafter(last, _END) for last in used)])
