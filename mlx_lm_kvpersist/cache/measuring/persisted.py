"""What was measured is persisted, so that it is measured once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ..geometry.fingerprint import content_hash


class Persisted(Protocol):
    """JSON values by key that outlive the process; the store implements it.

    A key names all that a value depends on, and the format of the value. So a result for another
    device, or in another format, is not found.
    """

    def get(self, key: str) -> Any:
        """Return a value; None where there is none, or none that can be read."""

    def put(self, key: str, value: Any) -> None:
        """Write a value, in place of any before."""


def hash_once(persisted: Persisted, path: Path, read: Callable[[Path], str] = content_hash) -> str:
    """Hash a file once: weights are gigabytes, and when they change, so does their stamp."""
    stat = path.stat()
    stamp = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
    match persisted.get(f"hash/{path}"):
        case [str(then), str(known)] if then == stamp:
            return known
    found = read(path)
    persisted.put(f"hash/{path}", [stamp, found])
    return found
