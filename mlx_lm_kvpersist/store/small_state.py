"""The index's small state: notes, reused tokens, replies, last requests, bytes written.

A rebuilt index keeps all of this if the old index can be read. From a damaged index, only readable
notes and reused tokens are kept.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import xxhash

from ..block import Block, pack_ids
from .database import Rows
from .records import Session

REPLY_DIGEST_BYTES = 16
"""The size of a reply's digest, and of its prompt's digest in the reply."""
_MAX_REPLIES = 10_000
KEPT = 100
_MAX_RECORD_CHARS = 4096
_CHECKSUM_BYTES = 8
_NOTE = "session "
"""The prefix of a note's key, before its session's id."""
_SAVED = "saved"
_HOUR = 60


class SmallState(Rows):
    """Replies, notes, counts and last requests. Any thread may read; changes need the lock."""

    def replies(self, root: bytes, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the remembered replies (JSON) whose checksum is right, by digest."""
        query = "SELECT digest, ids FROM replies WHERE root = ? AND digest IN (VALUES {})"
        rows = self.ask_in(query, zip(digests), root, types=(bytes, bytes))
        return {
            digest: value[:-_CHECKSUM_BYTES]
            for digest, value in rows
            if value[-_CHECKSUM_BYTES:] == _checksum(root, digest, value[:-_CHECKSUM_BYTES])
        }

    def add_replies(self, root: bytes, replies: Mapping[bytes, bytes], used: float) -> None:
        if not replies:
            return
        with self.database.transaction() as db:
            db.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?)",
                [
                    (root, digest, packed_ids + _checksum(root, digest, packed_ids), used)
                    for digest, packed_ids in replies.items()
                ],
            )
            db.execute(
                "DELETE FROM replies WHERE used <= "
                "(SELECT used FROM replies ORDER BY used DESC LIMIT 1 OFFSET ?)",
                (_MAX_REPLIES,),
            )

    def forget_replies(self, root: bytes, blocks: Sequence[Block], n_kept: int) -> None:
        """Remove a conversation's replies, except replies that another conversation may have.

        Other conversations share the first `n_kept` blocks. A stored reply is JSON
        (request/replies.py). The blocks may lack the last id of the last reply, because the model
        has not read it. O(replies of the root + text).
        """
        texts, ids = [b.text.encode() for b in blocks], [b.packed_ids for b in blocks]
        text, n_kept_bytes = b"".join(texts), len(b"".join(texts[:n_kept]))
        packed, start = b"".join(ids), len(b"".join(ids[:n_kept]))
        query = "SELECT digest, ids FROM replies WHERE root = ?"
        replies = []
        for digest, value in self.ask(query, root, types=(bytes, bytes)):
            with suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
                reply = json.loads(value[:-_CHECKSUM_BYTES])
                n, prompt = int(reply["n_prompt_bytes"]), str(reply["prompt_digest"])
                own = pack_ids(reply["ids"])
                is_last = len(own) > 4 and packed.endswith(own[:-4])
                is_own = n > n_kept_bytes or is_last
                if is_own or packed.find(own, max(0, start + 4 - len(own))) >= 0:
                    replies.append((n, prompt, digest))
        found, hashed, n_hashed = [], blake2b(digest_size=REPLY_DIGEST_BYTES), 0
        for n, prompt, digest in sorted(replies):
            hashed.update(text[n_hashed:n])
            n_hashed = n
            if hashed.hexdigest() == prompt:
                found.append((root, digest))
        with self.database.transaction() as db:
            db.executemany("DELETE FROM replies WHERE root = ? AND digest = ?", found)

    def trim_replies(self, max_bytes: int) -> None:
        """Remove the oldest replies until the rest takes at most `max_bytes`."""
        if self.database.files.n_bytes(self.database.path.name) <= max_bytes:
            return
        with self.database.transaction() as db:
            db.execute(
                "DELETE FROM replies WHERE used <= (SELECT used FROM (SELECT used, "
                "sum(length(ids)) OVER (ORDER BY used DESC) AS n_bytes FROM replies) "
                "WHERE n_bytes > ? ORDER BY used DESC LIMIT 1)",
                (max_bytes,),
            )

    def _get(self, key: str) -> Any:
        """Return a JSON value; None if it is missing or damaged."""
        for (value,) in self.ask("SELECT value FROM state WHERE key = ?", key, types=(str,)):
            text = value[2 * _CHECKSUM_BYTES :]
            return json.loads(text) if value == _checked(key, text) else None
        return None

    def _put(self, key: str, content: Any) -> None:
        with self.database.transaction() as db:
            row = key, _checked(key, json.dumps(content))
            db.execute("INSERT OR REPLACE INTO state VALUES (?, ?)", row)

    def note(self, session_id: str, *, with_text: bool = True) -> dict[str, str]:
        """Return a session's `title`, `client` and (if `with_text`) first `words`, if known."""
        note: dict[str, str] = self._get(f"{_NOTE}{session_id}") or {}
        return note if with_text else {**note, "words": ""}

    def matching(
        self, sessions: list[Session], find: str, *, with_text: bool = True
    ) -> list[Session]:
        """Return the sessions whose id, name or note contains `find`."""

        def texts(session: Session) -> str:
            note = self.note(session.id, with_text=with_text)
            return "\n".join((session.id, session.name or "", *note.values()))

        wanted = find.casefold()
        return [one for one in sessions if wanted in texts(one).casefold()] if find else sessions

    def add_note(self, session_id: str, **fields: str) -> None:
        before = self.note(session_id) if fields else {}
        if (after := before | fields) != before:
            self._put(f"{_NOTE}{session_id}", after)

    def forget_note(self, session_id: str) -> None:
        with self.database.transaction() as db:
            db.execute("DELETE FROM state WHERE key = ?", (f"{_NOTE}{session_id}",))

    def forget_lost_notes(self) -> None:
        with self.database.transaction() as db:
            db.execute(
                "DELETE FROM state WHERE key GLOB ?1 || '*' "
                "AND substr(key, length(?1) + 1) NOT IN (SELECT id FROM sessions)",
                (_NOTE,),
            )

    def saved(self) -> dict[str, float]:
        """Return sums over all requests, as numbers by name.

        `tokens`: the reused tokens. `seconds`: the estimated time to compute `timed` of these
        tokens. For the other tokens, no time is known.
        """
        return self._get(_SAVED) or {"tokens": 0, "timed": 0, "seconds": 0.0}

    def salvage(self, path: Path) -> None:
        """Add the notes and reused tokens of another index, as far as they can be read."""
        with (
            suppress(sqlite3.Error, UnicodeDecodeError),
            closing(self.database.files.encryption.connect(path)) as damaged,
        ):
            for row in damaged.execute("SELECT key, value FROM state"):
                with self.database.transaction() as db:
                    db.execute("INSERT OR IGNORE INTO state VALUES (?, ?)", row)

    def written_last_hour(self) -> int:
        """Return how many bytes all processes wrote to this store within the last hour."""
        now = _minute()
        # If the clock was set back, there are rows of future minutes.
        total = "SELECT CAST(total(n_bytes) AS INTEGER) FROM writes WHERE minute BETWEEN ? AND ?"
        return sum(n_bytes for (n_bytes,) in self.ask(total, now - _HOUR, now + 1))

    def count_write(self, n_bytes: int) -> None:
        """Count bytes that are written now. The caller holds the store's lock."""
        if not n_bytes:
            return
        now = _minute()
        with self.database.transaction() as db:
            db.execute(
                "DELETE FROM writes WHERE minute NOT BETWEEN ? AND ?", (now - _HOUR, now + 1)
            )
            db.execute(
                "INSERT INTO writes VALUES (?, ?) "
                "ON CONFLICT (minute) DO UPDATE SET n_bytes = n_bytes + excluded.n_bytes",
                (now, n_bytes),
            )

    def requests(self) -> list[dict[str, Any]]:
        """Return the readable records of requests, the newest first."""
        records = []
        for (record_json,) in self.ask("SELECT about FROM requests ORDER BY number DESC"):
            with suppress(TypeError, ValueError):
                record = json.loads(record_json)
                if isinstance(record, dict) and "sentence" in record:
                    records.append(record)
        return records

    def add_request(self, record: dict[str, Any]) -> None:
        """Add a request's reused tokens to `saved`; add its record, and keep the last `KEPT`.

        A record of more than 4,096 characters is not added.
        """
        if n_reused := record.get("reused_tokens", 0):
            saved, seconds = self.saved(), record.get("saved_s")
            new = {"tokens": n_reused, "timed": n_reused * bool(seconds), "seconds": seconds or 0.0}
            self._put(_SAVED, {name: saved[name] + more for name, more in new.items()})
        record_json = json.dumps(record)
        if len(record_json) > _MAX_RECORD_CHARS:
            return
        with self.database.transaction() as db:
            db.execute("INSERT INTO requests (about) VALUES (?)", (record_json,))
            db.execute(
                "DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - ?",
                (KEPT,),
            )

    def forget_requests(
        self, sessions: Collection[tuple[str | None, str | None]] | None = None
    ) -> None:
        """Remove the records of sessions (None: of all), and all quotations in the other records.

        `sessions` has pairs of name and namespace; the namespace None means any.
        """
        with self.database.transaction() as db:
            for number, record_json in db.execute("SELECT number, about FROM requests").fetchall():
                try:
                    record = json.loads(record_json)
                    is_gone = sessions is None or any(
                        record["session"] == name and namespace in (None, record["namespace"])
                        for name, namespace in sessions
                    )
                    unquoted_record = unquoted(record)
                except (TypeError, ValueError, KeyError):
                    is_gone = True
                if is_gone:
                    db.execute("DELETE FROM requests WHERE number = ?", (number,))
                elif unquoted_record != record:
                    row = json.dumps(unquoted_record), number
                    db.execute("UPDATE requests SET about = ? WHERE number = ?", row)


def unquoted(record: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a request without the text of prompts."""
    divergence = record["divergence"] and {**record["divergence"], "stored": None, "asked": None}
    return {**record, "divergence": divergence}


def _checksum(*contents: bytes) -> bytes:
    return xxhash.xxh3_64_digest(b"".join(contents))


def _checked(key: str, text: str) -> str:
    return _checksum(key.encode(), text.encode()).hex() + text


def _minute() -> int:
    return int(time.time() // 60)
