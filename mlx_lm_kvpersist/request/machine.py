"""The machine: how much memory it offers to this process, and how short it is of memory."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

NORMAL, WARNING, CRITICAL = 1, 2, 4
"""Levels of pressure, as macOS numbers them."""


def pressure_level() -> int:
    """Return how short of memory macOS says that it is; NORMAL elsewhere. It takes microseconds."""
    if sys.platform != "darwin":
        return NORMAL
    level, size = ctypes.c_int(NORMAL), ctypes.c_size_t(4)
    name = b"kern.memorystatus_vm_pressure_level"
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
    is_known = not failed and level.value in (WARNING, CRITICAL)
    return level.value if is_known else NORMAL


def offered_bytes() -> int:
    """Return the memory that this process may have on its device, with what it has already.

    Metal: the recommended working set. CUDA: what is free. Else what the machine has available,
    within the limits of its cgroups.
    """
    info, own = mx.device_info(), mx.get_active_memory() + mx.get_cache_memory()
    if working_set := info.get("max_recommended_working_set_size"):
        return int(working_set)
    if on_device := info.get("free_memory"):
        return int(on_device) + own
    if on_device := info.get("total_memory"):
        return int(on_device)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = _fields(Path("/proc/meminfo"))
    available = fields["MemAvailable:"] * 1024 if "MemAvailable:" in fields else physical * 3 // 4
    return min([available, *cgroup_bytes()]) + own


def cgroup_bytes(root: Path = Path("/")) -> Iterator[int]:
    """Yield what each limit on this process' control group leaves (cgroup v2, and v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, place = line.split(":", 2)
        if number == "0":
            top, limit, used = mounted, "memory.max", "anon"
        elif "memory" in controllers.split(","):
            top, limit, used = mounted / "memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        folder = top / place.lstrip("/")
        for group in (folder, *folder.parents):
            try:
                most = (group / limit).read_text().strip()
                if most != "max":
                    yield max(0, int(most) - _fields(group / "memory.stat").get(used, 0))
            except (OSError, ValueError):
                pass  # in a container the group's own place may not be there, its root is
            if group == top:
                break


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on each line."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
    except OSError:
        return {}
