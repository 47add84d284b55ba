"""The plugin's own files in a folder. No other module moves or removes these files.

A regular file is the plugin's own if its path below the folder matches `_FORMS` and contains no
link. No other file is moved, removed or counted. The folder itself may be reached through a link.

New files are written without the lock, and moved into the store under it:

    lock                                locked (flock) during each change; has the process's name
    writing/1a2b3c4d.lock               locked (flock) by its process; announces a number of bytes
    writing/1a2b3c4d-KEY.safetensors    a block or checkpoint that this process writes

A process announces how many bytes it will write. Announced bytes count as used: no other process
takes this space. If a process ends in any way, its lock ends too; the next sweep then removes its
files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BytesIO
from itertools import takewhile
from pathlib import Path
from threading import local
from typing import Any, BinaryIO

from ..errors import BlockCorrupt, StoreError, StoreFormatError

logger = logging.getLogger(__name__)

MARKER = "kvpersist-store"
"""The file that marks a folder as a store. In an encrypted store, it has the key's mark."""
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
    # obstore writes NAME#1, or a higher number, and renames it.
    rf"|{OBJECTS}/([0-9a-f]{{2}})/\2(?:[0-9a-f]{{30}}|[0-9a-f]{{62}})(?:#\d+)?",
    re.ASCII,
)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_LINKS = (errno.ENOTDIR, errno.ELOOP, errno.EMLINK)
"""The error numbers if a link or a file is opened as a folder."""
_IRREGULAR = (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.ENOTSUP, errno.EOPNOTSUPP)
"""The error numbers if a link or a socket is opened as a file, the last two on macOS."""
RANK_FOLDER = re.compile(r"rank-(\d+)-of-(\d+)")
"""The folder of one rank's store; it may be in the folder of another store."""
_NOT_COUNTED = re.compile(
    rf"{MARKER}\.[0-9a-f]{{8}}\.tmp|{RANK_FOLDER.pattern}|lock|writing|lost\+found"
    r"|\.(?:DS_Store|localized|Trashes|fseventsd|Spotlight-V100|TemporaryItems)"
)
"""A folder with only these names counts as empty. They belong to ranks' stores, to an interrupted
start, to a server whose folder was removed, or to an operating system."""
_WAIT_S = 2.0
_LOOK_AGAIN_S = 0.005
_STAGED = "writing"
MAGIC = b"kvp-seal\x01"
"""The first bytes of encrypted content: a magic, and the version of the encryption."""
OPEN_S = 5.0


class Plain:
    """No encryption: objects and files are named by their keys. The subclass `Cipher` encrypts."""

    mark = ""
    """Identifies the encryption key. The key cannot be derived from the mark."""
    n_added_bytes = 0

    def encrypt(self, content: bytes, name: bytes) -> bytes:
        return content

    def decrypt(self, encrypted: bytes, name: bytes) -> bytes:
        """Return the content. Raises StoreFormatError if the content is encrypted."""
        if encrypted.startswith(MAGIC):
            raise StoreFormatError("it is encrypted; give its key with --kvpersist-encrypt KEYFILE")
        return encrypted

    def object_name(self, key: bytes) -> str:
        return key.hex()

    def file_name(self, key: bytes) -> str:
        return key.hex()

    def key_of(self, file_name: str) -> bytes:
        return bytes.fromhex(file_name)

    def connect(self, path: Path, driver: Any = sqlite3) -> sqlite3.Connection:
        """Connect to a database that exists. The first query fails if it is damaged or locked."""
        # If the file was removed, a reader must not make it again.
        uri = f"{path.absolute().as_uri()}?mode=rw"
        # Without the check, any thread may close a connection that nothing refers to.
        db: sqlite3.Connection = driver.connect(
            uri, uri=True, timeout=OPEN_S, check_same_thread=False
        )
        return db


PLAIN = Plain()
Encryption = Plain
"""`PLAIN`, or a `Cipher`."""


