"""The numbers of `/metrics` on a real server are correct."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlx_lm_kvpersist.api.session_keys import KEEP_HEADER
from tests.support import (
    Message,
    Reply,
    ServerProcess,
    StartServer,
    synthetic_text,
    wait_until,
)
from tests.support.host import REPOSITORY

from .stored import wait_for_writer

DOCS = REPOSITORY / "docs"
SYSTEM: Message = {"role": "system", "content": synthetic_text(600, seed=31)}
Samples = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    """A server with a disk budget that is too small for `served`, and a RAM budget of 0."""
    return started.with_plugin(tiny_model, "--kvpersist-disk", "1960K", "--kvpersist-ram", "0")


def scraped(server: ServerProcess) -> Samples:
    """Return every sample by its name and the values of its labels."""
    status, headers, body = server.request("GET", "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def samples_of(samples: Samples, name: str) -> dict[str, float]:
    """Return a metric's samples by the value of its only label."""
    values = {
        labels[0]: value for (full, labels), value in samples.items() if full == f"kvpersist_{name}"
    }
    assert values, name
    return values


def get_json(server: ServerProcess, path: str) -> Any:
    return json.loads(server.request("GET", f"/v1/kvpersist/{path}")[2])


@pytest.fixture(scope="module")
def served(server: ServerProcess) -> list[Reply]:
    """Replies with every outcome that a text prompt can have.

    A reply is saved after its end, and before the next reply begins.
    """
    texts = [synthetic_text(1500, seed=n) for n in range(32, 36)]
    first: list[Message] = [SYSTEM, {"role": "user", "content": texts[0]}]
    last: list[Message] = [{"role": "user", "content": "Bye"}]
    replies = [server.chat(first, max_tokens=12)]
    replies.append(server.chat(last, max_tokens=1, headers={KEEP_HEADER: "no"}))
    wait_for_writer(server)
    replies.append(server.chat(first, stream=True, max_tokens=7))
    first += [{"role": "assistant", "content": replies[0].text}, {"role": "user", "content": "So?"}]
    replies.append(server.chat(first, max_tokens=5, seed=1))
    for text in texts[1:]:
        replies.append(server.chat([SYSTEM, {"role": "user", "content": text}], max_tokens=3))
    replies.append(server.complete("b", max_tokens=1))
    replies.append(server.chat(last, max_tokens=1, headers={KEEP_HEADER: "no"}))
    wait_for_writer(server)
    wait_until(
        lambda: (
            sum(samples_of(scraped(server), "first_token_seconds_count").values()) == len(replies)
        ),
        "all replies are counted",
    )
    return replies


def test_requests_and_tokens_are_counted_by_outcome(
    server: ServerProcess, served: list[Reply]
) -> None:
    samples, records = scraped(server), get_json(server, "requests")
    assert len(records) == len(served)
    outcomes = Counter(record["outcome"] for record in records)
    assert samples_of(samples, "requests_total") == outcomes and {"MISS", "EXACT", "DIVERGE"} <= {
        *outcomes
    }
    n_reused = sum(reply.cached_tokens for reply in served)
    n_prompt = sum(reply.prompt_tokens for reply in served)
    assert samples["kvpersist_prefilled_tokens_total", ()] == n_prompt - n_reused
    n_restored = sum(record["restored_tokens"] for record in records)
    reused = {"ram": n_reused - n_restored, "disk": n_restored}
    assert samples_of(samples, "reused_tokens_total") == reused and n_restored > 0


