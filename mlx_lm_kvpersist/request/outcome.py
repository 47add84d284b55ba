"""How many tokens a request reused, and why no more: for replies, the log and metrics.

prometheus_client is imported when Prometheus first asks, so the import delays neither the start nor
a reply. Any thread.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ..block import Root, block_key, pack_ids
from ..cache.blocks import BLOCK_TOKENS
from ..cache.geometry.precision import layout_in_words
from ..errors import COUNTING
from ..match import SHOWN_CHARS, Match, common_prefix
from ..store.block_store import BlockStore
from ..store.records import Gone
from ..store.small_state import unquoted
from ..units import shortened

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MIN_ALIKE_CHARS = 64
MIN_ALIKE_TOKENS = 16
"""If fewer characters or tokens match, they belong to the template, not to a conversation."""

_MAX_ROOTS = 64
KEPT = 200
"""A `RequestLog` has at most this number of requests."""
HEADERS = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
_FIRST_TOKEN_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_INTER_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


class Kind(Enum):
    """How a prompt relates to the stored conversations."""

    EXACT = "EXACT"
    """All tokens except the last were reused."""
    EXTEND = "EXTEND"
    """The prompt continues a stored conversation or ends inside it; more tokens were computed."""
    DIVERGE = "DIVERGE"
    """The prompt begins like a stored conversation, and continues differently."""
    MISS = "MISS"
    """Nothing of the prompt was reused."""
    STOCK = "STOCK"
    """The plugin does not store the prompt; the stock server may, in its own cache."""


PENDING = "outcome=PENDING"
"""The header's value for a stream whose headers are sent before its prompt is looked up."""
COLD = "cold"
"""The tier in the outcome if nothing of the prompt is reused."""


class Reason(Enum):
    """The reason why no more tokens were reused: a word for programs, a clause for people."""

    NOTHING_ALIKE = "new", "no stored prompt begins like it"
    DIVERGED = "diverged", "the prompt diverges from the stored text"
    OTHER_MODEL = "other-model", "stored for another model"
    OTHER_PRECISION = "other-precision", "stored in another KV precision"
    OTHER_NAMESPACE = "new", "stored in another namespace or session"
    """Only the operator sees this; a reply shows `NOTHING_ALIKE` instead."""
    EVICTED = "evicted", "evicted to stay within the budget"
    DAMAGED = "damaged", "a stored file failed its check and is in quarantine"
    NOT_WORTH_IT = "not-worth-it", "restoring would take longer than computing"
    NO_CHECKPOINT = "no-checkpoint", "the model can resume only at an earlier checkpoint"
    INSIDE_BLOCK = "inside-block", "the prompt ends inside a block that is stored quantized"
    OTHER_RANK = "other-rank", "another rank has stored less of the prompt"
    STORE_FAILED = "store-failed", "the store could not be read; the log says why"
    NOT_KEPT = "not-kept", "this request is served as in the stock server"

    def __init__(self, word: str, text: str) -> None:
        self.word = word
        self.text = text


@dataclass(frozen=True)
class Divergence:
    """Where a prompt diverges from the nearest stored branch.

    `char` is the position in the rendered prompt. `message_char` is the position in the content of
    the message with the index `message`; None between messages. `stored` and `asked` are the next
    characters of the stored text and of the prompt.
    """

    char: int
    message: int | None
    role: str | None
    message_char: int | None
    stored: str
    asked: str


@dataclass(frozen=True)
class Outcome:
    """How much a request reused: `n_reused` of `n_prompt` tokens.

    `n_restored` of the reused tokens were read from tiers below RAM. `tier` is the slowest tier
    from which any token was reused, or `COLD`.
    """

    kind: Kind
    n_prompt: int
    n_reused: int = 0
    n_restored: int = 0
    restore_ms: float = 0.0
    reason: Reason | None = None
    detail: str = ""
    divergence: Divergence | None = None
    tier: str = COLD

    @property
    def header(self) -> str:
        """The value of the X-KVPersist response header. It contains no text of the prompt."""
        reason = f"; reason={self.reason.word}" if self.reason else ""
        return (
            f"outcome={self.kind.value}; tier={self.tier}; reused={self.n_reused}; "
            f"restored={self.n_restored}; restore_ms={self.restore_ms:.1f}{reason}"
        )

    @property
    def why(self) -> str:
        return self.detail or (self.reason.text if self.reason else "")

    def sentence(self, session: str | None, *, is_kept: bool = True) -> str:
        why = self.why
        if self.kind is Kind.STOCK:
            clauses = [f"served as in the stock server: {why}"]
        elif self.n_reused == 0:
            clauses = [f"computed all {self.n_prompt:,} tokens" + (f": {why}" if why else "")]
        else:
            source = "RAM"
            if self.n_restored:
                is_all = self.n_restored >= self.n_reused
                source = self.tier if is_all else f"RAM and {self.tier}"
                source += f" in {self.restore_ms:,.0f} ms"
            clauses = [
                f"reused {self.n_reused:,} of {self.n_prompt:,} tokens from {source}",
                f"{self.n_prompt - self.n_reused:,} computed" + (f" ({why})" if why else ""),
            ]
        if not is_kept:
            clauses.append("not kept")
        if session:
            clauses.append(f"session {json.dumps(shortened(session, 80), ensure_ascii=False)}")
        return ", ".join(clauses)


