"""The last requests that the server answered, for people who ask why something was slow."""

from __future__ import annotations

import time
from dataclasses import asdict
from threading import Lock
from typing import Any

from .request.outcome import Outcome
from .request.serving import RequestState

KEPT = 200
"""Requests that a server remembers."""


class RequestLog:
    """The last requests as JSON objects; with_text: they may quote the prompt. Any thread."""

    def __init__(self, *, with_text: bool = True) -> None:
        self._with_text = with_text
        self._records: dict[str, dict[str, Any]] = {}
        self._lock = Lock()

    def add(
        self, state: RequestState, model: str, outcome: Outcome, precision: str | None = None
    ) -> dict[str, Any]:
        """Add a record and return it. `received` is in seconds since the epoch."""
        record: dict[str, Any] = {
            "id": state.id,
            "received": time.time(),
            "session": state.session,
            "client": state.note.get("client"),
            "namespace": state.namespace,
            "model": model,
            "precision": precision,
            "sentence": outcome.sentence(state.session, is_kept=state.is_kept),
            "kept": state.is_kept,
            "outcome": outcome.kind.value,
            "tier": outcome.tier,
            "prompt_tokens": outcome.n_prompt,
            "reused_tokens": outcome.n_reused,
            "restored_tokens": outcome.n_restored,
            "restore_ms": round(outcome.restore_ms, 2),
            "saved_s": state.saved_s,
            "reason": outcome.reason.text if outcome.reason else None,
            "detail": outcome.detail or None,
            "divergence": asdict(outcome.divergence) if outcome.divergence else None,
            "first_token_s": None,
        }
        if not (self._with_text and state.is_kept):
            record = _unquoted(record)
        with self._lock:
            self._records[record["id"]] = record
            if len(self._records) > KEPT:
                del self._records[next(iter(self._records))]
        return record

    def timed(self, request_id: str, first_token_s: float | None) -> dict[str, Any] | None:
        """Add the seconds from queueing to the first token; return the record if it is there."""
        with self._lock:
            if record := self._records.get(request_id):
                self._records[request_id] = {**record, "first_token_s": first_token_s}
            return self._records.get(request_id)

    def forget(self, session: str | None) -> None:
        """Remove the records of a deleted session; others may quote it, and quote no more."""
        with self._lock:
            records = self._records.values()
            left = (record for record in records if record["session"] != session)
            self._records = {record["id"]: _unquoted(record) for record in left}

    def records(self, *, with_text: bool = True) -> list[dict[str, Any]]:
        """Return the records, newest first; without text they quote no prompt."""
        with self._lock:
            records = list(self._records.values())[::-1]
        return records if with_text else [_unquoted(record) for record in records]


def _unquoted(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the text of prompts."""
    divergence = record["divergence"] and {**record["divergence"], "stored": None, "asked": None}
    return {**record, "divergence": divergence}
