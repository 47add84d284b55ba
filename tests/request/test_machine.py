"""The machine's memory: limits of control groups, and memory pressure."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.request import memory
from mlx_lm_kvpersist.request.memory import CRITICAL, NORMAL, WARNING, cgroup_bytes, pressure_level


@pytest.mark.parametrize(
    ("level", "expected"),
    [(1, NORMAL), (2, WARNING), (4, CRITICAL), (0, NORMAL), (9, NORMAL)],
)
def test_memory_pressure_follows_the_macos_level(
    monkeypatch: pytest.MonkeyPatch, level: int, expected: int
) -> None:
    def sysctlbyname(name: bytes, value: Any, *sizes: Any) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        value._obj.value = level
        return 0

    libc = SimpleNamespace(sysctlbyname=sysctlbyname)
    monkeypatch.setattr(memory, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    assert pressure_level() == expected
    libc.sysctlbyname = lambda *arguments: -1
    assert pressure_level() == NORMAL


def test_limits_of_all_control_groups_are_read(tmp_path: Path) -> None:
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
def test_without_proc_offered_memory_follows_metal_or_the_page_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working_set: int | None
) -> None:
    """macOS has no /proc. Metal recommends a size; MLX on the CPU does not."""
    info = {} if working_set is None else {"max_recommended_working_set_size": working_set}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 5)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 2)
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 100}.get)
    monkeypatch.setattr(memory, "cgroup_bytes", lambda: cgroup_bytes(tmp_path))
    assert memory.offered_bytes() == (working_set or 16384 * 75 + 7)
