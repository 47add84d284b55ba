"""What the store may use: bytes on disk, free space to leave, bytes written an hour."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreLimits:
    """Budgets in bytes."""

    max_ram_bytes: int
    max_disk_bytes: int
    min_free_bytes: int = 0
    """Free space to leave on the volume."""
    max_hourly_bytes: int | None = None
    """Most that all processes together may write within an hour; None for no limit."""