class OwnFiles:
    """The plugin's own files in a folder, which may be encrypted. Any thread."""

    def __init__(self, folder: Path, encryption: Encryption = PLAIN) -> None:
        self.folder = folder
        self.encryption = encryption

    @property
    def is_encrypted(self) -> bool:
        return self.encryption is not PLAIN

    # The folder of a store.

    def take_into_use(self, lock: StoreLock) -> None:
        """Make or check a store's folder, and mark it. Raises StoreError."""
        folder = self.folder
        make_private(folder)
        title = "This folder is a store of mlx-lm-kvpersist, which removes its own files.\n"
        if self._is_unmarked():
            with lock.held():
                if self._is_unmarked():  # otherwise another process has marked it first
                    with whole_file(folder / MARKER, fsync=True) as file:
                        file.write(f"{title}{self._mark_line}".encode())
        self.check_store()
        mode = stat.S_IMODE(folder.stat().st_mode)
        if mode & 0o077:
            logger.warning(
                "kvpersist: other users may list %s (mode %o); run chmod 700 on it", folder, mode
            )

    def _is_unmarked(self) -> bool:
        """Say whether the folder is empty or has only an interrupted start's empty marker."""
        names = [name for name in os.listdir(self.folder) if not _NOT_COUNTED.fullmatch(name)]
        return not names or (names == [MARKER] and not os.lstat(self.folder / MARKER).st_size)

    def check_store(self) -> None:
        """Raise StoreError unless the folder is marked as a store, and as a store of this key."""
        folder = self.folder
        for name in (*_FOLDERS, *INDEX_FILES, MARKER, "lock"):
            if (folder / name).is_symlink():
                raise StoreError(
                    f"{folder / name} is a link, and a store does not follow links; replace it "
                    "by the folder or file that it points to"
                )
        own_mark = self.encryption.mark
        if not (folder / MARKER).is_file():
            line = f" and write into it: {self._mark_line}" if own_mark else ""
            raise StoreError(
                f"{folder} holds no store: it has no file {MARKER}; choose a store or an empty "
                "folder with --kvpersist-dir, or, if this is a store, make an empty file of that "
                f"name in it{line}"
            )
        content = (folder / MARKER).read_text(encoding="ascii", errors="replace")
        mark = content.partition(_ENCRYPTED)[2].strip()
        if mark == own_mark:
            return
        made_with = "give the key file that it was made with"
        if not own_mark:
            fault = f"is encrypted; {made_with}: --kvpersist-encrypt KEYFILE"
        elif mark:
            fault = (
                f"is encrypted with another key; {made_with}, or choose an empty folder with "
                "--kvpersist-dir"
            )
        else:
            fault = (
                "is not encrypted; leave out --kvpersist-encrypt, or choose an empty folder with "
                "--kvpersist-dir: sessions export and import bring conversations there"
            )
        raise StoreError(f"the store {folder} {fault}")

    @property
    def _mark_line(self) -> str:
        mark = self.encryption.mark
        return f"{_ENCRYPTED} {mark}" if mark else ""

    # Names.

    def path_of(self, key: bytes, kind: str) -> Path:
        """Return the path of the block or checkpoint of this key; `kind` is the record's folder."""
        name = self.encryption.file_name(key)
        return self.folder / f"{kind}/{name[:2]}/{name}.safetensors"

    def _name_of(self, path: Path) -> bytes:
        """Return the name under which a file is encrypted: a record's key, or a session's id."""
        match = re.search("[0-9a-f]{32}", path.stem)
        return self.encryption.key_of(match[0]) if match else path.stem.encode()

    def paths(self, kind: str) -> Iterator[Path]:
        """Yield the plugin's own files in a folder. Raises OSError if it cannot be read."""
        path = f"{self.folder}/{kind}"
        if os.path.islink(path):
            return
        try:
            entries = list(os.scandir(path))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if "/" not in kind and re.fullmatch("[0-9a-f]{2}", entry.name):
                if entry.is_dir(follow_symlinks=False):
                    yield from self.paths(f"{kind}/{entry.name}")
            elif has_own_name(f"{kind}/{entry.name}") and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)

    def n_bytes(self, *names: str) -> int:
        """Return the size of the own files in folders of the store, or of single files."""
        total = 0
        for name in names:
            paths = self.paths(name) if name in _FOLDERS else iter([f"{self.folder}/{name}"])
            for path in paths:
                with suppress(FileNotFoundError):
                    total += os.lstat(path).st_size
        return total

    # Content.

    def open(self, path: Path) -> BinaryIO:
        """Open the content of a file. Raises BlockCorrupt, OSError, and StoreFormatError."""
        file = open_regular(path)
        if not (self.is_encrypted or file.peek().startswith(MAGIC)):
            return file
        with file:
            return BytesIO(self.encryption.decrypt(file.read(), self._name_of(path)))

    def read(self, path: Path) -> bytes:
        """Return the content of a file. Raises the errors of `open`."""
        with self.open(path) as file:
            return file.read()

    def write(self, path: Path, *parts: bytes | memoryview) -> int:
        """Write a new file of these parts; return its size in bytes."""
        with new_file(path) as file:
            if self.is_encrypted:
                parts = (self.encryption.encrypt(b"".join(parts), self._name_of(path)),)
            return sum(map(file.write, parts))

    def replace(self, path: Path, content: bytes) -> int:
        """Write a file, which may replace an own file; return its size in bytes."""
        make_private(path.parent)
        self.check_place(path)
        with whole_file(path) as file:
            return file.write(self.encryption.encrypt(content, self._name_of(path)))

    # Removing and moving.

    def remove(self, path: Path) -> bool:
        """Remove a file; return whether it existed and was the plugin's own."""
        try:
            with self._own(path) as parent:
                os.unlink(path.name, dir_fd=parent)
        except (FileNotFoundError, StoreError):
            return False
        return True

    def move(self, source: Path, target: Path) -> None:
        """Move an own file; it may replace an own file. Raises FileNotFoundError and StoreError."""
        with self._own(source) as from_folder:
            make_private(target.parent)
            with self._own(target) as to_folder:
                os.replace(source.name, target.name, src_dir_fd=from_folder, dst_dir_fd=to_folder)

    def check_place(self, path: Path) -> None:
        """Raise StoreError unless an own file is at `path`, or an own file may be put there."""
        with suppress(FileNotFoundError), self._own(path):
            pass

    @contextmanager
    def _own(self, path: Path) -> Iterator[int]:
        """Open the folder of an own file; yield the folder's descriptor. The file may be missing.

        Each folder on the way is opened relative to its parent, so a link that appears afterwards
        is not followed. Raises StoreError if the file is not own, and FileNotFoundError if a folder
        is missing.
        """
        relative = str(path).removeprefix(f"{self.folder}/")
        not_own = StoreError(
            f"{path} is reached through a link or is not the store's file; move it away"
        )
        if not has_own_name(relative):
            raise not_own
        *folders, file_name = relative.split("/")
        parent = os.open(self.folder, _FOLDER)
        try:
            for name in folders:
                above, parent = parent, os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
                os.close(above)
            with suppress(FileNotFoundError):
                mode = os.stat(file_name, dir_fd=parent, follow_symlinks=False).st_mode
                if not stat.S_ISREG(mode):
                    raise not_own
            yield parent
        except OSError as error:
            if error.errno in _LINKS:
                raise not_own from error
            raise
        finally:
            os.close(parent)


