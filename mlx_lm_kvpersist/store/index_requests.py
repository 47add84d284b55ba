"""The last requests in the index: people ask why one was slow after a restart, too."""

from __future__ import annotations

import json
from typing import Any

from .index_file import IndexFile

__all__ = ["KEPT", "RequestIndex"]

KEPT = 100
_MAX_RECORD_CHARS = 4096


class RequestIndex(IndexFile):
    """What the last requests reused, as JSON. The writer's thread changes it, any thread reads."""

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
