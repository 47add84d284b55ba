"""Files that failed a check: kept with the reason, for people to look at, until room is needed."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from ..errors import StoreError
from .folder import make_private, move, new_file, own_files, remove

logger = logging.getLogger(__name__)


class Quarantine:
    """The quarantine of a store, each file with a note beside it. The caller holds its lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def files(self) -> list[Path]:
        """Return the store's files in it."""
        return list(own_files(self._folder, "quarantine"))

    def empty(self) -> None:
        for path in self.files():
            remove(self._folder, path)

    def take(self, path: Path, key: bytes, reason: str) -> None:
        """Move the file of a block or part here, if it is there."""
        if not path.exists():
            return
        target = self._folder / "quarantine" / f"{key.hex()}-{time.time_ns()}.safetensors"
        note = target.with_suffix(".json")
        try:
            make_private(target.parent)
            with new_file(note) as file:
                about = {"key": key.hex(), "reason": reason, "time": time.time()}
                file.write(json.dumps(about).encode())
            move(self._folder, path, target)
        except (OSError, StoreError) as error:
            # Better no evidence than a block that stays in the way of a whole one.
            logger.warning("%s is not kept aside: %s", path.name, error)
            remove(self._folder, note)
            remove(self._folder, path)
