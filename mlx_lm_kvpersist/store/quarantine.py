"""What failed a check: kept aside with the reason, for people to look at, until room is needed."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from .files import make_private

logger = logging.getLogger(__name__)


class Quarantine:
    """A folder of files, each with a note beside it. The caller holds the store's lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        """Return everything in it, the oldest first."""
        return sorted(self.folder.glob("*"), key=lambda path: path.stat().st_mtime)

    def empty(self) -> None:
        for path in self.files():
            path.unlink(missing_ok=True)

    def take(self, path: Path, key: bytes, reason: str) -> None:
        """Move the file of a block or part here, if it is there."""
        if not path.exists():
            return
        target = self.folder / f"{key.hex()}-{time.time_ns()}.safetensors"
        try:
            _move_aside(path, target, {"key": key.hex(), "reason": reason})
        except OSError as error:
            # Better no evidence than a block that stays in the way of a whole one.
            logger.warning("%s is removed, not kept aside: %s", path.name, error)
            path.unlink(missing_ok=True)


def _move_aside(path: Path, target: Path, about: dict[str, str]) -> None:
    """Move a file, and put beside it what is to be known of it."""
    make_private(target.parent)
    note = target.with_suffix(".json")
    try:
        with os.fdopen(os.open(note, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            json.dump({**about, "time": time.time()}, file)
        os.replace(path, target)
    except BaseException:
        note.unlink(missing_ok=True)
        raise
