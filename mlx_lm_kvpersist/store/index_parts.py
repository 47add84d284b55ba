"""The rows of parts in the index: which there are, which may go, and with what they go."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing

from .index_file import IndexFile
from .index_rows import PART_COLUMNS, Totals, read_part
from .part import Part

__all__ = ["PartIndex"]

_END = float(1 << 33)
"""The year 2242: what claims to have been used later was not."""
_AT_ONCE = 500
"""Keys in one statement; SQLite takes 999 or more."""


class PartIndex(IndexFile):
    """What is on disk of parts. Who may read and change it is said in `index`."""

    def parts(self, blocks: Sequence[bytes]) -> list[tuple[Part, int]]:
        """Return the parts of these blocks with the sizes of their files, in bytes."""
        found: list[tuple[Part, int] | None] = []
        for first in range(0, len(blocks), _AT_ONCE):
            some = blocks[first : first + _AT_ONCE]
            rows = self._db.execute(
                f"SELECT {PART_COLUMNS} FROM parts "
                f"WHERE block IN ({','.join('?' * len(some))}) ORDER BY block, kind, n_tokens",
                some,
            )
            found += map(read_part, rows)
        return [part for part in found if part is not None]

    def part(self, key: bytes) -> tuple[Part, int] | None:
        """Return a part and the size of its file."""
        row = self._db.execute(f"SELECT {PART_COLUMNS} FROM parts WHERE key = ?", (key,)).fetchone()
        return None if row is None else read_part(row)

    def has_part(self, key: bytes) -> bool:
        return self._db.execute("SELECT 1 FROM parts WHERE key = ?", (key,)).fetchone() is not None

    def part_keys(self) -> set[bytes]:
        """Return the keys of all parts."""
        return {
            key for (key,) in self._db.execute("SELECT key FROM parts WHERE typeof(key) = 'blob'")
        }

    def totals(self) -> Totals:
        """Return numbers and bytes of all blocks and parts."""
        row = self._db.execute(
            "SELECT n_blocks, block_bytes, n_parts, part_bytes FROM totals WHERE root = x''"
        ).fetchone()
        return Totals(*(n if isinstance(n, int) else 0 for n in row or ()))

    def unused_parts(self) -> Iterator[tuple[float, bytes, bytes]]:
        """Yield time of use, key and block of all parts, the oldest first."""
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

    def stray_parts(self) -> list[bytes]:
        """Return the parts whose block is not there."""
        rows = self._db.execute(
            "SELECT key FROM parts AS p WHERE NOT EXISTS (SELECT 1 FROM blocks WHERE key = p.block)"
        )
        return [key for (key,) in rows]

    def add_parts(
        self, root: bytes, parts: Collection[tuple[Part, int]], used: float | None = None
    ) -> None:
        """Add parts whose files are in place, with their sizes."""
        with self.transaction() as db:
            used = self.now() if used is None else used
            # Not INSERT OR REPLACE: what that replaces would not be counted as removed.
            db.executemany("DELETE FROM parts WHERE key = ?", [(p.key,) for p, _ in parts])
            db.executemany(
                "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)",
                [(p.key, p.block, p.kind, p.n_tokens, size, used, root) for p, size in parts],
            )

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

    def _use_parts(self, db: sqlite3.Connection, parts: Collection[Part], now: float) -> None:
        """Mark parts as used, and put right what their rows say of them."""
        db.executemany(
            "UPDATE parts SET block = ?, kind = ?, n_tokens = ?, used = ? WHERE key = ?",
            [(p.block, p.kind, p.n_tokens, now, p.key) for p in parts],
        )

    def _remove_parts(
        self, db: sqlite3.Connection, keys: Collection[bytes], blocks: Collection[bytes] = ()
    ) -> list[tuple[bytes, int]]:
        """Remove parts, and all of some blocks; return their keys and the sizes of their files."""
        removed: list[tuple[bytes, int]] = []
        for column, values in (("key", keys), ("block", blocks)):
            for value in values:
                where = f"FROM parts WHERE {column} = ?"
                removed += db.execute(
                    f"SELECT key, CAST(n_bytes AS INTEGER) {where}", (value,)
                ).fetchall()
                db.execute(f"DELETE {where}", (value,))
        return removed
