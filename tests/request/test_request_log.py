"""The log of the last requests, and the metrics of all requests."""

from __future__ import annotations

import sys
import time

import pytest

from mlx_lm_kvpersist.request.outcome import (
    KEPT,
    Divergence,
    Kind,
    Metrics,
    Outcome,
    RequestLog,
)
from mlx_lm_kvpersist.request.serving import RequestState


def test_the_log_keeps_a_limited_number_of_newest_requests() -> None:
    log = RequestLog()
    ids = [
        log.add(RequestState().record("m", Outcome(Kind.MISS, 9)))["id"] for _ in range(KEPT + 1)
    ]
    assert len(set(ids)) == KEPT + 1
    assert [record["id"] for record in log.records()] == ids[:0:-1]


def test_prompts_are_quoted_only_if_kept_and_text_is_wanted() -> None:
    quote = Divergence(5, 0, "user", 3, stored="a secret", asked="a question")
    outcome = Outcome(Kind.DIVERGE, 9, divergence=quote)
    hidden = {**vars(quote), "stored": None, "asked": None}
    log = RequestLog()
    assert log.add(RequestState("s").record("m", outcome))["divergence"] == vars(quote)
    assert log.add(RequestState("s", is_kept=False).record("m", outcome))["divergence"] == hidden
    assert (
        RequestLog(with_text=False).add(RequestState("s").record("m", outcome))["divergence"]
        == hidden
    )
    assert [record["divergence"] for record in log.records(with_text=False)] == [hidden, hidden]
    assert [record["divergence"] for record in log.records()] == [hidden, vars(quote)]


def test_deleting_a_session_removes_its_records_and_all_quotes() -> None:
    log = RequestLog()
    quote = Divergence(0, None, None, None, stored="a secret", asked="a question")
    for name in ("deleted", "other", None):
        log.add(RequestState(name).record("model", Outcome(Kind.DIVERGE, 9, divergence=quote)))
    log.forget("deleted")
    records = log.records()
    assert [record["session"] for record in records] == [None, "other"]
    assert "secret" not in str(records)  # another session's record may quote the deleted one
    log.add(RequestState("new").record("model", Outcome(Kind.DIVERGE, 9, divergence=quote)))
    assert "secret" in str(log.records()[0])


def test_a_record_has_the_time_of_arrival_although_the_request_waits() -> None:
    before_s = time.time()
    state = RequestState()
    arrived_s = time.time()
    time.sleep(0.01)  # the request waits for memory
    assert before_s <= state.record("m", Outcome(Kind.MISS, 9))["received"] <= arrived_s


def test_the_time_of_the_first_token_is_added_to_its_record() -> None:
    log = RequestLog()
    first, second = (log.add(RequestState().record("m", Outcome(Kind.MISS, 9))) for _ in range(2))
    log.timed(first["id"], 0.25)
    log.timed("no-such", 1.0)
    newest, oldest = log.records()
    assert (newest["id"], newest["first_token_s"]) == (second["id"], None)
    assert (oldest["id"], oldest["first_token_s"]) == (first["id"], 0.25)


def test_metrics_count_no_times_for_a_reply_without_tokens() -> None:
    metrics = Metrics(lambda: None)
    for times_s in ([], [0.1], [0.1, 0.3, 0.4]):
        metrics.observe("MISS", times_s)
    text = metrics.exposed().decode()
    assert 'kvpersist_first_token_seconds_count{outcome="MISS"} 2.0' in text
    assert 'kvpersist_inter_token_seconds_count{outcome="MISS"} 2.0' in text


def test_requests_are_counted_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing prometheus_client takes 20 ms, and would delay a reply."""
    for name in ("prometheus_client", "prometheus_client.metrics_core"):
        monkeypatch.setitem(sys.modules, name, None)
    metrics = Metrics(lambda: None)
    for _ in range(1000):
        metrics.count("HIT", 2)
        metrics.observe("HIT", [0.1, 0.2])
    monkeypatch.undo()
    text = metrics.exposed().decode()
    assert 'kvpersist_requests_total{outcome="HIT"} 1000.0' in text
    assert "kvpersist_prefilled_tokens_total 2000.0" in text
    assert 'kvpersist_inter_token_seconds_count{outcome="HIT"} 1000.0' in text
    assert "kvpersist_inter_token_seconds_created" in text


def test_a_time_counts_in_buckets_with_an_equal_or_larger_bound() -> None:
    metrics = Metrics(lambda: None)
    metrics.observe("HIT", [0.1])
    metrics.observe("HIT", [300.0])
    text = metrics.exposed().decode()
    bucket = 'kvpersist_first_token_seconds_bucket{le="%s",outcome="HIT"} %s'
    for end, n in (("0.05", 0.0), ("0.1", 1.0), ("250.0", 1.0), ("+Inf", 2.0)):
        assert bucket % (end, n) in text
    assert 'kvpersist_first_token_seconds_sum{outcome="HIT"} 300.1' in text


def test_a_request_that_waited_keeps_its_place_in_the_order_of_arrival() -> None:
    log = RequestLog()
    first, second, third = RequestState(), RequestState(), RequestState()
    second.received_s, third.received_s = first.received_s + 1, first.received_s + 2
    for state in (first, third, second):  # the second waited for memory
        log.add(state.record("m", Outcome(Kind.MISS, 9)))
    assert [record["id"] for record in log.records()] == [third.id, second.id, first.id]
