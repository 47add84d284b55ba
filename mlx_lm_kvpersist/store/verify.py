"""Check a store from end to end: every file, every row, and that they agree.

Reading takes no lock, so a server goes on; what then looks wrong is looked at again under the
lock, because a turn that is being saved looks like a fault for a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ..errors import StoreError
from .disk import DiskStore
from .files import block_path, key_of, read_block
from .folder import own_files, remove
from .index import Index, Session
from .lock import StoreLock
from .part_files import part_path, read_part
from .rebuild import rebuild_index
from .session_notes import read_session

__all__ = ["Fault", "Problem", "find_problems", "fix_problems"]


class Fault(str, Enum):
    """What can be wrong with a store."""

    CORRUPT = "corrupt"
    """A block's or part's file is not what its name, metadata or checksum promise."""
    UNREADABLE = "unreadable"
    """A block's or part's file cannot be read now, which says nothing about what it holds."""
    MISSING = "missing"
    """A block or part of the index has no file."""
    UNREACHABLE = "unreachable"
    """A block's parent is not there, or ends elsewhere; a part's block is not there."""
    MISMATCH = "mismatch"
    """The index says something else of a block or part than its file, which is whole."""
    ORPHAN = "orphan"
    """A file that the index does not know."""
    SESSION = "session"
    """A session ends nowhere, or its file is not what a rebuilt index would need."""
    INDEX = "index"
    """The index has rows that cannot be read, or totals that are not those of its rows."""


@dataclass(frozen=True)
class Problem:
    """Something that is wrong. `subject` is a key as hex, a path or a session's id."""

    fault: Fault
    subject: str
    reason: str
    look_again: Callable[[], Problem | None] = field(compare=False, repr=False)


