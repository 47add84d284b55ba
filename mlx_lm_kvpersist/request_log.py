"""The last requests that the server answered, for people who ask why something was slow."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from .request.outcome import Outcome
from .request.state import RequestState

KEPT = 200
"""Requests that a server remembers."""


class RequestLog:
    """The last requests as JSON objects; with_text: they may quote the prompt. Any thread.

    A record never gets or loses a field, so a thread may read it while another sets a field.
    """

    def __init__(self, *, with_text: bool = True) -> None:
        self._with_text = with_text
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT)
        """The newest come first."""

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
        self._records.appendleft(record)
        return record

    def timed(self, request_id: str, first_token_s: float | None) -> dict[str, Any] | None:
        """Add the seconds from queueing to the first token; return the record if it is there."""
        for record in self._records.copy():
            if record["id"] == request_id:
                record["first_token_s"] = first_token_s
                return record
        return None

    def forget(self, session: str | None) -> None:
        """Remove the records of a deleted session; others may quote it, and quote no more."""
        for record in self._records.copy():
            record["divergence"] = _unquoted(record)["divergence"]
            if record["session"] == session:
                with suppress(ValueError):  # newer records have pushed it out
                    self._records.remove(record)

    def records(self, *, with_text: bool = True) -> list[dict[str, Any]]:
        """Return the records, newest first; without text they quote no prompt."""
        records = self._records.copy()
        return [record if with_text else _unquoted(record) for record in records]


def _unquoted(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the text of prompts."""
    divergence = record["divergence"] and {**record["divergence"], "stored": None, "asked": None}
    return {**record, "divergence": divergence}
