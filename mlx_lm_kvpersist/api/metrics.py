"""Metrics for Prometheus: what requests reused, how long they took, what the store holds.

What a request does is counted where its outcome is made. What the store counts itself is read when
Prometheus asks, as plain numbers. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Of `Metrics.exposed`."""
_FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_INTER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """All metrics, in a registry of their own.

    store: returns what `BlockStore.stats` does, memory what `Memory.parts` does; None where there
    is no store, or no model.
    """

    def __init__(
        self,
        store: Callable[[], dict[str, Any] | None],
        memory: Callable[[], dict[str, int] | None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._store, self._memory = store, memory

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"kvpersist_{name}", about, labels, registry=self.registry)

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            name, labels = f"kvpersist_{name}", ("outcome",)
            return Histogram(name, about, labels, buckets=buckets, registry=self.registry)

        self._requests = counter("requests", "Requests, by what they reused.", "outcome")
        self._prefilled = counter("prefilled_tokens", "Prompt tokens that were computed.")
        self._first_token = histogram(
            "first_token_seconds", "From queueing a request to its first token.", _FIRST_TOKEN_S
        )
        self._inter_token = histogram(
            "inter_token_seconds", "Between two tokens of a reply.", _INTER_TOKEN_S
        )
        self.registry.register(self)

    def count(self, outcome: str, n_prefilled: int) -> None:
        """Count a request by its outcome, and its prompt's tokens that were computed."""
        self._requests.labels(outcome).inc()
        self._prefilled.inc(n_prefilled)

    def observe(self, outcome: str, times_s: Sequence[float]) -> None:
        """Take the times of a reply's tokens, in seconds since its request was queued."""
        if times_s:
            self._first_token.labels(outcome).observe(times_s[0])
        inter_token = self._inter_token.labels(outcome)
        for before, after in pairwise(times_s):
            inter_token.observe(after - before)

    def exposed(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the counts of memory and of the store; the registry asks for them."""
        used = GaugeMetricFamily("kvpersist_memory_bytes", "Memory in use.", labels=["part"])
        for part, n_bytes in (parts := self._memory() or {}).items():
            if part not in ("waiting", "pressure"):
                used.add_metric([part], n_bytes)
        yield used
        waiting = parts.get("waiting", 0)
        yield GaugeMetricFamily("kvpersist_memory_waiting", "Wait for memory.", value=waiting)
        found = self._store()
        if found is None:
            return
        for make, key, name, about in (
            (GaugeMetricFamily, "blocks", "blocks", "Blocks of tokens."),
            (GaugeMetricFamily, "checkpoints", "checkpoints", "Checkpoints of blocks."),
            (GaugeMetricFamily, "bytes", "bytes", "Bytes of blocks and checkpoints."),
            (GaugeMetricFamily, "max_bytes", "max_bytes", "The budget."),
            (CounterMetricFamily, "evicted", "evictions", "Blocks and checkpoints evicted."),
            (CounterMetricFamily, "reused_tokens", "reused_tokens", "Not computed again."),
            (CounterMetricFamily, "asked_again_tokens", "asked_again_tokens", "Evicted in vain."),
            (CounterMetricFamily, "written_bytes", "written_bytes", "Bytes written to the tier."),
        ):
            family = make(f"kvpersist_{name}", about, labels=["tier"])
            for tier, about_tier in found["tiers"].items():
                if key in about_tier:
                    family.add_metric([tier], about_tier[key])
            yield family
        queue = found["queue"]
        for make, value, name, about in (
            (GaugeMetricFamily, queue["tasks"], "queue_tasks", "Tasks of the writer that wait."),
            (GaugeMetricFamily, queue["bytes"], "queue_bytes", "Bytes that wait to be written."),
            (GaugeMetricFamily, queue["max_bytes"], "queue_max_bytes", "Most that may wait."),
            (GaugeMetricFamily, len(found["failures"]), "failures", "What fails on disk now."),
            (CounterMetricFamily, found["turns_saved"], "saved_turns", "Turns written."),
            (CounterMetricFamily, found["turns_not_saved"], "dropped_turns", "Turns not written."),
            (CounterMetricFamily, found["blocks_quarantined"], "quarantined", "Failed a check."),
        ):
            yield make(f"kvpersist_{name}", about, value=value)
        failed = CounterMetricFamily("kvpersist_failed", "Failures so far.", labels=["kind"])
        # Prometheus cannot tell that a counter grows which begins with its first failure.
        for kind, n_failed in {"save a turn: disk": 0, **found["failed"]}.items():
            failed.add_metric([kind], n_failed)
        yield failed
