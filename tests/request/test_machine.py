"""What the machine offers: limits of control groups, and the pressure on its memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.request import memory
from mlx_lm_kvpersist.request.memory import CRITICAL, NORMAL, WARNING, cgroup_bytes, pressure_level


@pytest.mark.parametrize(
    ("level", "expected"),
    [(1, NORMAL), (2, WARNING), (4, CRITICAL), (0, NORMAL), (9, NORMAL)],
)
def test_the_pressure_is_that_of_the_system(
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
