"""What the store may use: bytes on disk, free space to leave, bytes written an hour."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..units import show_bytes


@dataclass(frozen=True)
class StoreLimits:
    """Budgets in bytes."""

    max_ram_bytes: int
    max_disk_bytes: int
    min_free_bytes: int = 0
    """Free space to leave on the volume."""
    max_hourly_bytes: int | None = None
    """Most that all processes together may write within an hour; None for no limit."""
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


def free_bytes(folder: Path) -> int:
    """Return the free space of the volume that holds `folder`."""
    return shutil.disk_usage(folder).free