def test_times_are_observed_by_outcome(server: ServerProcess, served: list[Reply]) -> None:
    samples = scraped(server)
    # If a stream begins before its prompt is looked up, its header has no outcome.
    outcomes = {record["id"]: record["outcome"] for record in get_json(server, "requests")}
    n_gaps: Counter[str] = Counter()
    for reply in served:
        n_gaps[outcomes[reply.headers["x-kvpersist-request"]]] += reply.completion_tokens - 1
    assert samples_of(samples, "first_token_seconds_count") == samples_of(samples, "requests_total")
    assert samples_of(samples, "inter_token_seconds_count") == n_gaps
    seconds = (
        samples_of(samples, "first_token_seconds_sum"),
        samples_of(samples, "inter_token_seconds_sum"),
    )
    total_s = sum(reply.total_s for reply in served)
    assert 0 < sum(seconds[0].values()) < total_s and 0 < sum(sum(s.values()) for s in seconds)
    assert sum(sum(sums.values()) for sums in seconds) <= total_s


def test_store_metrics_equal_the_stores_stats(server: ServerProcess, served: list[Reply]) -> None:
    samples, store = scraped(server), get_json(server, "stats")["store"]
    for name in ("blocks", "checkpoints", "max_bytes"):
        assert samples_of(samples, name) == {
            tier: store["tiers"][tier][name] for tier in ("ram", "disk")
        }
    folder = Path(store["folder"])
    files = (
        file
        for part in ("blocks", "checkpoints")
        for file in (folder / part).rglob("*.safetensors")
    )
    on_disk = sum(path.stat().st_size for path in files)
    assert samples_of(samples, "bytes") == {"ram": store["tiers"]["ram"]["bytes"], "disk": on_disk}
    evicted = samples_of(samples, "evictions_total")
    assert evicted == {tier: store["tiers"][tier]["evicted"] for tier in ("ram", "disk")}
    assert min(evicted.values()) > 0
    assert samples["kvpersist_saved_turns_total", ()] == store["turns_saved"] > 0
    written = store["tiers"]["disk"]["written_bytes"]
    assert samples_of(samples, "written_bytes_total") == {"disk": written} and written > on_disk
    assert store["written_turn_bytes"] == written // store["turns_saved"]
    assert written <= store["written_last_hour_bytes"] < 2 * written
    assert samples["kvpersist_queue_max_bytes", ()] == store["queue"]["max_bytes"]
    for name in ("queue_tasks", "queue_bytes", "failures", "quarantined_total"):
        assert samples[f"kvpersist_{name}", ()] == 0


def test_scrape_does_not_wait_for_generation(server: ServerProcess) -> None:
    body = {"prompt": "one", "max_tokens": 100_000, "stream": True}
    with closing(server.events("/v1/completions", body)) as events:
        next(events)
        # The whole reply takes longer.
        assert server.request("GET", "/metrics", timeout_s=60)[0] == 200


def test_damaged_files_are_counted_as_quarantined(
    server: ServerProcess, served: list[Reply]
) -> None:
    wait_for_writer(server)  # otherwise it may evict the files that are changed here
    folder = Path(get_json(server, "stats")["store"]["folder"])
    for path in (folder / "blocks").rglob("*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    talk: list[Message] = [SYSTEM, {"role": "user", "content": synthetic_text(1500, seed=35)}]
    server.chat(talk, max_tokens=1)
    wait_for_writer(server)
    n_quarantined = get_json(server, "stats")["store"]["blocks_quarantined"]
    assert scraped(server)["kvpersist_quarantined_total", ()] == n_quarantined > 0


def test_only_operators_may_scrape(server: ServerProcess) -> None:
    status, _, body = server.request("GET", "/metrics", headers={"Host": "evil.example"})
    assert status == 403 and "only for programs" in json.loads(body)["error"]["message"]


def test_dashboard_and_docs_have_exactly_the_existing_metrics(
    server: ServerProcess, served: list[Reply]
) -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    dashboard_names = {
        name for expression in expressions for name in re.findall(r"kvpersist_\w+", expression)
    }
    names = {name for name, _ in scraped(server)}
    assert len(expressions) > 10 and dashboard_names - names == set()
    # The docs and the dashboard have every metric.
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(kvpersist_\w+)` \|", page, re.MULTILINE))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    bases = {name for name in bases if not name.endswith("_created")}
    assert listed == bases
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in dashboard_names} == bases
