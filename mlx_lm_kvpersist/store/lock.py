"""The lock that lets one process at a time change a store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

from .folder import take_into_use


class StoreLock:
    """An exclusive lock between processes (flock), and between the threads of this one.

    It goes with the process that holds it, however that ends. Readers need none: block files are
    published whole, and the index is SQLite's to guard.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads = RLock()
        self._depth = 0
        self._descriptor = -1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it. May be nested."""
        with self._threads:
            if self._depth == 0:
                if not self._path.parent.exists():
                    take_into_use(self._path.parent)
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._descriptor = descriptor
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    os.close(self._descriptor)
