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


def common_options() -> argparse.ArgumentParser:
    """Return a parser with what every command takes, to be used as a parent."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--kvpersist-dir",
        type=Path,
        metavar="FOLDER",
        help="the store (default: the user's cache folder, as for the server)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def add_budgets(parser: argparse.ArgumentParser) -> None:
    """Add the server's options that say what the store may use."""
    parser.add_argument(
        "--kvpersist-disk",
        type=parse_size,
        metavar="SIZE",
        help="most disk space for conversations (default: the server's, a tenth of the volume, "
        "at most 64G); give what the server is given",
    )
    parser.add_argument(
        "--kvpersist-min-free",
        type=parse_size,
        default=DEFAULT_MIN_FREE_BYTES,
        metavar="SIZE",
        help="disk space to leave free on the volume (default: 10G)",
    )


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
