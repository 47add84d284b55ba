"""Objects by name in a bucket or folder that several servers use, through obstore.

Each URL or folder that obstore supports can be used. Credentials come from environment variables
such as AWS_ACCESS_KEY_ID (https://developmentseed.org/obstore/latest/api/store/).
"""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ..errors import ConfigError, NoAnswer
from ..units import parse_folder
from .folder import OBJECTS, OwnFiles, Volume, has_own_name
from .writer import Result, Threads

ANSWER_S, CONNECT_S = 9, 2
"""Time limits of an operation and of connecting, in seconds. No operation is retried."""
_N_THREADS = 8
"""Six threads fetch, one thread puts, and one is spare."""
_AT_ONCE = 100
"""Objects listed or removed in one operation."""
_PUTTING_S = 3600.0
"""A partly written object that is older than this was left by a server that ended."""


class ListedObject(NamedTuple):
    """A stored object: its size, and when it was put, in seconds since the epoch."""

    name: str
    n_bytes: int
    put_s: float


def surplus(
    objects: Iterable[ListedObject], older_s: float | None, max_bytes: int | None
) -> list[ListedObject]:
    """Return the objects to remove, the oldest first.

    These are all objects that were put more than `older_s` seconds ago. If the other objects exceed
    `max_bytes`, the oldest of them are also returned, until the rest fits. None: no such limit.
    """
    before_s = time.time() - older_s if older_s is not None else 0.0
    in_order = sorted(objects, key=lambda item: item.put_s)
    left = sum(item.n_bytes for item in in_order)
    for n, item in enumerate(in_order):
        if item.put_s >= before_s and (max_bytes is None or left <= max_bytes):
            return in_order[:n]
        left -= item.n_bytes
    return in_order


def _folder_of(url: str) -> Path | None:
    """Return the absolute folder that a URL or path names; None for a bucket.

    Raises ValueError or ArgumentTypeError if it cannot be a folder of this machine.
    """
    split_url = urlsplit(url)
    if split_url.scheme not in ("", "file"):
        return None
    if split_url.netloc not in ("", "localhost"):
        raise ValueError(
            f"it names the machine {split_url.netloc}, but only folders of this machine can be "
            "used: mount the share, and name the folder where it is mounted"
        )
    return parse_folder(unquote(split_url.path) if split_url.scheme else url)


