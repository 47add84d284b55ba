"""Open an existing store to read or change it. A server may run at the same time."""

from __future__ import annotations

import argparse
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ..config import default_folder, encryption_of
from ..errors import StoreError
from ..store.database import is_damage, is_empty
from ..store.disk import DiskStore
from ..store.folder import RANK_FOLDER, OwnFiles, check_writable
from ..store.index import Index
from ..store.records import StoreLimits


def folders_of(args: argparse.Namespace) -> list[Path]:
    """Return the folder that the options name, and the folders of ranks in it.

    The named folder need not exist. It is left out if it has folders of ranks and no index. All
    other functions need the folder of one store in `args`.
    """
    if "kvpersist_dir" not in args:
        return [Path()]  # `store prune` has no folder
    folder = args.kvpersist_dir or default_folder()
    of_ranks = sorted(path for path in folder.glob("rank-*") if RANK_FOLDER.fullmatch(path.name))
    has_own = not of_ranks or (folder / "index.sqlite").exists()
    return [*([folder] if has_own else []), *of_ranks]


def existing(args: argparse.Namespace) -> OwnFiles:
    """Return a store's files; change nothing.

    Raises StoreError if the folder holds no store, or needs another key. An index is optional.
    """
    folder: Path = args.kvpersist_dir
    files = OwnFiles(folder, encryption_of(args))
    if not folder.is_dir() or not any(folder.iterdir()):
        said = f"{folder} holds no store" if folder.is_dir() else f"there is no store at {folder}"
        option = (
            "" if folder == default_folder() else f" --kvpersist-dir {shlex.quote(str(folder))}"
        )
        raise StoreError(
            f"{said}; start the server first: mlx_lm.server --plugin kvpersist --model MODEL"
            f"{option}; or choose another folder with --kvpersist-dir"
        )
    files.check_store()
    return files


@contextmanager
def reading(args: argparse.Namespace, *, check_all: bool = False) -> Iterator[Index]:
    """Open the index of a store to read it; no lock is taken and nothing is repaired.

    `check_all` checks the whole index for damage, which takes half a minute for 10,000 sessions.
    Raises OSError if SQLite cannot write next to the index. SQLite needs this even to read.
    """
    files = existing(args)
    folder = files.folder
    path = folder / "index.sqlite"
    advice = "mlx-lm-kvpersist store rebuild rebuilds it from the files"
    if is_empty(path):
        raise StoreError(f"{path} is missing; {advice}")
    for each in (folder, path):
        check_writable(each)
    try:
        with closing(Index(path, files, check_all=check_all)) as index:
            yield index
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        why = " ".join(str(error).split())
        raise StoreError(f"{path} is damaged ({why}); {advice}") from error


@contextmanager
def changing(args: argparse.Namespace, limits: StoreLimits | None = None) -> Iterator[DiskStore]:
    """Open a store to change it; rebuild a missing or damaged index. The lock is not held."""
    limits = limits or StoreLimits(0, 1 << 62)
    folder, encryption = existing(args).folder, encryption_of(args)
    with closing(DiskStore(folder, limits, encryption=encryption)) as disk:
        yield disk
