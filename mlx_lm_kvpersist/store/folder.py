"""The folder of a store, and the only module that moves or removes files.

A file is the store's own if its name has exactly a form that the store makes, if it is a regular
file, and if no link leads to it from the store's folder. Nothing else is moved, removed or counted,
whatever folder the store is given. The folder itself may be reached through a link.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..errors import StoreError
from .seal import PLAIN, Sealing

logger = logging.getLogger(__name__)

MARKER = "kvpersist-store"
"""A file that says: this folder is a store. Of its content only the key's mark counts."""
_ENCRYPTED = "It is encrypted; the mark of its key is"
INDEX_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
_FOLDERS = ("blocks", "checkpoints", "sessions", "quarantine", "writing")
_FORMS = re.compile(
    r"(?:blocks|checkpoints)/([0-9a-f]{2})/\1[0-9a-f]{30}\.safetensors"
    r"|sessions/[0-9a-f]{8}(?:[0-9a-f]{8})?\.(?:json|[0-9a-f]+\.tmp)"
    r"|quarantine/[0-9a-f]{32}-\d+\.(?:safetensors|json)"
    r"|quarantine/(?:index|rebuild)-\d+\.sqlite(?:-wal|-shm)?"
    r"|writing/[0-9a-f]{8}(?:\.lock|-[0-9a-f]{32}\.safetensors)"
    r"|index\.sqlite(?:-wal|-shm)?"
)
_LEFT_BY_SYSTEMS = {".DS_Store", ".localized", ".Trashes", ".fseventsd", ".Spotlight-V100"} | {
    ".TemporaryItems",
    "lost+found",
}
"""Operating systems put these into folders and volumes. A folder with nothing else is empty."""
RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")
"""The stores of several ranks of one model stand in a folder, which may be another store."""
_LEFT_BEHIND = {"lock", "writing"}
"""What a running server may leave in a store's folder after somebody removed the folder."""


def take_into_use(folder: Path, sealing: Sealing = PLAIN) -> None:
    """Make a store's folder where there is none, or check that it is one, and mark it.

    Raises StoreError, before anything is touched, where it holds something else or has another key.
    """
    make_private(folder)
    found = {name for name in os.listdir(folder) if not RANK_FOLDER.fullmatch(name)}
    if found - _LEFT_BY_SYSTEMS - _LEFT_BEHIND:
        check_store(folder, sealing)
    about = "This folder is a store of mlx-lm-kvpersist, which removes its own files.\n"
    try:
        with new_file(folder / MARKER) as file:
            file.write(f"{about}{_mark_line(sealing)}".encode())
    except FileExistsError:
        check_store(folder, sealing)  # where it was empty, another process was quicker
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:
        logger.warning("others may look into the store %s (mode %o): chmod 700 it", folder, mode)


def check_store(folder: Path, sealing: Sealing = PLAIN) -> None:
    """Raise StoreError unless a folder is marked as a store, and as one of this key."""
    for name in (*_FOLDERS, *INDEX_FILES, MARKER, "lock"):
        if (folder / name).is_symlink():
            raise StoreError(
                f"{folder / name} is a link, and a store follows none; put there what it leads to"
            )
    if not (folder / MARKER).is_file():
        line = f" and write into it: {_mark_line(sealing)}" if sealing.mark else ""
        raise StoreError(
            f"{folder} holds no store: it has no file {MARKER}; choose a store or an empty folder "
            "with --kvpersist-dir, or, if this is a store, make an empty file of that name in it"
            f"{line}"
        )
    said = (folder / MARKER).read_text(encoding="ascii", errors="replace")
    mark = said.partition(_ENCRYPTED)[2].strip()
    if mark == sealing.mark:
        return
    if not sealing.mark:
        raise StoreError(
            f"the store {folder} is encrypted; give the key file that it was made with: "
            "--kvpersist-encrypt KEYFILE"
        )
    if mark:
        raise StoreError(
            f"the store {folder} is encrypted with another key; give the key file that it was made "
            "with, or choose an empty folder with --kvpersist-dir"
        )
    raise StoreError(
        f"the store {folder} is not encrypted; leave out --kvpersist-encrypt, or choose an empty "
        "folder with --kvpersist-dir: sessions export and import bring conversations there"
    )


def _mark_line(sealing: Sealing) -> str:
    return f"{_ENCRYPTED} {sealing.mark}" if sealing.mark else ""


def own_files(folder: Path, name: str) -> Iterator[Path]:
    """Yield the store's own files in one of its folders, in no order.

    Raises OSError where a folder that is there cannot be read: no file may seem to be missing.
    """
    if (folder / name).is_symlink():
        return
    try:
        entries = list(os.scandir(folder / name))
    except FileNotFoundError:
        return
    for entry in entries:
        if "/" not in name and re.fullmatch("[0-9a-f]{2}", entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from own_files(folder, f"{name}/{entry.name}")
        elif _FORMS.fullmatch(f"{name}/{entry.name}") and entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def own_bytes(folder: Path, *names: str) -> int:
    """Return the size of the store's own files in some of its folders, or of these files."""
    total = 0
    for name in names:
        paths = own_files(folder, name) if name in _FOLDERS else iter([folder / name])
        for path in paths:
            try:
                total += path.lstat().st_size
            except FileNotFoundError:  # removed since
                continue
    return total


def remove(folder: Path, path: Path) -> bool:
    """Remove a file of the store's own; say whether it was one, and there."""
    if not _is_own(folder, path):
        return False
    path.unlink(missing_ok=True)
    return True


def move(folder: Path, source: Path, target: Path) -> None:
    """Move a file of the store's own to where it may stand, in place of what is there.

    Raises FileNotFoundError where it is not there, and StoreError where either is not the store's.
    """
    if not _is_own(folder, source):
        source.lstat()
        raise StoreError(f"{source} is no file of the store's; move it away")
    make_private(target.parent)
    if not _may_stand(folder, target) or (os.path.lexists(target) and not _is_own(folder, target)):
        raise StoreError(f"{target} is no file of the store's; move it away")
    os.replace(source, target)


def _is_own(folder: Path, path: Path) -> bool:
    try:
        return _may_stand(folder, path) and stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _may_stand(folder: Path, path: Path) -> bool:
    """Say whether a path has the form of a store's file, and leads through no link."""
    relative = path.relative_to(folder) if path.is_relative_to(folder) else Path()
    if not _FORMS.fullmatch(relative.as_posix()):
        return False
    return not any((folder / parent).is_symlink() for parent in list(relative.parents)[:-1])


# Making files.


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents; what is new is for its owner alone."""
    missing: list[Path] = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)


def new_file(path: Path) -> BinaryIO:
    """Make a file and its folder, for their owner alone; raises FileExistsError if it is there."""
    make_private(path.parent)
    return _created(path)


def _created(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b")


@contextmanager
def whole_file(path: Path, *, fsync: bool = False) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` when all of it has been written; else nothing is left."""
    temporary = path.with_name(f"{path.stem[:100]}.{uuid.uuid4().hex[:8]}.tmp")
    with _created(temporary) as file:
        try:
            yield file
            file.flush()
            if fsync:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
