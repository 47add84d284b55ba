from __future__ import annotations

import pytest

from mlx_lm_kvpersist.cache.measuring.prefill_memory import PrefillMemory
from mlx_lm_kvpersist.host.scheduling.pace import Pace
from mlx_lm_kvpersist.request.model import MIN_RESTORE_BYTES, Speed
from mlx_lm_kvpersist.store.tier import DISK, RAM

MB = 10**6


def test_a_rate_follows_what_is_measured() -> None:
    """One odd measurement moves it by a fifth of the way."""
    found = Speed()
    for n_bytes, expected in ((100 * MB, 100), (10 * MB, 82), (582 * MB, 182)):
        found.learn(DISK, n_bytes, 1.0)
        assert found.rates[DISK] == pytest.approx(expected * MB)
    for _ in range(50):
        found.learn(DISK, 1000 * MB, 1.0)
    assert found.rates[DISK] == pytest.approx(1000 * MB, rel=0.01)
    before = dict(found.rates)
    found.learn(DISK, 0, 1.0)
    found.learn(DISK, 5 * MB, 0.0)
    assert found.rates == before


def test_a_small_restore_teaches_no_rate() -> None:
    found = Speed()
    found.learn(DISK, MIN_RESTORE_BYTES - 1, 2.0)
    assert not found.rates
    found.learn(DISK, MIN_RESTORE_BYTES, 2.0)
    assert found.rates == {DISK: MIN_RESTORE_BYTES / 2}


def test_the_server_computes_at_the_pace_that_is_learned_and_within_the_memory() -> None:
    assert Speed().limits(0.5) is None
    memory = PrefillMemory(1 << 20, 0.0, 0.0, 64 << 20)
    found = Speed(memory, Pace())
    limits = found.limits(0.5)
    assert limits is not None and (limits.max_stall_s, limits.max_unused_bytes) == (0.5, 64 << 20)
    assert limits.most_tokens(0) == memory.most_tokens(0) == 64
    limits.pace.learn(0, 512, 1.0)
    assert found.pace.seconds(0, 1024) == pytest.approx(2.0)
    assert found.describe() == {
        "prefill_tokens_per_s": {"0": 512.0},
        "restore_bytes_per_s": {RAM: None, DISK: None},
    }
