"""The last requests, for people, and numbers of all requests, for Prometheus.

prometheus_client is imported when Prometheus first asks, so that neither the start nor a reply
waits for the import. Any thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from .errors import COUNTING
from .request.outcome import Outcome
from .request.serving import RequestState

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

KEPT = 200
"""The number of requests that a server remembers."""
HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_INTER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


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
        """Add the seconds from queueing to the first token; return the record, if it exists."""
        for record in self._records.copy():
            if record["id"] == request_id:
                record["first_token_s"] = first_token_s
                return record
        return None

    def forget(self, session: str | None, namespace: str | None = None) -> None:
        """Remove a deleted session's records, and its quotations in other records.

        The session of that name in another namespace keeps its records; None: in any namespace.
        """
        for record in self._records.copy():
            record["divergence"] = _unquoted(record)["divergence"]
            if record["session"] == session and namespace in (None, record["namespace"]):
                with suppress(ValueError):  # newer records have replaced this record
                    self._records.remove(record)

    def records(self, *, with_text: bool = True) -> list[dict[str, Any]]:
        """Return the records, newest first; without text they quote no prompt."""
        records = self._records.copy()
        return [record if with_text else _unquoted(record) for record in records]


def _unquoted(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the text of prompts."""
    divergence = record["divergence"] and {**record["divergence"], "stored": None, "asked": None}
    return {**record, "divergence": divergence}


class Times:
    """A histogram of times, for each outcome of a request.

    bounds_s: the inclusive upper ends of the buckets, in seconds.
    """

    def __init__(self, name: str, description: str, bounds_s: Sequence[float]) -> None:
        self._name, self._description, self._bounds_s = name, description, bounds_s
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = defaultdict(float)

    def add(self, outcome: str, times_s: Iterable[float]) -> None:
        counts = self._counts.setdefault(outcome, [0] * (len(self._bounds_s) + 1))
        for time_s in times_s:
            counts[bisect_left(self._bounds_s, time_s)] += 1
            self._sums_s[outcome] += time_s

    def collect(self, created_s: float) -> Metric:
        from prometheus_client.metrics_core import HistogramMetricFamily

        family = HistogramMetricFamily(self._name, self._description, labels=["outcome"])
        ends = [*map(str, self._bounds_s), "+Inf"]
        for outcome, counts in self._counts.items():
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family.add_metric([outcome], buckets, self._sums_s[outcome])
            family.add_sample(f"{self._name}_created", {"outcome": outcome}, created_s)
        return family


class Metrics:
    """All metrics.

    store: returns `BlockStore.stats()`; memory: returns `Memory.parts()`. They return None
    without a store, or without a model.
    """

    def __init__(
        self,
        store: Callable[[], dict[str, Any] | None],
        memory: Callable[[], dict[str, int] | None] = lambda: None,
    ) -> None:
        self._store, self._memory = store, memory
        self._created_s = time.time()
        self._n_requests: Counter[str] = Counter()
        self._n_prefilled = 0
        self._first_token = Times(
            "kvpersist_first_token_seconds",
            "From queueing a request to its first token.",
            _FIRST_TOKEN_S,
        )
        self._inter_token = Times(
            "kvpersist_inter_token_seconds", "Between two tokens of a reply.", _INTER_TOKEN_S
        )

    def count(self, outcome: str, n_prefilled: int) -> None:
        """Count a request by its outcome, and its prompt's tokens that were computed."""
        with COUNTING:
            self._n_requests[outcome] += 1
            self._n_prefilled += n_prefilled

    def observe(self, outcome: str, times_s: Sequence[float]) -> None:
        """Record the times of a reply's tokens, in seconds since its request was queued."""
        with COUNTING:
            if times_s:
                self._first_token.add(outcome, times_s[:1])
            self._inter_token.add(outcome, (after - before for before, after in pairwise(times_s)))

    def exposed(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of requests, of memory and of the store; Prometheus asks for them."""
        from prometheus_client.metrics_core import CounterMetricFamily as Count
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

        with COUNTING:
            created_s = self._created_s
            requests = Count(
                "kvpersist_requests", "Requests, by what they reused.", labels=["outcome"]
            )
            for outcome, n_requests in self._n_requests.items():
                requests.add_metric([outcome], n_requests, created_s)
            prefilled = Count("kvpersist_prefilled_tokens", "Prompt tokens that were computed.")
            prefilled.add_metric([], self._n_prefilled, created_s)
            times = [part.collect(created_s) for part in (self._first_token, self._inter_token)]
        yield from (requests, prefilled, *times)
        used = Gauge("kvpersist_memory_bytes", "Memory in use.", labels=["part"])
        for area, n_bytes in (memory := self._memory() or {}).items():
            if area not in ("waiting", "pressure"):
                used.add_metric([area], n_bytes)
        yield used
        waiting = memory.get("waiting", 0)
        yield Gauge("kvpersist_memory_waiting", "Wait for memory.", value=waiting)
        stats = self._store()
        if stats is None:
            return
        for make, key, name, description in (
            (Gauge, "blocks", "blocks", "Blocks of tokens."),
            (Gauge, "checkpoints", "checkpoints", "Checkpoints of blocks."),
            (Gauge, "bytes", "bytes", "Bytes of blocks and checkpoints."),
            (Gauge, "max_bytes", "max_bytes", "The budget."),
            (Count, "evicted", "evictions", "Blocks and checkpoints evicted."),
            (Count, "reused_tokens", "reused_tokens", "Not computed again."),
            (Count, "asked_again_tokens", "asked_again_tokens", "Evicted in vain."),
            (Count, "written_bytes", "written_bytes", "Bytes written to the tier."),
        ):
            family = make(f"kvpersist_{name}", description, labels=["tier"])
            for tier, tier_stats in stats["tiers"].items():
                if key in tier_stats:
                    family.add_metric([tier], tier_stats[key])
            yield family
        queue = stats["queue"]
        for make, value, name, description in (
            (Gauge, queue["tasks"], "queue_tasks", "Tasks of the writer that wait."),
            (Gauge, queue["bytes"], "queue_bytes", "Bytes that wait to be written."),
            (Gauge, queue["max_bytes"], "queue_max_bytes", "Most that may wait."),
            (Gauge, len(stats["failures"]), "failures", "What fails on disk now."),
            (Count, stats["turns_saved"], "saved_turns", "Turns written."),
            (Count, stats["turns_not_saved"], "dropped_turns", "Turns not written."),
            (Count, stats["blocks_quarantined"], "quarantined", "Failed a check."),
        ):
            yield make(f"kvpersist_{name}", description, value=value)
        failed = Count("kvpersist_failed", "Failures so far.", labels=["kind"])
        # A counter that first appears with its first failure would not look like a growing counter
        # to Prometheus.
        for kind, n_failed in {"save a turn: disk": 0, **stats["failed"]}.items():
            failed.add_metric([kind], n_failed)
        yield failed
