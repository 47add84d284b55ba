"""Failures that repeat are counted, and each kind is logged once an hour."""

from __future__ import annotations

import logging
import threading

import pytest

from mlx_lm_kvpersist import failures
from mlx_lm_kvpersist.failures import LOG_AGAIN_S, Failures


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [5.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: now_s[0])
    return now_s


def test_each_kind_is_logged_once_an_hour_with_the_number_of_those_that_were_not(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failed = Failures(logging.getLogger("a test"))
    for hour in range(3):
        clock[0] = 5.0 + hour * LOG_AGAIN_S
        for n in range(4):
            failed.add("full", "no room for %s: 100%%", f"turn {n}", level=logging.ERROR)
            failed.add("damaged", "block %d", n)
    assert failed.counts == {"full": 12, "damaged": 12}
    more = " (3 more like this since the last such line)"
    said = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    first = ["no room for turn 0: 100%", "block 0"]
    assert said == [*first, *(f"{one}{more}" for one in first * 2)]
    assert len(caplog.records) == 24
    assert {record.name for record in caplog.records} == {"a test"}


def test_no_failure_of_several_threads_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    failed = Failures(logging.getLogger("a test"))
    threads = [
        threading.Thread(target=lambda: [failed.add("kind", "said") for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed.counts["kind"] == 2000 and len(caplog.records) == 1
