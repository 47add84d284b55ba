from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.measuring.prefill_memory import PrefillMemory
from mlx_lm_kvpersist.host.scheduling.pace import Pace
from mlx_lm_kvpersist.request.model import MIN_RESTORE_BYTES, Speed
from mlx_lm_kvpersist.store.records import DISK, RAM

MB = 10**6


def test_a_rate_moves_slowly_to_the_measured_rate() -> None:
    """One measurement moves the rate by a fifth of the difference."""
    speed = Speed()
    for n_bytes, expected in ((100 * MB, 100), (10 * MB, 82), (582 * MB, 182)):
        speed.learn(DISK, n_bytes, 1.0)
        assert speed.rates[DISK] == pytest.approx(expected * MB)
    for _ in range(50):
        speed.learn(DISK, 1000 * MB, 1.0)
    assert speed.rates[DISK] == pytest.approx(1000 * MB, rel=0.01)
    before = dict(speed.rates)
    speed.learn(DISK, 0, 1.0)
    speed.learn(DISK, 5 * MB, 0.0)
    assert speed.rates == before


def test_a_small_restore_does_not_change_the_rate() -> None:
    speed = Speed()
    speed.learn(DISK, MIN_RESTORE_BYTES - 1, 2.0)
    assert not speed.rates
    speed.learn(DISK, MIN_RESTORE_BYTES, 2.0)
    assert speed.rates == {DISK: MIN_RESTORE_BYTES / 2}


def test_prefill_limits_follow_the_learned_pace_and_memory() -> None:
    assert Speed().limits(0.5) is None
    memory = PrefillMemory(1 << 20, 0.0, 0.0, 64 << 20)
    speed = Speed(memory, Pace(), n_positions=1024)
    limits = speed.limits(0.5)
    assert limits is not None and limits.n_positions == 1024
    assert (limits.max_stall_s, limits.max_unused_bytes) == (0.5, 64 << 20)
    assert limits.most_tokens(0) == memory.most_tokens(0) == 64
    limits.took(512, 0, 1024 << 20)
    assert limits.most_tokens(0) == memory.most_tokens(0) < 32 + 1
    limits.pace.learn(0, 512, 1.0)
    assert speed.pace.seconds(0, 1024) == pytest.approx(2.0)
    assert speed.describe() == {
        "prefill_tokens_per_s": {"0": 512.0},
        "restore_bytes_per_s": {RAM: None, DISK: None},
    }


class Filling(dict[Any, Any]):
    """A dict that calls `fill` during an iteration, as another thread may learn at that time."""

    def __init__(self, content: dict[Any, Any], fill: Callable[[], object]) -> None:
        super().__init__(content)
        self._fill = fill
        self._is_filling = False

    def __iter__(self) -> Iterator[Any]:
        for key in dict.keys(self):
            if not self._is_filling:
                self._is_filling = True
                self._fill()
                self._is_filling = False
            yield key

    def keys(self) -> Any:
        return iter(self)

    def values(self) -> Any:
        return (self[key] for key in self)

    def items(self) -> Any:
        return ((key, self[key]) for key in self)


QUERIES: dict[str, Callable[[Speed], object]] = {
    "compute_s": lambda speed: speed.compute_s(0, 5000),
    "describe": Speed.describe,
    "tokens": lambda speed: speed.pace.tokens(5000, 1.0),
    "seconds": lambda speed: speed.pace.seconds(0, 5000),
}


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_rates_can_be_learned_while_another_thread_reads_them(
    query: Callable[[Speed], object],
) -> None:
    speed, numbers = Speed(), count(1)

    def learn_pace() -> None:
        speed.pace.learn(1 << next(numbers), 512, 1.0)

    def learn_rate() -> None:
        speed.learn(f"tier {next(numbers)}", 100 * MB, 1.0)

    learn_pace()
    learn_pace()  # the first chunk of a size may not count
    learn_rate()
    expected = query(speed)
    speed.pace._sums = Filling(speed.pace._sums, learn_pace)
    speed.rates = Filling(speed.rates, learn_rate)
    before = next(numbers)
    assert query(speed) == expected
    assert next(numbers) > before + 1  # learning took place
