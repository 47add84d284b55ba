"""Disks that are full, or read-only: a small tmpfs, or a substitute if no tmpfs can be mounted."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest


class Disk(Protocol):
    """A folder whose volume can be made full, or read-only, for the length of a block."""

    folder: Path

    def full(self) -> Any: ...

    def read_only(self) -> Any: ...


class Tmpfs:
    """A small separate file system."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def mounted(cls, folder: Path, n_bytes: int) -> Tmpfs | None:
        """Mount a tmpfs; None if that is not allowed."""
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            mounted = False
        return cls(folder) if mounted else None

    @contextmanager
    def full(self) -> Iterator[None]:
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        try:
            yield
        finally:
            ballast.unlink()

    @contextmanager
    def read_only(self) -> Iterator[None]:
        self._remount("ro")
        try:
            yield
        finally:
            self._remount("rw")

    def _remount(self, mode: str) -> None:
        # The server has files open for writing; a lazy read-only mount needs a bind mount.
        bind = ["mount", "--bind", str(self.folder), str(self.folder)]
        if mode == "ro":
            subprocess.run(bind, check=True)
            subprocess.run(["mount", "-o", "remount,ro,bind", str(self.folder)], check=True)
        else:
            subprocess.run(["umount", str(self.folder)], check=True)

    def unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


class Limited:
    """A substitute: files cannot grow (full), or cannot be opened for writing (read-only)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @contextmanager
    def full(self) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    @contextmanager
    def read_only(self) -> Iterator[None]:
        stock = os.open

        def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(self.folder)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return stock(path, flags, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "open", refusing)
            patch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
            patch.setattr(os, "statvfs", self._as_read_only(os.statvfs))
            yield

    @staticmethod
    def _as_read_only(statvfs: Callable[[Any], os.statvfs_result]) -> Callable[[Any], Any]:
        def call(path: Any) -> os.statvfs_result:
            *fields, flags, name_max = statvfs(path)
            return os.statvfs_result((*fields, flags | os.ST_RDONLY, name_max))

        return call


@contextmanager
def small_disk(kind: str, folder: Path, n_bytes: int = 8 << 20) -> Iterator[Disk]:
    """Yield a tmpfs, or its substitute, in a folder that does not exist yet."""
    tmpfs = Tmpfs.mounted(folder, n_bytes) if kind == "tmpfs" else None
    if tmpfs is None:
        yield Limited(folder)
        return
    try:
        yield tmpfs
    finally:
        tmpfs.unmount()