def find_problems(
    folder: Path, index: Index, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[Problem]:
    """Return what is wrong with a store; `progress` is told files read and files in all."""
    keys, parts = sorted(index.keys()), sorted(index.part_keys())
    found: list[Problem | None] = [_check_index(index, fault) for fault in index.faults()]
    for number, key in enumerate((*keys, *parts)):
        check = _check_block if number < len(keys) else _check_part
        found.append(check(folder, index, key))
        progress(number + 1, len(keys) + len(parts))
    for name in ("blocks", "parts"):
        for path in sorted(own_files(folder, name)):
            found.append(_check_file(folder, index, path))
    for path in sorted(own_files(folder, "sessions")):
        found.append(_check_session_file(index, path))
    for session in index.sessions():
        found.append(_check_session(folder, index, session.id))
    suspects = [problem for problem in found if problem is not None]
    if not suspects:
        return []
    with StoreLock(folder / "lock").held():
        again = [problem.look_again() for problem in suspects]
    return [problem for problem in again if problem is not None]


def fix_problems(disk: DiskStore, problems: list[Problem]) -> None:
    """Take out of use what is wrong, and what can no longer be reached without it.

    Bad files of blocks and parts go to quarantine. Where file and index disagree, the file is
    believed.
    """
    with disk.lock.held():
        if any(problem.fault in (Fault.MISMATCH, Fault.INDEX) for problem in problems):
            # First: a file that a damaged row does not name is not left behind.
            rebuild_index(disk.folder)
        # The fault may be gone since, or be another one.
        now = [again for problem in problems if (again := problem.look_again())]
        for problem in now:
            if problem.fault is Fault.CORRUPT:
                disk.quarantine(bytes.fromhex(problem.subject), problem.reason)
            elif problem.fault in (Fault.MISSING, Fault.UNREACHABLE):
                disk.forget(bytes.fromhex(problem.subject))
            elif problem.fault is Fault.ORPHAN:
                remove(disk.folder, Path(problem.subject))
        disk.sweep()
        for session in disk.index.sessions():
            if _end_of(disk.index, session) is not None:
                disk.remove_session(session)
            elif _check_session(disk.folder, disk.index, session.id) is not None:
                disk.set_pinned(session, session.pinned)  # writes its file anew
        disk.index.checkpoint()


def _check_index(index: Index, fault: str) -> Problem | None:
    if fault not in index.faults():
        return None
    return Problem(Fault.INDEX, index.path.name, fault, lambda: _check_index(index, fault))


def _check_block(folder: Path, index: Index, key: bytes) -> Problem | None:
    def problem(fault: Fault, reason: str) -> Problem:
        return Problem(fault, key.hex(), reason, lambda: _check_block(folder, index, key))

    if key not in index:
        return None
    row = index.block(key)
    path = block_path(folder, key)
    try:
        node, root, _ = read_block(folder, key)
        size = path.stat().st_size
    except FileNotFoundError:
        return problem(Fault.MISSING, f"{path.name} is not there")
    except StoreError as error:
        return problem(Fault.CORRUPT, str(error))
    except (OSError, MemoryError) as error:
        return problem(Fault.UNREADABLE, f"{path.name}: {error}")
    if (node, root.key, size) != row:
        return problem(Fault.MISMATCH, f"{path.name}: file and index disagree")
    if node.parent == root.key:
        stop = 0
    else:
        parent = index.block(node.parent)
        if parent is None:
            return problem(Fault.UNREACHABLE, f"its parent {node.parent.hex()} is not there")
        stop = parent[0].stop
    if node.start != stop:
        return problem(
            Fault.UNREACHABLE, f"it begins at token {node.start}, and its parent ends at {stop}"
        )
    return None


def _check_part(folder: Path, index: Index, key: bytes) -> Problem | None:
    def problem(fault: Fault, reason: str) -> Problem:
        return Problem(fault, key.hex(), reason, lambda: _check_part(folder, index, key))

    if not index.has_part(key):
        return None
    path = part_path(folder, key)
    try:
        part, root, _ = read_part(folder, key)
        size = path.stat().st_size
    except FileNotFoundError:
        return problem(Fault.MISSING, f"{path.name} is not there")
    except StoreError as error:
        return problem(Fault.CORRUPT, str(error))
    except (OSError, MemoryError) as error:
        return problem(Fault.UNREADABLE, f"{path.name}: {error}")
    block = index.block(part.block)
    if block is not None and block[1] != root.key:
        return problem(Fault.CORRUPT, f"its block {part.block.hex()} belongs to another model")
    if (part, size) != index.part(key):
        return problem(Fault.MISMATCH, f"{path.name}: file and index disagree")
    if block is None:
        return problem(Fault.UNREACHABLE, f"its block {part.block.hex()} is not there")
    return None


def _check_file(folder: Path, index: Index, path: Path) -> Problem | None:
    key = key_of(path)
    known = key is not None and (
        (key in index and path == block_path(folder, key))
        or (index.has_part(key) and path == part_path(folder, key))
    )
    if known or not path.exists():
        return None
    reason = "the index does not know it" if key else "left behind by an interrupted write"
    return Problem(
        Fault.ORPHAN, str(path), f"{path.name}: {reason}", lambda: _check_file(folder, index, path)
    )


def _check_session_file(index: Index, path: Path) -> Problem | None:
    known = path.suffix == ".json" and index.session(path.stem) is not None
    if known or not path.exists():
        return None
    return Problem(
        Fault.ORPHAN,
        str(path),
        f"{path.name}: no such session",
        lambda: _check_session_file(index, path),
    )


def _check_session(folder: Path, index: Index, session_id: str) -> Problem | None:
    session = index.session(session_id)
    if session is None:
        return None
    reason = _end_of(index, session)
    if reason is None and (session.name is not None or session.pinned):
        reason = _disagreement(folder / "sessions" / f"{session_id}.json", session)
    if reason is None:
        return None
    return Problem(
        Fault.SESSION, session_id, reason, lambda: _check_session(folder, index, session_id)
    )


def _end_of(index: Index, session: Session) -> str | None:
    """Say what is wrong with where a session ends."""
    row = index.block(session.leaf)
    if row is None:
        return f"its last block {session.leaf.hex()} is not there"
    if row[1] != session.root:
        return f"its last block {session.leaf.hex()} belongs to another model"
    return None


def _disagreement(path: Path, session: Session) -> str | None:
    """Say what a rebuilt index would get wrong of a session."""
    try:
        kept = read_session(path)
    except (ValueError, TypeError, KeyError, OSError) as error:
        return f"{path.name} cannot be read: {error}"
    for name in ("name", "pinned", "root", "leaf"):
        if getattr(kept, name) != getattr(session, name):
            return f"{path.name}: file and index disagree on {name}"
    return None
