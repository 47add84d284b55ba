"""What the machine offers: limits of control groups, and the pressure on its memory."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mlx_lm_kvpersist.request import machine
from mlx_lm_kvpersist.request.machine import Pressure, cgroup_bytes


def test_a_signal_raises_the_pressure_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "RAISED_S", 0.05)
    pressure = Pressure()
    pressure.raised()
    assert pressure.level == 4
    for _ in range(100):
        if pressure.level == 1:
            return
        time.sleep(0.05)
    raise AssertionError(pressure.level)


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert list(cgroup_bytes(tmp_path)) == []
    write("proc/self/cgroup", "0::/a/b\n4:cpu,memory:/c\n1:pids:/\n")
    write("sys/fs/cgroup/memory.max", "max\n")
    write("sys/fs/cgroup/a/memory.max", "1000\n")
    write("sys/fs/cgroup/a/memory.stat", "file 900\nanon 300\n")
    write("sys/fs/cgroup/a/b/memory.max", "5000\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000\n")
    assert list(cgroup_bytes(tmp_path)) == [5000, 700, 7000]