def has_own_name(name: str) -> bool:
    """Say whether a path below a folder, or an object's name, has one of the store's forms."""
    return _FORMS.fullmatch(name) is not None


def check_writable(path: Path) -> None:
    """Raise OSError, with the reason, if a file or folder cannot be written."""
    if not os.access(path, os.W_OK):
        is_read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        reason = errno.EROFS if is_read_only else errno.EACCES
        raise OSError(reason, os.strerror(reason), str(path))


def open_regular(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a file, without waiting for a pipe. Raises BlockCorrupt if it is not a regular file."""
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _IRREGULAR:
            raise BlockCorrupt(f"{path.name}: is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BlockCorrupt(f"{path.name}: is not a regular file")
    return os.fdopen(descriptor, "rb")


# Making files.


class Volume:
    """A folder's volume. While it is not mounted, the folder would be made on another volume."""

    def __init__(self, folder: Path) -> None:
        self._folder, path = folder, folder.resolve()
        self._mount_point = next(each for each in (path, *path.parents) if each.is_mount())

    def check(self) -> None:
        """Raise OSError if the folder is in the mount point and the volume is not mounted."""
        point = self._mount_point
        if not point.is_mount() and self._folder.resolve().is_relative_to(point):
            raise OSError(f"{point} is no longer mounted, so {self._folder} is not used")


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents; only the owner may read new folders."""
    if os.path.exists(folder):
        return
    make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)


def new_file(path: Path) -> BinaryIO:
    """Make a file and its folder, readable by the owner only. Raises FileExistsError."""
    make_private(path.parent)
    return _created(path)


def _created(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b")


def flush_to_device(descriptor: int) -> None:
    """Wait until the volume reports that a file's content would survive a power failure.

    Key files, exports and a store's marker are flushed; a store's other files are not. On macOS
    `fsync` leaves the content in the cache of the drive; F_FULLFSYNC writes it to the drive, but
    some volumes refuse that.
    """
    full_fsync = getattr(fcntl, "F_FULLFSYNC", None)
    if full_fsync is not None:
        with suppress(OSError):
            fcntl.fcntl(descriptor, full_fsync)
            return
    os.fsync(descriptor)


@contextmanager
def whole_file(path: Path, *, fsync: bool = False) -> Iterator[BinaryIO]:
    """Open a file that appears at `path` when it is complete; after an error, nothing is left."""
    # A file's name has at most 255 bytes.
    stem = os.fsencode(path.stem)[:100].decode(errors="ignore")
    temporary = path.with_name(f"{stem}.{os.urandom(4).hex()}.tmp")
    with _created(temporary) as file:
        try:
            yield file
            file.flush()
            if fsync:
                flush_to_device(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


# The lock, and files that are being written.


class _Held(local):
    depth = 0
    descriptor = -1


class StoreLock:
    """An exclusive lock between processes and threads (flock); its file names the holder.

    Readers need no lock: block files appear when complete, and SQLite guards the index.
    """

    def __init__(self, path: Path) -> None:
        self.is_patient = False
        """Whether to wait for another process without limit; otherwise at most 2 s."""
        self.check_missing: Callable[[], None] = lambda: None
        """Called before a missing folder is made. Raises if the folder must not be made."""
        self._path = path
        self._own = _Held()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait for the lock and hold it. A thread that holds the lock may call this again.

        If the lock is still taken after 2 s, raises StoreError, which names the holder. If
        `is_patient`, logs a warning instead and waits. Also raises StoreError if the volume cannot
        lock files.
        """
        own = self._own
        if own.depth == 0:
            while (descriptor := self._locked()) is None:
                pass
            own.descriptor = descriptor
        own.depth += 1
        try:
            yield
        finally:
            own.depth -= 1
            if own.depth == 0:
                os.close(own.descriptor)

    def _locked(self) -> int | None:
        """Lock the file; return its descriptor, or None if the file was removed."""
        if not os.path.exists(self._path.parent):
            self.check_missing()
            make_private(self._path.parent)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            self._wait(descriptor)
            name = _this_process().encode(errors="replace")
            os.pwrite(descriptor, name, 0)
            # Truncating takes nearly a millisecond, and most names have the same length.
            if os.fstat(descriptor).st_size != len(name):
                os.ftruncate(descriptor, len(name))
        except BaseException:
            os.close(descriptor)
            raise
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                return descriptor
        os.close(descriptor)
        return None  # another process may have locked a new file

    def _wait(self, descriptor: int) -> None:
        deadline_s, folder = time.monotonic() + _WAIT_S, self._path.parent
        while time.monotonic() < deadline_s:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_AGAIN_S)
            except OSError as error:
                raise StoreError(
                    f"the volume of {folder} cannot lock files ({error.strerror}); choose a "
                    "folder on another volume, such as this machine's own disk, with "
                    "--kvpersist-dir"
                ) from error
        holder = os.pread(descriptor, 1000, 0).decode(errors="replace") or "another process"
        if not self.is_patient:
            raise StoreError(
                f"the store {folder} is being changed by {holder}; try again when that has ended"
            )
        logger.warning(
            "kvpersist: the store %s is being changed by %s; turns stay in memory until that has "
            "ended",
            folder,
            holder,
        )
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _this_process() -> str:
    """Return this process's name for messages, without its options: they may be secret."""
    program, *words = sys.argv or ["python"]
    command = [os.path.basename(program), *takewhile(lambda word: word[:1] != "-", words[:2])]
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} ({' '.join(command)}) since {now}"


