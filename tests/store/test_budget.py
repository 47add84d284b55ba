"""What the store may use: bytes written within an hour, sizes that files are expected to have."""

from __future__ import annotations

from mlx_lm_kvpersist.store.budget import WriteMeter


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
