"""What only a session knows, its name and its pin: a small JSON file each, beside the index."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from .folder import make_private, whole_file
from .index import Session


def session_path(folder: Path, session_id: str) -> Path:
    """Return where the note of a session is kept. No name of a client's is part of it."""
    return folder / "sessions" / f"{session_id}.json"


def write_session(folder: Path, session: Session, *, fsync: bool) -> None:
    """Keep what a rebuilt index could not know of a session; nothing if there is nothing."""
    if session.name is None and not session.pinned:
        return
    content = {**asdict(session), "root": session.root.hex(), "leaf": session.leaf.hex()}
    path = session_path(folder, session.id)
    make_private(path.parent)
    with whole_file(path, fsync=fsync) as file:
        file.write(json.dumps(content).encode())


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
