"""Repeated failures are counted, and each kind is logged once an hour."""

from __future__ import annotations

import errno
import logging
import threading
import time

import pytest

from mlx_lm_kvpersist.errors import LOG_AGAIN_S, Failures, remedy


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "let this user write"),
        (OSError(errno.EROFS, "Read-only file system"), "mount the volume"),
        (OSError(errno.ENOSPC, "No space left on device"), "free space"),
        (OSError("no route"), ""),
        (ValueError("another"), ""),
    ],
)
def test_only_known_disk_errors_have_a_remedy(error: Exception, advice: str) -> None:
    assert remedy(error).startswith(f"; {advice}") if advice else remedy(error) == ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    return now_s


def test_each_kind_is_logged_hourly_with_the_suppressed_count(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    failed = Failures(logging.getLogger("a test"))
    for hour in range(3):
        clock[0] = 5.0 + hour * LOG_AGAIN_S
        for n in range(4):
            failed.add("no room for %s: 100%%", f"turn {n}", kind="full", level=logging.ERROR)
            failed.add("block %s", n)
    assert failed.counts == {"full": 12, "block …": 12}
    more = " (3 more like this since the last such line)"
    lines = [record.getMessage() for record in caplog.records if record.levelname != "DEBUG"]
    first = ["kvpersist: no room for turn 0: 100%", "kvpersist: block 0"]
    assert lines == [*first, *(f"{line}{more}" for line in first * 2)]
    assert len(caplog.records) == 24
    assert {record.name for record in caplog.records} == {"a test"}


def test_failures_of_several_threads_are_all_counted(caplog: pytest.LogCaptureFixture) -> None:
    failed = Failures(logging.getLogger("a test"))

    def fail() -> None:
        for _ in range(500):
            failed.add("said")

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed.counts["said"] == 2000 and len(caplog.records) == 1
