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

    def __init__(self, clock: Clock, n_first: int) -> None:
        self.done: list[str] = []
        self._clock = clock
        self.idle_work = IdleWork(self._steps("first", n_first), self._steps("later", 9), 0.1)

    def _steps(self, name: str, n_steps: int) -> Steps[None]:
        for _ in range(n_steps):
            self._clock.now_s += STEP_S
            self.done.append(name)
            yield


def test_replies_that_leave_no_pause_lose_little_and_only_after_a_while(clock: Clock) -> None:
    work = Work(clock, 50)
    for name, n_steps in (("first", 50), ("later", 9)):
        began_s, n_done = clock.now_s, 0
        while n_done < n_steps:
            before_s, n_before = clock.now_s, n_done
            work.idle_work.busy()
            n_done = work.done.count(name)
            assert n_done <= n_before + 1 and clock.now_s - before_s <= STEP_S
            assert not n_done or clock.now_s >= began_s + idle.PATIENCE_S
            clock.now_s += 0.05
        busy_s = clock.now_s - began_s - idle.PATIENCE_S
        assert 0.03 < n_steps * STEP_S / busy_s < 0.05
        clock.now_s += 1.0
        work.idle_work.busy()  # finds that these have ended
    clock.now_s += 1e6
    work.idle_work.busy()
    assert len(work.done) == 59


def test_what_is_done_later_waits_for_quiet(clock: Clock) -> None:
    work = Work(clock, 8)
    before_s = clock.now_s
    work.idle_work.idle(0.0)
    assert 0.1 <= clock.now_s - before_s < 0.1 + 2 * STEP_S and len(work.done) < 8
    for idle_s in (0.1, 1.9):
        work.idle_work.idle(idle_s)
        assert "later" not in work.done
    work.idle_work.idle(2.0)
    assert 5 <= (n_done := work.done.count("later")) < 9
    work.idle_work.busy()  # a request comes, and goes again soon
    work.idle_work.idle(1.9)
    assert work.done.count("later") == n_done
    for _ in range(2):
        work.idle_work.idle(2.0)
    assert work.done.count("later") == 9