class Staging:
    """Files that are being written, by key, until they are committed or `close` is called."""

    def __init__(self, files: OwnFiles) -> None:
        self._files = files
        self._name = os.urandom(4).hex()
        self._lock: BinaryIO | None = None
        self._n_bytes = 0
        self.sizes: dict[bytes, int] = {}
        """Sizes in bytes of the files that have been written, by key."""

    def close(self) -> None:
        """Remove files that were not moved, and the announcement. May be called several times."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with lock:
                for path in self._files.paths(_STAGED):
                    if path.name.startswith(self._name):
                        self._files.remove(path)

    def path(self, key: bytes) -> Path:
        name = f"{self._name}-{self._files.encryption.file_name(key)}.safetensors"
        return self._files.folder / f"{_STAGED}/{name}"

    def announce(self, n_bytes: int) -> None:
        """Count `n_bytes` more as used. The caller holds the store's lock and has made room."""
        total = self._n_bytes + n_bytes
        self._n_bytes = min(total, self._n_bytes)  # a decrease counts even if it cannot be written
        if self._lock is None:
            if not total:
                return
            lock = new_file(self._files.folder / _STAGED / f"{self._name}.lock")
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._lock = lock
        os.pwrite(self._lock.fileno(), b"%020d" % total, 0)
        self._n_bytes = total


def staged_bytes(files: OwnFiles) -> tuple[int, int]:
    """Return max(announced bytes, written bytes) and written bytes. Exact only under the lock."""
    announced = written = 0
    for path in files.paths(_STAGED):
        try:
            if path.suffix == ".lock":
                content = path.read_bytes()
                announced += int(content) if content.isdigit() else 0  # a power failure damaged it
            else:
                written += os.stat(path).st_size
        except FileNotFoundError:  # just moved into place, or removed
            continue
    return max(announced, written), written


def sweep_staged(files: OwnFiles) -> int:
    """Remove the files of processes that have ended; return how many. Under the lock."""
    paths = list(files.paths(_STAGED))
    alive = {path.stem for path in paths if path.suffix == ".lock" and _is_locked(path)}
    return sum(files.remove(path) for path in paths if path.stem[:8] not in alive)


def _is_locked(path: Path) -> bool:
    try:
        with suppress(FileNotFoundError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
