"""JSON files beside a store that keep what was measured, so that it is measured once."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read_kept(file: Path | None, version: int) -> dict[str, Any]:
    """Return what `keep` wrote; nothing without a file, from another version, or if damaged."""
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content["measured"]) if content["format"] == version else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        logger.warning("kvpersist: %s is not used, it is measured again: %r", file, error)
        return {}


def keep(file: Path | None, version: int, name: str, measured: Any) -> None:
    """Add a result to the file under `name`; a file that cannot be written is logged."""
    if file is None:
        return
    content = {"format": version, "measured": {**read_kept(file, version), name: measured}}
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a link there is not followed
        temporary.touch(0o600, exist_ok=False)
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, file)
    except OSError as error:
        with suppress(OSError):  # the folder may not exist
            temporary.unlink()
        logger.warning("kvpersist: %s is measured again at the next start: %s", file.stem, error)
