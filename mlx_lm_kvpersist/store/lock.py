"""The lock of a store, and files on their way into it: written without it, moved under it.

    lock                                locked (flock) by the process that changes the store, and
                                        says which process that is, and since when
    writing/1a2b3c4d.lock               locked (flock) by its process; says how many bytes may come
    writing/1a2b3c4d-KEY.safetensors    a block or checkpoint of that turn

What a process announced counts as used from then on, so that no other process takes the room. A
lock goes with its process, however that ends; then the next sweep removes the files.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from threading import RLock
from typing import BinaryIO

from ..errors import StoreError
from .folder import OwnFiles, make_private, new_file

logger = logging.getLogger(__name__)

_WAIT_S = 2.0
_LOOK_AGAIN_S = 0.005
_FOLDER = "writing"


class StoreLock:
    """An exclusive lock between processes (flock), and between the threads of this one.

    Readers need none: block files are published whole, and SQLite guards the index. The file says
    who holds the lock. A process that is killed leaves that text behind, and the lock free.
    """

    def __init__(self, path: Path) -> None:
        self.is_patient = False
        """Whether to wait as long as another process holds the lock; otherwise at most 2 s."""
        self._path = path
        self._threads = RLock()
        self._depth = 0
        self._descriptor = -1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it. May be nested.

        After 2 s the holder is named: in the log where this lock is patient, else in a StoreError.
        """
        with self._threads:
            if self._depth == 0:
                make_private(self._path.parent)
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                try:
                    self._wait(descriptor)
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, _this_process().encode(errors="replace"), 0)
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

    def _wait(self, descriptor: int) -> None:
        deadline_s, folder = time.monotonic() + _WAIT_S, self._path.parent
        while time.monotonic() < deadline_s:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_AGAIN_S)
            except OSError as error:
                raise StoreError(
                    f"the volume of {folder} cannot lock files ({error.strerror}); choose a folder "
                    "on another one, such as this machine's own disk, with --kvpersist-dir"
                ) from error
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        if not self.is_patient:
            raise StoreError(
                f"the store {folder} is being changed by {holder}; try again when that has ended"
            )
        logger.warning(
            "the store %s is being changed by %s; turns stay in memory until that has ended",
            folder,
            holder,
        )
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _this_process() -> str:
    """Return how messages name this process, without its options: they may be secret."""
    program, *words = sys.argv or ["python"]
    command = [Path(program).name, *takewhile(lambda word: word[:1] != "-", words[:2])]
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} ({' '.join(command)}) since {now}"


class Staging:
    """The files of one turn, by key, until they are committed or `close` is called."""

    def __init__(self, files: OwnFiles) -> None:
        self._files = files
        self._name = uuid.uuid4().hex[:8]
        self._lock: BinaryIO | None = None
        self._n_bytes = 0
        self.sizes: dict[bytes, int] = {}
        """What has been written, in bytes."""

    def close(self) -> None:
        """Remove files that were not moved, and the announcement. Any number of times."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with lock:
                for path in self._files.paths(_FOLDER):
                    if path.name.startswith(self._name):
                        self._files.remove(path)

    def write(self, key: bytes, write: Callable[[Path], int]) -> int:
        """Have the file of a block or checkpoint written; return its size in bytes."""
        self.sizes[key] = write(self.path(key))
        return self.sizes[key]

    def path(self, key: bytes) -> Path:
        """Return where the file of a block or checkpoint is until it is committed."""
        return self._files.staged_path(self._name, key)

    def announce(self, n_bytes: int) -> None:
        """Let `n_bytes` more count as used. The caller holds the store's lock and made room."""
        self._n_bytes += n_bytes
        if self._lock is None:
            self._lock = new_file(self._files.folder / _FOLDER / f"{self._name}.lock")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.seek(0)
        self._lock.write(b"%d" % self._n_bytes)
        self._lock.flush()


def staged_bytes(files: OwnFiles) -> tuple[int, int]:
    """Return how many bytes were announced, and how many of them are on disk. Under the lock."""
    announced = written = 0
    for path in files.paths(_FOLDER):
        try:
            if path.suffix == ".lock":
                announced += int(path.read_bytes() or 0)
            else:
                written += path.stat().st_size
        except FileNotFoundError:  # just moved into place, or given up
            continue
    return max(announced, written), written


def sweep_staged(files: OwnFiles) -> int:
    """Remove what processes that ended left behind; return how many files. Under the lock."""
    paths = list(files.paths(_FOLDER))
    alive = {path.stem for path in paths if path.suffix == ".lock" and _is_locked(path)}
    return sum(files.remove(path) for path in paths if path.stem[:8] not in alive)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
