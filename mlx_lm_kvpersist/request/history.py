"""The last requests, for people who ask why something was slow."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any

from .outcome import Outcome

KEPT = 200


@dataclass(frozen=True)
class RequestRecord:
    """One request; `received` in seconds since the epoch."""

    id: str
    session: str | None
    namespace: str
    model: str
    outcome: Outcome
    received: float = field(default_factory=time.time)

    def to_json(self, *, with_text: bool) -> dict[str, Any]:
        """Return the record; without text where text must not leave the prompt."""
        outcome = self.outcome.to_json()
        if not with_text and outcome["divergence"]:
            outcome["divergence"].update(stored=None, asked=None)
        return {
            "id": self.id,
            "received": self.received,
            "session": self.session,
            "namespace": self.namespace,
            "model": self.model,
            "sentence": self.outcome.sentence(self.session),
            **outcome,
        }


class History:
    """A bounded list of records, newest last. Any thread."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=KEPT)
        self._numbers = count(1)
        self._start = f"{int(time.time()) & 0xFFFFFF:06x}"
        self._lock = Lock()

    def new_id(self) -> str:
        """Return an id that no other request of this server has; they grow."""
        return f"kvp-{self._start}-{next(self._numbers)}"

    def add(self, record: RequestRecord) -> None:
        with self._lock:
            self._records.append(record)

    def records(self) -> list[RequestRecord]:
        with self._lock:
            return list(self._records)
