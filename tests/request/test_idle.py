"""Work in steps: when it is done, and how much of the replies' time it takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlx_lm_kvpersist.cache.steps import Steps
from mlx_lm_kvpersist.request import idle
from mlx_lm_kvpersist.request.idle import IdleWork

STEP_S = 0.02


class Clock:
    """A time that only the steps and the test let pass."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(idle, "time", made)
    monkeypatch.setattr(idle, "mx", SimpleNamespace(synchronize=lambda: None))
    return made


class Work:
    """Counts the steps that are done of it: `n_first`, then nine."""

    def __init__(self, clock: Clock, n_first: int, *, is_urgent: bool = True) -> None:
        self.done: list[str] = []
        self._clock = clock
        steps = self._steps("first", n_first)
        self.idle_work = IdleWork(steps, lambda: self._steps("later", 9), 0.1, is_urgent=is_urgent)

    def _steps(self, name: str, n_steps: int) -> Steps[None]:
        for _ in range(n_steps):
            self._clock.now_s += STEP_S
            self.done.append(name)
            yield


def test_replies_that_leave_no_pause_lose_little_and_only_after_a_while(clock: Clock) -> None:
    work, began_s = Work(clock, 50), clock.now_s
    while len(work.done) < 50:
        before_s, n_before = clock.now_s, len(work.done)
        work.idle_work.busy()
        assert len(work.done) <= n_before + 1 and clock.now_s - before_s <= STEP_S
        assert not work.done or clock.now_s >= began_s + idle.PATIENCE_S
        clock.now_s += 0.05
    busy_s = clock.now_s - began_s - idle.PATIENCE_S
    assert 0.03 < 50 * STEP_S / busy_s < 0.05
    for _ in range(100):
        clock.now_s += 10.0
        work.idle_work.busy()
    assert "later" not in work.done  # it needs memory


def test_what_is_not_urgent_never_takes_time_from_replies(clock: Clock) -> None:
    work = Work(clock, 5, is_urgent=False)
    clock.now_s += 1e6
    work.idle_work.busy()
    assert not work.done
    work.idle_work.idle(0.0)
    assert work.done == ["first"] * 5


def test_a_request_waits_for_few_steps_and_ends_what_is_done_later(clock: Clock) -> None:
    work = Work(clock, 8)
    before_s = clock.now_s
    work.idle_work.idle(0.0)
    assert 0.1 <= clock.now_s - before_s < 0.1 + 2 * STEP_S and len(work.done) < 8
    for idle_s in (0.1, 1.9):
        work.idle_work.idle(idle_s)
        assert "later" not in work.done
    work.idle_work.idle(2.0)
    assert 5 <= (n_in_vain := work.done.count("later")) < 9
    work.idle_work.pause()
    work.idle_work.idle(3.9)
    assert work.done.count("later") == n_in_vain
    for _ in range(3):
        work.idle_work.idle(4.0)  # from the beginning, and no more once it has ended
    assert work.done.count("later") == n_in_vain + 9
