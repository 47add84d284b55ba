"""JSON files beside a store that keep what was measured, so that it is measured once."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class Unreadable(Exception):
    """The file is there, and cannot be read now, or by this version."""


def read_kept(file: Path, version: int) -> dict[str, Any]:
    """Return what `keep` wrote; nothing without a file, from another version, or if damaged."""
    try:
        return _read(file, version)
    except Unreadable as error:
        logger.warning("kvpersist: %s is not used, it is measured again: %s", file, error)
        return {}


def keep(file: Path, version: int, name: str, measured: Any) -> None:
    """Add a result to the file under `name`; a file that cannot be written is logged.

    A file that cannot be read, or that a newer version wrote, stays as it is. Damaged content is
    replaced.
    """
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        content = {"format": version, "measured": {**_read(file, version), name: measured}}
        temporary.unlink(missing_ok=True)  # a link there is not followed
        temporary.touch(0o600, exist_ok=False)
        with temporary.open("w", encoding="utf-8") as made:
            made.write(json.dumps(content, indent=1) + "\n")
            made.flush()
            os.fsync(made.fileno())
        os.replace(temporary, file)
    except (OSError, Unreadable) as error:
        with suppress(OSError):  # the folder may not exist
            temporary.unlink()
        logger.warning("kvpersist: %s is measured again at the next start: %s", file.stem, error)


def _read(file: Path, version: int) -> dict[str, Any]:
    """Return what was kept; nothing without a file, from an older version, or if damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found, measured = content["format"], dict(content["measured"])
        is_newer = found > version
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise Unreadable(str(error)) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        logger.warning("kvpersist: %s is damaged, it is measured again: %r", file, error)
        return {}
    if is_newer:
        raise Unreadable(f"a newer version wrote it, in format {found}")
    return measured if found == version else {}
