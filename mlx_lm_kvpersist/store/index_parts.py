"""The rows of parts in the index: which there are, which may go, and with what they go."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

from .index_file import IndexFile
from .part import Part

__all__ = ["PartIndex"]

_AT_ONCE = 500
"""Keys in one statement; SQLite takes 999 or more."""


class PartIndex(IndexFile):
    """What is on disk of parts. Who may read and change it is said in `index`."""

    def parts(self, blocks: Sequence[bytes]) -> list[tuple[Part, int]]:
        """Return the parts of these blocks with the sizes of their files, in bytes.

        A damaged index may lie: what does not hash to its key is left out.
        """
        found: list[tuple[Part, int]] = []
        for first in range(0, len(blocks), _AT_ONCE):
            some = blocks[first : first + _AT_ONCE]
            rows = self._db.execute(
                "SELECT key, block, kind, n_tokens, n_bytes FROM parts "
                f"WHERE block IN ({_marks(some)}) ORDER BY block, kind, n_tokens",
                some,
            )
            for key, block, kind, n_tokens, n_bytes in rows:
                part = _part(block, kind, n_tokens)
                if part is not None and part.key == key:
                    found.append((part, n_bytes))
        return found

    def part(self, key: bytes) -> tuple[Part | None, int] | None:
        """Return what the row of this key says: a part, None if it cannot be one, and its size."""
        row = self._db.execute(
            "SELECT block, kind, n_tokens, n_bytes FROM parts WHERE key = ?", (key,)
        ).fetchone()
        return None if row is None else (_part(*row[:3]), row[3])

    def part_keys(self) -> set[bytes]:
        """Return the keys of all parts."""
        return {key for (key,) in self._db.execute("SELECT key FROM parts")}

    def n_parts(self) -> int:
        count: int = self._db.execute("SELECT count(*) FROM parts").fetchone()[0]
        return count

    def n_part_bytes(self) -> int:
        """Return the size of all part files, in bytes."""
        total: int = self._db.execute("SELECT coalesce(sum(n_bytes), 0) FROM parts").fetchone()[0]
        return total

    def parts_by_root(self) -> dict[bytes, tuple[int, int]]:
        """Return, by the key of the root, the number of parts and the bytes of their files."""
        rows = self._db.execute(
            "SELECT b.root, count(*), sum(p.n_bytes) FROM parts AS p "
            "JOIN blocks AS b ON b.key = p.block GROUP BY b.root"
        )
        return {root: (count, n_bytes) for root, count, n_bytes in rows}

    def unused_parts(self) -> Iterator[tuple[float, bytes, bytes]]:
        """Yield time of use, key and block of all parts, the oldest first."""
        with closing(
            self._db.execute("SELECT used, key, block FROM parts ORDER BY used, key")
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

    def add_parts(self, parts: Iterable[tuple[Part, int]], used: float | None = None) -> None:
        """Add parts whose files are in place, with their sizes."""
        with self.transaction() as db:
            self._add_parts(db, parts, time.time() if used is None else used)

    def _add_parts(
        self, db: sqlite3.Connection, parts: Iterable[tuple[Part, int]], used: float
    ) -> None:
        db.executemany(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)",
            [(p.key, p.block, p.kind, p.n_tokens, size, used) for p, size in parts],
        )

    def _use_parts(self, db: sqlite3.Connection, parts: Iterable[Part], now: float) -> None:
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
                removed += db.execute(f"SELECT key, n_bytes {where}", (value,)).fetchall()
                db.execute(f"DELETE {where}", (value,))
        return removed


def _marks(values: Collection[bytes]) -> str:
    return ",".join("?" * len(values))


def _part(block: Any, kind: Any, n_tokens: Any) -> Part | None:
    """Return the part that a row describes; None where its types are not those of one."""
    if not (isinstance(block, bytes) and isinstance(kind, str) and isinstance(n_tokens, int)):
        return None
    return Part(block, kind, n_tokens) if abs(n_tokens) < 1 << 31 else None
