"""What the store may use: bytes in RAM and on disk, free space to leave, bytes written an hour."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreLimits:
    """Budgets in bytes, and one in seconds."""

    max_ram_bytes: int
    max_disk_bytes: int
    min_free_bytes: int = 0
    """Free space to leave on the volume."""
    max_hourly_bytes: int | None = None
    """Most that all processes together may write within an hour; None for no limit."""
    max_loss_s: float = 0.0
    """Checkpoints that take no longer to compute again are postponed: see `store/writer.py`."""
