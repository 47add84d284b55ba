from __future__ import annotations

import threading
from pathlib import Path

from mlx_lm_kvpersist.match.tree import Match
from mlx_lm_kvpersist.request.costs import MIN_PREFILL_TOKENS, Rate, ReusePolicy
from mlx_lm_kvpersist.store.index import Index
from tests.store.conftest import ROOT, chain


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


def test_one_odd_measurement_moves_a_rate_by_a_fifth_of_the_way() -> None:
    rate = Rate()
    for n_units, expected in ((100, 100.0), (1, 80.2), (580.2, 180.2)):
        rate.learn(n_units, 1.0)
        assert rate.per_s is not None and abs(rate.per_s - expected) < 1e-9


def test_what_is_unknown_is_worth_trying() -> None:
    costs = ReusePolicy()
    assert costs.canary and costs.min_reuse is None
    assert costs.worth_it(1, 0, 1 << 30)
    costs.prefill.learn(1000, 1.0)
    assert costs.worth_it(1, 0, 1 << 30)


def test_the_cheaper_way_is_taken() -> None:
    costs = ReusePolicy()
    costs.prefill.learn(1000, 1.0)
    costs.from_disk.learn(1e9, 1.0)
    costs.from_ram.learn(1e10, 1.0)
    # A block of 16 MB takes 16 ms from disk: as long as 16 tokens of prefill.
    assert costs.worth_it(17, 0, 16_000_000)
    assert not costs.worth_it(15, 0, 16_000_000)
    assert costs.worth_it(15, 16_000_000, 0)
    assert not costs.worth_it(1, 16_000_000, 0)


def test_short_prefills_teach_nothing() -> None:
    costs = ReusePolicy()
    costs.prefill.learn(MIN_PREFILL_TOKENS - 1, 10.0)
    assert costs.prefill.per_s is None
    costs.prefill.learn(MIN_PREFILL_TOKENS, 10.0)
    assert costs.prefill.per_s == MIN_PREFILL_TOKENS / 10


def test_a17_a_branch_that_goes_round_in_circles_has_an_end(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    nodes = chain([1], [2], [3])
    index.add_blocks(ROOT, [(node, 1) for node in nodes])
    index._db.execute("UPDATE blocks SET parent = ? WHERE key = ?", (nodes[2].key, nodes[0].key))
    index._db.execute("UPDATE blocks SET parent = key, ids = x'' WHERE key = ?", (nodes[1].key,))
    index._db.commit()
    ended = []

    def ask() -> None:
        for node in nodes:
            match = Match((node,), 1, 50, at_end=False)
            policy = ReusePolicy(min_reuse=0.5)
            ended.append(policy.tokens_to_reuse(match, 1, index, None))  # type: ignore[arg-type]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert len(ended) == 3
    index.close()
