"""What is counted of replies; tests/server asks a real server."""

from __future__ import annotations

from mlx_lm_kvpersist.api.metrics import Metrics


def test_a_reply_that_did_not_begin_has_no_times() -> None:
    metrics = Metrics(lambda: None)
    for times_s in ([], [0.1], [0.1, 0.3, 0.4]):
        metrics.observe("MISS", times_s)
    text = metrics.exposed().decode()
    assert 'kvpersist_first_token_seconds_count{outcome="MISS"} 2.0' in text
    assert 'kvpersist_inter_token_seconds_count{outcome="MISS"} 2.0' in text


def test_events_wait_for_the_first_question_and_none_is_lost() -> None:
    metrics = Metrics(lambda: None)
    for _ in range(1000):
        metrics.count("HIT", 2)
        metrics.observe("HIT", [0.1, 0.2])
    text = metrics.exposed().decode()
    assert 'kvpersist_requests_total{outcome="HIT"} 1000.0' in text
    assert "kvpersist_prefilled_tokens_total 2000.0" in text
    assert 'kvpersist_inter_token_seconds_count{outcome="HIT"} 1000.0' in text