def divergence_at(
    text: str, nearest: Match, messages: Sequence[dict[str, Any]]
) -> Divergence | None:
    """Return the position and the message at which a prompt diverges from the stored text.

    Messages are found by content. None if the prompt or the stored text ends at this position.
    """
    n_agreed = nearest.n_agreed
    prompt_next = text[n_agreed : n_agreed + SHOWN_CHARS]
    if not prompt_next or not nearest.stored_next:
        return None
    texts = nearest.stored_next, prompt_next
    position = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            continue
        start = text.find(content, position)
        if start < 0:  # a template may trim content
            content = content.strip()
            start = text.find(content, position)
        if start < 0:
            continue
        if n_agreed < start:
            break
        position = start + len(content)
        if n_agreed < position:
            char = n_agreed - start
            return Divergence(n_agreed, index, message.get("role"), char, *texts)
    return Divergence(n_agreed, None, None, None, *texts)


def why_not_stored(
    prompt_ids: Sequence[int], text: str | None, match: Match, root: Root, store: BlockStore
) -> tuple[Reason, str]:
    """Return why no more of a prompt is stored, and a text that replaces the reason's text, or "".

    The tenant's blocks are compared first, so that the reason in a reply does not depend on other
    tenants.
    """
    used = (block for block in match.path if block.stop <= match.n_tokens)
    full = [block for block in used if block.n_tokens == BLOCK_TOKENS]
    start = full[-1].stop if full else 0
    next_ids = pack_ids(prompt_ids[start : start + BLOCK_TOKENS])
    gone = store.disk.gone.get(block_key(full[-1].key if full else root.key, next_ids))
    if gone is not None:
        return (Reason.EVICTED if gone is Gone.EVICTED else Reason.DAMAGED), ""
    if match.n_tokens >= MIN_ALIKE_TOKENS or match.n_agreed >= MIN_ALIKE_CHARS:
        return Reason.DIVERGED, ""
    if text:
        own = [tree for tree, _ in store.view.roots(_MAX_ROOTS, root) if tree.with_text]
        for tree in sorted(own, key=lambda tree: tree.fingerprint != root.fingerprint):
            if tree.key == root.key or not _begins_alike(tree, text, store):
                continue
            if tree.fingerprint != root.fingerprint:
                return Reason.OTHER_MODEL, ""
            stored, live = map(layout_in_words, (tree.layout, root.layout))
            stored += ", in an older format or other groups" if stored == live else ""
            reason = Reason.OTHER_PRECISION
            return reason, f"{reason.text}: {stored}; now {live}"
        for tree, _ in store.view.roots(_MAX_ROOTS):
            if not tree.shares_tenant(root) and _begins_alike(tree, text, store):
                return Reason.OTHER_NAMESPACE, ""
    return Reason.NOTHING_ALIKE, ""


def _begins_alike(root: Root, text: str, store: BlockStore) -> bool:
    """Whether a text has the first MIN_ALIKE_CHARS characters (or all) of a tree's first block."""
    return any(
        block.text and common_prefix(block.text, text, 0) >= min(MIN_ALIKE_CHARS, len(block.text))
        for block in store.children(root.key, text)
    )


class RequestLog:
    """The last requests as JSON objects. `with_text`: they may quote prompts. Any thread.

    Records never gain or lose fields, so a thread may read a record while another sets a field.
    """

    def __init__(self, *, with_text: bool = True) -> None:
        self._with_text = with_text
        self._records: deque[dict[str, Any]] = deque(maxlen=KEPT)
        """The requests that entered last come first."""

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add a record (`RequestState.record`), and return the record that is stored."""
        if not (self._with_text and record["kept"]):
            record = unquoted(record)
        self._records.appendleft(record)
        return record

    def timed(self, request_id: str, first_token_s: float | None) -> dict[str, Any] | None:
        """Set a request's seconds from queueing to first token; return its record, or None."""
        for record in self._records.copy():
            if record["id"] == request_id:
                record["first_token_s"] = first_token_s
                return record
        return None

    def forget(self, session: str | None, namespace: str | None = None) -> None:
        """Remove a deleted session's records, and all quotations in the other records.

        A session of this name in another namespace keeps its records, unless `namespace` is None.
        """
        for record in self._records.copy():
            record["divergence"] = unquoted(record)["divergence"]
            if record["session"] == session and namespace in (None, record["namespace"]):
                with suppress(ValueError):  # newer records have replaced this record
                    self._records.remove(record)

    def records(self, *, with_text: bool = True) -> list[dict[str, Any]]:
        """Return the records, newest first; without `with_text` they quote no prompt."""
        # A request that waited for memory entered after requests that arrived later.
        records = sorted(self._records.copy(), key=lambda record: record["received"], reverse=True)
        return [record if with_text else unquoted(record) for record in records]


