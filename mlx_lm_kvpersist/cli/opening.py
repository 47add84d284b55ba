"""Open a store that exists, to read it or to change it, beside a running server or without."""

from __future__ import annotations

import argparse
import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ..config import default_folder, sealing_of
from ..errors import StoreError
from ..store.database import is_empty
from ..store.disk import DiskStore
from ..store.folder import RANK_FOLDER, check_store
from ..store.index import Index
from ..store.index_schema import is_damage
from ..store.records import StoreLimits
from ..store.seal import Sealing


def folder_of(args: argparse.Namespace) -> Path:
    """Return the folder that the options name. It need not exist."""
    return args.kvpersist_dir or default_folder()


def folders_of(args: argparse.Namespace) -> list[Path]:
    """Return the folder that the options name, or those in it that several ranks have made."""
    if "kvpersist_dir" not in args:
        return [Path()]  # of a command without a store
    folder = folder_of(args)
    of_ranks = sorted(path for path in folder.glob("rank-*") if RANK_FOLDER.fullmatch(path.name))
    has_own = not of_ranks or (folder / "index.sqlite").exists()
    return [*([folder] if has_own else []), *of_ranks]


def existing(args: argparse.Namespace) -> tuple[Path, Sealing]:
    """Return the folder that the options name, and how it is sealed.

    Raises StoreError unless it holds a store of this key, with an index or without. Nothing is
    touched, whatever it holds.
    """
    folder, sealing = folder_of(args), sealing_of(args)
    if not folder.is_dir():
        raise StoreError(f"there is no store at {folder}; choose another with --kvpersist-dir")
    check_store(folder, sealing)
    return folder, sealing


@contextmanager
def reading(args: argparse.Namespace, *, check_all: bool = False) -> Iterator[Index]:
    """Open the index of a store to read it; no lock is taken and nothing is repaired.

    Only rows that are read are checked for damage. With `check_all` the whole index is, which takes
    half a minute for 10,000 sessions. SQLite writes beside an index even to read it. Raises
    PermissionError if it may not.
    """
    folder, sealing = existing(args)
    path = folder / "index.sqlite"
    advice = "mlx-lm-kvpersist store rebuild makes it anew from the files"
    if is_empty(path):
        raise StoreError(f"{path} is missing; {advice}")
    if not (os.access(folder, os.W_OK) and os.access(path, os.W_OK)):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    try:
        with closing(Index(path, whole=check_all, sealing=sealing)) as index:
            yield index
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        why = " ".join(str(error).split())
        raise StoreError(f"{path} is damaged ({why}); {advice}") from error


@contextmanager
def changing(args: argparse.Namespace, limits: StoreLimits | None = None) -> Iterator[DiskStore]:
    """Open a store to change it; a missing or damaged index is rebuilt.

    Each change takes the store's lock; opening it does not.
    """
    folder, sealing = existing(args)
    with closing(DiskStore(folder, limits or StoreLimits(0, 1 << 62), sealing=sealing)) as disk:
        yield disk
