"""The index of the store: which blocks are on disk, and which sessions end where (SQLite, WAL).

Any thread may read (`index_reader`). Only the writer changes it, and only while it holds the
store's lock. What it says of blocks can be rebuilt from their files.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from threading import Lock
from typing import Any

from ..match.block import Block, Root
from .index_reader import INCREMENTAL, IndexReader
from .index_schema import OTHER_TABLES, TABLES_OF_FILES, faults, prepare, recount, sound
from .records import (
    SESSION_COLUMNS,
    Forgotten,
    Leaf,
    Session,
    StoredReply,
    Turn,
    read_session,
    seal,
)

__all__ = ["Forgotten", "Index", "Leaf", "Session", "StoredReply"]

_MAX_REPLIES = 10_000
KEPT = 100
"""Records of requests."""
_MAX_RECORD_CHARS = 4096
_END = float(1 << 33)
"""The year 2242: what claims to have been used later was not."""


class Index(IndexReader):
    """What is on disk, in rows.

    Opening makes it where it is missing. Raises StoreFormatError when a newer version wrote it
    and sqlite3.DatabaseError when it is damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        path.touch(mode=0o600)
        self._seldom = Lock()
        self._inode = path.stat().st_ino
        try:
            prepare(self._db, path)
            if self._db.execute("PRAGMA auto_vacuum").fetchone() != (INCREMENTAL,):
                self._let_shrink()
        except UnicodeDecodeError as error:
            # A message of SQLite's that quotes a damaged schema.
            self.close()
            raise sqlite3.DatabaseError(f"its schema is damaged: {error.object!r}") from error
        except BaseException:
            self.close()
            raise

    def _let_shrink(self) -> None:
        """Have an index of an older format give pages back from now on."""
        try:
            self._db.execute(f"PRAGMA auto_vacuum = {INCREMENTAL}")
            self._db.execute("VACUUM")
            self.empty_log()
        except sqlite3.OperationalError:
            pass  # others are reading it, or the disk is full: the next one who opens it tries

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

    @contextmanager
    def asked_once(self) -> Iterator[Index]:
        """Answer a thread that comes and goes: one such thread at a time, then it is disconnected.

        SQLite keeps as many descriptors as connections were ever open at the same time.
        """
        with self._seldom:
            try:
                yield self
            finally:
                self.disconnect()

    # Blocks, checkpoints and sessions.

    def add_blocks(
        self, root: Root, blocks: Collection[tuple[Block, int]], used: float | None = None
    ) -> None:
        """Add blocks and checkpoints whose files are in place, with their sizes."""
        with self.transaction() as db:
            if blocks:
                db.execute("INSERT OR IGNORE INTO roots VALUES (?, ?)", (root.key, root.to_json()))
            used = self.now() if used is None else used
            db.executemany(
                "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0) "
                # The row is there when a damaged or missing file has been written anew.
                "ON CONFLICT (key) DO UPDATE SET n_bytes = excluded.n_bytes",
                [
                    (b.key, b.parent, root.key, b.start, b.packed_ids, b.text, b.pending, n, used)
                    for b, n in blocks
                    if not b.is_checkpoint
                ],
            )
            checkpoints = [
                (c.key, c.parent, c.kind, c.n_tokens, n, used, root.key)
                for c, n in blocks
                if c.is_checkpoint
            ]
            # Not INSERT OR REPLACE: what that replaces would not be counted as removed.
            db.executemany("DELETE FROM parts WHERE key = ?", [row[:1] for row in checkpoints])
            db.executemany("INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)", checkpoints)

    def commit_turn(
        self, turn: Turn, new: Collection[tuple[Block, int]] = (), session: Session | None = None
    ) -> list[bytes]:
        """Add blocks and checkpoints whose files are in place, and move the session: all or none.

        `new` comes with the sizes of the files, in bytes; `session` is that of the turn's leaf.
        Rows of the turn's blocks and checkpoints that say something else than those do are put
        right. Superseded checkpoints and those of replaced blocks are removed; return their keys.
        """
        root, leaf = turn.root, turn.leaf
        with self.transaction() as db:
            now = self.now()
            self.add_blocks(root, new, now)
            self._use_checkpoints(db, turn.checkpoints, now)
            replaced = [old for old, _ in leaf.replaced] if leaf is not None else []
            superseded = {block.key for block in turn.superseded} - turn.keys()
            removed = self._remove_checkpoints(db, superseded, replaced)
            db.executemany(
                "UPDATE blocks SET start = ?1, text = ?2, pending = ?3, ids = ?4 WHERE key = ?5 "
                "AND (start, text, pending, ids) IS NOT (?1, ?2, ?3, ?4)",
                [(n.start, n.text, n.pending, n.packed_ids, n.key) for n in turn.blocks],
            )
            db.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
                [
                    (root.key, reply.digest, seal(root.key, reply.digest, reply.packed_ids), now)
                    for reply in turn.replies
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

    def _use_checkpoints(
        self, db: sqlite3.Connection, checkpoints: Collection[Block], now: float
    ) -> None:
        """Mark checkpoints as used, and put right what their rows say of them."""
        db.executemany(
            "UPDATE parts SET block = ?, kind = ?, n_tokens = ?, used = ? WHERE key = ?",
            [(p.parent, p.kind, p.n_tokens, now, p.key) for p in checkpoints],
        )

    def _remove_checkpoints(
        self, db: sqlite3.Connection, keys: Collection[bytes], blocks: Collection[bytes] = ()
    ) -> list[tuple[bytes, int]]:
        """Remove checkpoints, and all of some blocks; return keys and sizes of their files."""
        removed: list[tuple[bytes, int]] = []
        for column, values in (("key", keys), ("block", blocks)):
            for value in values:
                where = f"FROM parts WHERE {column} = ?"
                removed += db.execute(
                    f"SELECT key, CAST(n_bytes AS INTEGER) {where}", (value,)
                ).fetchall()
                db.execute(f"DELETE {where}", (value,))
        return removed

    def now(self) -> float:
        """Return the time of use of what is used now, in seconds since the epoch.

        It is always the latest. Otherwise, after a clock jumps back, new blocks would be evicted
        first.
        """
        newest = [
            self._db.execute(
                f"SELECT used FROM {table} WHERE used < ? ORDER BY used DESC LIMIT 1", (_END,)
            ).fetchone()
            for table in ("blocks", "parts")
        ]
        return max([time.time(), *(math.nextafter(row[0], _END) for row in newest if row)])

    # Hashes of a model's files; what the last requests reused, as JSON.

    def set_file_hash(self, path: str, stamp: str, content_hash: str) -> None:
        with self.transaction() as db:
            db.execute(
                "INSERT OR REPLACE INTO file_hashes VALUES (?, ?, ?)", (path, stamp, content_hash)
            )

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

    def forget_requests(self, sessions: Collection[str | None] | None = None) -> None:
        """Remove the records of sessions, by their names; those of others quote no more.

        None stands for all. A record of another session may quote a session that is removed.
        """
        with self.transaction() as db:
            for number, about in db.execute("SELECT number, about FROM requests").fetchall():
                try:
                    record = json.loads(about)
                    is_gone = sessions is None or record["session"] in sessions
                    quotes = record["divergence"]
                except (TypeError, ValueError, KeyError):
                    is_gone, quotes = True, None
                if is_gone:
                    db.execute("DELETE FROM requests WHERE number = ?", (number,))
                elif quotes:
                    record["divergence"] = {**quotes, "stored": None, "asked": None}
                    about = json.dumps(record)
                    db.execute("UPDATE requests SET about = ? WHERE number = ?", (about, number))

    # The file as a whole.

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

    def faults(self) -> list[str]:
        """Return what is wrong with the rows in themselves, a line for each kind."""
        return faults(self._db)

    def take_over(self, path: Path) -> None:
        """Replace what the files say by the content of the index at `path`, in one transaction.

        What the files do not say is kept where it still applies and can be read: sessions that
        have neither name nor pin, times of use, remembered replies. Others read the old content
        until it is done.
        """
        with self._attached(path, "fresh") as db:
            for table in ("blocks", "parts"):
                db.execute(
                    f"UPDATE fresh.{table} SET used = max(used, "
                    f"(SELECT old.used FROM main.{table} AS old WHERE old.key = {table}.key)) "
                    f"WHERE key IN (SELECT key FROM main.{table} WHERE typeof(used) = 'real')"
                )
            sessions = map(read_session, db.execute(f"SELECT {SESSION_COLUMNS} FROM main.sessions"))
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

    def copy_outline(self, path: Path) -> None:
        """Fill this empty index from the one at `path`: its tree and sizes, no texts, no names."""
        with self._attached(path, "other") as db:
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

    @contextmanager
    def _attached(self, path: Path, name: str) -> Iterator[sqlite3.Connection]:
        """Give the index at `path` a name within one transaction of this one."""
        self._db.execute(f"ATTACH ? AS {name}", (str(path),))
        try:
            with self.transaction() as db:
                yield db
        finally:
            self._db.execute(f"DETACH {name}")
