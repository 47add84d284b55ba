"""The rows of checkpoints in the index: which there are, and which may be evicted."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing

from ..match.block import Block
from .index_file import IndexFile
from .index_rows import CHECKPOINT_COLUMNS, Totals, read_checkpoint

_END = float(1 << 33)
"""The year 2242: what claims to have been used later was not."""
_AT_ONCE = 500
"""Keys in one statement; SQLite takes 999 or more."""


class CheckpointIndex(IndexFile):
    """What is on disk of checkpoints. Who may read and change it is said in `index`."""

    def checkpoints(self, blocks: Sequence[bytes]) -> list[tuple[Block, int]]:
        """Return the checkpoints of these blocks with the sizes of their files, in bytes."""
        found: list[tuple[Block, int] | None] = []
        for first in range(0, len(blocks), _AT_ONCE):
            some = blocks[first : first + _AT_ONCE]
            rows = self._db.execute(
                f"SELECT {CHECKPOINT_COLUMNS} FROM parts "
                f"WHERE block IN ({','.join('?' * len(some))}) ORDER BY block, kind, n_tokens",
                some,
            )
            found += map(read_checkpoint, rows)
        return [row for row in found if row is not None]

    def checkpoint(self, key: bytes) -> tuple[Block, int] | None:
        """Return a checkpoint and the size of its file."""
        row = self._db.execute(
            f"SELECT {CHECKPOINT_COLUMNS} FROM parts WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else read_checkpoint(row)

    def has_checkpoint(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM parts WHERE key = ?", (key,)).fetchone() is not None

    def checkpoint_keys(self) -> set[bytes]:
        """Return the keys of all checkpoints."""
        return {
            key for (key,) in self._db.execute("SELECT key FROM parts WHERE typeof(key) = 'blob'")
        }

    def totals(self) -> Totals:
        """Return numbers and bytes of all blocks and checkpoints."""
        row = self._db.execute(
            "SELECT n_blocks, block_bytes, n_checkpoints, checkpoint_bytes FROM totals "
            "WHERE root = x''"
        ).fetchone()
        return Totals(*(n if isinstance(n, int) else 0 for n in row or ()))

    def unused_checkpoints(self) -> Iterator[tuple[float, bytes, bytes]]:
        """Yield time of use, key and block of all checkpoints, the oldest first."""
        with closing(
            self._db.execute("SELECT CAST(used AS REAL), key, block FROM parts ORDER BY used, key")
        ) as rows:
            yield from rows

    def pinned_blocks(self) -> set[bytes]:
        """Return the blocks of all pinned sessions."""
        rows = self._db.execute(
            "WITH RECURSIVE up(key) AS (SELECT leaf FROM sessions WHERE pinned "
            "UNION SELECT parent FROM blocks JOIN up ON blocks.key = up.key) SELECT key FROM up"
        )
        return {key for (key,) in rows}

    def stray_checkpoints(self) -> list[bytes]:
        """Return the checkpoints whose block is not there."""
        rows = self._db.execute(
            "SELECT key FROM parts AS p WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE key = p.block)"
        )
        return [key for (key,) in rows]

    def add_checkpoints(
        self, root: bytes, checkpoints: Collection[tuple[Block, int]], used: float | None = None
    ) -> None:
        """Add checkpoints whose files are in place, with their sizes."""
        with self.transaction() as db:
            used = self.now() if used is None else used
            # Not INSERT OR REPLACE: what that replaces would not be counted as removed.
            db.executemany("DELETE FROM parts WHERE key = ?", [(p.key,) for p, _ in checkpoints])
            rows = [(p.key, p.parent, p.kind, p.n_tokens, n, used, root) for p, n in checkpoints]
            db.executemany("INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)", rows)

    def now(self) -> float:
        """Return the time of use of what is used now, in seconds since the epoch.

        It is always the latest: were it not, a clock that jumps back would have what is written
        after that go first.
        """
        newest = [
            self._db.execute(
                f"SELECT used FROM {table} WHERE used < ? ORDER BY used DESC LIMIT 1", (_END,)
            ).fetchone()
            for table in ("blocks", "parts")
        ]
        return max([time.time(), *(math.nextafter(row[0], _END) for row in newest if row)])

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
