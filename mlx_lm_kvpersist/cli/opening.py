"""Open a store that exists, to read it or to change it, beside a running server or without."""

from __future__ import annotations

import argparse
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..config import (
    DEFAULT_MAX_DISK_BYTES,
    DEFAULT_MIN_FREE_BYTES,
    default_folder,
    volume_bytes,
)
from ..errors import StoreError
from ..store.budget import StoreLimits
from ..store.disk import DiskStore
from ..store.index import Index
from ..store.index_file import is_damage
from ..units import parse_size


def folder_of(args: argparse.Namespace) -> Path:
    """Return the folder that the options name. It need not exist."""
    folder: Path = args.kvpersist_dir or default_folder()
    return folder.expanduser().absolute()


def limits_of(args: argparse.Namespace, folder: Path) -> StoreLimits:
    """Return the budgets that the options name, with the server's defaults."""
    max_disk_bytes = args.kvpersist_disk
    if max_disk_bytes is None:
        max_disk_bytes = min(volume_bytes(folder) // 10, DEFAULT_MAX_DISK_BYTES)
    return StoreLimits(0, max_disk_bytes, min_free_bytes=args.kvpersist_min_free, fsync=True)


def check_exists(folder: Path) -> None:
    """Raise StoreError unless `folder` holds a store, with an index or without."""
    if not folder.is_dir():
        raise StoreError(f"there is no store at {folder}; choose another with --kvpersist-dir")
    if not any((folder / name).exists() for name in ("index.sqlite", "blocks")):
        raise StoreError(
            f"{folder} holds no store (no index, no blocks); choose another with --kvpersist-dir"
        )


@contextmanager
def said_in_one_line(folder: Path) -> Iterator[None]:
    """Turn what disk and SQLite raise into a StoreError."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{folder}: {error}") from error


@contextmanager
def reading(folder: Path) -> Iterator[Index]:
    """Open a store's index to read it; no lock is taken and nothing is repaired."""
    check_exists(folder)
    path = folder / "index.sqlite"
    advice = "mlx-lm-kvpersist store rebuild makes it anew from the files"
    with said_in_one_line(folder):
        if not path.exists() or path.stat().st_size == 0:
            raise StoreError(f"{path} is missing; {advice}")
        try:
            index = Index(path)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            raise StoreError(f"{path} is damaged ({error}); {advice}") from error
        try:
            yield index
        finally:
            index.close()


@contextmanager
def changing(folder: Path, limits: StoreLimits | None = None) -> Iterator[DiskStore]:
    """Open a store to change it; a missing or damaged index is rebuilt.

    The lock is taken by each change, not by this.
    """
    check_exists(folder)
    with open_store(folder, limits) as disk:
        yield disk


@contextmanager
def open_store(folder: Path, limits: StoreLimits | None = None) -> Iterator[DiskStore]:
    """Open a store, made where it is missing."""
    with said_in_one_line(folder):
        disk = DiskStore(folder, limits or StoreLimits(0, 1 << 62, fsync=True))
        try:
            yield disk
        finally:
            disk.close()
