"""What only a session knows, its name and its pin: a small JSON file each, beside the index."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from .files import make_private, sync
from .index import Session


def session_path(folder: Path, session_id: str) -> Path:
    """Return where the note of a session is kept. No name of a client's is part of it."""
    return folder / "sessions" / f"{session_id}.json"


def write_session(folder: Path, session: Session, *, fsync: bool) -> None:
    """Keep what a rebuilt index could not know of a session; nothing if there is nothing."""
    if session.name is None and not session.pinned:
        return
    path = session_path(folder, session.id)
    make_private(path.parent)
    content = {**asdict(session), "root": session.root.hex(), "leaf": session.leaf.hex()}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        if fsync:
            sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_session(path: Path) -> Session:
    """Read the file of a session.

    Raises ValueError, TypeError, KeyError or OSError when it is none, or another session's.
    """
    content = json.loads(path.read_text())
    content["root"] = bytes.fromhex(content["root"])
    content["leaf"] = bytes.fromhex(content["leaf"])
    session = Session(**content)
    if path.name != f"{session.id}.json":
        raise ValueError(f"it holds session {session.id!r}")
    if session.name is not None:
        session.name.encode()
    return session