class Objects:
    """Objects in one bucket or folder. Any thread. Operations raise FileNotFoundError or OSError.

    An operation raises StoreError if a foreign file has the object's name. The constructor raises
    ConfigError if obstore is missing or the URL cannot be used.
    """

    def __init__(self, url: str, *, makes_folder: bool = True) -> None:
        self.url, self._makes_folder = url, makes_folder
        try:
            import obstore
        except ImportError as error:
            raise ConfigError(
                "a shared store needs the package obstore: pip install 'mlx-lm-kvpersist[shared]'"
            ) from error
        self._obstore: Any = obstore
        self._store: Any = None
        self._volume: Volume | None = None
        with self._usable():
            self._folder = _folder_of(url)
            if self._folder is None:
                self._opened()

    def open(self) -> None:
        """Open the bucket or folder. Raises ConfigError if it cannot be used."""
        with self._usable():
            self._opened()

    @contextmanager
    def _usable(self) -> Iterator[None]:
        unusable = (self._obstore.exceptions.BaseError, OSError, ValueError, ArgumentTypeError)
        try:
            yield
        except unusable as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"the shared store {self.url} cannot be used: {reason}; give a folder, or a URL "
                "such as s3://bucket/prefix"
            ) from error

    def _opened(self) -> Any:
        """Return obstore's store. Opening a folder may hang; opening a bucket sends no request."""
        if self._store is None and self._folder is not None:
            if not self._makes_folder:
                self._folder.stat()  # raises FileNotFoundError
            self._store = self._obstore.store.LocalStore(self._folder, mkdir=True)
            self._volume = Volume(self._folder)
        elif self._store is None:
            times = {"timeout": f"{ANSWER_S}s", "connect_timeout": f"{CONNECT_S}s"}
            options = {**times, "allow_http": True}
            self._store = self._obstore.store.from_url(
                self.url, client_options=options, retry_config={"max_retries": 0}
            )
        return self._store

    @contextmanager
    def _failures(self, name: str) -> Iterator[None]:
        try:
            if self._volume is not None:
                self._volume.check()  # obstore would make the folder on another volume
            if self._folder is not None and has_own_name(name):
                OwnFiles(self._folder).check_place(self._folder / name)  # obstore follows links
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(name) from error
        except (self._obstore.exceptions.BaseError, RuntimeError) as error:
            raise OSError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return an object. Raises ValueError, without reading it, if it exceeds `max_bytes`."""
        with self._failures(name):
            answer = self._obstore.get(self._opened(), name)
            if (n_bytes := answer.meta["size"]) > max_bytes:
                raise ValueError(f"it has {n_bytes} bytes, more than the {max_bytes} it may have")
            return bytes(answer.bytes())

    def age_s(self, name: str) -> float | None:
        try:
            with self._failures(name):
                meta = self._obstore.head(self._opened(), name)
        except FileNotFoundError:
            return None
        return time.time() - float(meta["last_modified"].timestamp())

    def put(self, name: str, content: bytes) -> None:
        """Put an object, in one piece. It replaces an object of that name."""
        with self._failures(name):
            # Not a conditional put, although it would save asking whether the object exists: in a
            # folder it needs hard links, which SMB shares lack.
            self._obstore.put(self._opened(), name, content)

    def list(self) -> Iterator[ListedObject]:
        if self._folder is not None:
            for path in OwnFiles(self._folder).paths(OBJECTS):
                with suppress(FileNotFoundError):
                    stat = path.lstat()
                    if "#" in path.name and time.time() - stat.st_mtime < _PUTTING_S:
                        continue
                    name = path.relative_to(self._folder).as_posix()
                    yield ListedObject(name, stat.st_size, stat.st_mtime)
            return
        with self._failures(self.url):
            for page in self._obstore.list(self._opened(), OBJECTS):
                for meta in page:
                    if has_own_name(meta["path"]):
                        put_s = meta["last_modified"].timestamp()
                        yield ListedObject(meta["path"], meta["size"], put_s)

    def delete(self, names: Sequence[str]) -> None:
        """Remove at most 1,000 objects (S3's limit). If one is missing, others may remain."""
        if self._folder is not None:
            for name in names:
                OwnFiles(self._folder).remove(self._folder / name)
            return
        with suppress(FileNotFoundError), self._failures(self.url):
            self._obstore.delete(self._opened(), [name for name in names if has_own_name(name)])


class TimedObjects:
    """`Objects` with a time limit, because an operation may hang.

    Raises the errors of `Objects`, and NoAnswer if an operation takes longer than `ANSWER_S`. Then
    all operations raise NoAnswer immediately, until that operation ends or `try_again` is called.
    The constructor opens the bucket or folder, and raises ConfigError if it cannot be used.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._threads = Threads(_N_THREADS, "kvpersist-objects")
        self._late: Future[Any] | None = None
        with suppress(NoAnswer):
            self.ask(objects.open)

    @property
    def is_hanging(self) -> bool:
        return self._late is not None and not self._late.done()

    def try_again(self) -> None:
        """Let the next operation be tried, although another operation hangs."""
        self._late = None

    def close(self) -> None:
        self._threads.close(0)

    def ask(self, operation: Callable[..., Result], *args: object) -> Result:
        late = NoAnswer(f"it has not answered for {ANSWER_S} s")
        if self.is_hanging:
            raise late
        future = self._threads.submit(partial(operation, *args))
        try:
            return future.result(ANSWER_S)
        except TooLate:
            if future.done():  # the operation has raised it
                raise
            future.cancel()
            self._late = future
            raise late from None

    def list(self) -> Iterator[ListedObject]:
        objects = iter(self.ask(self._objects.list))
        while some := self.ask(lambda: [*islice(objects, _AT_ONCE)]):
            yield from some

    def delete(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _AT_ONCE):
            self.ask(self._objects.delete, names[first : first + _AT_ONCE])
