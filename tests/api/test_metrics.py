"""What is counted of replies; tests/server asks a real server."""

from __future__ import annotations

import sys

import pytest

from mlx_lm_kvpersist.api.metrics import Metrics


def test_a_reply_that_did_not_begin_has_no_times() -> None:
    metrics = Metrics(lambda: None)
    for times_s in ([], [0.1], [0.1, 0.3, 0.4]):
        metrics.observe("MISS", times_s)
    text = metrics.exposed().decode()
    assert 'kvpersist_first_token_seconds_count{outcome="MISS"} 2.0' in text
    assert 'kvpersist_inter_token_seconds_count{outcome="MISS"} 2.0' in text


def test_requests_are_counted_without_prometheus_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes 20 ms to import, and a reply would wait for that."""
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


def test_a_time_is_in_all_buckets_that_end_at_it_or_later() -> None:
    metrics = Metrics(lambda: None)
    metrics.observe("HIT", [0.1])
    metrics.observe("HIT", [300.0])
    text = metrics.exposed().decode()
    bucket = 'kvpersist_first_token_seconds_bucket{le="%s",outcome="HIT"} %s'
    for end, n in (("0.05", 0.0), ("0.1", 1.0), ("250.0", 1.0), ("+Inf", 2.0)):
        assert bucket % (end, n) in text
    assert 'kvpersist_first_token_seconds_sum{outcome="HIT"} 300.1' in text