class Times:
    """A histogram of times, by outcome. bounds_s: the inclusive upper ends of the buckets."""

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
    """All metrics. `store` returns `BlockStore.stats()`, `memory` returns `Memory.parts()`."""

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
            "Time from queueing a request to its first token.",
            _FIRST_TOKEN_S,
        )
        self._inter_token = Times(
            "kvpersist_inter_token_seconds", "Time between two tokens of a reply.", _INTER_TOKEN_S
        )

    def count(self, outcome: str, n_prefilled: int) -> None:
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
        """Yield the metrics of requests, memory and the store. `generate_latest` calls this."""
        from prometheus_client.metrics_core import CounterMetricFamily as Count
        from prometheus_client.metrics_core import GaugeMetricFamily as Gauge

        with COUNTING:
            created_s = self._created_s
            requests = Count("kvpersist_requests", "Requests, by outcome.", labels=["outcome"])
            for outcome, n_requests in self._n_requests.items():
                requests.add_metric([outcome], n_requests, created_s)
            prefilled = Count("kvpersist_prefilled_tokens", "Prompt tokens that were computed.")
            prefilled.add_metric([], self._n_prefilled, created_s)
            times = [part.collect(created_s) for part in (self._first_token, self._inter_token)]
        yield from (requests, prefilled, *times)
        used = Gauge("kvpersist_memory_bytes", "Bytes of memory, by part.", labels=["part"])
        for area, n_bytes in (memory := self._memory() or {}).items():
            if area not in ("waiting", "pressure"):
                used.add_metric([area], n_bytes)
        yield used
        waiting = memory.get("waiting", 0)
        yield Gauge("kvpersist_memory_waiting", "Requests that wait for memory.", value=waiting)
        stats = self._store()
        if stats is None:
            return
        for make, key, name, description in (
            (Gauge, "blocks", "blocks", "Blocks in the tier."),
            (Gauge, "checkpoints", "checkpoints", "Checkpoints in the tier."),
            (Gauge, "bytes", "bytes", "Bytes of blocks and checkpoints."),
            (Gauge, "max_bytes", "max_bytes", "The tier's budget in bytes."),
            (Count, "evicted", "evictions", "Blocks and checkpoints evicted."),
            (Count, "reused_tokens", "reused_tokens", "Prompt tokens reused from the tier."),
            (Count, "asked_again_tokens", "asked_again_tokens", "Tokens needed after eviction."),
            (Count, "written_bytes", "written_bytes", "Bytes written to the tier."),
        ):
            family = make(f"kvpersist_{name}", description, labels=["tier"])
            for tier, tier_stats in stats["tiers"].items():
                if key in tier_stats:
                    family.add_metric([tier], tier_stats[key])
            yield family
        queue = stats["queue"]
        for make, value, name, description in (
            (Gauge, queue["tasks"], "queue_tasks", "Waiting and running tasks of the writer."),
            (Gauge, queue["bytes"], "queue_bytes", "Bytes that wait to be written."),
            (Gauge, queue["max_bytes"], "queue_max_bytes", "The limit of kvpersist_queue_bytes."),
            (Gauge, len(stats["failures"]), "failures", "Kinds of failures since the last save."),
            (Count, stats["turns_saved"], "saved_turns", "Turns written to the disk."),
            (Count, stats["turns_not_saved"], "dropped_turns", "Turns that could not be written."),
            (Count, stats["blocks_quarantined"], "quarantined", "Records moved to quarantine."),
        ):
            yield make(f"kvpersist_{name}", description, value=value)
        failed = Count("kvpersist_failed", "Failures since the start.", labels=["kind"])
        # This counter exists from the start: Prometheus counts only increases, and would miss
        # the first failure if the counter appeared with it.
        for kind, n_failed in {"save a turn: disk": 0, **stats["failed"]}.items():
            failed.add_metric([kind], n_failed)
        yield failed
