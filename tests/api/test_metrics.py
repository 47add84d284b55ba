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
