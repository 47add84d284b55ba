from __future__ import annotations

from mlx_lm_kvpersist.request.costs import CostModel, Rate


def test_a_rate_follows_what_is_measured() -> None:
    rate = Rate()
    assert rate.seconds(10) is None
    rate.learn(100, 1.0)
    assert rate.seconds(50) == 0.5
    for _ in range(50):
        rate.learn(1000, 1.0)
    seconds = rate.seconds(1000)
    assert seconds is not None and abs(seconds - 1.0) < 0.01
    rate.learn(0, 1.0)
    rate.learn(5, 0.0)
    assert rate.seconds(1000) == seconds


def test_what_is_unknown_is_worth_trying() -> None:
    costs = CostModel()
    assert costs.worth_it(1, 0, 1 << 30)
    costs.learn_prefill(1000, 1.0)
    assert costs.worth_it(1, 0, 1 << 30)


def test_the_cheaper_way_is_taken() -> None:
    costs = CostModel()
    costs.learn_prefill(1000, 1.0)
    costs.from_disk.learn(1e9, 1.0)
    costs.from_ram.learn(1e10, 1.0)
    # A block of 16 MB takes 16 ms from disk: as long as 16 tokens of prefill.
    assert costs.worth_it(17, 0, 16_000_000)
    assert not costs.worth_it(15, 0, 16_000_000)
    assert costs.worth_it(15, 16_000_000, 0)
    assert not costs.worth_it(1, 16_000_000, 0)


def test_short_prefills_teach_nothing() -> None:
    costs = CostModel()
    costs.learn_prefill(10, 10.0)
    assert costs.prefill.per_s is None
