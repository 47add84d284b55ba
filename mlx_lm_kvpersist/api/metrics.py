"""Metrics for Prometheus: what requests reused, how long they took, what the store holds.

Events wait until Prometheus asks, or until there are many, so that neither a start nor a first
reply waits for prometheus_client to be imported. Any thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client import Histogram
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_MOST_UNCOUNTED = 32
_INTER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class RequestMetrics:
    """The metrics of requests, in a registry of their own."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self.registry = registry = CollectorRegistry()

        def counter(name: str, description: str, *labels: str) -> Counter:
            return Counter(f"kvpersist_{name}", description, labels, registry=registry)

        def histogram(name: str, description: str, buckets: Sequence[float]) -> Histogram:
            name, labels = f"kvpersist_{name}", ("outcome",)
            return Histogram(name, description, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests, by what they reused.", "outcome")
        self.prefilled = counter("prefilled_tokens", "Prompt tokens that were computed.")
        self.first_token = histogram(
            "first_token_seconds", "From queueing a request to its first token.", _FIRST_TOKEN_S
        )
        self.inter_token = histogram(
            "inter_token_seconds", "Between two tokens of a reply.", _INTER_TOKEN_S
        )


class Metrics:
    """All metrics.

    store: returns what `BlockStore.stats` does, memory what `Memory.parts` does; None without a
    store, or without a model.
    """

    def __init__(
        self,
        store: Callable[[], dict[str, Any] | None],
        memory: Callable[[], dict[str, int] | None] = lambda: None,
    ) -> None:
        self._store, self._memory = store, memory
        self._uncounted: deque[Callable[[RequestMetrics], None]] = deque()
        self._lock = Lock()
        self._requests: RequestMetrics | None = None

    def count(self, outcome: str, n_prefilled: int) -> None:
        """Count a request by its outcome, and its prompt's tokens that were computed."""

        def add(metrics: RequestMetrics) -> None:
            metrics.requests.labels(outcome).inc()
            metrics.prefilled.inc(n_prefilled)

        self._uncounted.append(add)

    def observe(self, outcome: str, times_s: Sequence[float]) -> None:
        """Take the times of a reply's tokens, in seconds since its request was queued."""

        def add(metrics: RequestMetrics) -> None:
            if times_s:
                metrics.first_token.labels(outcome).observe(times_s[0])
            inter_token = metrics.inter_token.labels(outcome)
            for before, after in pairwise(times_s):
                inter_token.observe(after - before)

        self._uncounted.append(add)
        if len(self._uncounted) > _MOST_UNCOUNTED:
            self._request_metrics()

    def _request_metrics(self) -> RequestMetrics:
        """Return the metrics of requests, with all events so far."""
        with self._lock:
            if self._requests is None:
                self._requests = RequestMetrics()
                self._requests.registry.register(self)
            while self._uncounted:
                self._uncounted.popleft()(self._requests)
        return self._requests

    def exposed(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._request_metrics().registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the counts of memory and of the store; the registry asks for them."""
        from prometheus_client.metrics_core import CounterMetricFamily as Count
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

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
        # Prometheus cannot tell that a counter grows which begins with its first failure.
        for kind, n_failed in {"save a turn: disk": 0, **stats["failed"]}.items():
            failed.add_metric([kind], n_failed)
        yield failed
