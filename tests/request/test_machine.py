"""What the machine offers: limits of control groups, and the pressure on its memory."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.request import machine
from mlx_lm_kvpersist.request.machine import CRITICAL, NORMAL, WARNING, Pressure, cgroup_bytes


def test_the_pressure_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    pressure, seen = Pressure(), list[int]()
    levels = iter([CRITICAL, CRITICAL, WARNING])
    clock = SimpleNamespace(sleep=lambda seconds: seen.append(pressure.level))
    monkeypatch.setattr(machine, "_system_level", lambda: next(levels))
    monkeypatch.setattr(machine, "time", clock)
    assert pressure.level == NORMAL
    with pytest.raises(StopIteration):
        pressure._watch()
    assert seen == [CRITICAL, CRITICAL, WARNING]


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


@pytest.mark.parametrize("working_set", [None, 12 << 30])
def test_a_system_without_proc_offers_a_part_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working_set: int | None
) -> None:
    """macOS has no /proc. There Metal says what it recommends; MLX on its CPU says nothing."""
    info = {} if working_set is None else {"max_recommended_working_set_size": working_set}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 5)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 2)
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 100}.get)
    monkeypatch.setattr(machine, "cgroup_bytes", lambda: cgroup_bytes(tmp_path))
    assert machine.offered_bytes() == (working_set or 16384 * 75 + 7)
