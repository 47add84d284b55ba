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
    found = Speed(memory, Pace(), n_positions=1024)
    limits = found.limits(0.5)
    assert limits is not None and limits.n_positions == 1024
    assert limits is not None and (limits.max_stall_s, limits.max_unused_bytes) == (0.5, 64 << 20)
    assert limits.most_tokens(0) == memory.most_tokens(0) == 64
    limits.took(512, 0, 1024 << 20)
    assert limits.most_tokens(0) == memory.most_tokens(0) < 32 + 1
    limits.pace.learn(0, 512, 1.0)
    assert found.pace.seconds(0, 1024) == pytest.approx(2.0)
    assert found.describe() == {
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


ASKED: dict[str, Callable[[Speed], object]] = {
    "compute_s": lambda speed: speed.compute_s(0, 5000),
    "describe": Speed.describe,
    "tokens": lambda speed: speed.pace.tokens(5000, 1.0),
    "seconds": lambda speed: speed.pace.seconds(0, 5000),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_the_generation_thread_may_learn_while_another_asks(ask: Callable[[Speed], object]) -> None:
    speed, numbers = Speed(), count(1)

    def learn_pace() -> None:
        speed.pace.learn(1 << next(numbers), 512, 1.0)

    def learn_rate() -> None:
        speed.learn(f"tier {next(numbers)}", 100 * MB, 1.0)

    learn_pace()
    learn_pace()  # the first chunk of a size may not count
    learn_rate()
    expected = ask(speed)
    speed.pace._sums = Filling(speed.pace._sums, learn_pace)
    speed.rates = Filling(speed.rates, learn_rate)
    before = next(numbers)
    assert ask(speed) == expected
    assert next(numbers) > before + 1  # it has learned
