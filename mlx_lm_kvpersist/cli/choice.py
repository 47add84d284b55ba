"""Find a session by its id, the beginning of its id, or its name."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import StoreError
from ..store.index import Session
from .output import shown


def choose(sessions: Sequence[Session], wanted: str) -> Session:
    """Return the session with the id `wanted`, or that name, or the only id that begins with it.

    An id comes first, so that no client can hide a session by calling another one by its id.
    Raises StoreError when no session or more than one matches.
    """
    by_id = [session for session in sessions if session.id == wanted]
    named = [session for session in sessions if session.name == wanted]
    begun = [session for session in sessions if wanted and session.id.startswith(wanted)]
    found = by_id or named or begun
    if not found:
        raise StoreError(f"no session has the id or the name {shown(wanted)}")
    if len(found) > 1:
        what = "branches have the name" if named else "ids begin with"
        ids = ", ".join(session.id for session in found)
        raise StoreError(f"{len(found)} {what} {shown(wanted)}; say which by id: {ids}")
    return found[0]
