"""What the store may use: bytes written within an hour, sizes that files are expected to have."""

from __future__ import annotations

import shutil
from pathlib import Path

from mlx_lm_kvpersist.store.budget import Space, StoreLimits, WriteMeter, free_bytes


def test_free_space_is_mentioned_once_it_is_below_the_floor() -> None:
    """A volume that has just the space to leave is not short of it."""
    store = Path("/store")
    enough = Space(store, 0, 2 << 30, 5 << 30, 5 << 30)
    assert str(enough) == "/store (0 B of 2.0 GiB, 5.0 GiB free)"
    assert str(Space(store, 0, 2 << 30, (5 << 30) - 1, 5 << 30)) == (
        "/store (0 B of 2.0 GiB, 5.0 GiB free; "
        "less than the 5.0 GiB of --kvpersist-min-free, so nothing new is stored)"
    )


def test_free_space_is_that_of_the_volume(tmp_path: Path) -> None:
    assert 0 < free_bytes(tmp_path) <= shutil.disk_usage(tmp_path).total


def test_no_floor_and_no_hourly_limit_unless_asked_for() -> None:
    limits = StoreLimits(1, 2)
    assert (limits.min_free_bytes, limits.max_hourly_bytes) == (0, None)
    assert limits.verify and not limits.fsync


def test_d_what_was_written_an_hour_ago_is_refunded() -> None:
    now = 0.0
    meter = WriteMeter(clock=lambda: now)
    meter.add(100)
    now = 1800.0
    meter.add(20)
    assert meter.last_hour_bytes() == 120
    now = 3600.0
    assert meter.last_hour_bytes() == 120
    now = 3601.0
    assert meter.last_hour_bytes() == 20
    now = 9000.0
    assert meter.last_hour_bytes() == 0
    meter.add(7)
    assert (meter.last_hour_bytes(), meter.total_bytes) == (7, 127)


def test_writes_older_than_an_hour_take_no_memory() -> None:
    """Without a limit nobody asks how much was written."""
    now = 0.0
    meter = WriteMeter(clock=lambda: now)
    for _ in range(100):
        now += 1800.0
        meter.add(1)
    assert len(meter._written) <= 3
