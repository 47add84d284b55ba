"""What the store may use: bytes on disk, free space to leave, bytes written an hour."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..units import show_bytes

_HOUR_S = 3600.0


@dataclass(frozen=True)
class StoreLimits:
    """Budgets in bytes."""

    max_ram_bytes: int
    max_disk_bytes: int
    min_free_bytes: int = 0
    """Free space to leave on the volume."""
    max_hourly_bytes: int | None = None
    """Most to write within an hour; None for no limit."""
    fsync: bool = False
    verify: bool = True
    """Whether to check the checksum of what is read."""


@dataclass(frozen=True)
class Space:
    """What a store uses and may use, in bytes."""

    folder: Path
    used_bytes: int
    max_bytes: int
    free_bytes: int
    """Free space of the volume."""
    min_free_bytes: int

    def __str__(self) -> str:
        used, most = show_bytes(self.used_bytes), show_bytes(self.max_bytes)
        text = f"{self.folder} ({used} of {most}, {show_bytes(self.free_bytes)} free"
        if self.free_bytes < self.min_free_bytes:
            floor = show_bytes(self.min_free_bytes)
            text += f"; less than the {floor} of --kvpersist-min-free, so nothing new is stored"
        return f"{text})"


class WriteMeter:
    """Counts the bytes written within the last hour. Writer thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._written: deque[tuple[float, int]] = deque()
        self.total_bytes = 0

    def add(self, n_bytes: int) -> None:
        self._forget_old()
        self._written.append((self._clock(), n_bytes))
        self.total_bytes += n_bytes

    def last_hour_bytes(self) -> int:
        self._forget_old()
        return sum(n_bytes for _, n_bytes in self._written)

    def _forget_old(self) -> None:
        while self._written and self._written[0][0] < self._clock() - _HOUR_S:
            self._written.popleft()


def free_bytes(folder: Path) -> int:
    """Return the free space of the volume that holds `folder`."""
    return shutil.disk_usage(folder).free
