"""Flushing a file to its device: for key files and exports. A store's files are not flushed."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress


def flush_to_device(descriptor: int) -> None:
    """Return when a file's content outlives a loss of power, as far as its volume can say.

    On macOS `fsync` leaves the content in the cache of the drive; F_FULLFSYNC writes it out, and
    volumes of other systems refuse that.
    """
    full_fsync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_fsync is not None:
        with suppress(OSError):
            fcntl.fcntl(descriptor, full_fsync)
            return
    os.fsync(descriptor)
