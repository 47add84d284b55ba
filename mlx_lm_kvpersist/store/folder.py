"""The folder of a store, and the only module that moves or removes files.

`_own` decides which files these are, in a store's folder and in a shared folder. A file is the
plugin's own if its name has exactly a form that the plugin gives, if it is a regular file, and if
no link leads to it from the folder. All other files are neither moved, removed nor counted. The
folder itself may be reached through a link. A file with several hard links is a regular file: its
content stays under its other names.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import StoreError
from .seal import PLAIN, Sealing

logger = logging.getLogger(__name__)

MARKER = "kvpersist-store"
"""A file that says: this folder is a store. Of its content only the key's mark counts."""
_ENCRYPTED = "It is encrypted; the mark of its key is"
INDEX_FILES = ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
OBJECTS = "kvpersist"
"""The objects of a shared store are in this folder, or have this prefix in a bucket."""
_FOLDERS = ("blocks", "checkpoints", "sessions", "quarantine", "writing")
_FORMS = re.compile(
    r"(?:blocks|checkpoints)/([0-9a-f]{2})/\1[0-9a-f]{30}\.safetensors"
    r"|sessions/[0-9a-f]{8}(?:[0-9a-f]{8})?\.(?:json|[0-9a-f]+\.tmp)"
    r"|quarantine/[0-9a-f]{32}-\d+\.(?:safetensors|json)"
    r"|quarantine/(?:index|rebuild)-\d+\.sqlite(?:-wal|-shm)?"
    r"|writing/[0-9a-f]{8}(?:\.lock|-[0-9a-f]{32}\.safetensors)"
    r"|index\.sqlite(?:-wal|-shm)?"
    rf"|{OBJECTS}/([0-9a-f]{{2}})/\2(?:[0-9a-f]{{30}}|[0-9a-f]{{62}})",
    re.ASCII,
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_LINKS = (errno.ENOTDIR, errno.ELOOP, errno.EMLINK)
"""The error numbers of opening a link, or another file, as a folder."""
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


def has_own_name(name: str) -> bool:
    """Say whether a name below a folder, or of a bucket's object, has a form that we give."""
    return _FORMS.fullmatch(name) is not None


def own_files(folder: Path, name: str) -> Iterator[Path]:
    """Yield the plugin's own files in one of its folders, in no order.

    Raises OSError where a folder that is there cannot be read: no file may seem to be missing.
    """
    if (folder / name).is_symlink():
        return
    try:
        entries = list(os.scandir(folder / name))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if "/" not in name and re.fullmatch("[0-9a-f]{2}", entry.name):
            if entry.is_dir(follow_symlinks=False):
                yield from own_files(folder, f"{name}/{entry.name}")
        elif has_own_name(f"{name}/{entry.name}") and entry.is_file(follow_symlinks=False):
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
    """Remove a file of the plugin's own; say whether it was one, and there."""
    try:
        with _own(folder, path) as parent:
            os.unlink(path.name, dir_fd=parent)
    except (FileNotFoundError, StoreError):
        return False
    return True


def move(folder: Path, source: Path, target: Path) -> None:
    """Move a file of the store's own to where it may stand, in place of what is there.

    Raises FileNotFoundError where it is not there, and StoreError where either is not the store's.
    """
    with _own(folder, source) as here:
        make_private(target.parent)
        with _own(folder, target, may_be_missing=True) as there:
            os.replace(source.name, target.name, src_dir_fd=here, dst_dir_fd=there)


def check_place(folder: Path, path: Path) -> None:
    """Raise StoreError unless an own file is at `path`, or nothing is and one may be put there."""
    with suppress(FileNotFoundError), _own(folder, path, may_be_missing=True):
        pass


@contextmanager
def _own(folder: Path, path: Path, *, may_be_missing: bool = False) -> Iterator[int]:
    """Open the folder that a file of the plugin's own is in, and yield its descriptor.

    Each folder on the way is opened in the one before it, so a link that appears afterwards is not
    followed. Raises StoreError if the file is not the plugin's own, and FileNotFoundError if a
    folder is missing, or the file and it may not be.
    """
    relative = path.relative_to(folder) if path.is_relative_to(folder) else Path()
    not_own = StoreError(f"{path} is behind a link or is no file of the store's; move it away")
    if not has_own_name(relative.as_posix()):
        raise not_own
    parent, mode = os.open(folder, _FOLDER), 0
    try:
        for name in relative.parts[:-1]:
            above, parent = parent, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            os.close(above)
        with suppress(FileNotFoundError) if may_be_missing else nullcontext():
            mode = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode
        if mode and not stat.S_ISREG(mode):
            raise not_own
        yield parent
    except OSError as error:
        if error.errno in _LINKS:
            raise not_own from error
        raise
    finally:
        os.close(parent)


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
